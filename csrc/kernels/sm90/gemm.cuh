// GEMM on wgmma (sm_90a). CTAs stay on their SM and walk over output tiles. Of a CTA's three
// warpgroups, one thread of the first asks TMA for tiles of A and B, up to kStages ahead and across
// output tiles, so that a tile's epilogue hides the next one's first loads. The two others
// multiply, together or in turn (Schedule), and hand their outputs to TMA. The CTAs of a cluster
// multicast what they share, or divide K among them and add up through one another's shared memory.
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
  tile.n = static_cast<int>(column) * (params.up.pointer ? Cta::kBlockN / 2 : Cta::kBlockN);
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
  tile.k_begin = min(k, tile.split * per_split);
  tile.k_tiles = max(1, (min(k - tile.k_begin, per_split) + block - 1) / block);
  return tile;
}

// A producer's part: one thread requests the tiles of A, or of B, for every output tile of this
// CTA. Two threads, because a request takes about a hundred cycles. With two factors (kGlu),
// columns of `b` and of `up` alternate in a tile of B, 64 at a time.
template <class Cta, bool kIsA, bool kKMajor, bool kGlu = false>
__device__ inline void produce(const Arguments& arguments, int first, SharedMemory<Cta>& shared) {
  constexpr int kShare = kIsA ? Cta::kBlockM : Cta::kBlockN / Cta::kCluster;
  constexpr int kBox = kKMajor && !kGlu ? kShare : 64;
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
  for (int i = first; i < arguments.tiles; i += step) {
    const Tile tile = decode<Cta>(arguments, i, rank);
    const MapCoordinates at(map, params, tile.batch);
    const MapCoordinates at_up(kGlu ? arguments.up : map, params, tile.batch);
    const int mn = (kIsA ? tile.m : tile.n) + (kGlu ? share / 2 : share);
    int k = tile.k_begin;
    if (i == first) {
      // B, the weight as a rule, can come to L2 while the kernels before this one finish.
      if (!kIsA && !kGlu) {
        for (int j = 0; j < min(tile.k_tiles, Cta::kStages); ++j) {
#pragma unroll
          for (int box = 0; box < kShare; box += kBox) {
            prefetch_box(map, at, kKMajor, mn + box, k + j * step_k);
          }
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
#pragma unroll
      for (int box = 0; box < kShare; box += kBox) {
        const bool is_up = kGlu && box % 128 != 0;
        request_box(to + box * Cta::kRowBytes, is_up ? arguments.up : map, is_up ? at_up : at,
                    kKMajor, mn + (kGlu ? box / 128 * 64 : box), k, full, kAll);
      }
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

// Rows of a tile that a CTA finishes of a cluster that divides K.
template <class Cta>
__device__ inline int partial_rows(const Arguments& arguments) {
  return (Cta::kBlockM + arguments.cluster_split - 1) / arguments.cluster_split;
}

// A consumer's part: a warpgroup that multiplies kBlocks times 64 rows of a tile by kColumns, 16
// rows of each block per warp.
template <class Cta>
class Consumer {
 public:
  __device__ Consumer(const Arguments& arguments, SharedMemory<Cta>& shared)
      : arguments_(arguments), params_(arguments.gemm), shared_(shared) {}

  using Sums = float[Cta::kBlocks][Cta::kColumns / 2];

  __device__ void multiply(Sums& sums, const Tile& tile, StageCursor<Cta::kStages>& cursor,
                           bool more) {
    using enum ptx::WgmmaType;
#pragma unroll
    for (auto& block : sums) {
#pragma unroll
      for (float& sum : block) sum = 0.0f;
    }
    const auto run = [&]<ptx::WgmmaType kType, bool kAKMajor, bool kBKMajor>() {
      multiply_tiles<kType, kAKMajor, kBKMajor>(sums, tile, cursor, more);
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
    } else if (arguments_.linear) {
      if (params_.out.dtype == DType::kBFloat16) {
        store_linear<true>(sums, tile);
      } else {
        store_linear<false>(sums, tile);
      }
    } else {
      store_fused(sums, tile);
    }
  }

  // Sends the sums to the CTAs of the cluster that finish their rows.
  __device__ void send_partial(const Sums& sums) {
    const int rows = partial_rows<Cta>(arguments_);
    float* const mine = reinterpret_cast<float*>(shared_.stages) +
                        shared_.rank * rows * Cta::kPartialPitch + first_column() + lane() % 4 * 2;
#pragma unroll
    for (int block = 0; block < Cta::kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row() + block * 64 + warp() % 4 * 16 + half * 8 + lane() / 4;
        const int owner = row / rows;
        const uint32_t to =
            ptx::mapa(ptx::shared_address(mine + (row - owner * rows) * Cta::kPartialPitch), owner);
        const uint32_t arrived = ptx::mapa(ptx::shared_address(&shared_.barriers.partial), owner);
#pragma unroll
        for (int j = 0; j < Cta::kColumns / 8; ++j) {
          const float* pair = sums[block] + 4 * j + 2 * half;
          ptx::st_async(to + 32 * j, pair[0], pair[1], arrived);
        }
      }
    }
  }

  // Waits for its turn to multiply (ping-pong).
  __device__ void take_turn() const { ptx::named_barrier_sync(kTurn + consumer(), 256); }

  // TMA reads shared memory until then.
  __device__ static void finish() { cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>{}); }

 private:
  // Barriers 1 and 2: of a consumer's four warps. 3 and 4: the turn passes to a consumer.
  static constexpr int kOwn = 1, kTurn = 3;

  __device__ static int consumer() { return static_cast<int>(threadIdx.x) / 128 - 1; }
  __device__ static int warp() {
    return static_cast<int>(threadIdx.x) / 32 - 4;
  }  // of all consumers
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // First of this consumer's rows and columns in a tile.
  __device__ int first_row() const {
    return Cta::kPingPong || Cta::kSplitColumns ? 0 : consumer() * 64 * Cta::kBlocks;
  }
  __device__ int first_column() const {
    return Cta::kSplitColumns ? consumer() * Cta::kColumns : 0;
  }

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
  __device__ void multiply_tiles(Sums& sums, const Tile& tile, StageCursor<Cta::kStages>& cursor,
                                 bool more) {
    using Multiplier = ptx::Wgmma<Cta::kColumns, kType, kAKMajor, kBKMajor>;
    constexpr int kSteps = Cta::kRowBytes / 32;
    constexpr uint64_t kBlockStep = 64 * Cta::kRowBytes / 16;  // 64 rows, in both arrangements
    int previous = 0;
    for (int i = 0; i < tile.k_tiles; ++i) {
      wait(shared_.barriers.full[cursor.stage], cursor.parity);
      if (i == tile.k_tiles - 1 && more) pass_turn();
      const uint32_t stage = ptx::shared_address(shared_.stages[cursor.stage]);
      uint64_t a = ptx::wgmma_descriptor<kAKMajor>(stage + first_row() * Cta::kRowBytes, 0);
      uint64_t b = ptx::wgmma_descriptor<kBKMajor>(
          stage + Cta::kBytesA + first_column() * Cta::kRowBytes, 64 * Cta::kRowBytes);
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
      if (i == 0) prepare(tile);
      ptx::wgmma_wait_group<1>();
      if (i > 0) release(previous);
      previous = cursor.stage;
      cursor.advance();
    }
    ptx::wgmma_wait_group<0>();
    release(previous);
  }

  // Fetches what the fused epilogue will need, while the Tensor Cores are busy.
  __device__ void prepare(const Tile& tile) {
    if (!arguments_.fused) return;
    if (params_.bias.pointer || params_.up_bias.pointer) {
      ptx::named_barrier_sync(kOwn + consumer(), 128);  // the last tile's bias has been read
      for (int i = threadIdx.x % 128; i < Cta::kColumns; i += 128) {
        const int column = first_column() + i;
        const bool is_up = params_.up.pointer && column % 128 >= 64;
        const MatrixParams& bias = is_up ? params_.up_bias : params_.bias;
        const int n = tile.n + (params_.up.pointer ? column / 128 * 64 + column % 64 : column);
        float value = 0.0f;
        if (bias.pointer && n < params_.n) {
          value = load_element(bias.pointer, bias.dtype, n);
        }
        shared_.bias[consumer()][i] = value;
      }
    }
    if (params_.residual.pointer && lane() == 0) {
      const MapCoordinates at(arguments_.residual, params_, tile.batch);
      uint64_t& barrier = shared_.barriers.residual[warp()];
      cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>{});  // the last tile's outputs have left
      for_each_box(tile, [&](int box, int m, int n) {
        cptx::mbarrier_expect_tx(cptx::sem_relaxed, cptx::scope_cta, cptx::space_shared, &barrier,
                                 static_cast<uint32_t>(Cta::kSlotBytes));
        request_box(slot(box), arguments_.residual, at, true, m, n, barrier);
      });
      arrive(barrier);
    }
  }

  // A warp's boxes of a tile: 16 rows by 64 outputs. Of a row of blocks:
  __device__ int boxes() const {
    return params_.up.pointer ? Cta::kColumns / 128 : Cta::kColumns / 64;
  }

  struct Origin {
    int m, n;
  };
  __device__ Origin box_origin(const Tile& tile, int box) const {
    const int column = params_.up.pointer ? first_column() / 2 : first_column();
    return {tile.m + first_row() + box / boxes() * 64 + warp() % 4 * 16,
            tile.n + column + box % boxes() * 64};
  }

  // Calls f(box, m, n) for those that are not wholly outside.
  template <class Function>
  __device__ void for_each_box(const Tile& tile, const Function& f) const {
#pragma unroll 1
    for (int box = 0; box < Cta::kBlocks * boxes(); ++box) {
      const auto [m, n] = box_origin(tile, box);
      if (m < params_.m && n < params_.n) f(box, m, n);
    }
  }

  __device__ unsigned char* slot(int box) const {
    return shared_.staged[warp()] + box % Cta::kSlots * Cta::kSlotBytes;
  }

  // Waits until a box's place in shared memory is free.
  __device__ static void wait_for_slot(int box) {
    if (lane() == 0) {
      if (box == 0 || Cta::kSlots == 1) {
        cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>{});
      } else if (box >= Cta::kSlots) {
        cptx::cp_async_bulk_wait_group_read(cptx::n32_t<Cta::kSlots - 1>{});
      }
    }
    __syncwarp();
  }

  // Where stmatrix has this lane's 16 bytes of 16 columns of a box: row lane % 16, swizzled with
  // the row's number.
  __device__ static uint32_t matrix_address(uint32_t slot, int part) {
    const int row = lane() % 16;
    return slot + row * 128 + ((part * 2 + lane() / 16) ^ (row % 8)) * 16;
  }

  // Hands boxes over to TMA.
  __device__ void send(const Tile& tile, int first, int count) {
    cptx::fence_proxy_async(cptx::space_shared);
    __syncwarp();
    if (lane() != 0) return;
    const MapCoordinates at(arguments_.out, params_, tile.batch);
    for (int box = first; box < first + count; ++box) {
      const auto [m, n] = box_origin(tile, box);
      if (m >= params_.m || n >= params_.n) continue;
      const int32_t coordinates[5] = {n, m, at.batch[0], at.batch[1], at.batch[2]};
      cptx::cp_async_bulk_tensor(cptx::space_global, cptx::space_shared, &arguments_.out.map,
                                 coordinates, slot(box));
    }
    cptx::cp_async_bulk_commit_group();
  }

  // alpha * sum + bias, unrolled: the usual case, and the Tensor Cores wait for it.
  template <bool kBf16>
  __device__ void store_linear(const Sums& sums, const Tile& tile) {
    constexpr int kBoxes = Cta::kColumns / 64;
    const bool biased = params_.bias.pointer;
    if (biased) ptx::named_barrier_sync(kOwn + consumer(), 128);
#pragma unroll
    for (int box = 0; box < Cta::kBlocks * kBoxes; ++box) {
      if (box % Cta::kSlots == 0) {
        if (lane() == 0) cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>{});
        __syncwarp();
      }
      const uint32_t to = ptx::shared_address(slot(box));
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* v = sums[box / kBoxes] + box % kBoxes * 32 + part * 8;
        float2 bias[2] = {};
        if (biased) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            bias[i] = *reinterpret_cast<const float2*>(
                &shared_.bias[consumer()][box % kBoxes * 64 + part * 16 + i * 8 + lane() % 4 * 2]);
          }
        }
        uint32_t packed[4];  // columns of 8, rows of 8
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          packed[i] = pack<kBf16>(fmaf(params_.alpha, v[2 * i], bias[i / 2].x),
                                  fmaf(params_.alpha, v[2 * i + 1], bias[i / 2].y));
        }
        ptx::stmatrix_x4(matrix_address(to, part), packed);
      }
      if (box % Cta::kSlots == Cta::kSlots - 1) send(tile, box + 1 - Cta::kSlots, Cta::kSlots);
    }
  }

  // activation(alpha * sum + bias) + beta * residual, or with two factors activation(...) * (...),
  // 32 columns at a time, in 16 bits. The loop is rolled, to keep one copy of it.
  __device__ void store_fused(const Sums& sums, const Tile& tile) {
    const bool glu = params_.up.pointer;
    const bool biased = params_.bias.pointer || params_.up_bias.pointer;
    if (biased) ptx::named_barrier_sync(kOwn + consumer(), 128);
    if (params_.residual.pointer) {
      wait(shared_.barriers.residual[warp()], residual_parity_);
      residual_parity_ ^= 1;
    }
    for_each_box(tile, [&](int box, int, int) {
      if (!params_.residual.pointer) wait_for_slot(box);
      const uint32_t to = ptx::shared_address(slot(box));
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int chunk = glu ? (box / boxes() * Cta::kColumns + box % boxes() * 128) / 32 + half
                              : 2 * box + half;
        const float* bias = &shared_.bias[consumer()][chunk * 32 % Cta::kColumns + lane() % 4 * 2];
        float value[16];
        select(value, sums, chunk);
        scale_and_add(value, biased, bias);
        activate_16_bit(params_.activation, value);
        if (glu) {
          float up[16];
          select(up, sums, chunk + 2);
          scale_and_add(up, biased, bias + 64);
#pragma unroll
          for (int i = 0; i < 16; ++i) value[i] *= up[i];
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {  // 16 columns
          const uint32_t address = matrix_address(to, half * 2 + part);
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
      send(tile, box, 1);
    });
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

  __device__ void scale_and_add(float (&value)[16], bool biased, const float* bias) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair =
          biased ? *reinterpret_cast<const float2*>(bias + 8 * i) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        value[4 * i + j] = fmaf(params_.alpha, value[4 * i + j], j % 2 == 0 ? pair.x : pair.y);
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
    float* wide = reinterpret_cast<float*>(shared_.staged[warp()]);
    float* to = wide + lane() / 4 * Cta::kWidePitch + lane() % 4 * 2;
    // In shared memory, because registers are short.
    BatchOffsets& offset = shared_.offset[warp()];
    if (lane() == 0) offset = batch_offsets(params_, tile.batch);
#pragma unroll 1
    for (int chunk = 0; chunk < Cta::kBlocks * kChunks; ++chunk) {
      const int m = tile.m + first_row() + chunk / kChunks * 64 + warp() % 4 * 16;
      const int n = tile.n + first_column() + chunk % kChunks * Cta::kWideChunk;
      if (m >= params_.m) return;
      if (n >= params_.n) continue;
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
  uint32_t residual_parity_ = 0;
};

// Adds up the cluster's partial sums for this CTA's share of the tile's rows, always in the order
// of the CTAs, and finishes them. By the consumers' 256 threads.
template <class Cta>
__device__ inline void reduce_in_cluster(const Arguments& arguments, const Tile& tile,
                                         SharedMemory<Cta>& shared) {
  const GemmParams& params = arguments.gemm;
  const int rows = partial_rows<Cta>(arguments);
  const int begin = shared.rank * rows;
  const int end = min(Cta::kBlockM, begin + rows);
  const BatchOffsets offset = batch_offsets(params, tile.batch);
  wait(shared.barriers.partial, 0);
  const auto finish = [&]<int kVec>() {
    constexpr int kPerRow = Cta::kBlockN / kVec;
    for (int i = threadIdx.x - 128; i < (end - begin) * kPerRow; i += 256) {
      const int row = i / kPerRow;
      const int column = i % kPerRow * kVec;
      const int m = tile.m + begin + row;
      const int n = tile.n + column;
      if (m >= params.m || n >= params.n) continue;
      const float* from =
          reinterpret_cast<const float*>(shared.stages) + row * Cta::kPartialPitch + column;
      float sum[1][kVec] = {};
      for (int split = 0; split < arguments.cluster_split; ++split) {
        float value[kVec];
        load_elements(from + split * rows * Cta::kPartialPitch, DType::kFloat32, 0, value);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[0][j] += value[j];
      }
      finish_at(params, offset, m, n, sum);
    }
  };
  if (params.vector_epilogue) {
    finish.template operator()<4>();
  } else {
    finish.template operator()<1>();
  }
}

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
      const int rows = partial_rows<Cta>(arguments);
      const int mine = max(0, min(rows, Cta::kBlockM - shared.rank * rows));
      cptx::mbarrier_arrive_expect_tx(
          cptx::sem_release, cptx::scope_cta, cptx::space_shared, &shared.barriers.partial,
          static_cast<uint32_t>(mine * Cta::kBlockN * 4 * arguments.cluster_split));
    }
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

  int i = static_cast<int>(blockIdx.x) / cluster_size;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Cta::kProducerRegisters>();
    const bool elected = ptx::elect_sync();
    if (threadIdx.x < 32) {
      if (elected) {
        if (arguments.a_k_major) {
          produce<Cta, true, true>(arguments, i, shared);
        } else {
          produce<Cta, true, false>(arguments, i, shared);
        }
      }
    } else if (threadIdx.x < 64) {
      if (elected) {
        const bool glu = arguments.gemm.up.pointer;
        if (arguments.b_k_major) {
          if (glu) {
            produce<Cta, false, true, true>(arguments, i, shared);
          } else {
            produce<Cta, false, true>(arguments, i, shared);
          }
        } else if (glu) {
          produce<Cta, false, false, true>(arguments, i, shared);
        } else {
          produce<Cta, false, false>(arguments, i, shared);
        }
      }
    }
    if (splits) {  // as the consumers, below
      __syncwarp();
      cluster.sync();
    }
  } else {
    ptx::setmaxnreg_inc<Cta::kConsumerRegisters>();
    Consumer<Cta> consumer(arguments, shared);
    StageCursor<Cta::kStages> cursor;
    // In a ping-pong pair, each steps over the stages of the tiles of the other.
    const auto skip = [&] {
      if (Cta::kPingPong) {
        cursor.advance(decode<Cta>(arguments, i, shared.rank).k_tiles);
        i += shared.step;
      }
    };
    if (threadIdx.x >= 256) skip();
    ptx::griddepcontrol_wait();
    while (i < arguments.tiles) {
      const Tile tile = decode<Cta>(arguments, i, shared.rank);
      if (Cta::kPingPong && i >= shared.step) consumer.take_turn();
      typename Consumer<Cta>::Sums sums;
      consumer.multiply(sums, tile, cursor, i + shared.step < arguments.tiles);
      if (splits) {
        cluster.sync();  // nobody multiplies from the stages any more
        consumer.send_partial(sums);
        reduce_in_cluster<Cta>(arguments, tile, shared);
      } else {
        consumer.store(sums, tile);
      }
      i += shared.step;
      skip();
    }
    consumer.finish();
  }
#endif
}

}  // namespace tgemm::sm90
