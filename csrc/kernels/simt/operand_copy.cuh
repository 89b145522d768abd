// Global to shared memory for the simt kernels. Each class moves one operand's (kBlockK, kBlockMn)
// tile into a pipeline slot laid out [k][mn] with a pitch of kBlockMn + 4 floats, kCopies steps per
// thread and k block, so that the mainloop can spread the steps between its multiplications.
//
// K is padded at the *front* to a multiple of kBlockK: only the first k block holds padding, which
// is written as zeros, and every later block copies without a bounds check. Rows beyond the matrix
// repeat its last row (or last vector of rows): their products belong to outputs that are never
// stored. So no address outside the operand is ever read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/params.hpp"
#include "device/ptx.cuh"
#include "kernels/simt/cp_async.cuh"
#include "kernels/simt/cta_tile.hpp"

namespace tgemm::simt {

// Where in an operand a CTA starts. `stride_mn` and `stride_k` in elements.
struct OperandView {
  const void* base;  // of the batch entry
  DType dtype;
  int64_t stride_mn;
  int64_t stride_k;
  int64_t mn_size;
  int64_t mn;   // first row of the CTA tile
  int64_t k;    // first k of the first block, -padding at the least
  int padding;  // how many k of the first block lie before the slice
};

template <Copy kCopy, int kBlockMn, int kBlockK, int kThreads>
class OperandCopy;

// Eight lanes take 8 consecutive k of a row (one 32-byte sector), so a warp copies 8 k x 4 rows.
// Rows are addressed by 32-bit offsets from the tile's first row, which halves the registers they
// take, so rows may be at most kMaxRowStride apart.
template <int kBlockMn, int kBlockK, int kThreads>
class OperandCopy<Copy::kKMajor, kBlockMn, kBlockK, kThreads> {
  static constexpr int kPitch = kBlockMn + 4;
  static constexpr int kRowsPerPass = kThreads / 8;
  static constexpr int kPasses = kBlockMn / kRowsPerPass;
  static constexpr int kStepsK = kBlockK / 8;
  static_assert(kPasses * kRowsPerPass == kBlockMn && kBlockMn <= 256);

 public:
  static constexpr int kCopies = kPasses * kStepsK;
  static constexpr bool kAsync = true;

  __device__ OperandCopy(const OperandView& view, int thread)
      : tile_(static_cast<const float*>(view.base) + view.mn * view.stride_mn + view.k),
        k_(thread % 8 - view.padding) {
    const int row = thread / 8;
    const int last_row = static_cast<int>(min(view.mn_size - view.mn, int64_t{kBlockMn})) - 1;
    shared_offset_ = 4 * ((thread % 8) * kPitch + row);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      offset_[i] = min(row + i * kRowsPerPass, last_row) * static_cast<uint32_t>(view.stride_mn) +
                   thread % 8;
    }
  }

  template <bool kFirstBlock>
  __device__ void copy(int index, uint32_t slot, bool enabled) {
    const int pass = index / kStepsK;
    const int step = index % kStepsK;
    const uint32_t shared = slot + shared_offset_ + 4 * (step * 8 * kPitch + pass * kRowsPerPass);
    if constexpr (kFirstBlock) {
      // In the padding, the first k of the row is named, and nothing is read.
      const int k = max(step * 8, -k_);
      ptx::cp_async_4_zfill(shared, tile_ + (offset_[pass] + k), k == step * 8 ? 4 : 0);
    } else {
      ptx::cp_async_4_if(shared, tile_ + offset_[pass] + step * 8, enabled);
    }
    if (index == kCopies - 1) tile_ += kBlockK;
  }

  __device__ void finish(float*) {}

 private:
  const float* tile_;  // first row of the tile, first k of the next block
  uint32_t offset_[kPasses];
  uint32_t shared_offset_;
  int k_;  // of the first block, negative in the padding
};

// A warp copies 32 consecutive rows (of A; columns of B) of one k.
template <int kBlockMn, int kBlockK, int kThreads>
class OperandCopy<Copy::kMnMajor, kBlockMn, kBlockK, kThreads> {
  static constexpr int kPitch = kBlockMn + 4;
  static constexpr int kGroups = kBlockMn > kThreads ? kBlockMn / kThreads : 1;
  static constexpr int kThreadsPerK = kBlockMn < kThreads ? kBlockMn : kThreads;
  static constexpr int kKPerPass = kThreads / kThreadsPerK;

 public:
  static constexpr int kCopies = kBlockMn * kBlockK / kThreads;
  static constexpr bool kAsync = true;

  __device__ OperandCopy(const OperandView& view, int thread)
      : base_(static_cast<const float*>(view.base)),
        pass_stride_(kKPerPass * view.stride_k),
        k_(thread / kThreadsPerK - view.padding) {
    const int k = thread / kThreadsPerK;
    const int mn = thread % kThreadsPerK;
    shared_offset_ = 4 * (k * kPitch + mn);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int64_t clamped = min(view.mn + mn + i * kThreads, view.mn_size - 1);
      pointer_[i] = base_ + clamped + (view.k + k) * view.stride_k;
    }
  }

  template <bool kFirstBlock>
  __device__ void copy(int index, uint32_t slot, bool enabled) {
    const int pass = index / kGroups;
    const int group = index % kGroups;
    const uint32_t shared =
        slot + shared_offset_ + 4 * (pass * kKPerPass * kPitch + group * kThreads);
    if constexpr (kFirstBlock) {
      const bool valid = k_ + pass * kKPerPass >= 0;
      ptx::cp_async_4_zfill(shared, valid ? pointer_[group] : base_, valid ? 4 : 0);
    } else {
      ptx::cp_async_4_if(shared, pointer_[group], enabled);
    }
    pointer_[group] += pass_stride_;
  }

  __device__ void finish(float*) {}

 private:
  const float* base_;
  const float* pointer_[kGroups];
  int64_t pass_stride_;
  uint32_t shared_offset_;
  int k_;
};

// The same with vectors of 4. mn_size is a multiple of 4, so a vector lies wholly inside or
// outside.
template <int kBlockMn, int kBlockK, int kThreads>
class OperandCopy<Copy::kMnMajorVec4, kBlockMn, kBlockK, kThreads> {
  static constexpr int kPitch = kBlockMn + 4;
  static constexpr int kThreadsPerK = kBlockMn / 4;
  static constexpr int kKPerPass = kThreads / kThreadsPerK;
  static_assert(kKPerPass > 0 && kBlockK % kKPerPass == 0);

 public:
  static constexpr int kCopies = kBlockK / kKPerPass;
  static constexpr bool kAsync = true;

  __device__ OperandCopy(const OperandView& view, int thread)
      : base_(static_cast<const float*>(view.base)),
        pass_stride_(kKPerPass * view.stride_k),
        k_(thread / kThreadsPerK - view.padding) {
    const int k = thread / kThreadsPerK;
    const int mn = thread % kThreadsPerK * 4;
    shared_offset_ = 4 * (k * kPitch + mn);
    pointer_ = base_ + min(view.mn + mn, view.mn_size - 4) + (view.k + k) * view.stride_k;
  }

  template <bool kFirstBlock>
  __device__ void copy(int index, uint32_t slot, bool enabled) {
    const uint32_t shared = slot + shared_offset_ + 4 * index * kKPerPass * kPitch;
    if constexpr (kFirstBlock) {
      const bool valid = k_ + index * kKPerPass >= 0;
      ptx::cp_async_16_zfill(shared, valid ? pointer_ : base_, valid ? 16 : 0);
    } else {
      ptx::cp_async_16_prefetch_if(shared, pointer_, enabled);
    }
    pointer_ += pass_stride_;
  }

  __device__ void finish(float*) {}

 private:
  const float* base_;
  const float* pointer_;
  int64_t pass_stride_;
  uint32_t shared_offset_;
  int k_;
};

// Loads into registers with copy(), converts and stores to shared memory with finish(). Lanes run
// along whichever dimension is closer together in memory: 8 k x 4 rows per warp, or 32 rows of one
// k.
template <int kBlockMn, int kBlockK, int kThreads>
class OperandCopy<Copy::kAnyStride, kBlockMn, kBlockK, kThreads> {
  static constexpr int kPitch = kBlockMn + 4;
  // Lanes along K: element i lies kRowStep * i rows further at the same k.
  static constexpr int kWarpsK = kBlockK / 8;
  static constexpr int kRowStep = kThreads / kBlockK;
  static_assert(kThreads / 32 % kWarpsK == 0);
  // Lanes along MN: kGroups elements, kThreads rows apart, at each of this thread's k.
  static constexpr int kGroups = kBlockMn > kThreads ? kBlockMn / kThreads : 1;
  static constexpr int kThreadsPerK = kBlockMn < kThreads ? kBlockMn : kThreads;
  static constexpr int kKPerPass = kThreads / kThreadsPerK;

 public:
  static constexpr int kCopies = kBlockMn * kBlockK / kThreads;
  static constexpr bool kAsync = false;

  __device__ OperandCopy(const OperandView& view, int thread)
      : base_(view.base), dtype_(view.dtype), lanes_along_k_(view.stride_k <= view.stride_mn) {
    int mn, k;
    if (lanes_along_k_) {
      const int warp = thread / 32;
      k = thread % 8 + warp % kWarpsK * 8;
      mn = warp / kWarpsK * 4 + thread % 32 / 8;
      inner_step_ = outer_step_ = kRowStep * view.stride_mn;
      block_step_ = kBlockK * view.stride_k - kCopies * outer_step_;
    } else {
      k = thread / kThreadsPerK;
      mn = thread % kThreadsPerK;
      inner_step_ = kThreads * view.stride_mn;
      outer_step_ = kKPerPass * view.stride_k - (kGroups - 1) * inner_step_;
      block_step_ = 0;
    }
    shared_index_ = k * kPitch + mn;
    k_ = k - view.padding;
    // At most the tile's extent matters, and that fits 32 bits.
    rows_left_ = static_cast<int>(min(view.mn_size - view.mn, int64_t{kBlockMn})) - mn;
    index_ = (view.mn + mn) * view.stride_mn + (view.k + k) * view.stride_k;
  }

  template <bool kFirstBlock>
  __device__ void copy(int i, uint32_t, bool enabled) {
    const int row = lanes_along_k_ ? i * kRowStep : i % kGroups * kThreads;
    const int k = lanes_along_k_ ? 0 : i / kGroups * kKPerPass;
    raw_[i] = 0;
    if (enabled && row < rows_left_ && (!kFirstBlock || k_ + k >= 0)) {
      raw_[i] = dtype_ == DType::kFloat32 ? static_cast<const uint32_t*>(base_)[index_]
                                          : static_cast<const uint16_t*>(base_)[index_];
    }
    index_ += i % kGroups == kGroups - 1 ? outer_step_ : inner_step_;
    if (i == kCopies - 1) index_ += block_step_;
  }

  __device__ void finish(float* slot) {
    float* shared = slot + shared_index_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int offset =
          lanes_along_k_ ? i * kRowStep : i / kGroups * kKPerPass * kPitch + i % kGroups * kThreads;
      shared[offset] = to_float(raw_[i]);
    }
  }

 private:
  __device__ float to_float(uint32_t raw) const {
    if (dtype_ == DType::kFloat16) return __half2float(__ushort_as_half(raw));
    if (dtype_ == DType::kBFloat16) raw <<= 16;
    return __uint_as_float(raw);
  }

  const void* base_;
  DType dtype_;
  bool lanes_along_k_;
  int k_;
  int rows_left_;
  int shared_index_;
  int64_t index_;  // of the next element, from base_
  int64_t inner_step_, outer_step_, block_step_;
  uint32_t raw_[kCopies];
};

}  // namespace tgemm::simt
