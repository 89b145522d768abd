// GEMM of few rows on wgmma (sm_90a): decoding. Time is that of reading the weight once, so the
// weight is what wgmma takes 64 rows of at a time, and the few rows of x are the other operand:
// out^T = W x^T. A CTA has one tile of the output, or its share of K of one; several fit on an SM,
// so that some load while others start or finish, the next kernel's among them. One warp asks TMA
// for stages of both operands, a warpgroup multiplies. CTAs that divide K add up through one
// another's shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/epilogue.cuh"
#include "device/ptx.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/skinny/instances.hpp"

namespace tgemm::skinny {

// What a CTA works on. 32 bits are enough where TMA is.
struct Tile {
  int rank;     // of this CTA in the cluster
  int m, n;     // first row and column of the outputs
  int batch;    // linear batch index
  int split;    // of the splits of K through the workspace
  int k_begin;  // first k
  int k_tiles;  // at least one, so that sums are always set: beyond K, TMA delivers zeros
};

template <class Cta>
__device__ inline Tile decode(const Arguments& arguments) {
  const GemmParams& params = arguments.gemm;
  // CTAs next to one another share rows of the weight, then read adjacent ones.
  const uint32_t cluster = arguments.cluster.divide(blockIdx.x);
  const uint32_t column = arguments.tiles_m.divide(cluster);
  const uint32_t slot = arguments.tiles_n.divide(column);
  Tile tile;
  tile.rank = static_cast<int>(blockIdx.x - cluster * arguments.cluster.divisor());
  tile.m = static_cast<int>(cluster - column * arguments.tiles_m.divisor()) * Cta::kRows;
  tile.n = static_cast<int>(column - slot * arguments.tiles_n.divisor()) *
           (arguments.gated ? Cta::kColumns / 2 : Cta::kColumns);
  tile.split = static_cast<int>(arguments.batches.divide(slot));
  tile.batch = static_cast<int>(slot - tile.split * arguments.batches.divisor());
  const auto per_share = static_cast<int>(params.k_per_split);
  tile.k_begin = (params.split_k > 1 ? tile.split : tile.rank) * per_share;
  const int k = min(static_cast<int>(params.k) - tile.k_begin, per_share);
  tile.k_tiles = max(1, (k + Cta::kBlockK - 1) / Cta::kBlockK);
  return tile;
}

// Goes round the stages; each round flips the parity that the barriers are waited for with.
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// What a CTA keeps in shared memory.
template <class Cta>
struct Shared {
  unsigned char* ring;
  SharedMemory<Cta>* rest;

  __device__ unsigned char* weight(int stage) const { return ring + stage * Cta::kStageBytes; }
  __device__ unsigned char* x(int stage) const {
    return weight(stage) + Cta::kBoxes * Cta::kWeightBytes;
  }
  __device__ Barriers& barriers() const { return rest->barriers; }
};

// Calls request(to, map, n) for each box of 64 k of the weight: all its rows, or 64 of them where
// the blocks are of two weights, or the rows are what is contiguous.
template <class Cta, class Request>
__device__ inline void for_each_weight_box(const Arguments& arguments, const Tile& tile,
                                           unsigned char* to, const Request& request) {
  request(to, arguments.b, tile.n);
  if (Cta::kBlocks == 1 || (arguments.b_k_major && !arguments.gated)) return;
  if (arguments.gated) {
    request(to + Cta::kBlockBytes, arguments.up, tile.n);
  } else {
    request(to + Cta::kBlockBytes, arguments.b, tile.n + 64);
  }
}

// The producer's part: one thread.
template <class Cta>
__device__ inline void produce(const Arguments& arguments, const Tile& tile,
                               const Shared<Cta>& shared) {
  const GemmParams& params = arguments.gemm;
  const int stages = arguments.stages;
  const bool k_major = arguments.b_k_major;
  const MapCoordinates at_x(arguments.a, params, tile.batch);
  const MapCoordinates at_weight(arguments.b, params, tile.batch);
  const auto request_weight = [&](int stage, int k) {
    uint64_t& full = shared.barriers().full[stage];
    // Both operands' bytes.
    cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared, &full,
                                    static_cast<uint32_t>(Cta::kStageBytes));
#pragma unroll
    for (int box = 0; box < Cta::kBoxes; ++box) {
      for_each_weight_box<Cta>(arguments, tile, shared.weight(stage) + box * Cta::kWeightBytes,
                               [&](unsigned char* to, const OperandMap& map, int n) {
                                 request_box(to, map, at_weight, k_major, n, k + box * kBoxK, full);
                               });
    }
  };

  // What the kernel before this one writes may be read when it has ended. Of a weight that may be
  // that, a part is brought to L2 until then: at worst in vain.
  if (!arguments.static_weight) {
    for (int i = 0; i < min(arguments.prefetched, tile.k_tiles); ++i) {
#pragma unroll
      for (int box = 0; box < Cta::kBoxes; ++box) {
        for_each_weight_box<Cta>(arguments, tile, nullptr,
                                 [&](unsigned char*, const OperandMap& map, int n) {
                                   prefetch_box(map, at_weight, k_major, n,
                                                tile.k_begin + i * Cta::kBlockK + box * kBoxK);
                                 });
      }
    }
    ptx::griddepcontrol_wait();
  }
  // The weight first: it comes from memory, x from L2.
  const int ahead = min(stages, tile.k_tiles);
  for (int i = 0; i < ahead; ++i) request_weight(i, tile.k_begin + i * Cta::kBlockK);
  if (arguments.static_weight) ptx::griddepcontrol_wait();
  RingCursor cursor;
  int k = tile.k_begin;
  for (int i = 0; i < tile.k_tiles; ++i, k += Cta::kBlockK) {
    if (i >= ahead) {
      wait(shared.barriers().empty[cursor.stage], cursor.parity ^ 1);
      request_weight(cursor.stage, k);
    }
#pragma unroll
    for (int box = 0; box < Cta::kBoxes; ++box) {
      request_box(shared.x(cursor.stage) + box * Cta::kXBytes, arguments.a, at_x, true, tile.m,
                  k + box * kBoxK, shared.barriers().full[cursor.stage]);
    }
    cursor.advance(stages);
  }
}

// The consumers' part: a warpgroup.
template <class Cta>
class Consumer {
 public:
  __device__ Consumer(const Arguments& arguments, const Tile& tile, const Shared<Cta>& shared)
      : arguments_(arguments), params_(arguments.gemm), tile_(tile), shared_(shared) {}

  // Of each block 64 rows of the weight by kRows of x, 16 of the 64 per warp.
  using Sums = float[Cta::kBlocks][Cta::kRows / 2];

  __device__ void multiply(Sums& sums) {
    using enum ptx::WgmmaType;
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (float& sum : block) sum = 0.0f;
    }
    if (params_.a.dtype == DType::kFloat16) {
      if (arguments_.b_k_major) {
        multiply_tiles<kF16, true>(sums);
      } else {
        multiply_tiles<kF16, false>(sums);
      }
    } else if (arguments_.b_k_major) {
      multiply_tiles<kBf16, true>(sums);
    } else {
      multiply_tiles<kBf16, false>(sums);
    }
  }

  // Leaves the sums of this CTA's units where its stages were, and sends the others' to the CTAs of
  // the cluster that finish them. Until this returns, other CTAs may write to this one.
  __device__ void exchange(const Sums& sums) {
    ptx::named_barrier_sync(kConsumers, 128);  // nobody multiplies from the stages any more
    const int splits = cluster_split();
    if (splits > 1) cptx::barrier_cluster_wait();  // all CTAs have their barriers
    const uint32_t partial =
        ptx::shared_address(shared_.rest->partial) + static_cast<uint32_t>(lane()) * 16;
    const uint32_t arrived = ptx::shared_address(&shared_.barriers().partial);
#pragma unroll
    for (int group = 0; group < Cta::kRows / 8; ++group) {
      const int unit = group * 4 + warp();
      const int slot = splits > 1 ? unit / splits : unit;
      const int owner = unit - slot * splits;
      if (owner == tile_.rank || splits == 1) {
#pragma unroll
        for (int block = 0; block < Cta::kBlocks; ++block) {
          const float* v = sums[block] + group * 4;
          own(unit, block)[lane()] = make_float4(v[0], v[1], v[2], v[3]);
        }
      } else {
        const int source = tile_.rank < owner ? tile_.rank : tile_.rank - 1;
        const uint32_t to =
            ptx::mapa(partial + (slot * (splits - 1) + source) * Cta::kUnitBytes, owner);
        const uint32_t remote = ptx::mapa(arrived, owner);
#pragma unroll
        for (int block = 0; block < Cta::kBlocks; ++block) {
          ptx::st_async(to + block * 512, sums[block] + group * 4, remote);
        }
      }
    }
    if (splits > 1) wait(shared_.barriers().partial, 0);
    ptx::named_barrier_sync(kConsumers, 128);
  }

  // Finishes the outputs of this CTA's units.
  __device__ void store() {
    if (arguments_.vectors) {
      store_units<4, Cta::kUnitsAtOnce>();
    } else {
      store_units<1, 1>();
    }
  }

 private:
  static constexpr int kConsumers = 1;  // named barrier

  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int cluster_split() const { return static_cast<int>(arguments_.cluster.divisor()); }

  // This CTA's sums of a unit, 4 for each lane; gathered: of 8 rows of outputs 16 columns each.
  __device__ float4* own(int unit, int block) const {
    return reinterpret_cast<float4*>(shared_.ring) + (unit * Cta::kBlocks + block) * 32;
  }

  // Multiplies this CTA's k-tiles, with one group of instructions always in flight.
  template <ptx::WgmmaType kType, bool kWeightKMajor>
  __device__ void multiply_tiles(Sums& sums) {
    using Multiplier = ptx::Wgmma<Cta::kRows, kType, kWeightKMajor, true>;
    constexpr int kSteps = kRowBytes / 32;
    constexpr uint64_t kBlockStep = Cta::kBlockBytes / 16;
    RingCursor cursor;
    int previous = 0;
    for (int i = 0; i < tile_.k_tiles; ++i) {
      const uint32_t at = ptx::uniform(ptx::shared_address(shared_.weight(cursor.stage)));
      const uint64_t weight_stage = ptx::wgmma_descriptor<kWeightKMajor>(at, 0);
      const uint64_t x_stage = ptx::wgmma_descriptor<true>(at + Cta::kBoxes * Cta::kWeightBytes, 0);
      wait(shared_.barriers().full[cursor.stage], cursor.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < Cta::kBoxes * kSteps; ++step) {
        const int box = step / kSteps, in_box = step % kSteps;
        const uint64_t weight = weight_stage + box * (Cta::kWeightBytes / 16) +
                                in_box * ptx::kWgmmaStepK<kWeightKMajor>;
        const uint64_t x = x_stage + box * (Cta::kXBytes / 16) + in_box * ptx::kWgmmaStepK<true>;
#pragma unroll
        for (int block = 0; block < Cta::kBlocks; ++block) {
          Multiplier::multiply(sums[block], weight + block * kBlockStep, x);
        }
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (i > 0) release(previous);
      previous = cursor.stage;
      cursor.advance(arguments_.stages);
    }
    ptx::wgmma_wait_group<0>();
  }

  __device__ void release(int stage) const {
    if (threadIdx.x == 0) arrive(shared_.barriers().empty[stage]);
  }

  // Adds to this CTA's sums of a unit those of the others, always in their order, and turns them so
  // that columns of outputs are adjacent.
  __device__ void gather(int unit, int slot) const {
    const int others = cluster_split() - 1;
    const auto* from = reinterpret_cast<const float4*>(shared_.rest->partial) +
                       slot * others * (Cta::kUnitBytes / 16) + lane();
    float4 sum[Cta::kBlocks];
#pragma unroll
    for (int block = 0; block < Cta::kBlocks; ++block) sum[block] = own(unit, block)[lane()];
#pragma unroll 1
    for (int source = 0; source < others; ++source, from += Cta::kUnitBytes / 16) {
#pragma unroll
      for (int block = 0; block < Cta::kBlocks; ++block) {
        const float4 four = from[block * 32];
        sum[block].x += four.x, sum[block].y += four.y;
        sum[block].z += four.z, sum[block].w += four.w;
      }
    }
    __syncwarp();
    // This lane's sums: of columns lane / 4 and 8 further on, two rows each.
#pragma unroll
    for (int block = 0; block < Cta::kBlocks; ++block) {
      float* to = reinterpret_cast<float*>(own(unit, block)) + lane() % 4 * 32 + lane() / 4;
      to[0] = sum[block].x, to[16] = sum[block].y, to[8] = sum[block].z, to[24] = sum[block].w;
    }
  }

  // A run of adjacent outputs.
  struct Run {
    int m, n;
    const float* sums;  // in shared memory; of the second weight, 128 floats behind
    bool valid;
  };

  // The warps take the units in turn, each kAtOnce at a time.
  template <int kVec, int kAtOnce>
  __device__ void store_units() const {
    constexpr int kRunsPerChunk = 4 / kVec;  // of a lane, in the outputs of a unit in a block
    constexpr int kRunsPerUnit = Cta::kBlocks * kRunsPerChunk;
    const int splits = cluster_split();
    const int units = (Cta::kUnits - tile_.rank + splits - 1) / splits;
    const BatchOffsets offset = batch_offsets(params_, tile_.batch);
#pragma unroll 1
    for (int first = warp(); first < units; first += 4 * kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slot = first + 4 * i;
        if (slot < units) gather(slot * splits + tile_.rank, slot);
      }
      __syncwarp();
      const auto run = [&](int item, int block) {
        const int slot = first + 4 * (item / kRunsPerChunk);
        const int unit = slot * splits + tile_.rank;
        const int position = item % kRunsPerChunk * 32 * kVec + lane() * kVec;
        Run run;
        run.m = tile_.m + unit / 4 * 8 + position / 16;
        run.n = tile_.n + block * 64 + unit % 4 * 16 + position % 16;
        run.sums = reinterpret_cast<const float*>(own(unit, block)) + position;
        run.valid = slot < units && run.m < params_.m && run.n < params_.n;
        return run;
      };
      if (Cta::kCanGate && arguments_.gated) {
#pragma unroll 1
        for (int item = 0; item < kAtOnce * kRunsPerChunk; ++item) {
          finish_gated<kVec>(run(item, 0), offset);
        }
      } else if (kVec == 4 && params_.split_k > 1) {
#pragma unroll
        for (int item = 0; item < kAtOnce * kRunsPerUnit; ++item) {
          store_partial(run(item / Cta::kBlocks, item % Cta::kBlocks));
        }
      } else {
        constexpr int kRuns = std::min(kAtOnce * kRunsPerUnit, 4);
#pragma unroll 1
        for (int item = 0; item < kAtOnce * kRunsPerUnit; item += kRuns) {
          Run some[kRuns];
#pragma unroll
          for (int i = 0; i < kRuns; ++i) {
            some[i] = run((item + i) / Cta::kBlocks, (item + i) % Cta::kBlocks);
          }
          finish<kVec>(some, offset);
        }
      }
    }
  }

  template <int kVec, int kRuns>
  __device__ void finish(const Run (&some)[kRuns], const BatchOffsets& offset) const {
    EpilogueRuns<kRuns> runs;
    float bias[kRuns][kVec] = {}, sums[kRuns][kVec];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const Run& run = some[i];
      const auto start = [&](const MatrixParams& matrix, int64_t base) {
        return base + run.m * matrix.row_stride + run.n * matrix.col_stride;
      };
      runs.valid[i] = run.valid;
      runs.out[i] = start(params_.out, offset.out);
      runs.residual[i] = start(params_.residual, offset.residual);
      runs.preact[i] = start(params_.preact, offset.preact);
      if (params_.bias.pointer && run.valid) {
        load_elements(params_.bias.pointer, params_.bias.dtype, start(params_.bias, offset.bias),
                      bias[i]);
      }
      load_elements(run.sums, DType::kFloat32, 0, sums[i]);
    }
    finish_runs(params_, runs, bias, sums);
  }

  // activation(gate + bias) * (up + its bias).
  template <int kVec>
  __device__ void finish_gated(const Run& run, const BatchOffsets& offset) const {
    if (!run.valid) return;
    float gate[kVec], up[kVec], bias[kVec] = {}, up_bias[kVec] = {};
    const MatrixParams& second = arguments_.up_bias;
    if (params_.bias.pointer) {
      load_elements(params_.bias.pointer, params_.bias.dtype, run.n * params_.bias.col_stride,
                    bias);
    }
    if (second.pointer) {
      load_elements(second.pointer, second.dtype, run.n * second.col_stride, up_bias);
    }
    load_elements(run.sums, DType::kFloat32, 0, gate);
    load_elements(run.sums + 128, DType::kFloat32, 0, up);
#pragma unroll
    for (int i = 0; i < kVec; ++i) gate[i] += bias[i];
    activate(params_.activation, gate);
#pragma unroll
    for (int i = 0; i < kVec; ++i) gate[i] *= up[i] + up_bias[i];
    store_elements(params_.out.pointer, params_.out.dtype,
                   offset.out + run.m * params_.out.row_stride + run.n * params_.out.col_stride,
                   gate);
  }

  // Sums of a split of K to the workspace, whose rows hold whole vectors.
  __device__ void store_partial(const Run& run) const {
    if (!run.valid) return;
    const int64_t matrix = int64_t{tile_.split} * params_.batch_count + tile_.batch;
    float* const to =
        params_.workspace + (matrix * params_.m + run.m) * params_.workspace_pitch + run.n;
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(run.sums);
  }

  const Arguments& arguments_;
  const GemmParams& params_;
  const Tile& tile_;
  const Shared<Cta>& shared_;
};

template <class Cta>
__global__ void __launch_bounds__(Cta::kThreads, Cta::kCtasPerSm)
    skinny_gemm(const __grid_constant__ Arguments arguments) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char dynamic[];  // 1024: the swizzle's pattern
  // The next kernel may start; this one touches no memory that others write before it has waited
  // for them.
  ptx::griddepcontrol_launch_dependents();
  const Shared<Cta> shared{
      dynamic, reinterpret_cast<SharedMemory<Cta>*>(dynamic + arguments.stages * Cta::kStageBytes)};
  const Tile tile = decode<Cta>(arguments);
  const auto splits = static_cast<int>(arguments.cluster.divisor());
  const bool produces = threadIdx.x >= 128;
  if (threadIdx.x == 128) {
    ptx::prefetch_tensor_map(&arguments.b.map);
    ptx::prefetch_tensor_map(&arguments.a.map);
    if (arguments.gated) ptx::prefetch_tensor_map(&arguments.up.map);
    Barriers& barriers = shared.barriers();
    for (int i = 0; i < arguments.stages; ++i) {
      cptx::mbarrier_init(&barriers.full[i], 1u);
      cptx::mbarrier_init(&barriers.empty[i], 1u);
    }
    cptx::mbarrier_init(&barriers.partial, 1u);
    cptx::fence_mbarrier_init(cptx::sem_release, cptx::scope_cluster);
    if (splits > 1) {
      const int units = (Cta::kUnits - tile.rank + splits - 1) / splits;
      cptx::mbarrier_arrive_expect_tx(
          cptx::sem_release, cptx::scope_cta, cptx::space_shared, &barriers.partial,
          static_cast<uint32_t>(units * (splits - 1) * Cta::kUnitBytes));
    }
  }
  __syncthreads();
  // No CTA writes to another one's shared memory before that CTA has arrived here. All threads have
  // to; those that send wait, much later.
  if (splits > 1) cptx::barrier_cluster_arrive(cptx::sem_relaxed);

  if (produces) {
    if (threadIdx.x / 32 == 4 && ptx::elect_sync()) produce<Cta>(arguments, tile, shared);
    __syncwarp();
    if (splits > 1) cptx::barrier_cluster_wait();
  } else {
    ptx::griddepcontrol_wait();
    Consumer<Cta> consumer(arguments, tile, shared);
    typename Consumer<Cta>::Sums sums;
    consumer.multiply(sums);
    consumer.exchange(sums);
    consumer.store();
  }
#endif
}

}  // namespace tgemm::skinny
