// Rung 9, wgmma: Hopper's way. The Tensor Cores read their operands from shared memory by
// themselves (wgmma), tiles arrive there by themselves (TMA), and mbarriers tell the two about each
// other. So warps specialise: one thread of the first warpgroup asks for tiles, the two other
// warpgroups do nothing but multiply, each 64 rows of the CTA's 128x256 outputs.
#pragma once

#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/ladder/common.cuh"
#include "kernels/ladder/wgmma.hpp"

namespace tgemm::ladder {

constexpr TileShape kTile = kWgmmaTile;
constexpr int kStages = kTile.stages;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kBytesA = kTile.m * kTile.k * 2;
constexpr int kBytesB = kTile.n * kTile.k * 2;
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kWgmmaK = 16;
static_assert(kTile.k * 2 == 128, "a row of a tile is as wide as the swizzle");

// The sums pass through shared memory on their way out, where tiles have been.
constexpr int kStagedPitch = kTile.n + 8;
constexpr int kStagedFloats = 16 * kStagedPitch;  // per warp
static_assert(kConsumers * 4 * kStagedFloats * 4 <= kStages * kStageBytes);

// Full: the tiles of a stage have arrived. Empty: both consumers have read them.
struct Barriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // `filling`: threads that report a stage as full.
  __device__ void init(int filling) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        cptx::mbarrier_init(&full[i], static_cast<uint32_t>(filling));
        cptx::mbarrier_init(&empty[i], static_cast<uint32_t>(kConsumers));
      }
      cptx::fence_mbarrier_init(cptx::sem_release, cptx::scope_cluster);
    }
    __syncthreads();
  }
};

// What TMA cannot read: copies a tile of kMn by 64 elements with plain loads and stores, by the 128
// threads of the producing warpgroup, into the K-major arrangement that TMA would have made.
template <class T, int kMn, Side kSide>
__device__ inline void copy_tile(unsigned char* tile, const Operand<kSide>& operand, int64_t k) {
  const auto put_along_k = [&](int at_mn, int at_k, const auto& elements) {
    const int chunk = at_k / 8 ^ (at_mn % 8);
    put(reinterpret_cast<T*>(tile) + at_mn * kTile.k + chunk * 8 + at_k % 8, elements);
  };
  if (operand.mn_stride() != 1) {
    TileCopy<T, kMn, kTile.k, true, 128, kSide, 8>(operand).copy(k, put_along_k);
  } else {
    TileCopy<T, kMn, kTile.k, false, 128, kSide, 8>(operand).copy(
        k, [&]<int kCount>(int at_mn, int at_k, const Elements<T, kCount>& elements) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            put_along_k(at_mn + i, at_k, Elements<T, 1>{elements.values[i]});
          }
        });
  }
}

// The part of a consumer: multiplies all k-tiles of an output tile, with one group of instructions
// always in flight, and hands the sums to the epilogue.
template <bool kBf16, bool kAKMajor, bool kBKMajor>
__device__ inline void consume(const GemmParams& params, const Tile& tile, unsigned char* stages,
                               Barriers& barriers, StageCursor<kStages>& cursor) {
  using Multiplier =
      ptx::Wgmma<kTile.n, kBf16 ? ptx::WgmmaType::kBf16 : ptx::WgmmaType::kF16, kAKMajor, kBKMajor>;
  const auto consumer = static_cast<int>(ptx::uniform(threadIdx.x / 128)) - 1;
  const int thread = threadIdx.x % 128;
  const int k_tiles = static_cast<int>((params.k + kTile.k - 1) / kTile.k);
  float sums[kTile.n / 2] = {};
  int previous = -1;  // the stage that the group in flight before this one reads
  for (int i = 0; i < k_tiles; ++i) {
    const uint32_t tile_a = ptx::uniform(ptx::shared_address(stages + cursor.stage * kStageBytes));
    // 64 rows are 64 * 128 bytes in both arrangements.
    uint64_t a = ptx::wgmma_descriptor<kAKMajor>(tile_a + consumer * 64 * kTile.k * 2, 0);
    uint64_t b = ptx::wgmma_descriptor<kBKMajor>(tile_a + kBytesA, 64 * kTile.k * 2);
    wait(barriers.full[cursor.stage], cursor.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTile.k / kWgmmaK; ++step) {
      Multiplier::multiply(sums, a, b);
      a += ptx::kWgmmaStepK<kAKMajor>;
      b += ptx::kWgmmaStepK<kBKMajor>;
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    if (previous >= 0 && thread == 0) arrive(barriers.empty[previous]);
    previous = cursor.stage;
    cursor.advance();
  }
  ptx::wgmma_wait_group<0>();
  if (previous >= 0 && thread == 0) arrive(barriers.empty[previous]);

  // Both consumers are through with the tiles before sums are written over them.
  ptx::named_barrier_sync(1, kConsumers * 128);
  const int warp = thread / 32;
  const int lane = thread % 32;
  float* staged = reinterpret_cast<float*>(stages) + (consumer * 4 + warp) * kStagedFloats;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    float* at = staged + lane / 4 * kStagedPitch + j * 8 + lane % 4 * 2;
    *reinterpret_cast<float2*>(at) = make_float2(sums[4 * j], sums[4 * j + 1]);
    *reinterpret_cast<float2*>(at + 8 * kStagedPitch) =
        make_float2(sums[4 * j + 2], sums[4 * j + 3]);
  }
  __syncwarp();
  store_tile<16, kTile.n, kStagedPitch, 32>(params, tile, tile.m + consumer * 64 + warp * 16,
                                            tile.n, staged, lane);
  // What is written here next, TMA writes.
  cptx::fence_proxy_async(cptx::space_shared);
}

template <bool kBf16, bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(kTile.threads, 1)
    wgmma_tma(const __grid_constant__ GemmParams params, const __grid_constant__ OperandMap map_a,
              const __grid_constant__ OperandMap map_b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  // The swizzle's pattern repeats every 1024 bytes of address.
  unsigned char* stages = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024;
  __shared__ Barriers barriers;
  barriers.init(/*filling=*/1);
  StageCursor<kStages> cursor;

  for_each_tile<kTile.m, kTile.n>(params, [&](const Tile& tile) {
    if (threadIdx.x >= 128) {
      consume<kBf16, kAKMajor, kBKMajor>(params, tile, stages, barriers, cursor);
    } else if (threadIdx.x == 0) {
      const MapCoordinates at_a(map_a, params, tile.batch);
      const MapCoordinates at_b(map_b, params, tile.batch);
      for (int64_t k = 0; k < params.k; k += kTile.k) {
        wait(barriers.empty[cursor.stage], cursor.parity ^ 1);
        uint64_t& full = barriers.full[cursor.stage];
        unsigned char* stage = stages + cursor.stage * kStageBytes;
        cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared,
                                        &full, static_cast<uint32_t>(kStageBytes));
        request_tile<kTile.m, kAKMajor>(stage, map_a, at_a, tile.m, k, full);
        request_tile<kTile.n, kBKMajor>(stage + kBytesA, map_b, at_b, tile.n, k, full);
        cursor.advance();
      }
    }
  });
#endif
}

template <bool kBf16>
__global__ void __launch_bounds__(kTile.threads, 1)
    wgmma_staged(const __grid_constant__ GemmParams params) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using T = std::conditional_t<kBf16, __nv_bfloat16, __half>;
  extern __shared__ unsigned char shared[];
  unsigned char* stages = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024;
  __shared__ Barriers barriers;
  barriers.init(/*filling=*/128);
  StageCursor<kStages> cursor;

  for_each_tile<kTile.m, kTile.n>(params, [&](const Tile& tile) {
    if (threadIdx.x >= 128) {
      consume<kBf16, true, true>(params, tile, stages, barriers, cursor);
    } else {
      const Operand<Side::kA> a(params, tile);
      const Operand<Side::kB> b(params, tile);
      for (int64_t k = 0; k < params.k; k += kTile.k) {
        wait(barriers.empty[cursor.stage], cursor.parity ^ 1);
        unsigned char* stage = stages + cursor.stage * kStageBytes;
        copy_tile<T, kTile.m>(stage, a, k);
        copy_tile<T, kTile.n>(stage + kBytesA, b, k);
        cptx::fence_proxy_async(cptx::space_shared);  // wgmma reads by the asynchronous proxy
        arrive(barriers.full[cursor.stage]);
        cursor.advance();
      }
    }
  });
#endif
}

}  // namespace tgemm::ladder
