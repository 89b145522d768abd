// GEMM on wgmma (sm_90a). CTAs stay on their SM and walk over output tiles. Of a CTA's three
// warpgroups, one thread of the first asks TMA for tiles of A and B, up to kStages ahead and across
// output tiles, so that a tile's epilogue hides the next one's first loads; the two others multiply
// 64 rows each. The CTAs of a cluster multicast what they share.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "device/epilogue.cuh"
#include "device/params.hpp"
#include "device/ptx.cuh"
#include "device/tile_scheduler.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/sm90/cta_tile.hpp"

namespace tgemm::sm90 {

// Full: a stage's tiles have arrived in this CTA. Empty: all consumers of the cluster have read
// theirs, so that any of its CTAs may write to all.
template <class Cta>
struct Barriers {
  uint64_t full[Cta::kStages];
  uint64_t empty[Cta::kStages];

  __device__ void init() {
    for (int i = 0; i < Cta::kStages; ++i) {
      cptx::mbarrier_init(&full[i], 1u);
      cptx::mbarrier_init(&empty[i], static_cast<uint32_t>(Cta::kConsumers * Cta::kCluster));
    }
    cptx::fence_mbarrier_init(cptx::sem_release, cptx::scope_cluster);
  }
};

// An output tile of this CTA: that of its cluster, moved down by its rank.
template <class Cta>
class Scheduler {
 public:
  __device__ explicit Scheduler(const GemmParams& params, int rank)
      : scheduler_(params), rank_(rank) {}

  __device__ int64_t first() const { return blockIdx.x / Cta::kCluster; }
  __device__ int64_t step() const { return gridDim.x / Cta::kCluster; }
  __device__ int64_t count() const { return scheduler_.count(); }
  __device__ Tile tile(int64_t index) const {
    Tile tile = scheduler_.tile(index);
    tile.m += rank_ * Cta::kBlockM;
    return tile;
  }

 private:
  TileScheduler<Cta::kBlockM * Cta::kCluster, Cta::kBlockN> scheduler_;
  int rank_;
};

template <class Cta>
__device__ inline int k_tiles(const Tile& tile) {
  return static_cast<int>((tile.k_end - tile.k_begin + Cta::kBlockK - 1) / Cta::kBlockK);
}

__device__ inline void sync_warpgroup(int consumer) {
  // Constant numbers: with a computed one, the kernel would count as using all 16 barriers.
  if (consumer == 0) {
    ptx::named_barrier_sync(1, 128);
  } else {
    ptx::named_barrier_sync(2, 128);
  }
}

// The producer's work: requests every tile of A and B of every output tile of this CTA.
template <class Cta, bool kAKMajor, bool kBKMajor>
__device__ inline void produce(const GemmParams& params, const OperandMap& map_a,
                               const OperandMap& map_b, const Scheduler<Cta>& scheduler, int rank,
                               unsigned char* stages, Barriers<Cta>& barriers) {
  constexpr int kShareN = Cta::kBlockN / Cta::kCluster;
  constexpr uint16_t kAll = Cta::kCluster > 1 ? (1 << Cta::kCluster) - 1 : 0;
  StageCursor<Cta::kStages> cursor;
  for (int64_t i = scheduler.first(); i < scheduler.count(); i += scheduler.step()) {
    const Tile tile = scheduler.tile(i);
    const MapCoordinates at_a(map_a, params, tile.batch);
    const MapCoordinates at_b(map_b, params, tile.batch);
    const int count = k_tiles<Cta>(tile);
    int64_t k = tile.k_begin;
    for (int j = 0; j < count; ++j, k += Cta::kBlockK) {
      wait(barriers.empty[cursor.stage], cursor.parity ^ 1);
      uint64_t& full = barriers.full[cursor.stage];
      unsigned char* stage = stages + cursor.stage * Cta::kStageBytes;
      cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared, &full,
                                      static_cast<uint32_t>(Cta::kStageBytes));
      request_tile<Cta::kBlockM, kAKMajor>(stage, map_a, at_a, tile.m, k, full);
      request_tile<kShareN, kBKMajor>(stage + Cta::kBytesA + rank * kShareN * Cta::kBlockK * 2,
                                      map_b, at_b, tile.n + rank * kShareN, k, full, kAll);
      cursor.advance();
    }
  }
  // Nobody may leave while another CTA of the cluster still writes to it or waits for it; so the
  // last stages are waited for as if they were to be filled again.
  for (int j = 0; j < Cta::kStages; ++j) {
    wait(barriers.empty[cursor.stage], cursor.parity ^ 1);
    cursor.advance();
  }
}

// A consumer's sums: 64 rows of the tile, 16 for each of its warps.
template <class Cta, bool kBf16, bool kAKMajor, bool kBKMajor>
class Consumer {
 public:
  __device__ Consumer(unsigned char* stages, Barriers<Cta>& barriers)
      : stages_(stages), barriers_(barriers) {}

  // Not a member: the sums live from one multiply() to its store(), not over the loop around both.
  using Sums = float[Cta::kBlockN / 2];

  // Multiplies the k-tiles of one output tile, with one group of instructions always in flight.
  __device__ void multiply(Sums& sums, int count) {
    using Multiplier = ptx::Wgmma<Cta::kBlockN, kBf16, kAKMajor, kBKMajor>;
    const int consumer = threadIdx.x / 128 - 1;
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    if (count == 0) return;
    int previous = 0;
    for (int i = 0; i < count; ++i) {
      wait(barriers_.full[cursor_.stage], cursor_.parity);
      const uint32_t stage = ptx::shared_address(stages_) + cursor_.stage * Cta::kStageBytes;
      // 64 rows are 64 * 128 bytes in both arrangements.
      uint64_t a = ptx::wgmma_descriptor<kAKMajor>(stage + consumer * 64 * Cta::kBlockK * 2, 0);
      uint64_t b = ptx::wgmma_descriptor<kBKMajor>(stage + Cta::kBytesA, 64 * Cta::kBlockK * 2);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Cta::kBlockK / 16; ++step) {
        Multiplier::multiply(sums, a, b);
        a += ptx::kWgmmaStepK<kAKMajor>;
        b += ptx::kWgmmaStepK<kBKMajor>;
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (i > 0) release(previous);
      previous = cursor_.stage;
      cursor_.advance();
    }
    ptx::wgmma_wait_group<0>();
    release(previous);
  }

  // Writes the sums out through the epilogue, by way of this warp's `staged` bytes.
  __device__ void store(const Sums& sums, const GemmParams& params, const Tile& tile,
                        unsigned char* staged) {
    const int warp = threadIdx.x / 32 - 4;
    const int64_t m = tile.m + warp * 16;
    if (m >= params.m) return;
    if (params.plain_epilogue) {
      store_plain(sums, params, tile, m, staged);
    } else {
      store_any(sums, params, tile, m, staged);
    }
  }

 private:
  // One thread for each CTA of the cluster tells its producer.
  __device__ void release(int stage) {
    const int thread = threadIdx.x % 128;
    if constexpr (Cta::kCluster == 1) {
      if (thread == 0) arrive(barriers_.empty[stage]);
    } else if (thread < Cta::kCluster) {
      uint64_t* remote =
          cooperative_groups::this_cluster().map_shared_rank(&barriers_.empty[stage], thread);
      cptx::mbarrier_arrive(cptx::sem_release, cptx::scope_cluster, cptx::space_cluster, remote);
    }
  }

  // alpha * sum + bias in 16 bits, eight outputs at a time.
  __device__ static void store_plain(const Sums& sums, const GemmParams& params, const Tile& tile,
                                     int64_t m, unsigned char* staged) {
    const int lane = threadIdx.x % 32;
    const uint32_t to =
        ptx::shared_address(staged) + (lane % 16 * Cta::kChunkPitch + lane / 16 * 8) * 2;
    constexpr int kLanesPerRow = Cta::kChunk / 8;
    const int row = lane / kLanesPerRow;
    const int column = lane % kLanesPerRow * 8;
    const uint4* from =
        reinterpret_cast<const uint4*>(staged + (row * Cta::kChunkPitch + column) * 2);
    uint16_t* out = static_cast<uint16_t*>(params.out.pointer) + tile.offset.out +
                    (m + row) * params.out.row_stride + tile.n + column;
    // Rolled: otherwise the loads of all biases come first, and need more registers than there are.
#pragma unroll 1
    for (int chunk = 0; chunk < Cta::kBlockN / Cta::kChunk; ++chunk) {
      const int64_t n = tile.n + chunk * Cta::kChunk;
      if (n >= params.n) return;
      float bias[Cta::kChunk / 4] = {};
      if (params.bias.pointer) {
#pragma unroll
        for (int i = 0; i < Cta::kChunk / 4; ++i) {
          const int64_t at = n + i / 2 * 8 + lane % 4 * 2 + i % 2;
          if (at < params.n) {
            bias[i] = load_element(params.bias.pointer, params.bias.dtype, tile.offset.bias + at);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < Cta::kBlockN / 16; ++i) {
        if (i / (Cta::kChunk / 16) != chunk) continue;
        const int j = i % (Cta::kChunk / 16);
        uint32_t packed[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // columns of 8, rows of 8
          const float* pair = sums + i * 8 + part / 2 * 4 + part % 2 * 2;
          packed[part] = pack(fmaf(params.alpha, pair[0], bias[4 * j + part / 2 * 2]),
                              fmaf(params.alpha, pair[1], bias[4 * j + part / 2 * 2 + 1]));
        }
        ptx::stmatrix_x4(to + j * 32, packed);
      }
      __syncwarp();
      constexpr int kRowStep = 32 / kLanesPerRow;
#pragma unroll
      for (int r = 0; r < 16; r += kRowStep) {
        if (m + row + r < params.m && n + column < params.n) {
          *reinterpret_cast<uint4*>(out + r * params.out.row_stride + chunk * Cta::kChunk) =
              from[r * Cta::kChunkPitch / 8];
        }
      }
      __syncwarp();
    }
  }

  __device__ static uint32_t pack(float low, float high) {
    if constexpr (kBf16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      return reinterpret_cast<const uint32_t&>(pair);
    }
  }

  // Everything else, in FP32 through the common epilogue. The loop is rolled, to keep one copy of
  // it.
  __device__ static void store_any(const Sums& sums, const GemmParams& params, const Tile& tile,
                                   int64_t m, unsigned char* staged) {
    const int lane = threadIdx.x % 32;
    float* wide = reinterpret_cast<float*>(staged);
    float* to = wide + lane / 4 * Cta::kWidePitch + lane % 4 * 2;
#pragma unroll 1
    for (int chunk = 0; chunk < Cta::kBlockN / Cta::kWideChunk; ++chunk) {
      const int64_t n = tile.n + chunk * Cta::kWideChunk;
      if (n >= params.n) return;
#pragma unroll
      for (int i = 0; i < Cta::kBlockN / 8; ++i) {
        if (i / (Cta::kWideChunk / 8) != chunk) continue;
        float* at = to + i % (Cta::kWideChunk / 8) * 8;
        *reinterpret_cast<float2*>(at) = make_float2(sums[4 * i], sums[4 * i + 1]);
        *reinterpret_cast<float2*>(at + 8 * Cta::kWidePitch) =
            make_float2(sums[4 * i + 2], sums[4 * i + 3]);
      }
      __syncwarp();
      store_tile<16, Cta::kWideChunk, Cta::kWidePitch, 32, /*kMaxItems=*/2>(params, tile, m, n,
                                                                            wide, lane);
      __syncwarp();
    }
  }

  unsigned char* stages_;
  Barriers<Cta>& barriers_;
  StageCursor<Cta::kStages> cursor_;
};

template <class Cta, bool kBf16, bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(Cta::kThreads, 1)
    sm90_gemm(const __grid_constant__ GemmParams params, const __grid_constant__ OperandMap map_a,
              const __grid_constant__ OperandMap map_b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char shared[];
  unsigned char* stages = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024;
  unsigned char* staged = stages + Cta::kStages * Cta::kStageBytes;
  __shared__ Barriers<Cta> barriers;
  __shared__ Tile tiles[Cta::kConsumers];
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = Cta::kCluster > 1 ? static_cast<int>(cluster.block_rank()) : 0;
  if (threadIdx.x == 0) barriers.init();
  if constexpr (Cta::kCluster > 1) {
    cluster.sync();  // no CTA writes to another one's barriers before they exist
  } else {
    __syncthreads();
  }

  const Scheduler<Cta> scheduler(params, rank);
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<72>();
    if (threadIdx.x == 0) {
      produce<Cta, kAKMajor, kBKMajor>(params, map_a, map_b, scheduler, rank, stages, barriers);
    }
  } else {
    ptx::setmaxnreg_inc<216>();
    const int warp = threadIdx.x / 32 - 4;
    Tile& tile = tiles[warp / 4];
    using ThisConsumer = Consumer<Cta, kBf16, kAKMajor, kBKMajor>;
    ThisConsumer consumer(stages, barriers);
    for (int64_t i = scheduler.first(); i < scheduler.count(); i += scheduler.step()) {
      // One thread decodes the tile for its warpgroup, when all have left the one before.
      sync_warpgroup(warp / 4);
      if (threadIdx.x % 128 == 0) tile = scheduler.tile(i);
      sync_warpgroup(warp / 4);
      typename ThisConsumer::Sums sums;
      consumer.multiply(sums, k_tiles<Cta>(tile));
      consumer.store(sums, params, tile, staged + warp * Cta::kStagedBytesPerWarp);
    }
  }
#endif
}

}  // namespace tgemm::sm90
