// What the two WMMA rungs share: a warp's accumulators, of 16x16 outputs each, multiplied by
// nvcuda::wmma and handed to the epilogue 16 rows at a time.
#pragma once

#include <mma.h>

#include "kernels/ladder/common.cuh"
#include "kernels/ladder/launch_tensor_core.cuh"

namespace tgemm::ladder {

namespace wmma = nvcuda::wmma;

constexpr int kFragment = 16;  // rows, columns and depth of a fragment

// A (row-major when K-major) and B (column-major when K-major).
template <class T, bool kKMajor>
using FragmentA = wmma::fragment<wmma::matrix_a, 16, 16, 16, T,
                                 std::conditional_t<kKMajor, wmma::row_major, wmma::col_major>>;
template <class T, bool kKMajor>
using FragmentB = wmma::fragment<wmma::matrix_b, 16, 16, 16, T,
                                 std::conditional_t<kKMajor, wmma::col_major, wmma::row_major>>;

// The sums of kRows by kColumns outputs.
template <int kRows, int kColumns>
class WarpSums {
 public:
  static constexpr int kFragmentsM = kRows / kFragment;
  static constexpr int kFragmentsN = kColumns / kFragment;

  __device__ WarpSums() {
#pragma unroll
    for (int i = 0; i < kFragmentsM * kFragmentsN; ++i) {
      wmma::fill_fragment(sums_[i / kFragmentsN][i % kFragmentsN], 0.0f);
    }
  }

  template <class A, class B>
  __device__ void multiply(int i, const A& a, const B (&b)[kFragmentsN]) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
      wmma::mma_sync(sums_[i][j], a, b[j], sums_[i][j]);
    }
  }

  static constexpr int kStagedPitch = kColumns + 8;
  static constexpr int kStagedFloats = kFragment * kStagedPitch;  // per warp

  // Writes out the sums, whose first is output (m, n), through this warp's `staged` floats.
  __device__ void finish(const GemmParams& params, const Tile& tile, int64_t m, int64_t n,
                         float* staged) {
    // Rolled, to keep one copy of the epilogue; picking the row in it keeps the sums in registers.
#pragma unroll 1
    for (int row = 0; row < kFragmentsM; ++row) {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        if (i != row) continue;
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
          wmma::store_matrix_sync(staged + j * kFragment, sums_[i][j], kStagedPitch,
                                  wmma::mem_row_major);
        }
      }
      finish_staged<kFragment, kColumns, kStagedPitch>(params, tile.offset, m + row * kFragment, n,
                                                       staged);
    }
  }

 private:
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums_[kFragmentsM][kFragmentsN];
};

}  // namespace tgemm::ladder
