// GEMM on mma.sync (sm_80 and later): warps multiply swizzled shared-memory tiles that a
// multi-stage cp.async pipeline fills, fragments double-buffered in registers. The design follows
// what NVIDIA describes for Ampere GEMMs ("Developing CUDA kernels to push Tensor Cores to the
// absolute limit on A100", GTC 2020).
#pragma once

#include <cstdint>

#include "device/epilogue.cuh"
#include "device/params.hpp"
#include "device/ptx.cuh"
#include "device/tile_scheduler.cuh"
#include "kernels/sm80/cta_tile.hpp"
#include "kernels/sm80/loaders.cuh"
#include "kernels/sm80/shared_tile.cuh"

namespace tgemm::sm80 {

// One warp's accumulators and the fragments that feed them.
template <class Cta, class TileA, class TileB, bool kAKMajor, bool kBKMajor, Math kMath>
class WarpMma {
 public:
  static constexpr int kFragmentsM = Cta::kWarpM / 16;
  static constexpr int kFragmentsN = Cta::kWarpN / 16;  // pairs of n8
  static constexpr int kSteps = Cta::kKBytes / kKStepBytes;

  __device__ WarpMma(int warp, int lane)
      : warp_m_(warp % Cta::kWarpsM * Cta::kWarpM),
        warp_n_(warp / Cta::kWarpsM * Cta::kWarpN),
        lane_(lane),
        reader_a_(warp_m_, lane),
        reader_b_(warp_n_, lane) {}

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i)
#pragma unroll
      for (int j = 0; j < 2 * kFragmentsN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) accumulators_[i][j][e] = 0.0f;
  }

  // Fragments of k-step `step` into register buffer `step` % 2.
  __device__ void read(uint32_t tile_a, uint32_t tile_b, int step) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) reader_a_.read(a_[step % 2][i], tile_a, i, step);
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) reader_b_.read(b_[step % 2][j], tile_b, j, step);
  }

  // Back and forth along M, so that neighbouring instructions share a fragment. Sharing B's rather
  // than A's costs less power, and power is what limits large problems (benchmarks/NOTES.md).
  __device__ void multiply(int step) {
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      const uint32_t (&b)[4] = b_[step % 2][j / 2];
#pragma unroll
      for (int ii = 0; ii < kFragmentsM; ++ii) {
        const int i = j % 2 == 0 ? ii : kFragmentsM - 1 - ii;
        mma<kMath>(accumulators_[i][j], a_[step % 2][i], b[j % 2 * 2], b[j % 2 * 2 + 1]);
      }
    }
  }

  // Moves the accumulators to this warp's slab of `shared`.
  __device__ void stage(float* shared, int warp) {
    float* corner =
        shared + warp * Cta::kStagedFloatsPerWarp + lane_ / 4 * Cta::kStagedPitch + lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kFragmentsN; ++j) {
        float* at = corner + i * 16 * Cta::kStagedPitch + j * 8;
        const float (&d)[4] = accumulators_[i][j];
        *reinterpret_cast<float2*>(at) = make_float2(d[0], d[1]);
        *reinterpret_cast<float2*>(at + 8 * Cta::kStagedPitch) = make_float2(d[2], d[3]);
      }
    }
    __syncwarp();
  }

  // Writes the staged slab out through the epilogue.
  __device__ void store(const GemmParams& params, const Tile& tile, const float* shared,
                        int warp) const {
    store_tile<Cta::kWarpM, Cta::kWarpN, Cta::kStagedPitch, 32>(
        params, tile, tile.m + warp_m_, tile.n + warp_n_, shared + warp * Cta::kStagedFloatsPerWarp,
        lane_);
  }

 private:
  int warp_m_, warp_n_, lane_;
  FragmentReader<Operand::kA, TileA, kAKMajor, kMath> reader_a_;
  FragmentReader<Operand::kB, TileB, kBKMajor, kMath> reader_b_;
  uint32_t a_[2][kFragmentsM][4];
  uint32_t b_[2][kFragmentsN][4];
  float accumulators_[kFragmentsM][2 * kFragmentsN][4];
};

// 16-byte aligned operands, one instantiation per layout.
template <class Cta, Math kMath, bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(Cta::kThreads, Cta::kCtasPerSm)
    mma_sync_kernel(const __grid_constant__ GemmParams params) {
#if __CUDA_ARCH__ >= 800
  constexpr int kBytes = kElementBytesOf<kMath>;
  constexpr int kTileK = Cta::kKBytes / kBytes;
  using TileA = SharedTile<kAKMajor, Cta::kBlockM, Cta::kKBytes, kBytes>;
  using TileB = SharedTile<kBKMajor, Cta::kBlockN, Cta::kKBytes, kBytes>;
  using LoaderA = AsyncLoader<TileA, kAKMajor, Cta::kKBytes, kBytes, Cta::kThreads>;
  using LoaderB = AsyncLoader<TileB, kBKMajor, Cta::kKBytes, kBytes, Cta::kThreads>;
  using Mma = WarpMma<Cta, TileA, TileB, kAKMajor, kBKMajor, kMath>;
  constexpr int kSteps = Mma::kSteps;

  // In shared memory, so that what the epilogue needs does not sit in registers through the
  // mainloop.
  __shared__ Tile tile;
  extern __shared__ __align__(128) unsigned char shared[];  // stages of (A tile, B tile)
  const uint32_t stages = ptx::shared_address(shared);
  const int thread = threadIdx.x;
  const int warp = thread / 32;
  Mma warp_mma(warp, thread % 32);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const TileScheduler<Cta::kBlockM, Cta::kBlockN> scheduler(params);
  for (int64_t index = blockIdx.x; index < scheduler.count(); index += gridDim.x) {
    if (thread == 0) tile = scheduler.tile(index);
    __syncthreads();
    const int64_t k_length = tile.k_end - tile.k_begin;
    const int k_tiles = static_cast<int>((k_length + kTileK - 1) / kTileK);
    LoaderA load_a(static_cast<const char*>(params.a.pointer) + tile.offset.a * kBytes,
                   params.a.row_stride, params.a.col_stride, tile.m, params.m, tile.k_begin,
                   thread);
    LoaderB load_b(static_cast<const char*>(params.b.pointer) + tile.offset.b * kBytes,
                   params.b.col_stride, params.b.row_stride, tile.n, params.n, tile.k_begin,
                   thread);

    uint32_t filling = stages;
    uint32_t reading = stages;
    const auto next = [stages](uint32_t stage) {
      stage += Cta::kStageBytes;
      return stage == stages + Cta::kStages * Cta::kStageBytes ? stages : stage;
    };
    // Requests share `part` of `parts` of a k-tile, if there is one.
    const auto request = [&](int part, int parts, bool wanted) {
      load_a.copy(filling, LoaderA::kPasses * part / parts, LoaderA::kPasses * (part + 1) / parts,
                  wanted);
      load_b.copy(filling + TileA::kBytes, LoaderB::kPasses * part / parts,
                  LoaderB::kPasses * (part + 1) / parts, wanted);
      if (part < parts - 1) return;
      ptx::cp_async_commit_group();
      load_a.advance();
      load_b.advance();
      filling = next(filling);
    };

    if (k_tiles > 0) {
      const int first_k = static_cast<int>(k_length - int64_t{k_tiles - 1} * kTileK);
      load_a.copy_first(filling, first_k, thread);
      load_b.copy_first(filling + TileA::kBytes, first_k, thread);
    }
    ptx::cp_async_commit_group();
    filling = next(filling);
#pragma unroll
    for (int s = 1; s < Cta::kStages - 1; ++s) request(0, 1, s < k_tiles);

    warp_mma.clear();
    ptx::cp_async_wait_group<Cta::kStages - 2>();
    __syncthreads();
    if (k_tiles > 0) warp_mma.read(reading, reading + TileA::kBytes, 0);

    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
      const bool more = k_tile + Cta::kStages - 1 < k_tiles;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step == kSteps - 1) {
          // The next stage has landed for this thread; the barrier makes that true for all, and
          // lets the stage just read be filled again. (After the last k-tile stale data is read,
          // and not used.)
          ptx::cp_async_wait_group<Cta::kStages - 2>();
          __syncthreads();
          reading = next(reading);
        }
        warp_mma.read(reading, reading + TileA::kBytes, (step + 1) % kSteps);
        if (step < kSteps - 1) request(step, kSteps - 1, more);
        warp_mma.multiply(step);
      }
    }

    ptx::cp_async_wait_group<0>();
    __syncthreads();  // all fragments read: the stages become the epilogue's buffer
    warp_mma.stage(reinterpret_cast<float*>(shared), warp);
    warp_mma.store(params, tile, reinterpret_cast<float*>(shared), warp);
    __syncthreads();
  }
#endif
}

// Any strides and alignment, FP32 operands rounded to FP16/BF16 on the way; layouts at run time.
template <class Cta, Math kMath, class Source>
__global__ void __launch_bounds__(Cta::kThreads, Cta::kCtasPerSm)
    mma_sync_staged_kernel(const __grid_constant__ GemmParams params) {
#if __CUDA_ARCH__ >= 800
  constexpr int kBytes = kElementBytesOf<kMath>;
  constexpr int kTileK = Cta::kKBytes / kBytes;
  using TileA = SharedTile<true, Cta::kBlockM, Cta::kKBytes, kBytes>;
  using TileB = SharedTile<true, Cta::kBlockN, Cta::kKBytes, kBytes>;
  using LoaderA = StagedLoader<TileA, kMath, Source, Cta::kKBytes, Cta::kThreads>;
  using LoaderB = StagedLoader<TileB, kMath, Source, Cta::kKBytes, Cta::kThreads>;
  using Mma = WarpMma<Cta, TileA, TileB, true, true, kMath>;
  static_assert(Cta::kStages == 2);

  // In shared memory, so that what the epilogue needs does not sit in registers through the
  // mainloop.
  __shared__ Tile tile;
  extern __shared__ __align__(128) unsigned char shared[];  // two stages of (A tile, B tile)
  const uint32_t stages = ptx::shared_address(shared);
  const int thread = threadIdx.x;
  const int warp = thread / 32;
  Mma warp_mma(warp, thread % 32);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const TileScheduler<Cta::kBlockM, Cta::kBlockN> scheduler(params);
  for (int64_t index = blockIdx.x; index < scheduler.count(); index += gridDim.x) {
    if (thread == 0) tile = scheduler.tile(index);
    __syncthreads();
    LoaderA load_a(static_cast<const Source*>(params.a.pointer) + tile.offset.a,
                   params.a.row_stride, params.a.col_stride, tile.m, params.m, tile.k_begin,
                   tile.k_end, thread);
    LoaderB load_b(static_cast<const Source*>(params.b.pointer) + tile.offset.b,
                   params.b.col_stride, params.b.row_stride, tile.n, params.n, tile.k_begin,
                   tile.k_end, thread);
    const int64_t k_tiles = (tile.k_end - tile.k_begin + kTileK - 1) / kTileK;

    warp_mma.clear();
    uint32_t reading = stages;
    uint32_t filling = stages;
    if (k_tiles > 0) {
      load_a.fetch();
      load_b.fetch();
      load_a.store(filling);
      load_b.store(filling + TileA::kBytes);
    }
    __syncthreads();
    for (int64_t k_tile = 0; k_tile < k_tiles; ++k_tile) {
      const bool more = k_tile + 1 < k_tiles;
      if (more) {
        load_a.fetch();
        load_b.fetch();
      }
#pragma unroll
      for (int step = 0; step < Mma::kSteps; ++step) {
        warp_mma.read(reading, reading + TileA::kBytes, step);
        warp_mma.multiply(step);
      }
      filling = reading == stages ? stages + Cta::kStageBytes : stages;
      if (more) {
        load_a.store(filling);
        load_b.store(filling + TileA::kBytes);
      }
      reading = filling;
      __syncthreads();
    }
    warp_mma.stage(reinterpret_cast<float*>(shared), warp);
    warp_mma.store(params, tile, reinterpret_cast<float*>(shared), warp);
    __syncthreads();
  }
#endif
}

}  // namespace tgemm::sm80
