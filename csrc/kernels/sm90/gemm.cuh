// GEMM on wgmma (sm_90a). CTAs stay on their SM and walk over output tiles, with warpgroups of
// specialised warps. Of the first, one or two threads ask TMA for tiles of A and of B, up to
// kStages ahead and across output tiles, and a warp for each consumer fetches what its epilogue
// needs and sends its outputs, through TMA or, where that refuses, by itself. The others, the
// consumers, multiply, together or in turn (Schedule): what they do not have to wait for, they do
// not do. The CTAs of a cluster multicast what they share, or divide K among them and add up
// through one another's shared memory.
#pragma once

#include <cstdint>

#include "device/activation_16_bit.cuh"
#include "device/epilogue.cuh"
#include "device/ptx.cuh"
#include "device/tf32_parts.hpp"
#include "device/tile_scheduler.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/sm90/instances.hpp"

namespace tgemm::sm90 {

// Of this CTA in its cluster.
__device__ inline int rank() { return static_cast<int>(cptx::get_sreg_cluster_ctarank()); }

// The first output tile of its cluster. Volatile: read where it is needed, not kept from the start
// of the kernel on, for which registers are short.
__device__ inline int first_tile() {
  int index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// From one output tile of a cluster to its next.
__device__ inline int tile_step() { return static_cast<int>(cptx::get_sreg_nclusterid_x()); }

// By one thread: the first requests wait for this.
template <class Cta>
__device__ inline void init(const Arguments& arguments, Barriers<Cta>& barriers) {
  for (int i = 0; i < Cta::kStages; ++i) {
    cptx::mbarrier_init(&barriers.full[i], static_cast<uint32_t>(Cta::kProducers));
    cptx::mbarrier_init(&barriers.empty[i],
                        static_cast<uint32_t>(Cta::kConsumersPerTile * Cta::kCluster));
  }
  for (uint64_t& barrier : barriers.residual) cptx::mbarrier_init(&barrier, 1u);
  for (auto& of_consumer : barriers.outputs) {
    for (uint64_t& barrier : of_consumer) cptx::mbarrier_init(&barrier, 4u);  // warps
  }
  cptx::mbarrier_init(&barriers.partial, 1u);
  cptx::fence_mbarrier_init(cptx::sem_release, cptx::scope_cluster);
  if (Cta::kSplits && arguments.cluster_split > 1) {
    const int others = arguments.cluster_split - 1;
    const int boxes = (Cta::kConsumers * Cta::kSlots - rank() + others) / arguments.cluster_split;
    cptx::mbarrier_arrive_expect_tx(
        cptx::sem_release, cptx::scope_cta, cptx::space_shared, &barriers.partial,
        static_cast<uint32_t>(max(0, boxes) * others * Cta::kPartialBytes));
  }
}

// Named barriers, one for each consumer: it has the turn to multiply (ping-pong); its epilogue warp
// has made room for its outputs, and brought its bias.
enum NamedBarrier { kTurn = 1, kRoom = 3 };

// An output tile of a CTA and its share of K. 32 bits are enough where TMA is; consumers have few
// registers to spare.
struct Tile {
  int m, n;     // first row and column
  int batch;    // linear batch index
  int k_begin;  // first k
  int k_tiles;  // some at least, so that sums are always set: beyond K, TMA delivers zeros
  int split;
};

// Elements of a tile along K, as a power of two: divisions would hold up the first requests.
__device__ inline int log2_block_k(const GemmParams& params) {
  return params.a.dtype == DType::kFloat32 ? 5 : 6;
}

// The tile of this CTA of the cluster: the cluster's, moved down by the rank, or with the rank's
// share of K. Tiles that run together share rows and columns in L2, as in TileScheduler.
template <class Cta>
__device__ inline Tile decode(const Arguments& arguments, int index) {
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
  if (Cta::kCluster > 1) tile.m += rank() * Cta::kBlockM;
  tile.n = static_cast<int>(column) * (arguments.gated ? Cta::kBlockN / 2 : Cta::kBlockN);
  tile.batch = static_cast<int>(slot);
  tile.split = 0;
  if (arguments.cluster_split > 1) {
    tile.split = rank();
  } else if (params.split_k > 1) {
    tile.split = static_cast<int>(arguments.batches.divide(slot));
    tile.batch -= tile.split * static_cast<int>(params.batch_count);
  }
  const auto per_split = static_cast<int>(params.k_per_split);
  const int k = static_cast<int>(params.k);
  const int log2_block = log2_block_k(params);
  // A split that K leaves empty begins beyond K, but still at a whole tile: TMA refuses to start
  // where a line is not 16-byte aligned.
  tile.k_begin = tile.split * per_split;
  const int share = min(k - tile.k_begin, per_split);
  tile.k_tiles = max(Cta::kTilesAtOnce, (share + (1 << log2_block) - 1) >> log2_block);
  return tile;
}

// Asks for an operand's part of a stage: for A's rows from mn on, or for this CTA's share of B's
// columns. By one thread, whose instructions small tiles wait for: the usual case, one box along K,
// comes first, and has few.
template <class Cta, bool kA>
__device__ inline void request(const Arguments& arguments, SharedMemory<Cta>& shared, int stage,
                               const MapCoordinates& at, bool one_box, int mn, int k) {
  constexpr uint16_t kAll = !kA && Cta::kCluster > 1 ? (1 << Cta::kCluster) - 1 : 0;
  const OperandMap& operand = kA ? arguments.a : arguments.b;
  const int share = !kA && Cta::kCluster > 1 ? rank() * Cta::kShareB : 0;
  unsigned char* to = shared.stages[stage] + (kA ? 0 : Cta::kBytesA + share * Cta::kRowBytes);
  uint64_t& full = shared.barriers.full[stage];
  if (one_box) {
    request_box(to, operand, at, true, mn + share, k, full, kAll);
  } else if (!kA && Cta::kCanGate && arguments.gated) {
#pragma unroll 1
    for (int column = share; column < share + Cta::kShareB; column += 64) {
      request_box(to, column % 128 == 0 ? operand : arguments.up, at, arguments.b_k_major,
                  mn + column / 128 * 64, k, full, kAll);
      to += 64 * Cta::kRowBytes;
    }
  } else if (kA || !Cta::kOnlyKMajorB) {
    request_tile<kA ? Cta::kBlockM : Cta::kShareB, false>(to, operand, at, mn + share, k, full,
                                                          kAll);
  }
}

// A producer's part: requests the tiles of A, of B, or of both, for every output tile of this CTA,
// of which this is the first.
template <class Cta, bool kA, bool kB>
__device__ inline void produce(const Arguments& arguments, SharedMemory<Cta>& shared, Tile tile) {
  constexpr uint32_t kBytes = (kA ? Cta::kBytesA : 0) + (kB ? Cta::kBytesB : 0);
  const GemmParams& params = arguments.gemm;
  const int step_k = 1 << log2_block_k(params);
  const bool one_box_a = arguments.a_k_major;
  const bool one_box_b = Cta::kOnlyKMajorB || (arguments.b_k_major && !arguments.gated);
  StageCursor<Cta::kStages> cursor{.stage = 0, .parity = 1};  // all stages are empty
  int index = first_tile();
  ptx::griddepcontrol_wait();
  while (true) {
    const MapCoordinates at_a(arguments.a, params, tile.batch);
    const MapCoordinates at_b(arguments.b, params, tile.batch);
    int k = tile.k_begin;
    for (int j = 0; j < tile.k_tiles; ++j, k += step_k) {
      wait(shared.barriers.empty[cursor.stage], cursor.parity);
      cptx::mbarrier_arrive_expect_tx(cptx::sem_release, cptx::scope_cta, cptx::space_shared,
                                      &shared.barriers.full[cursor.stage], kBytes);
      if (kA) request<Cta, true>(arguments, shared, cursor.stage, at_a, one_box_a, tile.m, k);
      if (kB) request<Cta, false>(arguments, shared, cursor.stage, at_b, one_box_b, tile.n, k);
      cursor.advance();
    }
    index += tile_step();
    if (index >= arguments.tiles) break;
    tile = decode<Cta>(arguments, index);
  }
  // Nobody may leave while another CTA of the cluster still writes to it or waits for it; so the
  // last stages are waited for as if they were to be filled again.
  for (int j = 0; kB && Cta::kCluster > 1 && j < Cta::kStages; ++j) {
    wait(shared.barriers.empty[cursor.stage], cursor.parity);
    cursor.advance();
  }
}

// The boxes in which a consumer's outputs leave: 64 rows by 128 bytes, of which it has kSlots at a
// time; FP32 takes two rounds.
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

  __device__ bool wide() const { return arguments_.gemm.out.dtype == DType::kFloat32; }
  __device__ int rounds() const { return wide() ? 2 : 1; }

  // Is this box (of two weights: which alternate) for this CTA of the cluster to finish?
  __device__ bool owns(int box) const {
    return arguments_.cluster_split == 1 ||
           (consumer_ * Cta::kSlots + box) % arguments_.cluster_split == rank();
  }

  // Calls f(slot, m, n, sent) for the boxes of a round, of which those are sent that are this CTA's
  // and not wholly outside.
  template <class Function>
  __device__ void for_each(const Tile& tile, int round, const Function& f) const {
    const auto last_m = static_cast<int>(arguments_.gemm.m);
    const auto last_n = static_cast<int>(arguments_.gemm.n);
    const bool gated = Cta::kCanGate && arguments_.gated;
    const int slots = gated ? Cta::kSlots / 2 : Cta::kSlots;
    const int halves = wide() ? 1 : 2;  // of a box, in a slot
    const int halves_across = gated ? Cta::kBoxesAcross : 2 * Cta::kBoxesAcross;
    int m = tile.m + first_row();
    int half = round * Cta::kSlots;
    if (half >= halves_across) m += 64, half -= halves_across;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) {
      const int n = tile.n + first_column() + (gated ? half * 32 : Cta::half_box_column(half));
      const int box = wide() ? (round * Cta::kSlots + slot) / 2 : slot;
      f(slot, m, n, m < last_m && n < last_n && owns(box));
      half += halves;
      if (half == halves_across) {
        half = 0;
        m += 64;
      }
    }
  }

 private:
  const Arguments& arguments_;
  const SharedMemory<Cta>& shared_;
  int consumer_;
};

// Brings the bias of a tile to a consumer. By its epilogue warp.
template <class Cta>
__device__ inline void bring_bias(const Arguments& arguments, const Tile& tile, int consumer,
                                  int first_column, SharedMemory<Cta>& shared) {
  const GemmParams& params = arguments.gemm;
  if (!params.bias.pointer && !arguments.up_bias.pointer) return;
  for (int column = static_cast<int>(threadIdx.x) % 32; column < Cta::kColumns; column += 32) {
    const bool up = arguments.gated && column % 128 >= 64;
    const MatrixParams& bias = up ? arguments.up_bias : params.bias;
    const int n =
        tile.n + first_column + (arguments.gated ? column / 128 * 64 + column % 64 : column);
    shared.bias[consumer][column] =
        bias.pointer && n < params.n ? load_element(bias.pointer, bias.dtype, n) : 0.0f;
  }
}

// Copies a box from where it belongs in a matrix. By a warp, for matrices that TMA refuses: `Unit`
// is what may be accessed at once, pitch and columns count them.
template <class Unit>
__device__ inline void read_box(unsigned char* box, const Unit* matrix, int64_t pitch, int rows,
                                int columns) {
  constexpr int kUnit = sizeof(Unit), kRowsAtOnce = 4;
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x) % 32; column < min(columns, 128 / kUnit);
       column += 32) {
    const int chunk = column * kUnit / 16;
    unsigned char* const in_box = box + column * kUnit % 16;
    const Unit* at = matrix + column;
#pragma unroll 1
    for (int row = 0; row < rows; row += kRowsAtOnce, at += kRowsAtOnce * pitch) {
      Unit value[kRowsAtOnce];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (row + i < rows) value[i] = at[i * pitch];
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (row + i >= rows) break;
        *reinterpret_cast<Unit*>(in_box + (row + i) * 128 + (chunk ^ (row + i) % 8) * 16) =
            value[i];
      }
    }
  }
}

// Brings a box of the residual, which TMA refuses, in the widest units that are always aligned.
// `first`: of its elements in memory.
__device__ inline void read_residual(unsigned char* box, const Arguments& arguments, int64_t first,
                                     int m, int n) {
  const MatrixParams& matrix = arguments.gemm.residual;
  const int rows = min(64, static_cast<int>(arguments.gemm.m) - m);
  const int columns = static_cast<int>(arguments.gemm.n) - n;
  if (matrix.dtype == DType::kFloat32) {
    read_box(box, static_cast<const uint32_t*>(matrix.pointer) + first, matrix.row_stride, rows,
             columns);
  } else if (arguments.reads_pairs) {
    read_box(box, static_cast<const uint32_t*>(matrix.pointer) + first / 2, matrix.row_stride / 2,
             rows, columns / 2);
  } else {
    read_box(box, static_cast<const uint16_t*>(matrix.pointer) + first, matrix.row_stride, rows,
             columns);
  }
}

// Copies a box of outputs to where TMA refuses to, because rows may begin at any element. By a
// warp, for which few instructions count: eight threads to a row write 16 aligned bytes each, which
// lie across two chunks of the box, and two bytes of what is left at the row's ends.
template <class Cta>
__device__ inline void write_outputs(const unsigned char* box, const GemmParams& params,
                                     int64_t first, int m, int n) {
  const int element = params.out.dtype == DType::kFloat32 ? 4 : 2;  // bytes
  const int64_t pitch = params.out.row_stride * element;
  unsigned char* const matrix = static_cast<unsigned char*>(params.out.pointer) + first * element;
  const int rows = min(64, static_cast<int>(params.m) - m);
  const int bytes = (static_cast<int>(params.n) - n) * element;
  const auto offset = [](int row, int byte) {
    return row * 128 + (byte / 16 % 8 ^ row % 8) * 16 + byte % 16;
  };
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto by_elements = [&]<class Element>(Element) {
    constexpr int kBytes = sizeof(Element);
#pragma unroll 1
    for (int at = lane * kBytes; at < min(bytes, 128); at += 32 * kBytes) {
#pragma unroll 2
      for (int row = 0; row < rows; ++row) {
        *reinterpret_cast<Element*>(matrix + row * pitch + at) =
            *reinterpret_cast<const Element*>(box + offset(row, at));
      }
    }
  };
  if (Cta::kShortOfRegisters || bytes < 128) {  // the matrix' last columns
    return element == 4 ? by_elements(uint32_t{}) : by_elements(uint16_t{});
  }
  if constexpr (!Cta::kShortOfRegisters) {
#pragma unroll 1
    for (int row = lane / 8; row < 8; row += 4) {
      // Rows that are eight apart are aligned alike, and swizzled alike.
      unsigned char* whole = matrix + row * pitch;
      const int head = static_cast<int>(-reinterpret_cast<uintptr_t>(whole) % 16);
      const int part = lane % 8, begin = head + part * 16;
      const int edge = part * 2 < head ? part * 2 : part * 2 + 112;
      const int shift = head % 4;  // the words of the box begin this many bytes earlier
      const unsigned char* word[5];
#pragma unroll
      for (int i = 0; i < 5; ++i) word[i] = box + offset(row, begin - shift + 4 * i);
      const unsigned char* const from_edge = box + offset(row, edge);
      unsigned char* to_edge = whole + edge;
      whole += begin;
#pragma unroll
      for (int i = 0; i < 64; i += 8, whole += 8 * pitch, to_edge += 8 * pitch) {
        if (row + i >= rows) break;
        if (begin + 16 <= 128) {
          uint32_t value[5];
#pragma unroll
          for (int j = 0; j < 5; ++j) {
            value[j] = *reinterpret_cast<const uint32_t*>(word[j] + i * 128);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) value[j] = __funnelshift_r(value[j], value[j + 1], shift * 8);
          *reinterpret_cast<uint4*>(whole) = make_uint4(value[0], value[1], value[2], value[3]);
        }
        if (head != 0) {
          *reinterpret_cast<uint16_t*>(to_edge) =
              *reinterpret_cast<const uint16_t*>(from_edge + i * 128);
        }
      }
    }
  }
}

// Where a batch entry of a matrix starts, in elements. As batch_offsets, but where TMA reads the
// operands 32 bits are enough to divide.
__device__ inline int64_t batch_offset(const GemmParams& params, const MatrixParams& matrix,
                                       int batch) {
  auto rest = static_cast<uint32_t>(batch);
  int64_t offset = 0;
#pragma unroll 1
  for (int i = params.batch_dims - 1; i >= 0; --i) {
    const auto size = static_cast<uint32_t>(params.batch_size[i]);
    const uint32_t outer = i == 0 ? 0 : rest / size;
    offset += static_cast<int64_t>(rest - outer * size) * matrix.batch_stride[i];
    rest = outer;
  }
  return offset;
}

// The part of a consumer's epilogue warp where TMA refuses the outputs, or the residual.
template <class Cta>
__device__ inline void serve_by_copying(const Arguments& arguments, int consumer,
                                        SharedMemory<Cta>& shared) {
  const GemmParams& params = arguments.gemm;
  const Boxes<Cta> boxes(arguments, shared, consumer);
  unsigned char* const staged = shared.staged[consumer];
  BatchOffsets& offset = shared.offset[consumer];
  uint32_t parity = 0;
  ptx::griddepcontrol_wait();
  // Registers are short: the step is read again for each tile.
  for (int i = first_tile() + (Cta::kPingPong ? consumer * tile_step() : 0); i < arguments.tiles;
       i += Cta::kPingPong ? 2 * tile_step() : tile_step()) {
    const Tile tile = decode<Cta>(arguments, i);
    bring_bias(arguments, tile, consumer, boxes.first_column(), shared);
    if (threadIdx.x % 32 == 0) {
      offset.out = batch_offset(params, params.out, tile.batch);
      offset.residual = batch_offset(params, params.residual, tile.batch);
    }
    __syncwarp();
#pragma unroll 1
    for (int round = 0; round < boxes.rounds(); ++round, parity ^= 1) {
      if (params.residual.pointer) {
        boxes.for_each(tile, round, [&](int slot, int m, int n, bool sent) {
          if (!sent) return;
          read_residual(staged + slot * Cta::kSlotBytes, arguments,
                        offset.residual + m * params.residual.row_stride + n, m, n);
        });
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(shared.barriers.residual[consumer]);
      }
      ptx::named_barrier_arrive(kRoom + consumer, 160);
      boxes.for_each(tile, round, [&](int slot, int m, int n, bool sent) {
        wait(shared.barriers.outputs[consumer][slot], parity);
        if (!sent) return;
        write_outputs<Cta>(staged + slot * Cta::kSlotBytes, params,
                           offset.out + m * params.out.row_stride + n, m, n);
      });
      __syncwarp();
    }
  }
}

// The part of a consumer's epilogue warp.
template <class Cta>
__device__ inline void serve_epilogue(const Arguments& arguments, int consumer,
                                      SharedMemory<Cta>& shared) {
  const GemmParams& params = arguments.gemm;
  const Boxes<Cta> boxes(arguments, shared, consumer);
  const bool elected = ptx::elect_sync();
  uint64_t& residual = shared.barriers.residual[consumer];
  const int step = tile_step();
  uint32_t parity = 0;
  ptx::griddepcontrol_wait();
  for (int i = first_tile() + (Cta::kPingPong ? consumer * step : 0); i < arguments.tiles;
       i += Cta::kPingPong ? 2 * step : step) {
    const Tile tile = decode<Cta>(arguments, i);
    bring_bias(arguments, tile, consumer, boxes.first_column(), shared);
#pragma unroll 1
    for (int round = 0; round < boxes.rounds(); ++round) {
      if (elected) {
        cptx::cp_async_bulk_wait_group_read(cptx::n32_t<0>{});  // the last outputs have left
        if (params.residual.pointer) {
          const MapCoordinates at(arguments.residual, params, tile.batch);
          boxes.for_each(tile, round, [&](int slot, int m, int n, bool sent) {
            if (!sent) return;
            cptx::mbarrier_expect_tx(cptx::sem_relaxed, cptx::scope_cta, cptx::space_shared,
                                     &residual, static_cast<uint32_t>(Cta::kSlotBytes));
            request_box(shared.staged[consumer] + slot * Cta::kSlotBytes, arguments.residual, at,
                        true, m, n, residual);
          });
          arrive(residual);
        }
      }
      __syncwarp();
      ptx::named_barrier_arrive(kRoom + consumer, 160);
      if (elected) {
        const MapCoordinates at(arguments.out, params, tile.batch);
        boxes.for_each(tile, round, [&](int slot, int m, int n, bool sent) {
          wait(shared.barriers.outputs[consumer][slot], parity);
          if (!sent) return;
          const int32_t coordinates[5] = {n, m, at.batch[0], at.batch[1], at.batch[2]};
          cptx::cp_async_bulk_tensor(cptx::space_global, cptx::space_shared, &arguments.out.map,
                                     coordinates, shared.staged[consumer] + slot * Cta::kSlotBytes);
        });
        cptx::cp_async_bulk_commit_group();
      }
      __syncwarp();  // the consumer has read its bias
      parity ^= 1;
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
    if constexpr (Cta::kParts) {
      multiply_parts(sums[0], k_tiles, cursor);
      return;
    }
    const auto run = [&]<ptx::WgmmaType kType, bool kAKMajor>() {
      if (Cta::kOnlyKMajorB || arguments_.b_k_major) {
        multiply_tiles<kType, kAKMajor, true>(sums, k_tiles, cursor, more);
      } else if constexpr (kType != kTf32) {
        multiply_tiles<kType, kAKMajor, Cta::kOnlyKMajorB>(sums, k_tiles, cursor, more);
      }
    };
    if (params_.a.dtype == DType::kFloat32) {
      run.template operator()<kTf32, true>();
    } else if (params_.a.dtype == DType::kFloat16) {
      if (arguments_.a_k_major) {
        run.template operator()<kF16, true>();
      } else {
        run.template operator()<kF16, false>();
      }
    } else if (arguments_.a_k_major) {
      run.template operator()<kBf16, true>();
    } else {
      run.template operator()<kBf16, false>();
    }
  }

  // Writes the sums of output tile `index` out through the epilogue.
  __device__ void store(const Sums& sums, int index) {
    if (params_.split_k > 1) {
      store_partial(sums, decode<Cta>(arguments_, index));
    } else if (Cta::kCommonEpilogue && arguments_.outputs == Outputs::kCommon) {
      store_any(sums, decode<Cta>(arguments_, index));
    } else if (arguments_.simple && (Cta::kUnrollsResiduals || arguments_.linear)) {
      wait_for_room();
      const auto run = [&]<bool kMore>() {
        if (params_.out.dtype == DType::kBFloat16) {
          store_simple<true, kMore>(sums);
        } else {
          store_simple<false, kMore>(sums);
        }
      };
      if (arguments_.linear) {
        run.template operator()<false>();
      } else if constexpr (Cta::kUnrollsResiduals) {
        run.template operator()<true>();
      }
    } else if (Cta::kCanGate && arguments_.gated) {
      wait_for_room();
      store_gated(sums);
    } else {
#pragma unroll 1
      for (int round = 0; round < boxes_.rounds(); ++round) {
        wait_for_room();
        store_fused(sums, round);
      }
    }
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
      if (owner == rank()) continue;
      const int source = rank() < owner ? rank() : rank() - 1;
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
  __device__ void wait_for_room() const { ptx::named_barrier_sync(kRoom + consumer(), 160); }

  // A box of outputs is in shared memory, for the epilogue warp to send.
  __device__ void hand_over(int slot) const {
    cptx::fence_proxy_async(cptx::space_shared);
    __syncwarp();
    if (lane() == 0) arrive(shared_.barriers.outputs[consumer()][slot]);
  }

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
    // Narrow tiles wait for whatever is done for each k-tile beside multiplying.
    const uint32_t stages = ptx::shared_address(shared_.stages);
    const uint64_t first_a =
        ptx::wgmma_descriptor<kAKMajor>(stages + boxes_.first_row() * Cta::kRowBytes, 0);
    const uint64_t first_b = ptx::wgmma_descriptor<kBKMajor>(
        stages + Cta::kBytesA + boxes_.first_column() * Cta::kRowBytes, 64 * Cta::kRowBytes);
    auto low_a = static_cast<uint32_t>(first_a), low_b = static_cast<uint32_t>(first_b);
    asm volatile("" : "+r"(low_a), "+r"(low_b));  // else they are computed for each k-tile
    int previous = 0;
    for (int i = 0; i < k_tiles; ++i) {
      const uint32_t offset = cursor.stage * (Cta::kStageBytes / 16);
      uint64_t a = (first_a >> 32 << 32) | ptx::uniform(low_a + offset);
      uint64_t b = (first_b >> 32 << 32) | ptx::uniform(low_b + offset);
      wait(shared_.barriers.full[cursor.stage], cursor.parity);
      if (i == k_tiles - 1 && more) pass_turn();
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
      const int current = cursor.stage;
      cursor.advance();
      ptx::wgmma_wait_group<1>();
      if (i > 0) release(previous);
      previous = current;
    }
    ptx::wgmma_wait_group<0>();
    release(previous);
  }

  using BlockSums = float[Cta::kColumns / 2];

  // D = A * B, or, kAdds, D += A * B, with the k of a tile of each, which begin at these addresses.
  template <bool kAdds>
  __device__ void multiply_tile(BlockSums& d, uint32_t tile_a, uint32_t tile_b) const {
    using Multiplier = ptx::Wgmma<Cta::kColumns, ptx::WgmmaType::kTf32, true, true>;
    uint64_t a = ptx::wgmma_descriptor<true>(tile_a, 0);
    uint64_t b = ptx::wgmma_descriptor<true>(tile_b, 0);
    Multiplier::template multiply<kAdds>(d, a, b);
#pragma unroll
    for (int step = 1; step < Cta::kRowBytes / 32; ++step) {
      a += ptx::kWgmmaStepK<true>;
      b += ptx::kWgmmaStepK<true>;
      Multiplier::multiply(d, a, b);
    }
  }

  // The instructions that compute these sums have been waited for, of which the compiler knows
  // nothing: before that it may not touch them.
  __device__ static void settle(BlockSums& sums) {
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
  }

  // Multiplies the tiles of one output tile that hold parts of FP32 operands, two by two: low parts
  // of A and high ones of B, then high and low ones. Tensor Cores do not round their sums but
  // truncate them. So products of high parts are added up here, in sums of kPartsK of them, while
  // those with a low part are computed: they are so much smaller that their sums may take all of K.
  __device__ void multiply_parts(BlockSums& sums, int k_tiles, StageCursor<Cta::kStages>& cursor) {
    BlockSums large, small;
#pragma unroll
    for (float& sum : small) sum = 0.0f;
    const uint32_t offset_a = boxes_.first_row() * Cta::kRowBytes;
    const uint32_t offset_b = Cta::kBytesA + boxes_.first_column() * Cta::kRowBytes;
#pragma unroll 1
    for (; k_tiles > 0; k_tiles -= 2) {
      const int first = cursor.stage;
      wait(shared_.barriers.full[first], cursor.parity);
      wait(shared_.barriers.full[first + 1], cursor.parity);
      const uint32_t stage = ptx::uniform(ptx::shared_address(shared_.stages[first]));
      const uint32_t a[2] = {stage + offset_a, stage + offset_a + Cta::kStageBytes};
      const uint32_t b[2] = {stage + offset_b, stage + offset_b + Cta::kStageBytes};
      ptx::wgmma_fence();
      multiply_tile<false>(large, a[1], b[0]);
      ptx::wgmma_commit_group();
      multiply_tile<true>(small, a[0], b[0]);
      multiply_tile<true>(small, a[1], b[1]);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      settle(large);
#pragma unroll
      for (int j = 0; j < Cta::kColumns / 2; ++j) sums[j] += large[j];
      ptx::wgmma_wait_group<0>();
      release(first);
      release(first + 1);
      cursor.advance();
      cursor.advance();
    }
    settle(small);
#pragma unroll
    for (int j = 0; j < Cta::kColumns / 2; ++j) {
      // Where products overflow, those with a low part may do so with another sign.
      const bool overflown = fabsf(sums[j]) == INFINITY;
      sums[j] = overflown ? sums[j] : fmaf(small[j], 1.0f / kLowPartScale, sums[j]);
    }
  }

  // Where stmatrix has this lane's 16 bytes of a warp's 16 rows and 16 columns of a box: row
  // lane % 16, swizzled with the row's number.
  struct MatrixAddress {
    uint32_t row, swizzle;
    __device__ uint32_t operator()(int box, int part) const {
      return row + box * Cta::kSlotBytes + (swizzle ^ part * 32);
    }
  };

  __device__ MatrixAddress matrix_address() const {
    unsigned thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // else all addresses are computed early, and spilled
    const unsigned row = thread % 16;
    const uint32_t start = ptx::shared_address(shared_.staged[thread / 128 - 1]);
    return {start + (thread / 32 % 4 * 16 + row) * 128, (row % 8 ^ thread % 32 / 16) * 16};
  }

  // A thread's 32 sums of a box.
  template <class AnySums>
  __device__ static auto* sums_of(AnySums& sums, int box) {
    return sums[box / Cta::kBoxesAcross] + Cta::half_box_column(2 * box) / 2;
  }

  // alpha * sum + bias, and, kMore, of that the positive part, and + beta * residual. Unrolled:
  // these are the usual cases, and the Tensor Cores wait for them.
  template <bool kBf16, bool kMore>
  __device__ void store_simple(const Sums& sums) {
    const bool plain = !params_.bias.pointer && params_.alpha == 1.0f;
    const float least = params_.activation == Activation::kRelu ? 0.0f : -INFINITY;
    const bool adds = kMore && params_.residual.pointer;
    if (adds) wait_for_residual();
    const MatrixAddress address = matrix_address();
#pragma unroll
    for (int box = 0; box < Cta::kSlots; ++box) {
      uint32_t residual[4][4];  // it lies where the outputs will be
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        if (adds) ptx::ldmatrix_x4(residual[part], address(box, part));
      }
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float* sum = sums_of(sums, box) + part * 8;
        uint32_t packed[4];  // columns of 8, rows of 8
        if (!kMore && plain) {
#pragma unroll
          for (int i = 0; i < 4; ++i) packed[i] = pack<kBf16>(sum[2 * i], sum[2 * i + 1]);
        } else {
          const int column = Cta::half_box_column(2 * box) + part * 16;
          float value[8];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 bias = bias_at(column + i / 2 * 8);
            value[2 * i] = fmaf(params_.alpha, sum[2 * i], bias.x);
            value[2 * i + 1] = fmaf(params_.alpha, sum[2 * i + 1], bias.y);
          }
          if constexpr (kMore) {
#pragma unroll
            for (float& v : value) v = ptx::max_nan(v, least);
          }
          if (adds) add<kBf16>(value, residual[part]);
#pragma unroll
          for (int i = 0; i < 4; ++i) packed[i] = pack<kBf16>(value[2 * i], value[2 * i + 1]);
        }
        ptx::stmatrix_x4(address(box, part), packed);
      }
      hand_over(box);
    }
  }

  __device__ void wait_for_residual() {
    wait(shared_.barriers.residual[consumer()], residual_parity_);
    residual_parity_ ^= 1;
  }

  // Adds beta * residual to eight outputs.
  template <bool kBf16>
  __device__ void add(float* value, const uint32_t (&residual)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<kBf16>(residual[i]);
      value[2 * i] = fmaf(params_.beta, pair.x, value[2 * i]);
      value[2 * i + 1] = fmaf(params_.beta, pair.y, value[2 * i + 1]);
    }
  }

  // activation(alpha * sum + bias) + beta * residual, half a box at a time. The loop is rolled, to
  // keep one copy of it.
  __device__ void store_fused(const Sums& sums, int round) {
    if (params_.residual.pointer) wait_for_residual();
    const bool wide = boxes_.wide();
    const int begin = round * Cta::kSlots;
    const int end = begin + (wide ? Cta::kSlots : 2 * Cta::kSlots);
#pragma unroll 1
    for (int half = begin; half < end; ++half) {
      float value[16];
      select(value, sums, half);
      scale_and_add_bias(value, Cta::half_box_column(half));
      activate_16_bit(params_.activation, value);
      if (wide) {
        finish_wide(value, half - begin);
      } else {
        finish(value, half);
      }
      if (wide || half % 2 == 1) hand_over(wide ? half - begin : half / 2);
    }
  }

  // activation(gate + bias) * (up + bias): 64 columns of each alternate.
  __device__ void store_gated(const Sums& sums) {
#pragma unroll 1
    for (int half = 0; half < Cta::kSlots; ++half) {
      const int gate = half / 2 * 4 + half % 2;
      const int column = Cta::half_box_column(gate);
      float value[16], up[16];
      select(value, sums, gate);
      select(up, sums, gate + 2);
      scale_and_add_bias(value, column);
      scale_and_add_bias(up, column + 64);
      activate_16_bit(params_.activation, value);
#pragma unroll
      for (int i = 0; i < 16; ++i) value[i] *= up[i];
      finish(value, half);
      if (half % 2 == 1) hand_over(half / 2);
    }
  }

  __device__ void scale_and_add_bias(float (&value)[16], int column) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 bias = bias_at(column + i * 8);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        value[4 * i + j] = fmaf(params_.alpha, value[4 * i + j], j % 2 == 0 ? bias.x : bias.y);
      }
    }
  }

  // Adds the residual to half a box of outputs, and leaves them in 16 bits where it was.
  __device__ void finish(float (&value)[16], int half) const {
    if (params_.out.dtype == DType::kBFloat16) {
      finish<true>(value, half);
    } else {
      finish<false>(value, half);
    }
  }

  template <bool kBf16>
  __device__ void finish(float (&value)[16], int half) const {
    const MatrixAddress address = matrix_address();
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 16 columns
      const uint32_t at = address(half / 2, half % 2 * 2 + part);
      float* const v = value + part * 8;
      uint32_t packed[4];  // columns of 8, rows of 8
      if (params_.residual.pointer) {
        ptx::ldmatrix_x4(packed, at);
        add<kBf16>(v, packed);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = pack<kBf16>(v[2 * i], v[2 * i + 1]);
      ptx::stmatrix_x4(at, packed);
    }
  }

  // The same in FP32.
  __device__ void finish_wide(float (&value)[16], int slot) const {
    const int row = lane() / 4;  // and 8 below
    unsigned char* line =
        shared_.staged[consumer()] + slot * Cta::kSlotBytes + (warp() * 16 + row) * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 8 columns
      unsigned char* at = line + ((i * 2 + lane() % 4 / 2) ^ row) * 16 + lane() % 2 * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half, at += 8 * 128) {
        float2 pair = make_float2(value[4 * i + 2 * half], value[4 * i + 2 * half + 1]);
        if (params_.residual.pointer) {
          const float2 other = *reinterpret_cast<const float2*>(at);
          pair.x = fmaf(params_.beta, other.x, pair.x);
          pair.y = fmaf(params_.beta, other.y, pair.y);
        }
        *reinterpret_cast<float2*>(at) = pair;
      }
    }
  }

  // Of this lane's two columns among eight from `column` on.
  __device__ float2 bias_at(int column) const {
    if (!params_.bias.pointer && !arguments_.up_bias.pointer) return make_float2(0.0f, 0.0f);
    return *reinterpret_cast<const float2*>(&shared_.bias[consumer()][column + lane() % 4 * 2]);
  }

  // A thread's 16 sums in the run-time half of a box.
  __device__ static void select(float (&value)[16], const Sums& sums, int half) {
    static_assert(Cta::kSlots <= 4);
    switch (half) {  // a jump: choosing among all halves costs far more
      case 0:
        return select<0>(value, sums);
      case 1:
        return select<1>(value, sums);
      case 2:
        return select<2>(value, sums);
      case 3:
        return select<3>(value, sums);
      case 4:
        return select<4>(value, sums);
      case 5:
        return select<5>(value, sums);
      case 6:
        return select<6>(value, sums);
      case 7:
        return select<7>(value, sums);
      default:
        __builtin_unreachable();
    }
  }

  template <int kHalf>
  __device__ static void select(float (&value)[16], const Sums& sums) {
    if constexpr (kHalf < 2 * Cta::kSlots) {
#pragma unroll
      for (int i = 0; i < 16; ++i) value[i] = sums_of(sums, kHalf / 2)[kHalf % 2 * 16 + i];
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

  template <bool kBf16>
  __device__ static float2 unpack(uint32_t packed) {
    if constexpr (kBf16) return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
    return __half22float2(reinterpret_cast<const __half2&>(packed));
  }

  // First row and column of half a box.
  __device__ int row_of(const Tile& tile, int half) const {
    const int below = Cta::kBlocks == 1 ? 0 : half / (2 * Cta::kBoxesAcross) * 64;
    return tile.m + boxes_.first_row() + below;
  }
  __device__ int column_of(const Tile& tile, int half) const {
    return tile.n + boxes_.first_column() + Cta::half_box_column(half);
  }

  // Sums of a split of K to the workspace, of which 8 rows of 32 bytes at a time.
  __device__ void store_partial(const Sums& sums, const Tile& tile) {
    const int64_t matrix = int64_t{tile.split} * params_.batch_count + tile.batch;
    const int64_t pitch = params_.workspace_pitch;
    const auto rows = static_cast<int>(params_.m);
    const auto columns = static_cast<int>(pitch);
#pragma unroll 1
    for (int half = 0; half < 2 * Cta::kSlots; ++half) {
      const int m = row_of(tile, half) + warp() * 16 + lane() / 4;
      const int n = column_of(tile, half) + lane() % 4 * 2;
      float* to = params_.workspace + (matrix * params_.m + m) * pitch + n;
      float value[16];
      select(value, sums, half);
#pragma unroll
      for (int below = 0; below < 2; ++below, to += 8 * pitch) {
        if (m + below * 8 >= rows) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (n + i * 8 >= columns) break;
          *reinterpret_cast<float2*>(to + i * 8) =
              make_float2(value[4 * i + 2 * below], value[4 * i + 2 * below + 1]);
        }
      }
    }
  }

  // Through the common epilogue, in FP32. Rolled, too.
  __device__ void store_any(const Sums& sums, const Tile& tile) {
    float* wide = reinterpret_cast<float*>(shared_.staged[consumer()]) + warp() * 16 * 32;
    // In shared memory, because registers are short.
    BatchOffsets& offset = shared_.offset[consumer() * 4 + warp()];
    if (lane() == 0) offset = batch_offsets(params_, tile.batch);
#pragma unroll 1
    for (int half = 0; half < 2 * Cta::kSlots; ++half) {
      const int m = row_of(tile, half) + warp() * 16;
      const int n = column_of(tile, half);
      if (m >= params_.m) return;
      if (n >= params_.n || !boxes_.owns(half / 2)) continue;
      float value[16];
      select(value, sums, half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4;  // and 8 below
        float* at = wide + wide_offset(row, i * 8 + lane() % 4 * 2);
        *reinterpret_cast<float2*>(at) = make_float2(value[4 * i], value[4 * i + 1]);
        *reinterpret_cast<float2*>(at + 8 * 32) = make_float2(value[4 * i + 2], value[4 * i + 3]);
      }
      __syncwarp();
      if (params_.vector_epilogue) {
        finish_chunk<4>(wide, offset, m, n);
      } else {
        finish_chunk<1>(wide, offset, m, n);
      }
      __syncwarp();
    }
  }

  // Of 16 rows by 32 floats, swizzled as TMA does it.
  __device__ static int wide_offset(int row, int column) {
    return row * 32 + (column ^ row % 8 * 4);
  }

  // Finishes 16 rows by 32 columns from (m, n) on, kVec columns at a time.
  template <int kVec>
  __device__ void finish_chunk(const float* wide, const BatchOffsets& offset, int m, int n) {
    constexpr int kPerRow = 32 / kVec;
#pragma unroll 1
    for (int i = lane(); i < 16 * kPerRow; i += 32) {
      const int row = i / kPerRow;
      const int column = i % kPerRow * kVec;
      if (m + row >= params_.m || n + column >= params_.n) continue;
      float sum[1][kVec];
      load_elements(wide + wide_offset(row, column), DType::kFloat32, 0, sum[0]);
      finish_at(params_, offset, m + row, n + column, sum);
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
  const auto splits = [&] {
    int parts = arguments.cluster_split;
    asm volatile("" : "+r"(parts));  // asked anew each time: else the answer is kept, and spilled
    return Cta::kSplits && parts > 1;
  };
  const auto warp = static_cast<int>(ptx::uniform(threadIdx.x / 32));
  // While one warp makes the barriers, the others prepare the first requests.
  if (threadIdx.x == 32 * Cta::kProducers) init<Cta>(arguments, shared.barriers);
  if (warp == 0) ptx::prefetch_tensor_map(&arguments.a.map);
  if (warp == Cta::kProducers - 1) ptx::prefetch_tensor_map(&arguments.b.map);
  const Tile first = decode<Cta>(arguments, first_tile());
  if constexpr (Cta::kCluster > 1) {
    // No CTA writes to another one's barriers before they exist; init() has published them.
    cptx::barrier_cluster_arrive(cptx::sem_relaxed);
    cptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
  // The next kernel may start; this one touches no memory that others write before it has waited
  // for them.
  ptx::griddepcontrol_launch_dependents();

  // In this order, the producers' instructions come next, and are soon there: the first requests
  // wait for them.
  if (threadIdx.x >= 128) {
    ptx::setmaxnreg_inc<Cta::kConsumerRegisters>();
    Consumer<Cta> consumer(arguments, shared);
    StageCursor<Cta::kStages> cursor;
    int i = first_tile();
    ptx::griddepcontrol_wait();
    // All tiles have as many k-tiles, unless K is split.
    auto k_tiles = static_cast<int>(ptx::uniform(first.k_tiles));
    const auto next = [&] {
      i += tile_step();
      if (arguments.gemm.split_k > 1) k_tiles = decode<Cta>(arguments, i).k_tiles;
    };
    // In a ping-pong pair, each steps over the stages of the tiles of the other.
    const auto skip = [&] {
      if (!Cta::kPingPong) return;
      cursor.advance(k_tiles);
      next();
    };
    if (threadIdx.x >= 256) skip();
    while (i < arguments.tiles) {
      if (Cta::kPingPong && i >= tile_step()) consumer.take_turn();
      typename Consumer<Cta>::Sums sums;
      consumer.multiply(sums, k_tiles, cursor, i + tile_step() < arguments.tiles);
      if (splits()) {
        // Nobody multiplies from the stages any more. Nothing written before is read after: no
        // fence.
        cptx::barrier_cluster_arrive(cptx::sem_relaxed);
        cptx::barrier_cluster_wait();
        consumer.exchange(sums);
      }
      consumer.store(sums, i);
      next();
      skip();
    }
  } else {
    ptx::setmaxnreg_dec<Cta::kProducerRegisters>();
    // Consumers wait here for one another before they exchange sums; all threads have to take part.
    if (warp >= Cta::kProducers && splits()) cptx::barrier_cluster_arrive(cptx::sem_relaxed);
    if (warp >= Cta::kProducers) {
      const int consumer = warp - Cta::kProducers;
      if (arguments.outputs == Outputs::kTma) serve_epilogue<Cta>(arguments, consumer, shared);
      if (arguments.outputs == Outputs::kCopied) {
        serve_by_copying<Cta>(arguments, consumer, shared);
      }
    } else {
      if (ptx::elect_sync()) {
        if constexpr (Cta::kProducers == 1) {
          produce<Cta, true, true>(arguments, shared, first);
        } else if (warp == 0) {
          produce<Cta, true, false>(arguments, shared, first);
        } else {
          produce<Cta, false, true>(arguments, shared, first);
        }
      }
      __syncwarp();
      if (splits()) cptx::barrier_cluster_arrive(cptx::sem_relaxed);
    }
    __syncwarp();
    if (splits()) cptx::barrier_cluster_wait();
  }
#endif
}

}  // namespace tgemm::sm90
