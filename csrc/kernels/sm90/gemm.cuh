// GEMM on wgmma (sm_90a). CTAs stay on their SM and walk over output tiles. Of a CTA's three
// warpgroups, the first has two working threads: one decodes output tiles ahead of time, one asks
// TMA for their tiles of A and B, up to kStages ahead and across output tiles, so that a tile's
// epilogue hides the next one's first loads. The two others multiply, together or in turn
// (Schedule). The CTAs of a cluster multicast what they share.
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

// An output tile as the scheduler announces it, and where in the stages its tiles of A and B begin.
template <class Cta>
struct Work {
  Tile tile;
  int k_tiles;
  StageCursor<Cta::kStages> cursor;
};

constexpr int kWorkSlots = 4;

// Stages: full when their tiles have arrived in this CTA; empty when all consumers of the cluster
// have read theirs, so that any of its CTAs may write to all. Work: the same, scheduler to producer
// and consumers. Turn: the other consumer of a ping-pong pair has seen all its stages full; waiting
// for a stage before that would take the phase before its own for its own.
template <class Cta>
struct Barriers {
  uint64_t full[Cta::kStages];
  uint64_t empty[Cta::kStages];
  uint64_t work_full[kWorkSlots];
  uint64_t work_empty[kWorkSlots];
  uint64_t turn[Cta::kConsumers];

  __device__ void init() {
    for (int i = 0; i < Cta::kStages; ++i) {
      cptx::mbarrier_init(&full[i], 1u);
      cptx::mbarrier_init(&empty[i], static_cast<uint32_t>(Cta::kConsumersPerTile * Cta::kCluster));
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      cptx::mbarrier_init(&work_full[i], 1u);
      cptx::mbarrier_init(&work_empty[i], static_cast<uint32_t>(4 * Cta::kConsumersPerTile + 1));
    }
    for (uint64_t& barrier : turn) cptx::mbarrier_init(&barrier, 1u);
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
  __device__ int64_t tiles_of_cta() const {
    return count() <= first() ? 0 : (count() - first() + step() - 1) / step();
  }
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

// The scheduler's part: announces every output tile of this CTA.
template <class Cta>
__device__ inline void schedule(const GemmParams& params, int rank, Work<Cta> (&works)[kWorkSlots],
                                Barriers<Cta>& barriers) {
  const Scheduler<Cta> scheduler(params, rank);
  StageCursor<Cta::kStages> cursor;
  StageCursor<kWorkSlots> slot;
  for (int64_t i = scheduler.first(); i < scheduler.count(); i += scheduler.step()) {
    const Tile tile = scheduler.tile(i);
    const int count = k_tiles<Cta>(tile);
    wait(barriers.work_empty[slot.stage], slot.parity ^ 1);
    works[slot.stage] = {tile, count, cursor};
    arrive(barriers.work_full[slot.stage]);
    slot.advance();
    cursor.advance(count);
  }
}

// The producer's part: requests the tiles of A and B of every output tile of this CTA.
template <class Cta, bool kAKMajor, bool kBKMajor>
__device__ inline void produce(const GemmParams& params, const OperandMap& map_a,
                               const OperandMap& map_b, int rank, unsigned char* stages,
                               const Work<Cta> (&works)[kWorkSlots], Barriers<Cta>& barriers) {
  constexpr int kShareN = Cta::kBlockN / Cta::kCluster;
  constexpr uint16_t kAll = Cta::kCluster > 1 ? (1 << Cta::kCluster) - 1 : 0;
  StageCursor<Cta::kStages> cursor;
  StageCursor<kWorkSlots> slot;
  const int64_t tiles = Scheduler<Cta>(params, rank).tiles_of_cta();
  for (int64_t i = 0; i < tiles; ++i) {
    wait(barriers.work_full[slot.stage], slot.parity);
    const Work<Cta>& work = works[slot.stage];
    const int64_t m = work.tile.m;
    const int64_t n = work.tile.n + rank * kShareN;
    const int64_t batch = work.tile.batch;
    const int count = work.k_tiles;
    int64_t k = work.tile.k_begin;
    arrive(barriers.work_empty[slot.stage]);
    slot.advance();

    const MapCoordinates at_a(map_a, params, batch);
    const MapCoordinates at_b(map_b, params, batch);
    for (int j = 0; j < count; ++j, k += Cta::kBlockK) {
      wait(barriers.empty[cursor.stage], cursor.parity ^ 1);
      uint64_t& full = barriers.full[cursor.stage];
      unsigned char* stage = stages + cursor.stage * Cta::kStageBytes;
      cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared, &full,
                                      static_cast<uint32_t>(Cta::kStageBytes));
      request_tile<Cta::kBlockM, kAKMajor>(stage, map_a, at_a, m, k, full);
      request_tile<kShareN, kBKMajor>(stage + Cta::kBytesA + rank * kShareN * Cta::kBlockK * 2,
                                      map_b, at_b, n, k, full, kAll);
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

// A consumer's part: a warpgroup that multiplies kBlocks times 64 rows of a tile, 16 rows of each
// block per warp.
template <class Cta, bool kBf16, bool kAKMajor, bool kBKMajor>
class Consumer {
 public:
  __device__ Consumer(unsigned char* stages, Barriers<Cta>& barriers)
      : stages_(stages), barriers_(barriers) {}

  // Not a member: the sums live from one multiply() to its store(), not over the loop around both.
  using Sums = float[Cta::kBlocks][Cta::kBlockN / 2];

  // First of this consumer's rows in a tile.
  __device__ static int first_row() {
    return Cta::kPingPong ? 0 : (threadIdx.x / 128 - 1) * 64 * Cta::kBlocks;
  }

  // Multiplies the k-tiles of one output tile, with one group of instructions always in flight.
  __device__ void multiply(Sums& sums, int count, StageCursor<Cta::kStages> cursor) {
    using Multiplier = ptx::Wgmma<Cta::kBlockN, kBf16, kAKMajor, kBKMajor>;
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (float& sum : block) sum = 0.0f;
    }
    const int consumer = threadIdx.x / 128 - 1;
    if (Cta::kPingPong) {
      wait(barriers_.turn[consumer], turn_.parity ^ (consumer == 0));
      turn_.advance();
      // Only when all four warps have had the turn may one of them pass it on: with a single k-tile
      // it could otherwise come round twice before the slowest warp looks, which then waits for
      // ever.
      if (consumer == 0) {  // constant numbers: a computed one would reserve all barriers
        ptx::named_barrier_sync(1, 128);
      } else {
        ptx::named_barrier_sync(2, 128);
      }
    }
    if (count == 0) {
      pass_turn(consumer);
      return;
    }
    int previous = 0;
    for (int i = 0; i < count; ++i) {
      wait(barriers_.full[cursor.stage], cursor.parity);
      if (i == count - 1) pass_turn(consumer);
      const uint32_t stage = ptx::shared_address(stages_) + cursor.stage * Cta::kStageBytes;
      // 64 rows are 64 * 128 bytes in both arrangements.
      constexpr uint64_t kBlockStep = 64 * Cta::kBlockK * 2 / 16;
      uint64_t a = ptx::wgmma_descriptor<kAKMajor>(stage + first_row() * Cta::kBlockK * 2, 0);
      uint64_t b = ptx::wgmma_descriptor<kBKMajor>(stage + Cta::kBytesA, 64 * Cta::kBlockK * 2);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Cta::kBlockK / 16; ++step) {
#pragma unroll
        for (int block = 0; block < Cta::kBlocks; ++block) {
          Multiplier::multiply(sums[block], a + block * kBlockStep, b);
        }
        a += ptx::kWgmmaStepK<kAKMajor>;
        b += ptx::kWgmmaStepK<kBKMajor>;
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (i > 0) release(previous);
      previous = cursor.stage;
      cursor.advance();
    }
    ptx::wgmma_wait_group<0>();
    release(previous);
  }

  // Writes the sums out through the epilogue, by way of this warp's `staged` bytes.
  __device__ static void store(const Sums& sums, const GemmParams& params, const Tile& tile,
                               unsigned char* staged) {
    const int64_t m = tile.m + first_row() + threadIdx.x % 128 / 32 * 16;
    if (m >= params.m) return;
    if (params.plain_epilogue) {
      store_plain(sums, params, tile, m, staged);
    } else {
      store_any(sums, params, tile, m, staged);
    }
  }

 private:
  __device__ void pass_turn(int consumer) {
    if (Cta::kPingPong && threadIdx.x % 128 == 0) arrive(barriers_.turn[1 - consumer]);
  }

  // One thread for each CTA of the cluster tells its producer.
  __device__ void release(int stage) {
    const int thread = threadIdx.x % 128;
    if constexpr (Cta::kCluster == 1) {
      if (thread == 0) arrive(barriers_.empty[stage]);
    } else if (thread < Cta::kCluster) {
      ptx::mbarrier_arrive_remote(&barriers_.empty[stage], thread);
    }
  }

  // alpha * sum + bias in 16 bits, eight outputs at a time.
  __device__ static void store_plain(const Sums& sums, const GemmParams& params, const Tile& tile,
                                     int64_t first_m, unsigned char* staged) {
    constexpr int kChunks = Cta::kBlockN / Cta::kChunk;
    constexpr int kLanesPerRow = Cta::kChunk / 8;
    constexpr int kRowStep = 32 / kLanesPerRow;
    const int lane = threadIdx.x % 32;
    const uint32_t to =
        ptx::shared_address(staged) + (lane % 16 * Cta::kChunkPitch + lane / 16 * 8) * 2;
    const int row = lane / kLanesPerRow;
    const int column = lane % kLanesPerRow * 8;
    const uint4* from =
        reinterpret_cast<const uint4*>(staged + (row * Cta::kChunkPitch + column) * 2);
    // Rolled: otherwise the loads of all biases come first, and need more registers than there are.
#pragma unroll 1
    for (int chunk = 0; chunk < Cta::kBlocks * kChunks; ++chunk) {
      const int64_t m = first_m + chunk / kChunks * 64;
      const int64_t n = tile.n + chunk % kChunks * Cta::kChunk;
      if (m >= params.m) return;
      if (n >= params.n) continue;
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
      for (int i = 0; i < Cta::kBlocks * Cta::kBlockN / 16; ++i) {
        if (i / (Cta::kChunk / 16) != chunk) continue;
        const int j = i % (Cta::kChunk / 16);
        uint32_t packed[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // columns of 8, rows of 8
          const float* pair = sums[i * 16 / Cta::kBlockN] + i * 8 % (Cta::kBlockN / 2) +
                              part / 2 * 4 + part % 2 * 2;
          packed[part] = pack(fmaf(params.alpha, pair[0], bias[4 * j + part / 2 * 2]),
                              fmaf(params.alpha, pair[1], bias[4 * j + part / 2 * 2 + 1]));
        }
        ptx::stmatrix_x4(to + j * 32, packed);
      }
      __syncwarp();
      uint16_t* out = static_cast<uint16_t*>(params.out.pointer) + tile.offset.out +
                      (m + row) * params.out.row_stride + n + column;
#pragma unroll
      for (int r = 0; r < 16; r += kRowStep) {
        if (m + row + r < params.m && n + column < params.n) {
          *reinterpret_cast<uint4*>(out + r * params.out.row_stride) =
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
                                   int64_t first_m, unsigned char* staged) {
    constexpr int kChunks = Cta::kBlockN / Cta::kWideChunk;
    const int lane = threadIdx.x % 32;
    float* wide = reinterpret_cast<float*>(staged);
    float* to = wide + lane / 4 * Cta::kWidePitch + lane % 4 * 2;
#pragma unroll 1
    for (int chunk = 0; chunk < Cta::kBlocks * kChunks; ++chunk) {
      const int64_t m = first_m + chunk / kChunks * 64;
      const int64_t n = tile.n + chunk % kChunks * Cta::kWideChunk;
      if (m >= params.m) return;
      if (n >= params.n) continue;
#pragma unroll
      for (int i = 0; i < Cta::kBlocks * Cta::kBlockN / 8; ++i) {
        if (i / (Cta::kWideChunk / 8) != chunk) continue;
        const float* four = sums[i * 8 / Cta::kBlockN] + i * 4 % (Cta::kBlockN / 2);
        float* at = to + i % (Cta::kWideChunk / 8) * 8;
        *reinterpret_cast<float2*>(at) = make_float2(four[0], four[1]);
        *reinterpret_cast<float2*>(at + 8 * Cta::kWidePitch) = make_float2(four[2], four[3]);
      }
      __syncwarp();
      store_tile<16, Cta::kWideChunk, Cta::kWidePitch, 32, /*kMaxItems=*/2>(params, tile, m, n,
                                                                            wide, lane);
      __syncwarp();
    }
  }

  unsigned char* stages_;
  Barriers<Cta>& barriers_;
  StageCursor<1> turn_;
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
  __shared__ Work<Cta> works[kWorkSlots];
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = Cta::kCluster > 1 ? static_cast<int>(cluster.block_rank()) : 0;
  if (threadIdx.x == 0) barriers.init();
  if constexpr (Cta::kCluster > 1) {
    cluster.sync();  // no CTA writes to another one's barriers before they exist
  } else {
    __syncthreads();
  }

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<88>();
    if (threadIdx.x == 32) {
      schedule<Cta>(params, rank, works, barriers);
    } else if (threadIdx.x == 0) {
      produce<Cta, kAKMajor, kBKMajor>(params, map_a, map_b, rank, stages, works, barriers);
    }
  } else {
    ptx::setmaxnreg_inc<208>();
    using ThisConsumer = Consumer<Cta, kBf16, kAKMajor, kBKMajor>;
    ThisConsumer consumer(stages, barriers);
    const int warp = threadIdx.x / 32 - 4;
    StageCursor<kWorkSlots> slot;
    if (Cta::kPingPong && warp >= 4) slot.advance();
    const int64_t count = Scheduler<Cta>(params, rank).tiles_of_cta();
    for (int64_t i = slot.stage; i < count; i += Cta::kPingPong ? 2 : 1) {
      wait(barriers.work_full[slot.stage], slot.parity);
      const Work<Cta>& work = works[slot.stage];
      typename ThisConsumer::Sums sums;
      consumer.multiply(sums, work.k_tiles, work.cursor);
      consumer.store(sums, params, work.tile, staged + warp * Cta::kStagedBytesPerWarp);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(barriers.work_empty[slot.stage]);
      slot.advance();
      if (Cta::kPingPong) slot.advance();
    }
  }
#endif
}

}  // namespace tgemm::sm90
