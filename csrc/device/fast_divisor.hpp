// Division by a number that is known when a kernel is launched. Host and device.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define TGEMM_HOST_DEVICE __host__ __device__
#else
#define TGEMM_HOST_DEVICE
#endif

namespace tgemm {

// n / divisor for n below 2^31: the high half of a product (Granlund and Montgomery, "Division by
// invariant integers using multiplication", PLDI 1994).
class FastDivisor {
 public:
  FastDivisor() = default;
  explicit FastDivisor(uint32_t divisor) : divisor_(divisor) {
    if (divisor == 1) return;
    const int log2 = 32 - std::countl_zero(divisor - 1);  // rounded up
    shift_ = static_cast<uint32_t>(log2 - 1);
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + divisor - 1) / divisor);
  }

  TGEMM_HOST_DEVICE uint32_t divisor() const { return divisor_; }
  TGEMM_HOST_DEVICE uint32_t divide(uint32_t n) const {
    const auto high = static_cast<uint32_t>(uint64_t{n} * multiplier_ >> 32);
    return divisor_ == 1 ? n : high >> shift_;
  }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 0;
  uint32_t shift_ = 0;
};

}  // namespace tgemm
