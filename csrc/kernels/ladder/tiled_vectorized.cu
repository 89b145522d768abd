// Rung 4, tiled_vectorized: 128-bit loads and register blocking. A thread computes 8x8 outputs of a
// 128x128 tile: 16 numbers from shared memory, read 128 bits at a time, serve 64 multiply-adds.
// Global memory is read in chunks of 16 bytes; with kWide off, one element at a time.
#include "kernels/ladder/common.cuh"
#include "kernels/ladder/launch_by_dtype.cuh"

namespace tgemm::ladder {

namespace {

constexpr TileShape kTile = kVectorizedTile;
constexpr int kPitch = kTile.m + 4;    // keeps rows 16-byte aligned
constexpr int kThreadTile = 8;         // two runs of 4 rows by two runs of 4 columns,
constexpr int kRunStep = kTile.m / 2;  // this far apart: a warp's 128-bit reads are contiguous

// A tile of the operand to shared[k][mn] as FP32.
template <class T, bool kWide, bool kKMajor, Side kSide>
__device__ inline void copy_tile(float (&shared)[kTile.k][kPitch], const Operand<kSide>& operand,
                                 int64_t k) {
  TileCopy<T, kTile.m, kTile.k, kKMajor, kTile.threads, kSide, /*kInFlight=*/4> copy(operand,
                                                                                     kWide);
  copy.copy(k, [&]<int kCount>(int at_mn, int at_k, const Elements<T, kCount>& elements) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      shared[at_k + (kKMajor ? i : 0)][at_mn + (kKMajor ? 0 : i)] = to_float(elements.values[i]);
    }
  });
}

__device__ inline void read_fragment(float (&fragment)[kThreadTile], const float* row) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 v = *reinterpret_cast<const float4*>(row + half * kRunStep);
    fragment[4 * half] = v.x, fragment[4 * half + 1] = v.y;
    fragment[4 * half + 2] = v.z, fragment[4 * half + 3] = v.w;
  }
}

}  // namespace

template <class T, bool kWide>
__global__ void __launch_bounds__(kTile.threads, 2)
    tiled_vectorized(const __grid_constant__ GemmParams params) {
  __shared__ __align__(16) float shared_a[kTile.k][kPitch];
  __shared__ __align__(16) float shared_b[kTile.k][kPitch];
  // A warp covers 4 x 8 runs: 16 rows by 32 columns, twice in each direction.
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int row = warp / 2 * 16 + lane / 8 * 4;
  const int column = warp % 2 * 32 + lane % 8 * 4;

  for_each_tile<kTile.m, kTile.n>(params, [&](const Tile& tile) {
    const Operand<Side::kA> a(params, tile);
    const Operand<Side::kB> b(params, tile);
    float sums[kThreadTile][kThreadTile] = {};
    for (int64_t k = 0; k < params.k; k += kTile.k) {
      if (a.mn_stride() == 1) {
        copy_tile<T, kWide, false>(shared_a, a, k);
      } else {
        copy_tile<T, kWide, true>(shared_a, a, k);
      }
      if (b.mn_stride() == 1) {
        copy_tile<T, kWide, false>(shared_b, b, k);
      } else {
        copy_tile<T, kWide, true>(shared_b, b, k);
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kTile.k; ++i) {
        float from_a[kThreadTile], from_b[kThreadTile];
        read_fragment(from_a, &shared_a[i][row]);
        read_fragment(from_b, &shared_b[i][column]);
#pragma unroll
        for (int r = 0; r < kThreadTile; ++r) {
#pragma unroll
          for (int c = 0; c < kThreadTile; ++c) {
            sums[r][c] = fmaf(from_a[r], from_b[c], sums[r][c]);
          }
        }
      }
      __syncthreads();
    }
    // Rolled, to keep one copy of the epilogue; picking a run in it keeps the sums in registers.
#pragma unroll 1
    for (int run = 0; run < 2 * kThreadTile; ++run) {
      float4 picked{};
#pragma unroll
      for (int i = 0; i < 2 * kThreadTile; ++i) {
        const float* from = &sums[i / 2][i % 2 * 4];
        if (i == run) picked = make_float4(from[0], from[1], from[2], from[3]);
      }
      const int r = run / 2;
      finish_four(params, tile.offset, tile.m + row + r % 4 + r / 4 * kRunStep,
                  tile.n + column + run % 2 * kRunStep, picked);
    }
  });
}

std::string launch_tiled_vectorized(bool wide_loads, const GemmParams& params,
                                    const LaunchTarget& target) {
  if (wide_loads) {
    return launch_by_dtype<tiled_vectorized<float, true>, tiled_vectorized<__half, true>,
                           tiled_vectorized<__nv_bfloat16, true>>(kTile, params, target);
  }
  return launch_by_dtype<tiled_vectorized<float, false>, tiled_vectorized<__half, false>,
                         tiled_vectorized<__nv_bfloat16, false>>(kTile, params, target);
}

}  // namespace tgemm::ladder
