// Rungs 2 and 3. The CTA copies a 32x32 tile of A and one of B to shared memory and multiplies from
// there: each element comes from global memory once per tile instead of once per output.
//
// Both tiles are stored with K as the row, and read from global memory along whatever is contiguous
// there. So an operand that is contiguous along K (A row-major) is transposed on the way: the 32
// threads of a warp store to 32 rows of one column. With rows of 32 floats these are 32 words of
// one bank, one store after the other; kPitch is what the two rungs differ in.
#pragma once

#include "kernels/ladder/common.cuh"
#include "kernels/ladder/launch_by_dtype.cuh"

namespace tgemm::ladder {

template <int kPitch, class T, Side kSide>
__device__ inline void copy_tile(float (&shared)[kTiledTile.k][kPitch],
                                 const Operand<kSide>& operand, int64_t mn, int64_t k) {
  constexpr int kSize = 32;
  const int fast = threadIdx.x % kSize;
  const bool along_k = operand.k_stride() == 1;
#pragma unroll
  for (int slow = threadIdx.x / kSize; slow < kSize; slow += kTiledTile.threads / kSize) {
    const int row = along_k ? fast : slow;
    const int column = along_k ? slow : fast;
    shared[row][column] = to_float(load_or_zero<T>(operand, mn + column, k + row));
  }
}

template <int kPitch, class T>
__device__ inline void multiply_tiled(const GemmParams& params) {
  __shared__ float shared_a[kTiledTile.k][kPitch];
  __shared__ float shared_b[kTiledTile.k][kPitch];
  constexpr int kRowStep = kTiledTile.threads / kTiledTile.n;
  constexpr int kOutputs = kTiledTile.m / kRowStep;
  const int row = threadIdx.x / kTiledTile.n;  // and every kRowStep-th below it
  const int column = threadIdx.x % kTiledTile.n;

  for_each_tile<kTiledTile.m, kTiledTile.n>(params, [&](const Tile& tile) {
    const Operand<Side::kA> a(params, tile);
    const Operand<Side::kB> b(params, tile);
    float sums[kOutputs] = {};
    for (int64_t k = 0; k < params.k; k += kTiledTile.k) {
      copy_tile<kPitch, T>(shared_a, a, tile.m, k);
      copy_tile<kPitch, T>(shared_b, b, tile.n, k);
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < kTiledTile.k; ++i) {
        const float from_b = shared_b[i][column];
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) {
          sums[j] = fmaf(shared_a[i][row + j * kRowStep], from_b, sums[j]);
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < kOutputs; ++j) {
      finish_one(params, tile.offset, tile.m + row + j * kRowStep, tile.n + column, sums[j]);
    }
  });
}

}  // namespace tgemm::ladder
