// Launching one of a Tensor Core rung's instantiations.
#pragma once

#include "kernels/ladder/rungs.hpp"
#include "kernels/launch.cuh"

namespace tgemm::ladder {

// BF16 came to the Tensor Cores with compute capability 8.0. Of a kernel that does not exist for an
// architecture, an empty body is compiled, and the host refuses to run it.
template <class T>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kExists = std::is_same_v<T, __half>;
#else
inline constexpr bool kExists = true;
#endif

// `run` is called with the operands' type as a value and their orders as integral constants.
template <class Run>
std::string with_operands(const TensorCoreOperands& operands, Run run) {
  const auto with_type = [&](auto type) {
    constexpr std::true_type kKMajor;
    constexpr std::false_type kMnMajor;
    if (operands.a_k_major) {
      return operands.b_k_major ? run(type, kKMajor, kKMajor) : run(type, kKMajor, kMnMajor);
    }
    return operands.b_k_major ? run(type, kMnMajor, kKMajor) : run(type, kMnMajor, kMnMajor);
  };
  return operands.bf16 ? with_type(__nv_bfloat16{}) : with_type(__half{});
}

}  // namespace tgemm::ladder
