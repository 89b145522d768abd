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

// The run at `from`, which may be any element's address: two aligned loads, shifted into place. Of
// the run `elements` exist; where they end, zeros follow.
template <int kWords>
__device__ inline void load_shifted_run(uint32_t (&words)[kWords], const uint16_t* from,
                                        int elements) {
  constexpr int kElements = 2 * kWords;
  const auto address = reinterpret_cast<uintptr_t>(from);
  const int shift = static_cast<int>(address % (2 * kElements)) / 2;
  const uint16_t* const aligned = from - shift;
  uint32_t low[kWords] = {}, high[kWords] = {};
  // A load without one of the elements may be of memory that is not there.
  if (elements > 0) load_run(low, aligned);
  if (min(elements, kElements) > kElements - shift) load_run(high, aligned + kElements);
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
    words[i] = 2 * i + 1 < elements ? word : 2 * i < elements ? word & 0xffffu : 0u;
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
};

// Rows of A (columns of B) that belong to a tile, from some k on.
struct Operand {
  const uint16_t* first;
  int mn_left;  // none: a tile that does not exist

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
  // order by `arrange`, which is another function lest the warp waits for one operand before it
  // requests the next.
  template <int kBlocks>
  __device__ void request(const Layout& layout, int k_left, bool whole_runs, int lane,
                          Fragment<kBlocks>& words) const {
    // A line has consecutive k of one row, or consecutive rows at one k.
    const bool mn_major = layout.mn_major();
    const int64_t stride = mn_major ? layout.stride_k : layout.stride_mn;
    const int run = 2 * kBlocks * (lane % 4);
    const int lines = mn_major ? k_left : mn_left;
    const int elements = (mn_major ? mn_left : k_left) - run;
    if (layout.aligned()) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int line = permuted<kBlocks>(j, lane / 4);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) words[j][i] = 0;
        if (line < lines && elements > 0) load_run(words[j], first + line * stride + run);
      }
    } else if (layout.reading.load == Load::kAnyStride || !whole_runs) {
      const int64_t step = mn_major ? layout.stride_mn : layout.stride_k;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int line = permuted<kBlocks>(j, lane / 4);
        const int left = line < lines ? elements : 0;
        const uint16_t* from = first + line * stride + run * step;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          const uint32_t low = 2 * i < left ? __ldg(from) : 0u;
          const uint32_t high = 2 * i + 1 < left ? __ldg(from + step) : 0u;
          words[j][i] = low | high << 16;
          from += 2 * step;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int line = permuted<kBlocks>(j, lane / 4);
        load_shifted_run(words[j], first + line * stride + run, line < lines ? elements : 0);
      }
    }
  }

  // Transposes what was requested of an MN-major operand.
  template <int kBlocks>
  __device__ static void arrange(const Layout& layout, Fragment<kBlocks>& words) {
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

// `plain_runs`: outputs of 16 bits can be stored in aligned runs, and the epilogue has nothing but
// alpha.
template <class Warp>
__global__ void __launch_bounds__(32 * kWarps, Warp::kCtasPerSm)
    tiny_gemm(const __grid_constant__ GemmParams params, Reading reading_a, Reading reading_b,
              bool plain_runs) {
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
        for (int i = 0; i < kTiles; ++i) operands[i] = own.from_lane(i * kLanes);
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
      Fragment<kBlocks> a_words[kTiles], b_words[kTiles];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const unsigned tile = near_end & 1u << (i * kLanes);
        a[i].template request<kBlocks>(layout_a, k_left, !(last_a & tile), lane, a_words[i]);
        b[i].template request<kBlocks>(layout_b, k_left, !(last_b & tile), lane, b_words[i]);
        a[i].first += kSize * layout_a.stride_k;
        b[i].first += kSize * layout_b.stride_k;
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        Operand::arrange<kBlocks>(layout_a, a_words[i]);
        Operand::arrange<kBlocks>(layout_b, b_words[i]);
        multiply<kBlocks>(params.a.dtype, a_words[i], b_words[i], acc[i]);
      }
    }

    const int column = kRun * (lane % 4);
    if (plain_runs) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint16_t* const out = static_cast<uint16_t*>(params.out.pointer) +
                              __shfl_sync(~0u, out_offset, i * kLanes) + column;
        for_rows<kBlocks>(acc[i], lane, [&](int row, const float (&values)[kRun]) {
          uint32_t words[kBlocks];
#pragma unroll
          for (int w = 0; w < kBlocks; ++w) {
            words[w] = pack(params.out.dtype, params.alpha * values[2 * w],
                            params.alpha * values[2 * w + 1]);
          }
          if (row < a[i].mn_left && column < b[i].mn_left) {
            store_run(out + row * params.out.row_stride, words);
          }
        });
      }
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
