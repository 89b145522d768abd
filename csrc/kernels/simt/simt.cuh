// True FP32 GEMM on the FMA pipes: FP32, FP16 or BF16 operands, FP32 products and sums.
//
// A CTA tile is fed through a ring of kStages shared-memory slots and multiplied as an outer
// product per k: every thread reads a column fragment of A and a row fragment of B with 16-byte
// loads, one k ahead of the multiplications that use them. With (8, 16) outputs per thread that is
// 6 loads to 128 FFMA.
#pragma once

#include <cstdint>

#include "device/epilogue.cuh"
#include "device/params.hpp"
#include "device/ptx.cuh"
#include "device/tile_scheduler.cuh"
#include "kernels/simt/cta_tile.hpp"
#include "kernels/simt/operand_copy.cuh"

namespace tgemm::simt {

// Which part of the CTA tile a thread computes: 4 rows from `row` and every 4 * kLanesM further, 4
// columns from `column` and every 4 * kLanesN further.
//
// Lanes i and i ^ 1 share their rows (or columns), lanes i and i ^ 2 the other: the hardware then
// serves the 16-byte fragment reads of half a warp at once.
template <class Cta>
struct ThreadTile {
  int warp, lane;
  int row, column;

  __device__ explicit ThreadTile(int thread) : warp(thread / 32), lane(thread % 32) {
    const int eight = lane / 2 % 8;
    const int four = lane / 16 * 2 + lane % 2;
    const bool rows_in_eight = Cta::kLanesM == 8;
    row = warp / Cta::kWarpsN * Cta::kWarpM + 4 * (rows_in_eight ? eight : four);
    column = warp % Cta::kWarpsN * Cta::kWarpN + 4 * (rows_in_eight ? four : eight);
  }
};

template <int kCount>
__device__ inline void load_fragment(float (&fragment)[kCount], const float* shared, int stride) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float4 v = *reinterpret_cast<const float4*>(shared + i * stride);
    fragment[4 * i] = v.x, fragment[4 * i + 1] = v.y;
    fragment[4 * i + 2] = v.z, fragment[4 * i + 3] = v.w;
  }
}

// The outer product walks b back and forth, which keeps an operand in the reuse cache across rows
// and lets ptxas place registers so that nearly no FFMA reads three from one bank (7 % did in plain
// order).
template <int kM, int kN>
__device__ inline void multiply_accumulate(float (&acc)[kM][kN], const float (&a)[kM],
                                           const float (&b)[kN]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int step = 0; step < kN; ++step) {
      const int j = i % 2 == 0 ? step : kN - 1 - step;
      acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
    }
  }
}

template <class Cta, Copy kCopyA, Copy kCopyB>
struct Mainloop {
  using CopyA = OperandCopy<kCopyA, Cta::kBlockM, Cta::kBlockK, Cta::kThreads>;
  using CopyB = OperandCopy<kCopyB, Cta::kBlockN, Cta::kBlockK, Cta::kThreads>;
  static constexpr int kCopies = CopyA::kCopies + CopyB::kCopies;
  // Copies are issued in a few batches per k block: ptxas guards every batch that follows
  // shared-memory reads with three dummy ones, and a single batch would stall the fragment reads
  // behind it. The last step of a block waits for the next block, so the batches end before it.
  static constexpr int kBatches = 4;
  static constexpr int kStepsPerBatch = Cta::kBlockK / kBatches;
  static constexpr int kCopiesPerBatch = (kCopies + kBatches - 1) / kBatches;
  static constexpr int kOffsetB = Cta::kBlockK * Cta::kPitchA;  // floats, within a slot

  CopyA copy_a;
  CopyB copy_b;
  float* shared;

  // Steps [begin, begin + count) of the copies of one k block into slot `slot`.
  template <bool kFirstBlock>
  __device__ void copy(int begin, int count, int slot, bool enabled) {
    const uint32_t address = ptx::shared_address(shared) + slot * (4 * Cta::kStageFloats);
#pragma unroll
    for (int i = begin; i < begin + count; ++i) {
      if (i < CopyA::kCopies) {
        copy_a.template copy<kFirstBlock>(i, address, enabled);
      } else if (i < kCopies) {
        copy_b.template copy<kFirstBlock>(i - CopyA::kCopies, address + 4 * kOffsetB, enabled);
      }
    }
  }

  __device__ void finish_copies(int slot) {
    float* start = shared + slot * Cta::kStageFloats;
    copy_a.finish(start);
    copy_b.finish(start + kOffsetB);
    if constexpr (CopyA::kAsync || CopyB::kAsync) ptx::cp_async_commit_group();
  }

  // Afterwards the oldest slot in flight is complete and visible, and the slot before it is free.
  __device__ void wait_for_slot() {
    if constexpr (CopyA::kAsync || CopyB::kAsync) ptx::cp_async_wait_group<Cta::kStages - 2>();
    __syncthreads();
  }

  __device__ void run(int blocks, const ThreadTile<Cta>& thread,
                      float (&acc)[Cta::kThreadM][Cta::kThreadN]) {
    if (blocks == 0) return;
    copy<true>(0, kCopies, 0, true);
    finish_copies(0);
#pragma unroll
    for (int slot = 1; slot < Cta::kStages - 1; ++slot) {
      copy<false>(0, kCopies, slot, slot < blocks);
      finish_copies(slot);
    }

    float a[2][Cta::kThreadM], b[2][Cta::kThreadN];
    const float* read_a = shared + thread.row;
    const float* read_b = shared + kOffsetB + thread.column;
    const auto load_fragments = [&](int k) {
      load_fragment(a[k % 2], read_a + k * Cta::kPitchA, 4 * Cta::kLanesM);
      load_fragment(b[k % 2], read_b + k * Cta::kPitchB, 4 * Cta::kLanesN);
    };
    wait_for_slot();
    load_fragments(0);

    int read_slot = 0, write_slot = Cta::kStages - 1;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const bool enabled = block + Cta::kStages - 1 < blocks;
#pragma unroll
      for (int k = 0; k < Cta::kBlockK; ++k) {
        if (k < Cta::kBlockK - 1) {
          load_fragments(k + 1);
          if (k % kStepsPerBatch == 0) {
            copy<false>(k / kStepsPerBatch * kCopiesPerBatch, kCopiesPerBatch, write_slot, enabled);
          }
        } else {
          finish_copies(write_slot);
          write_slot = read_slot;
          read_slot = read_slot + 1 == Cta::kStages ? 0 : read_slot + 1;
          wait_for_slot();
          read_a = shared + read_slot * Cta::kStageFloats + thread.row;
          read_b = shared + read_slot * Cta::kStageFloats + kOffsetB + thread.column;
          load_fragments(0);
        }
        multiply_accumulate(acc, a[k % 2], b[k % 2]);
      }
    }
    __syncthreads();  // the epilogue writes over the slots
  }
};

// Stages the accumulators of one warp, 4 * kLanesM rows at a time, and hands them to the epilogue.
// Rows, not accumulators, are looped over at run time: the epilogue's code exists once.
template <class Cta>
__device__ inline void store_accumulators(const GemmParams& params, const Tile& tile, float* shared,
                                          const ThreadTile<Cta>& thread,
                                          const float (&acc)[Cta::kThreadM][Cta::kThreadN]) {
  constexpr int kRows = Cta::kStagedRows, kPitch = Cta::kStagedPitch;
  float* staged = shared + thread.warp * (kRows * kPitch);
  const int warp_row = thread.warp / Cta::kWarpsN * Cta::kWarpM;
  const int warp_column = thread.warp % Cta::kWarpsN * Cta::kWarpN;
  float* mine = staged + (thread.row - warp_row) * kPitch + thread.column - warp_column;
#pragma unroll 1
  for (int part = 0; part < Cta::kThreadM / 4; ++part) {
#pragma unroll
    for (int i = 0; i < Cta::kThreadM; ++i) {
      if (i / 4 != part) continue;
#pragma unroll
      for (int j = 0; j < Cta::kThreadN; j += 4) {
        *reinterpret_cast<float4*>(mine + i % 4 * kPitch + j * Cta::kLanesN) =
            make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
      }
    }
    __syncwarp();
    store_tile<kRows, Cta::kWarpN, kPitch, 32>(params, tile, tile.m + warp_row + part * kRows,
                                               tile.n + warp_column, staged, thread.lane);
    __syncwarp();
  }
}

template <class Cta, Copy kCopyA, Copy kCopyB>
__global__ void __launch_bounds__(Cta::kThreads, Cta::kCtasPerSm)
    simt_gemm(const __grid_constant__ GemmParams params) {
#if __CUDA_ARCH__ < 800
  // No cp.async: the launcher takes the copy through registers there.
  if constexpr (kCopyA != Copy::kAnyStride || kCopyB != Copy::kAnyStride) {
    __trap();
  } else
#endif
  {
    extern __shared__ __align__(16) float simt_shared[];
    using Mainloop = Mainloop<Cta, kCopyA, kCopyB>;
    const ThreadTile<Cta> thread(threadIdx.x);
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    const TileScheduler<Cta::kBlockM, Cta::kBlockN> scheduler(params);
    // In shared memory, so that what the epilogue needs does not sit in registers through the
    // mainloop.
    __shared__ Tile tile;
#pragma unroll 1
    for (int64_t index = blockIdx.x; index < scheduler.count(); index += gridDim.x) {
      if (threadIdx.x == 0) tile = scheduler.tile(index);
      __syncthreads();
      const int64_t k_size = max(tile.k_end - tile.k_begin, int64_t{0});
      const int blocks = static_cast<int>((k_size + Cta::kBlockK - 1) / Cta::kBlockK);
      const int padding = static_cast<int>(int64_t{blocks} * Cta::kBlockK - k_size);

      const auto view = [&](const MatrixParams& matrix, int64_t offset, int64_t stride_mn,
                            int64_t stride_k, int64_t mn_size, int64_t mn) {
        const char* base = static_cast<const char*>(matrix.pointer) +
                           offset * (matrix.dtype == DType::kFloat32 ? 4 : 2);
        return OperandView{base, matrix.dtype,           stride_mn, stride_k, mn_size,
                           mn,   tile.k_begin - padding, padding};
      };
      Mainloop mainloop{{view(params.a, tile.offset.a, params.a.row_stride, params.a.col_stride,
                              params.m, tile.m),
                         static_cast<int>(threadIdx.x)},
                        {view(params.b, tile.offset.b, params.b.col_stride, params.b.row_stride,
                              params.n, tile.n),
                         static_cast<int>(threadIdx.x)},
                        simt_shared};
      float acc[Cta::kThreadM][Cta::kThreadN] = {};
      mainloop.run(blocks, thread, acc);
      store_accumulators<Cta>(params, tile, simt_shared, thread, acc);
      __syncthreads();  // the next tile's copies write over the staged rows
    }
  }
}

}  // namespace tgemm::simt
