// GEMM on wgmma (sm_90a). CTAs stay on their SM and walk over output tiles, with three warpgroups
// of specialised warps. Of the first, two threads ask TMA for tiles of A and of B, up to kStages
// ahead and across output tiles, and a warp for each consumer fetches what its epilogue needs and
// hands its outputs to TMA. The two others, the consumers, multiply, together or in turn
// (Schedule): what they do not have to wait for, they do not do. The CTAs of a cluster multicast
// what they share, or divide K among them and add up through one another's shared memory.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "device/activation_16_bit.cuh"
#include "device/epilogue.cuh"
#include "device/ptx.cuh"
#include "device/tile_scheduler.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/sm90/instances.hpp"

namespace tgemm::sm90 {

template <class Cta>
__device__ inline void init(Barriers<Cta>& barriers) {
  for (int i = 0; i < Cta::kStages; ++i) {
    cptx::mbarrier_init(&barriers.full[i], 2u);  // the producers of A and of B
    cptx::mbarrier_init(&barriers.empty[i],
                        static_cast<uint32_t>(Cta::kConsumersPerTile * Cta::kCluster));
  }
  for (uint64_t& barrier : barriers.residual) cptx::mbarrier_init(&barrier, 1u);
  cptx::mbarrier_init(&barriers.partial, 1u);
  cptx::fence_mbarrier_init(cptx::sem_release, cptx::scope_cluster);
}

// Named barriers, one for each consumer: it has the turn to multiply (ping-pong); its epilogue warp
// has made room for its outputs, and brought its bias; its outputs are there.
enum NamedBarrier { kTurn = 1, kRoom = 3, kOutputs = 5 };

// An output tile of a CTA and its share of K. 32 bits are enough where TMA is; consumers have few
// registers to spare.
struct Tile {
  int m, n;     // first row and column
  int batch;    // linear batch index
  int k_begin;  // first k
  int k_tiles;  // at least one, so that sums are always set: beyond K, TMA delivers zeros
  int split;
};

// Elements of a tile along K.
__device__ inline int block_k(const GemmParams& params) {
  return params.a.dtype == DType::kFloat32 ? 32 : 64;
}

// The tile of CTA `rank` of the cluster: the cluster's, moved down by the rank, or with the rank's
// share of K. Tiles that run together share rows and columns in L2, as in TileScheduler.
template <class Cta>
__device__ inline Tile decode(const Arguments& arguments, int index, int rank) {
  const GemmParams& params = arguments.gemm;
  const unsigned slot = arguments.tiles_per_batch.divide(index);
  const unsigned in_batch = index - slot * arguments.tiles_per_batch.divisor();
  const unsigned group = arguments.tiles_per_group.divide(in_batch);
  const unsigned in_group = in_batch - group * arguments.tiles_per_group.divisor();
  const bool whole =
      (group + 1) * arguments.tiles_per_group.divisor() <= arguments.tiles_per_batch.divisor();
  const unsigned column = whole ? in_group / Cta::kGroupM : arguments.last_rows.divide(in_group);
  const unsigned rows = whole ? Cta::kGroupM : arguments.last_rows.divisor();
  const unsigned row = group * Cta::kGroupM + in_group - column * rows;

  Tile tile;
  tile.m = static_cast<int>(row * Cta::kCluster) * Cta::kBlockM;
  tile.n = static_cast<int>(column) * Cta::kBlockN;
  tile.batch = static_cast<int>(slot);
  tile.split = 0;
  if (Cta::kCluster > 1) tile.m += rank * Cta::kBlockM;
  if (arguments.cluster_split > 1) {
    tile.split = rank;
  } else if (params.split_k > 1) {
    tile.split = static_cast<int>(arguments.batches.divide(slot));
    tile.batch -= tile.split * static_cast<int>(params.batch_count);
  }
  const auto per_split = static_cast<int>(params.k_per_split);
  const int k = static_cast<int>(params.k);
  const int block = block_k(params);
  // A split that K leaves empty begins beyond K, but still at a whole tile: TMA refuses to start
  // where a line is not 16-byte aligned.
  tile.k_begin = tile.split * per_split;
  tile.k_tiles = max(1, (min(k - tile.k_begin, per_split) + block - 1) / block);
  return tile;
}

// A producer's part: one thread requests the tiles of A, or of B, for every output tile of this
// CTA. Two threads, because a request takes about a hundred cycles.
template <class Cta, bool kIsA, bool kKMajor>
__device__ inline void produce(const Arguments& arguments, SharedMemory<Cta>& shared) {
  constexpr int kShare = kIsA ? Cta::kBlockM : Cta::kBlockN / Cta::kCluster;
  constexpr int kBox = kKMajor ? kShare : 64;
  constexpr uint32_t kBytes = kIsA ? Cta::kBytesA : Cta::kBytesB;
  constexpr uint16_t kAll = !kIsA && Cta::kCluster > 1 ? (1 << Cta::kCluster) - 1 : 0;
  const GemmParams& params = arguments.gemm;
  const OperandMap& map = kIsA ? arguments.a : arguments.b;
  const int rank = shared.rank;
  const int share = kIsA || Cta::kCluster == 1 ? 0 : rank * kShare;
  const int offset = (kIsA ? 0 : Cta::kBytesA) + share * Cta::kRowBytes;
  const int step = shared.step;
  const int step_k = block_k(params);
  StageCursor<Cta::kStages> cursor;
  const int first = shared.first;
  for (int i = first; i < arguments.tiles; i += step) {
    const Tile tile = decode<Cta>(arguments, i, rank);
    const MapCoordinates at(map, params, tile.batch);
    const int mn = (kIsA ? tile.m : tile.n) + share;
    int k = tile.k_begin;
    if (i == first) {
      // B, the weight as a rule, can come to L2 while the kernels before this one finish.
      for (int j = 0; !kIsA && j < min(tile.k_tiles, Cta::kStages); ++j) {
#pragma unroll
        for (int box = 0; box < kShare; box += kBox) {
          prefetch_box(map, at, kKMajor, mn + box, k + j * step_k);
        }
      }
      ptx::griddepcontrol_wait();
    }
    for (int j = 0; j < tile.k_tiles; ++j, k += step_k) {
      wait(shared.barriers.empty[cursor.stage], cursor.parity ^ 1);
      uint64_t& full = shared.barriers.full[cursor.stage];
      unsigned char* to = shared.stages[cursor.stage] + offset;
      cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared, &full,
                                      kBytes);
      request_tile<kShare, kKMajor>(to, map, at, mn, k, full, kAll);
      cursor.advance();
    }
  }
  // Nobody may leave while another CTA of the cluster still writes to it or waits for it; so the
  // last stages are waited for as if they were to be filled again.
  for (int j = 0; !kIsA && Cta::kCluster > 1 && j < Cta::kStages; ++j) {
    wait(shared.barriers.empty[cursor.stage], cursor.parity ^ 1);
    cursor.advance();
  }
}

// Outputs leave in boxes of 64 rows by 64 columns, of which a consumer has Cta::kSlots.
template <class Cta>
class Boxes {
 public:
  __device__ Boxes(const Arguments& arguments, const SharedMemory<Cta>& shared, int consumer)
      : arguments_(arguments), shared_(shared), consumer_(consumer) {}

  // First of the consumer's rows and columns in a tile.
  __device__ int first_row() const {
    return Cta::kPingPong || Cta::kSplitColumns ? 0 : consumer_ * 64 * Cta::kBlocks;
  }
  __device__ int first_column() const { return Cta::kSplitColumns ? consumer_ * Cta::kColumns : 0; }

  // Is this box for this CTA of the cluster to finish?
  __device__ bool owns(int box) const {
    return arguments_.cluster_split == 1 ||
           (consumer_ * Cta::kSlots + box) % arguments_.cluster_split == shared_.rank;
  }

  // Calls f(box, m, n) for this CTA's boxes that are not wholly outside.
  template <class Function>
  __device__ void for_each(const Tile& tile, const Function& f) const {
    constexpr int kAcross = Cta::kColumns / 64;
    const auto last_m = static_cast<int>(arguments_.gemm.m);
    const auto last_n = static_cast<int>(arguments_.gemm.n);
#pragma unroll 1
    for (int box = 0; box < Cta::kSlots; ++box) {
      const int m = tile.m + first_row() + box / kAcross * 64;
      const int n = tile.n + first_column() + box % kAcross * 64;
      if (m < last_m && n < last_n && owns(box)) f(box, m, n);
    }
  }

 private:
  const Arguments& arguments_;
  const SharedMemory<Cta>& shared_;
  int consumer_;
};

// The part of a consumer's epilogue warp.
template <class Cta>
__device__ inline void serve_epilogue(const Arguments& arguments, int consumer,
                                      SharedMemory<Cta>& shared) {
  const GemmParams& params = arguments.gemm;
  const Boxes<Cta> boxes(arguments, shared, consumer);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool elected = ptx::elect_sync();
  uint64_t& residual = shared.barriers.residual[consumer];
  const int step = shared.step;
  ptx::griddepcontrol_wait();
  for (int i = shared.first + (Cta::kPingPong ? consumer * step : 0); i < arguments.tiles;
       i += Cta::kPingPong ? 2 * step : step) {
    const Tile tile = decode<Cta>(arguments, i, shared.rank);
    if (params.bias.pointer) {
      for (int column = lane; column < Cta::kColumns; column += 32) {
        const int n = tile.n + boxes.first_column() + column;
        shared.bias[consumer][column] =
            n < params.n ? load_element(params.bias.pointer, params.bias.dtype, n) : 0.0f;
      }
    }
    if (elected) {
      cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>{});  // the last tile's outputs have left
      if (params.residual.pointer) {
        const MapCoordinates at(arguments.residual, params, tile.batch);
        boxes.for_each(tile, [&](int box, int m, int n) {
          cptx::mbarrier_expect_tx(cptx::sem_relaxed, cptx::scope_cta, cptx::space_shared,
                                   &residual, static_cast<uint32_t>(Cta::kSlotBytes));
          request_box(shared.staged[consumer] + box * Cta::kSlotBytes, arguments.residual, at, true,
                      m, n, residual);
        });
        arrive(residual);
      }
    }
    __syncwarp();
    ptx::named_barrier_arrive(kRoom + consumer, 160);
    ptx::named_barrier_sync(kOutputs + consumer, 160);
    if (elected) {
      const MapCoordinates at(arguments.out, params, tile.batch);
      boxes.for_each(tile, [&](int box, int m, int n) {
        const int32_t coordinates[5] = {n, m, at.batch[0], at.batch[1], at.batch[2]};
        cptx::cp_async_bulk_tensor(cptx::space_global, cptx::space_shared, &arguments.out.map,
                                   coordinates, shared.staged[consumer] + box * Cta::kSlotBytes);
      });
      cptx::cp_async_bulk_commit_group();
    }
  }
  if (elected) cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>{});
}

// A consumer's part: a warpgroup that multiplies kBlocks times 64 rows of a tile by kColumns, 16
// rows of each block per warp.
template <class Cta>
class Consumer {
 public:
  __device__ Consumer(const Arguments& arguments, SharedMemory<Cta>& shared)
      : arguments_(arguments),
        params_(arguments.gemm),
        shared_(shared),
        boxes_(arguments, shared, consumer()) {}

  using Sums = float[Cta::kBlocks][Cta::kColumns / 2];

  // Multiplies k_tiles tiles. `more`: the other consumer has another output tile to multiply.
  __device__ void multiply(Sums& sums, int k_tiles, StageCursor<Cta::kStages>& cursor, bool more) {
    using enum ptx::WgmmaType;
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (float& sum : block) sum = 0.0f;
    }
    const auto run = [&]<ptx::WgmmaType kType, bool kAKMajor, bool kBKMajor>() {
      multiply_tiles<kType, kAKMajor, kBKMajor>(sums, k_tiles, cursor, more);
    };
    if (params_.a.dtype == DType::kFloat32) {
      run.template operator()<kTf32, true, true>();
    } else if (params_.a.dtype == DType::kFloat16) {
      if (arguments_.a_k_major) {
        if (arguments_.b_k_major) {
          run.template operator()<kF16, true, true>();
        } else {
          run.template operator()<kF16, true, false>();
        }
      } else if (arguments_.b_k_major) {
        run.template operator()<kF16, false, true>();
      } else {
        run.template operator()<kF16, false, false>();
      }
    } else if (arguments_.a_k_major) {
      if (arguments_.b_k_major) {
        run.template operator()<kBf16, true, true>();
      } else {
        run.template operator()<kBf16, true, false>();
      }
    } else if (arguments_.b_k_major) {
      run.template operator()<kBf16, false, true>();
    } else {
      run.template operator()<kBf16, false, false>();
    }
  }

  // Writes the sums out through the epilogue.
  __device__ void store(const Sums& sums, const Tile& tile) {
    if (!arguments_.fused) {
      store_any(sums, tile);
      return;
    }
    ptx::named_barrier_sync(kRoom + consumer(), 160);
    if (!arguments_.linear) {
      store_fused(sums);
    } else if (params_.out.dtype == DType::kBFloat16) {
      store_linear<true>(sums);
    } else {
      store_linear<false>(sums);
    }
    cptx::fence_proxy_async(cptx::space_shared);
    ptx::named_barrier_arrive(kOutputs + consumer(), 160);
  }

  // Where the CTAs of a cluster have divided K: sends the sums of each box to the CTA that finishes
  // it, and adds what comes from the others, always in their order.
  __device__ void exchange(Sums& sums) {
    constexpr int kBytes = Cta::kPartialBytes;
    const int splits = arguments_.cluster_split;
    const int thread = threadIdx.x % 128;
    const uint32_t stages = ptx::shared_address(shared_.stages) + thread * 16;
    const uint32_t barrier = ptx::shared_address(&shared_.barriers.partial);
    // Of a box, a thread has eight times four sums, 128 threads apart.
#pragma unroll
    for (int box = 0; box < Cta::kSlots; ++box) {
      const int unit = consumer() * Cta::kSlots + box;
      const int owner = unit % splits;
      if (owner == shared_.rank) continue;
      const int source = shared_.rank < owner ? shared_.rank : shared_.rank - 1;
      const uint32_t to =
          ptx::mapa(stages + (unit / splits * (splits - 1) + source) * kBytes, owner);
      const uint32_t arrived = ptx::mapa(barrier, owner);
#pragma unroll
      for (int j = 0; j < 8; ++j) ptx::st_async(to + j * 2048, sums_of(sums, box) + 4 * j, arrived);
    }
    wait(shared_.barriers.partial, 0);
#pragma unroll
    for (int box = 0; box < Cta::kSlots; ++box) {
      if (!boxes_.owns(box)) continue;
      const int unit = consumer() * Cta::kSlots + box;
      const float4* from = reinterpret_cast<const float4*>(&shared_.stages[0][0] +
                                                           unit / splits * (splits - 1) * kBytes) +
                           thread;
#pragma unroll 1
      for (int source = 0; source + 1 < splits; ++source, from += kBytes / 16) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float4 four = from[j * 128];
          float* const sum = sums_of(sums, box) + 4 * j;
          sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
        }
      }
    }
  }

  // Waits for its turn to multiply (ping-pong).
  __device__ void take_turn() const { ptx::named_barrier_sync(kTurn + consumer(), 256); }

 private:
  __device__ static int consumer() { return static_cast<int>(threadIdx.x) / 128 - 1; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ void pass_turn() const {
    if (Cta::kPingPong) ptx::named_barrier_arrive(kTurn + 1 - consumer(), 256);
  }

  // One thread for each CTA of the cluster tells its producer.
  __device__ void release(int stage) {
    const int thread = threadIdx.x % 128;
    if constexpr (Cta::kCluster == 1) {
      if (thread == 0) arrive(shared_.barriers.empty[stage]);
    } else if (thread < Cta::kCluster) {
      ptx::mbarrier_arrive_remote(&shared_.barriers.empty[stage], thread);
    }
  }

  // Multiplies the k-tiles of one output tile, with one group of instructions always in flight.
  template <ptx::WgmmaType kType, bool kAKMajor, bool kBKMajor>
  __device__ void multiply_tiles(Sums& sums, int k_tiles, StageCursor<Cta::kStages>& cursor,
                                 bool more) {
    using Multiplier = ptx::Wgmma<Cta::kColumns, kType, kAKMajor, kBKMajor>;
    constexpr int kSteps = Cta::kRowBytes / 32;
    constexpr uint64_t kBlockStep = 64 * Cta::kRowBytes / 16;  // 64 rows, in both arrangements
    int previous = 0;
    for (int i = 0; i < k_tiles; ++i) {
      wait(shared_.barriers.full[cursor.stage], cursor.parity);
      if (i == k_tiles - 1 && more) pass_turn();
      const uint32_t stage = ptx::shared_address(shared_.stages[cursor.stage]);
      uint64_t a = ptx::wgmma_descriptor<kAKMajor>(stage + boxes_.first_row() * Cta::kRowBytes, 0);
      uint64_t b = ptx::wgmma_descriptor<kBKMajor>(
          stage + Cta::kBytesA + boxes_.first_column() * Cta::kRowBytes, 64 * Cta::kRowBytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
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

  // Where stmatrix has this lane's 16 bytes of a warp's 16 rows and 16 columns of a box: row
  // lane % 16, swizzled with the row's number.
  __device__ uint32_t matrix_address(int box, int part) const {
    const int row = lane() % 16;
    return ptx::shared_address(shared_.staged[consumer()]) + box * Cta::kSlotBytes +
           (warp() * 16 + row) * 128 + ((part * 2 + lane() / 16) ^ (row % 8)) * 16;
  }

  // A thread's 32 sums of a box.
  template <class AnySums>
  __device__ static auto* sums_of(AnySums& sums, int box) {
    constexpr int kAcross = Cta::kColumns / 64;
    return sums[box / kAcross] + box % kAcross * 32;
  }

  // alpha * sum + bias, unrolled: the usual case, and the Tensor Cores wait for it.
  template <bool kBf16>
  __device__ void store_linear(const Sums& sums) {
    const bool plain = !params_.bias.pointer && params_.alpha == 1.0f;
#pragma unroll
    for (int box = 0; box < Cta::kSlots; ++box) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* v = sums_of(sums, box) + part * 8;
        uint32_t packed[4];  // columns of 8, rows of 8
        if (plain) {
#pragma unroll
          for (int i = 0; i < 4; ++i) packed[i] = pack<kBf16>(v[2 * i], v[2 * i + 1]);
        } else {
          const int column = box * 64 % Cta::kColumns + part * 16;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 bias = bias_at(column + i / 2 * 8);
            packed[i] = pack<kBf16>(fmaf(params_.alpha, v[2 * i], bias.x),
                                    fmaf(params_.alpha, v[2 * i + 1], bias.y));
          }
        }
        ptx::stmatrix_x4(matrix_address(box, part), packed);
      }
    }
  }

  // activation(alpha * sum + bias) + beta * residual, 32 columns at a time, in 16 bits. The loop is
  // rolled, to keep one copy of it.
  __device__ void store_fused(const Sums& sums) {
    if (params_.residual.pointer) {
      wait(shared_.barriers.residual[consumer()], residual_parity_);
      residual_parity_ ^= 1;
    }
#pragma unroll 1
    for (int chunk = 0; chunk < 2 * Cta::kSlots; ++chunk) {
      float value[16];
      select(value, sums, chunk);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 bias = bias_at(chunk * 32 % Cta::kColumns + i * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          value[4 * i + j] = fmaf(params_.alpha, value[4 * i + j], j % 2 == 0 ? bias.x : bias.y);
        }
      }
      activate_16_bit(params_.activation, value);
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 16 columns
        const uint32_t address = matrix_address(chunk / 2, chunk % 2 * 2 + part);
        float* const v = value + part * 8;
        uint32_t packed[4];  // columns of 8, rows of 8
        if (params_.residual.pointer) {
          ptx::ldmatrix_x4(packed, address);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack(packed[i]);
            v[2 * i] = fmaf(params_.beta, pair.x, v[2 * i]);
            v[2 * i + 1] = fmaf(params_.beta, pair.y, v[2 * i + 1]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i] = pack(v[2 * i], v[2 * i + 1]);
        ptx::stmatrix_x4(address, packed);
      }
    }
  }

  // Of this lane's two columns among eight from `column` on.
  __device__ float2 bias_at(int column) const {
    if (!params_.bias.pointer) return make_float2(0.0f, 0.0f);
    return *reinterpret_cast<const float2*>(&shared_.bias[consumer()][column + lane() % 4 * 2]);
  }

  // A thread's 16 sums in a run-time group of 32 columns.
  __device__ static void select(float (&value)[16], const Sums& sums, int group) {
#pragma unroll
    for (int i = 0; i < Cta::kSums / 16; ++i) {
      if (i == group) {
        asm volatile("");  // keeps this a branch: selecting between all groups costs far more
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const int at = i * 16 + j;
          value[j] = sums[at / (Cta::kColumns / 2)][at % (Cta::kColumns / 2)];
        }
      }
    }
  }

  template <bool kBf16>
  __device__ static uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (kBf16) {
      reinterpret_cast<__nv_bfloat162&>(packed) = __floats2bfloat162_rn(low, high);
    } else {
      reinterpret_cast<__half2&>(packed) = __floats2half2_rn(low, high);
    }
    return packed;
  }

  __device__ uint32_t pack(float low, float high) const {
    return params_.out.dtype == DType::kBFloat16 ? pack<true>(low, high) : pack<false>(low, high);
  }

  __device__ float2 unpack(uint32_t packed) const {
    if (params_.out.dtype == DType::kBFloat16) {
      return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
    }
    return __half22float2(reinterpret_cast<const __half2&>(packed));
  }

  // Everything else, in FP32 through the common epilogue or into the workspace. Rolled, too.
  __device__ void store_any(const Sums& sums, const Tile& tile) {
    constexpr int kChunks = Cta::kColumns / Cta::kWideChunk;
    float* wide =
        reinterpret_cast<float*>(shared_.staged[consumer()]) + warp() * 16 * Cta::kWidePitch;
    float* to = wide + lane() / 4 * Cta::kWidePitch + lane() % 4 * 2;
    // In shared memory, because registers are short.
    BatchOffsets& offset = shared_.offset[consumer() * 4 + warp()];
    if (lane() == 0) offset = batch_offsets(params_, tile.batch);
#pragma unroll 1
    for (int chunk = 0; chunk < Cta::kBlocks * kChunks; ++chunk) {
      const int m = tile.m + boxes_.first_row() + chunk / kChunks * 64 + warp() * 16;
      const int n = tile.n + boxes_.first_column() + chunk % kChunks * Cta::kWideChunk;
      if (m >= params_.m) return;
      if (n >= params_.n || !boxes_.owns(chunk / 2)) continue;
      float value[16];
      select(value, sums, chunk);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* at = to + i * 8;
        *reinterpret_cast<float2*>(at) = make_float2(value[4 * i], value[4 * i + 1]);
        *reinterpret_cast<float2*>(at + 8 * Cta::kWidePitch) =
            make_float2(value[4 * i + 2], value[4 * i + 3]);
      }
      __syncwarp();
      if (params_.split_k > 1) {
        store_chunk<4>(wide, m, n, [&](int row, int column, float (&sum)[1][4]) {
          const int64_t at = (int64_t{tile.split} * params_.batch_count + tile.batch) * params_.m;
          *reinterpret_cast<float4*>(params_.workspace + (at + row) * params_.workspace_pitch +
                                     column) =
              make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
        });
      } else if (params_.vector_epilogue) {
        store_chunk<4>(wide, m, n, [&](int row, int column, float (&sum)[1][4]) {
          finish_at(params_, offset, row, column, sum);
        });
      } else {
        store_chunk<1>(wide, m, n, [&](int row, int column, float (&sum)[1][1]) {
          finish_at(params_, offset, row, column, sum);
        });
      }
      __syncwarp();
    }
  }

  // Calls store(row, column, sums) for kVec adjacent sums at a time of 16 rows by kWideChunk.
  template <int kVec, class Function>
  __device__ void store_chunk(const float* wide, int m, int n, const Function& store) {
    constexpr int kPerRow = Cta::kWideChunk / kVec;
#pragma unroll 1
    for (int i = lane(); i < 16 * kPerRow; i += 32) {
      const int row = i / kPerRow;
      const int column = i % kPerRow * kVec;
      if (m + row >= params_.m || n + column >= params_.n) continue;
      float sum[1][kVec];
      load_elements(wide + row * Cta::kWidePitch + column, DType::kFloat32, 0, sum[0]);
      store(m + row, n + column, sum);
    }
  }

  const Arguments& arguments_;
  const GemmParams& params_;
  SharedMemory<Cta>& shared_;
  Boxes<Cta> boxes_;
  uint32_t residual_parity_ = 0;
};

template <class Cta>
__global__ void __launch_bounds__(Cta::kThreads, 1)
    sm90_gemm(const __grid_constant__ Arguments arguments) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char dynamic[];
  auto& shared = reinterpret_cast<SharedMemory<Cta>&>(dynamic);
  const bool splits = Cta::kCluster == 1 && arguments.cluster_split > 1;
  const auto cluster = cooperative_groups::this_cluster();
  const int cluster_size = Cta::kCluster * arguments.cluster_split;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&arguments.a.map);
    ptx::prefetch_tensor_map(&arguments.b.map);
    init(shared.barriers);
    shared.rank = cluster_size > 1 ? static_cast<int>(cluster.block_rank()) : 0;
    if (splits) {
      const int boxes = Cta::kConsumers * Cta::kSlots;
      const int mine =
          (boxes - shared.rank + arguments.cluster_split - 1) / arguments.cluster_split;
      cptx::mbarrier_arrive_expect_tx(
          cptx::sem_release, cptx::scope_cta, cptx::space_shared, &shared.barriers.partial,
          static_cast<uint32_t>(max(0, mine) * (arguments.cluster_split - 1) * Cta::kPartialBytes));
    }
    shared.first = static_cast<int>(blockIdx.x) / cluster_size;
    shared.step = static_cast<int>(gridDim.x) / cluster_size;
  }
  if constexpr (Cta::kCluster > 1) {
    cluster.sync();  // no CTA writes to another one's barriers before they exist
  } else {
    __syncthreads();
  }
  // The next kernel may start; this one touches no memory that others write before it has waited
  // for them.
  ptx::griddepcontrol_launch_dependents();

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Cta::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    // Consumers wait here for one another before they exchange sums; all threads have to take part.
    if (splits && warp >= 2) cptx::barrier_cluster_arrive(cptx::sem_relaxed);
    if (warp == 0) {
      if (ptx::elect_sync()) {
        if (arguments.a_k_major) {
          produce<Cta, true, true>(arguments, shared);
        } else {
          produce<Cta, true, false>(arguments, shared);
        }
      }
    } else if (warp == 1) {
      if (ptx::elect_sync()) {
        if (arguments.b_k_major) {
          produce<Cta, false, true>(arguments, shared);
        } else {
          produce<Cta, false, false>(arguments, shared);
        }
      }
    } else if (arguments.fused) {
      serve_epilogue<Cta>(arguments, warp - 2, shared);
    }
    if (splits) {
      __syncwarp();
      if (warp < 2) cptx::barrier_cluster_arrive(cptx::sem_relaxed);
      cptx::barrier_cluster_wait();
    }
  } else {
    ptx::setmaxnreg_inc<Cta::kConsumerRegisters>();
    Consumer<Cta> consumer(arguments, shared);
    StageCursor<Cta::kStages> cursor;
    int i = shared.first;
    ptx::griddepcontrol_wait();
    Tile tile = decode<Cta>(arguments, i, shared.rank);
    // Where the epilogue warp knows where outputs go, the consumer needs the number of k-tiles
    // alone, which all tiles share unless K is split.
    const bool decodes = !arguments.fused || arguments.gemm.split_k > 1;
    // In a ping-pong pair, each steps over the stages of the tiles of the other.
    const auto skip = [&] {
      if (!Cta::kPingPong) return;
      cursor.advance(decodes ? decode<Cta>(arguments, i, shared.rank).k_tiles : tile.k_tiles);
      i += shared.step;
    };
    if (threadIdx.x >= 256) skip();
    while (i < arguments.tiles) {
      if (decodes) tile = decode<Cta>(arguments, i, shared.rank);
      if (Cta::kPingPong && i >= shared.step) consumer.take_turn();
      typename Consumer<Cta>::Sums sums;
      consumer.multiply(sums, tile.k_tiles, cursor, i + shared.step < arguments.tiles);
      if (splits) {
        // Nobody multiplies from the stages any more. Nothing written before is read after: no
        // fence.
        cptx::barrier_cluster_arrive(cptx::sem_relaxed);
        cptx::barrier_cluster_wait();
        consumer.exchange(sums);
      }
      consumer.store(sums, tile);
      i += shared.step;
      skip();
    }
  }
#endif
}

}  // namespace tgemm::sm90
