// Many small products: a warp to a tile, operands straight from global memory into the registers of
// mma.sync, no shared memory and no synchronisation on the way.
//
// Which k, row or column of a tile an element of a fragment stands for is free, as long as A and B
// agree on k and the outputs on rows and columns. It is chosen so that a lane's elements lie side
// by side in memory whatever the layout: position c of block j (of eight) stands for
//
//   permuted(j, c) = kRun * (c / 2) + 2 * j + c % 2
//
// Lane i holds positions 2 * (i % 4) and 2 * (i % 4) + 1 of each block, which together are the run
// of kRun elements from kRun * (i % 4) on: one load for all blocks. An MN-major operand is loaded
// in runs of rows and transposed 8x8 by 8x8 (movmatrix). Outputs leave in runs as well.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/epilogue.cuh"
#include "device/params.hpp"
#include "device/ptx.cuh"
#include "device/tile_scheduler.cuh"
#include "kernels/tiny/warp_tile.hpp"

namespace tgemm::tiny {

// 16-bit elements of an operand, [block of rows (columns)][block of k], two to a word.
template <int kBlocks>
using Fragment = uint32_t[kBlocks][kBlocks];

template <int kBlocks>
__device__ inline int permuted(int block, int position) {
  return 2 * kBlocks * (position / 2) + 2 * block + position % 2;
}

// From global memory. A pointer that came from another lane has lost what it points to: __ldg says
// it.
template <int kWords>
__device__ inline void load_run(uint32_t (&words)[kWords], const uint16_t* from) {
  if constexpr (kWords == 1) {
    words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
    words[0] = v.x, words[1] = v.y;
  } else {
    static_assert(kWords == 4);
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
}

template <int kWords>
__device__ inline void store_run(uint16_t* to, const uint32_t (&words)[kWords]) {
  if constexpr (kWords == 1) {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    static_assert(kWords == 4);
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Stores the first `left` elements of a run, `width` elements at a time: 2, 4, 8, ..., as many as
// the run has at most. Neither the address nor `left` splits such a piece.
template <int kPieceWords, int kWords>
__device__ inline void store_pieces(uint16_t* to, const uint32_t (&words)[kWords], int left,
                                    int width) {
  if constexpr (kPieceWords > 0) {
    if (width < 2 * kPieceWords) return store_pieces<kPieceWords / 2>(to, words, left, width);
#pragma unroll
    for (int w = 0; w < kWords; w += kPieceWords) {
      uint32_t piece[kPieceWords];
#pragma unroll
      for (int i = 0; i < kPieceWords; ++i) piece[i] = words[w + i];
      if (2 * w < left) store_run(to + 2 * w, piece);
    }
  }
}

// Element of an aligned run of kWords words.
template <int kWords>
__device__ inline int shift_of(const uint16_t* from) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(from) / 2 % (2 * kWords));
}

// The largest tile has no registers for all that its runs are shifted out of.
template <int kBlocks>
constexpr bool kShiftsAtOnce = kBlocks == 4;

// The two aligned runs that the run at `from` lies across, wherever it begins. Of it `elements`
// exist; an aligned run without one of them may not be there, and is not read.
template <int kWords>
__device__ inline void load_around(uint32_t (&low)[kWords], uint32_t (&high)[kWords],
                                   const uint16_t* from, int elements) {
  constexpr int kElements = 2 * kWords;
  const int shift = shift_of<kWords>(from);
  const auto* aligned = reinterpret_cast<const uint16_t*>(reinterpret_cast<uintptr_t>(from) &
                                                          ~uintptr_t{4 * kWords - 1});
#pragma unroll
  for (int i = 0; i < kWords; ++i) low[i] = high[i] = 0;
  if (elements > 0) load_run(low, aligned);
  if (min(elements, kElements) > kElements - shift) load_run(high, aligned + kElements);
}

// Out of those two, the run, in place of the first: it begins at the element `shift`. Zeros follow
// its `elements`.
template <int kWords>
__device__ inline void shift_run(uint32_t (&low)[kWords], const uint32_t (&high)[kWords], int shift,
                                 int elements) {
  uint32_t down[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) down[i] = low[i], down[kWords + i] = high[i];
#pragma unroll
  for (int by = kWords / 2; by > 0; by /= 2) {  // words
#pragma unroll
    for (int i = 0; i + by < 2 * kWords; ++i) {
      if (shift & (2 * by)) down[i] = down[i + by];
    }
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint32_t word = __funnelshift_r(down[i], down[i + 1], shift & 1 ? 16 : 0);
    low[i] = 2 * i + 1 < elements ? word : 2 * i < elements ? word & 0xffffu : 0u;
  }
}

// How an operand lies in memory: the same for all tiles, so nothing of it takes a lane's registers.
struct Layout {
  int64_t stride_mn, stride_k;
  Reading reading;

  __device__ bool mn_major() const {
    return reading.load == Load::kMnMajor || reading.load == Load::kMnMajorShifted;
  }
  __device__ bool aligned() const {
    return reading.load == Load::kKMajor || reading.load == Load::kMnMajor;
  }
  __device__ bool shifted() const {
    return reading.load == Load::kKMajorShifted || reading.load == Load::kMnMajorShifted;
  }
  // A line has consecutive k of one row, or consecutive rows at one k. From line to line, and from
  // element to element of a line:
  __device__ int64_t line_stride() const { return mn_major() ? stride_k : stride_mn; }
  __device__ int64_t stride() const { return mn_major() ? stride_mn : stride_k; }
};

// The elements of a tile that a lane loads: a run of kRun elements from `run` on, of `line` and of
// every second line after it.
template <int kBlocks>
struct LanePart {
  int line, run;

  __device__ explicit LanePart(int lane)
      : line(permuted<kBlocks>(0, lane / 4)), run(2 * kBlocks * (lane % 4)) {}
};

// Rows of A (columns of B) that belong to a tile, from some k on.
struct Operand {
  const uint16_t* first;  // of the tile; of the lane's part, once it is known
  int mn_left;            // of the tile. None: a tile that does not exist

  __device__ Operand from_lane(int lane) const {
    const auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(first), lane);
    return {reinterpret_cast<const uint16_t*>(address), __shfl_sync(~0u, mn_left, lane)};
  }

  // Would aligned loads reach beyond the end of what `layout` describes, somewhere in `k_size` of
  // K?
  __device__ bool is_last(const Layout& layout, int k_size) const {
    const uint16_t* last =
        first + (mn_left - 1) * layout.stride_mn + (k_size - 1) * layout.stride_k;
    return last >= layout.reading.whole_runs_end;
  }

  // Requests the first kSize of K, of which k_left exist; zeros beyond the matrix. Where shifted
  // runs could reach beyond the operand, element by element. What arrives has to be brought into
  // place by `shift` and `transpose`, which are other functions lest the warp waits for one operand
  // before it requests the next.
  template <int kBlocks>
  __device__ void request(const Layout& layout, const LanePart<kBlocks>& part, int k_left,
                          bool whole_runs, Fragment<kBlocks>& words,
                          Fragment<kBlocks>& above) const {
    const bool mn_major = layout.mn_major();
    const int lines = (mn_major ? k_left : mn_left) - part.line;
    const int elements = (mn_major ? mn_left : k_left) - part.run;
    const int64_t line_stride = layout.line_stride();
    if (layout.aligned()) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) words[j][i] = 0;
        if (2 * j < lines && elements > 0) load_run(words[j], first + 2 * j * line_stride);
      }
    } else if (layout.shifted() && whole_runs) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const uint16_t* from = first + 2 * j * line_stride;
        const int left = 2 * j < lines ? elements : 0;
        load_around(words[j], above[j], from, left);
        if (kShiftsAtOnce<kBlocks>) shift_run(words[j], above[j], shift_of<kBlocks>(from), left);
      }
    } else {
      const int64_t stride = layout.stride();
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int left = 2 * j < lines ? elements : 0;
        const uint16_t* from = first + 2 * j * line_stride;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          const uint32_t low = 2 * i < left ? __ldg(from) : 0u;
          const uint32_t high = 2 * i + 1 < left ? __ldg(from + stride) : 0u;
          words[j][i] = low | high << 16;
          from += 2 * stride;
        }
      }
    }
  }

  // Shifts what was requested, with the same arguments, in shifted runs. `first` may have moved on
  // by kSize of K: that many elements are whole runs.
  template <int kBlocks>
  __device__ void shift(const Layout& layout, const LanePart<kBlocks>& part, int k_left,
                        bool whole_runs, Fragment<kBlocks>& words,
                        const Fragment<kBlocks>& above) const {
    if (kShiftsAtOnce<kBlocks> || !layout.shifted() || !whole_runs) return;
    const bool mn_major = layout.mn_major();
    const int lines = (mn_major ? k_left : mn_left) - part.line;
    const int elements = (mn_major ? mn_left : k_left) - part.run;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int shift = shift_of<kBlocks>(first + 2 * j * layout.line_stride());
      shift_run(words[j], above[j], shift, 2 * j < lines ? elements : 0);
    }
  }

  // Transposes what was requested of an MN-major operand.
  template <int kBlocks>
  __device__ static void transpose(const Layout& layout, Fragment<kBlocks>& words) {
    if (!layout.mn_major()) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      words[i][i] = ptx::movmatrix_trans(words[i][i]);
#pragma unroll
      for (int j = 0; j < i; ++j) {
        const uint32_t upper = ptx::movmatrix_trans(words[j][i]);
        words[j][i] = ptx::movmatrix_trans(words[i][j]);
        words[i][j] = upper;
      }
    }
  }
};

// kBlocks x kBlocks blocks of 8x8 outputs, in pairs of blocks of rows as mma has them. A single
// block of rows has the lower half of a pair; the other half multiplies zeros and is not looked at.
template <int kBlocks>
using Accumulators = float[(kBlocks + 1) / 2][kBlocks][4];

template <int kBlocks>
__device__ inline void multiply(DType dtype, const Fragment<kBlocks>& a, const Fragment<kBlocks>& b,
                                Accumulators<kBlocks>& acc) {
  const auto all = [&](const auto& mma) {
    if constexpr (kBlocks == 1) {
      mma(acc[0][0], {a[0][0], 0u}, b[0][0]);
    } else {
#pragma unroll
      for (int k = 0; k < kBlocks; k += 2) {
#pragma unroll
        for (int m = 0; m < kBlocks; m += 2) {
          const uint32_t rows[4] = {a[m][k], a[m + 1][k], a[m][k + 1], a[m + 1][k + 1]};
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) mma(acc[m / 2][n], rows, b[n][k], b[n][k + 1]);
        }
      }
    }
  };
  if constexpr (kBlocks == 1) {
    using Rows = const uint32_t (&)[2];
    if (dtype == DType::kFloat16) {
      all([](float (&d)[4], Rows rows, uint32_t b) { ptx::mma_m16n8k8_f16(d, rows, b); });
    } else {
      all([](float (&d)[4], Rows rows, uint32_t b) { ptx::mma_m16n8k8_bf16(d, rows, b); });
    }
  } else {
    using Rows = const uint32_t (&)[4];
    if (dtype == DType::kFloat16) {
      all([](float (&d)[4], Rows rows, uint32_t b0, uint32_t b1) {
        ptx::mma_m16n8k16_f16(d, rows, b0, b1);
      });
    } else {
      all([](float (&d)[4], Rows rows, uint32_t b0, uint32_t b1) {
        ptx::mma_m16n8k16_bf16(d, rows, b0, b1);
      });
    }
  }
}

// Calls body(row, values) for each row of the tile that this lane has outputs of: kRun columns from
// kRun * (lane % 4) on.
template <int kBlocks, class Body>
__device__ inline void for_rows(const Accumulators<kBlocks>& acc, int lane, const Body& body) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    float values[2 * kBlocks];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      values[2 * n] = acc[j / 2][n][j % 2 * 2];
      values[2 * n + 1] = acc[j / 2][n][j % 2 * 2 + 1];
    }
    body(permuted<kBlocks>(j, lane / 4), values);
  }
}

__device__ inline uint32_t pack(DType dtype, float low, float high) {
  if (dtype == DType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// `store_width`: how many outputs of 16 bits can be stored at once, aligned, where the epilogue has
// nothing but alpha; 0 otherwise.
template <class Warp>
__global__ void __launch_bounds__(32 * kWarps, Warp::kCtasPerSm)
    tiny_gemm(const __grid_constant__ GemmParams params, Reading reading_a, Reading reading_b,
              int store_width) {
#if __CUDA_ARCH__ < 800
  __trap();
#else
  constexpr int kBlocks = Warp::kBlocks, kTiles = Warp::kTiles, kSize = Warp::kSize;
  constexpr int kRun = Warp::kRun;
  constexpr int kLanes = 32 / kTiles;  // for each tile
  __shared__ __align__(16) float shared[kWarps][Warp::kStagedFloats];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const staged = shared[warp];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const TileScheduler<kSize, kSize> scheduler(params);
  Layout layout_a{params.a.row_stride, params.a.col_stride, reading_a};
  Layout layout_b{params.b.col_stride, params.b.row_stride, reading_b};
  const LanePart<kBlocks> part(lane);
  const int k_size = static_cast<int>(params.k);
  const int64_t stride = int64_t{gridDim.x} * (kWarps * kTiles);
#pragma unroll 1
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * kTiles; first < scheduler.count();
       first += stride) {
    // As many lanes decode each of the tiles, and tell the others.
    const int tiles = static_cast<int>(min(scheduler.count() - first, int64_t{kTiles}));
    const int mine = lane / kLanes;
    const auto decode = [&] { return scheduler.tile(first + min(mine, tiles - 1)); };
    Operand a[kTiles], b[kTiles];
    unsigned last_a, last_b;  // tiles with the end of an operand: a bit for each lane of theirs
    int64_t out_offset;       // of the own tile
    {
      const Tile tile = decode();
      out_offset = tile.offset.out + tile.m * params.out.row_stride + tile.n;
      const auto share = [&](const Layout& layout, const MatrixParams& matrix, int64_t offset,
                             int64_t begin, int64_t size, Operand(&operands)[kTiles]) {
        const Operand own{
            static_cast<const uint16_t*>(matrix.pointer) + offset + begin * layout.stride_mn,
            mine < tiles ? static_cast<int>(min(size - begin, int64_t{kSize})) : 0};
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          operands[i] = own.from_lane(i * kLanes);
          operands[i].first += part.line * layout.line_stride() + part.run * layout.stride();
        }
        return __ballot_sync(~0u, own.is_last(layout, k_size));
      };
      last_a = share(layout_a, params.a, tile.offset.a, tile.m, params.m, a);
      last_b = share(layout_b, params.b, tile.offset.b, tile.n, params.n, b);
    }

    Accumulators<kBlocks> acc[kTiles] = {};
#pragma unroll 1
    for (int k_left = k_size; k_left > 0; k_left -= kSize) {
      // Else ptxas works out every address of every layout before the loop, and spills them.
      asm volatile("" : "+l"(layout_a.stride_mn), "+l"(layout_a.stride_k));
      asm volatile("" : "+l"(layout_b.stride_mn), "+l"(layout_b.stride_k));
      // An aligned run with the operand's end has elements of the last kRun of K alone.
      const unsigned near_end = k_left < kSize + kRun ? ~0u : 0u;
      const auto whole = [&](unsigned last, int i) {
        return !(last & near_end & 1u << i * kLanes);
      };
      Fragment<kBlocks> a_words[kTiles], b_words[kTiles], a_above[kTiles], b_above[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const auto request = [&](Operand& operand, const Layout& layout, unsigned last, auto& words,
                                 auto& above) {
          operand.request(layout, part, k_left, whole(last, i), words, above);
          operand.first += kSize * layout.stride_k;
        };
        request(a[i], layout_a, last_a, a_words[i], a_above[i]);
        request(b[i], layout_b, last_b, b_words[i], b_above[i]);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        a[i].shift(layout_a, part, k_left, whole(last_a, i), a_words[i], a_above[i]);
        b[i].shift(layout_b, part, k_left, whole(last_b, i), b_words[i], b_above[i]);
        Operand::transpose<kBlocks>(layout_a, a_words[i]);
        Operand::transpose<kBlocks>(layout_b, b_words[i]);
        multiply<kBlocks>(params.a.dtype, a_words[i], b_words[i], acc[i]);
      }
    }

    const int column = kRun * (lane % 4);
    const auto out_of = [&](int i) {  // a pointer that comes from one of the tile's lanes
      return static_cast<uint16_t*>(params.out.pointer) + __shfl_sync(~0u, out_offset, i * kLanes);
    };
    // Calls body(row, words) for each row of tile i that this lane has outputs of, as for_rows.
    const auto for_packed_rows = [&](int i, const auto& body) {
      for_rows<kBlocks>(acc[i], lane, [&](int row, const float (&values)[kRun]) {
        uint32_t words[kBlocks];
#pragma unroll
        for (int w = 0; w < kBlocks; ++w) {
          words[w] = pack(params.out.dtype, params.alpha * values[2 * w],
                          params.alpha * values[2 * w + 1]);
        }
        body(row, words);
      });
    };
    if (store_width > 1) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint16_t* const out = out_of(i) + column;
        for_packed_rows(i, [&](int row, const uint32_t (&words)[kBlocks]) {
          const int left = row < a[i].mn_left ? b[i].mn_left - column : 0;
          store_pieces<kBlocks>(out + row * params.out.row_stride, words, left, store_width);
        });
      }
    } else if (store_width == 1) {
      // Through shared memory, so that a warp writes elements that lie side by side.
      auto* const packed = reinterpret_cast<uint16_t*>(staged);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for_packed_rows(i, [&](int row, const uint32_t (&words)[kBlocks]) {
          store_run(packed + (i * kSize + row) * kSize + column, words);
        });
      }
      __syncwarp();
      constexpr int kRowsAtOnce = 32 / kSize;
      const int row = lane / kSize, n = lane % kSize;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint16_t* out = out_of(i) + row * params.out.row_stride + n;
        const int rows_left = n < b[i].mn_left ? a[i].mn_left - row : 0;
#pragma unroll 8
        for (int r = 0; r < kSize; r += kRowsAtOnce, out += kRowsAtOnce * params.out.row_stride) {
          if (r < rows_left) *out = packed[(i * kSize + r) * kSize + lane];
        }
      }
      __syncwarp();  // the next tiles are staged over these
    } else {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        for_rows<kBlocks>(acc[i], lane, [&](int row, const float (&values)[kRun]) {
          float* const to = staged + (i * kSize + row) * Warp::kPitch + column;
#pragma unroll
          for (int c = 0; c < kRun; ++c) to[c] = values[c];
        });
      }
      __syncwarp();
      if (mine < tiles) {
        const Tile tile = decode();
        store_tile<kSize, kSize, Warp::kPitch, kLanes>(
            params, tile, tile.m, tile.n, staged + mine * kSize * Warp::kPitch, lane % kLanes);
      }
      __syncwarp();  // the next tiles are staged over these
    }
  }
#endif
}

}  // namespace tgemm::tiny
