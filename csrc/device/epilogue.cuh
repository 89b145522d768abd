// The one epilogue of all kernels: out = activation(alpha * acc + bias) + beta * residual (or times
// the residual), in FP32, rounded once. Kernels stage their FP32 accumulators in shared memory and
// hand the tile over; the loop over it stays rolled, so that the activation switch costs a few
// hundred instructions per kernel instead of being multiplied by the accumulator count.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <numeric>

#include "device/params.hpp"
#include "device/tile_scheduler.cuh"

namespace tgemm {

// --- element access by run-time dtype (warp-uniform branches) ---

__device__ inline float load_element(const void* pointer, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(pointer)[index];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(pointer)[index]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(pointer)[index]);
}

__device__ inline void store_element(void* pointer, DType dtype, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(pointer)[index] = value;
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(pointer)[index] = __float2half_rn(value);
  } else {
    static_cast<__nv_bfloat16*>(pointer)[index] = __float2bfloat16_rn(value);
  }
}

template <int kVec>
__device__ inline void load_elements(const void* pointer, DType dtype, int64_t index,
                                     float (&value)[kVec]) {
  static_assert(kVec == 1 || kVec == 4);
  if constexpr (kVec == 1) {
    value[0] = load_element(pointer, dtype, index);
  } else if (dtype == DType::kFloat32) {
    const float4 v = *reinterpret_cast<const float4*>(static_cast<const float*>(pointer) + index);
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
  } else {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __half*>(pointer) + index);
    float2 low, high;
    if (dtype == DType::kFloat16) {
      low = __half22float2(reinterpret_cast<const __half2&>(raw.x));
      high = __half22float2(reinterpret_cast<const __half2&>(raw.y));
    } else {
      low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.x));
      high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(raw.y));
    }
    value[0] = low.x, value[1] = low.y, value[2] = high.x, value[3] = high.y;
  }
}

template <int kVec>
__device__ inline void store_elements(void* pointer, DType dtype, int64_t index,
                                      const float (&value)[kVec]) {
  static_assert(kVec == 1 || kVec == 4);
  if constexpr (kVec == 1) {
    store_element(pointer, dtype, index, value[0]);
  } else if (dtype == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(pointer) + index) =
        make_float4(value[0], value[1], value[2], value[3]);
  } else {
    uint2 raw;
    if (dtype == DType::kFloat16) {
      reinterpret_cast<__half2&>(raw.x) = __floats2half2_rn(value[0], value[1]);
      reinterpret_cast<__half2&>(raw.y) = __floats2half2_rn(value[2], value[3]);
    } else {
      reinterpret_cast<__nv_bfloat162&>(raw.x) = __floats2bfloat162_rn(value[0], value[1]);
      reinterpret_cast<__nv_bfloat162&>(raw.y) = __floats2bfloat162_rn(value[2], value[3]);
    }
    *reinterpret_cast<uint2*>(static_cast<__half*>(pointer) + index) = raw;
  }
}

// --- activations, FP32 in and out, accurate to a few ulp (no fast-math intrinsics) ---

__device__ inline float apply_activation(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // keeps NaN
    case Activation::kGelu:
      return x * normcdff(x);
    case Activation::kGeluTanh: {
      const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
      return 0.5f * x * (1.0f + tanhf(inner));
    }
    case Activation::kSilu:
      return x / (1.0f + expf(-x));
  }
  return x;
}

// Two at a time in a rolled loop that rotates the array: little code, and still two independent
// chains.
template <int kCount>
__device__ inline void activate(Activation activation, float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    x[0] = apply_activation(activation, x[0]);
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount; i += 2) {
      const float first = apply_activation(activation, x[0]);
      const float second = apply_activation(activation, x[1]);
#pragma unroll
      for (int j = 0; j + 2 < kCount; ++j) x[j] = x[j + 2];
      x[kCount - 2] = first;
      x[kCount - 1] = second;
    }
  }
}

// Offsets of kItems runs of outputs in the matrices that the epilogue touches, in elements.
template <int kItems>
struct EpilogueRuns {
  int64_t out[kItems];
  int64_t residual[kItems];
  int64_t preact[kItems];
  bool valid[kItems];
};

// Finishes kItems runs of kVec horizontally adjacent outputs each, to which `bias` has been loaded
// already; runs that are not valid are skipped. kVec 4 needs params.vector_epilogue. Branches are
// warp-uniform, and each is paid once for all runs, whose loads overlap.
template <int kVec, int kItems>
__device__ inline void finish_runs(const GemmParams& params, const EpilogueRuns<kItems>& runs,
                                   const float (&bias)[kItems][kVec], float (&acc)[kItems][kVec]) {
  constexpr int kCount = kItems * kVec;
  float residual[kItems][kVec] = {};
  if (params.residual.pointer) {
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      if (runs.valid[r]) {
        load_elements(params.residual.pointer, params.residual.dtype, runs.residual[r],
                      residual[r]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    acc[i / kVec][i % kVec] = fmaf(params.alpha, acc[i / kVec][i % kVec], bias[i / kVec][i % kVec]);
  }
  if (params.preact.pointer) {
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      if (runs.valid[r])
        store_elements(params.preact.pointer, params.preact.dtype, runs.preact[r], acc[r]);
    }
  }
  if (params.activation != Activation::kNone) {
    activate(params.activation, reinterpret_cast<float (&)[kCount]>(acc));
  }
  if (params.residual.pointer) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& value = acc[i / kVec][i % kVec];
      const float other = residual[i / kVec][i % kVec];
      value = params.multiplies ? value * other : fmaf(params.beta, other, value);
    }
  }
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    if (runs.valid[r]) store_elements(params.out.pointer, params.out.dtype, runs.out[r], acc[r]);
  }
}

// Finishes kVec outputs from (m, n) on.
template <int kVec>
__device__ inline void finish_at(const GemmParams& params, const BatchOffsets& offset, int64_t m,
                                 int64_t n, float (&sum)[1][kVec]) {
  const auto at = [=](const MatrixParams& matrix, int64_t base) {
    return base + m * matrix.row_stride + n * matrix.col_stride;
  };
  float bias[1][kVec] = {};
  if (params.bias.pointer) {
    load_elements(params.bias.pointer, params.bias.dtype, at(params.bias, offset.bias), bias[0]);
  }
  finish_runs<kVec, 1>(params,
                       {{at(params.out, offset.out)},
                        {at(params.residual, offset.residual)},
                        {at(params.preact, offset.preact)},
                        {true}},
                       bias, sum);
}

// store_tile, kVec columns at a time. A thread stays in its columns and walks down the rows, so
// that offsets are sums and the usual bias (one value per column) is loaded once.
template <int kVec, int kRows, int kCols, int kPitch, int kThreads, int kMaxItems>
__device__ inline void finish_tile(const GemmParams& params, const BatchOffsets& offset, int64_t m,
                                   int64_t n, const float* staged, int thread) {
  constexpr int kPerRow = kCols / kVec;
  constexpr int kAcross = std::gcd(kPerRow, kThreads);  // threads side by side in a row
  constexpr int kRowStep = kThreads / kAcross;
  constexpr int kRowsPerThread = kRows / kRowStep;
  constexpr int kItems = std::gcd(kRowsPerThread, kMaxItems);
  static_assert(kRows % kRowStep == 0);

  const int first_row = thread / kAcross;
  const int rows_left = static_cast<int>(min(params.m - m, int64_t{kRows})) - first_row;
  const bool bias_per_row = params.bias.pointer && params.bias.row_stride != 0;
#pragma unroll 1
  for (int col = thread % kAcross * kVec; col < kCols; col += kAcross * kVec) {
    if (n + col >= params.n) return;
    const auto start = [&](const MatrixParams& matrix, int64_t base) {
      return base + (m + first_row) * matrix.row_stride + (n + col) * matrix.col_stride;
    };
    int64_t out = start(params.out, offset.out);
    int64_t residual = start(params.residual, offset.residual);
    int64_t preact = start(params.preact, offset.preact);
    int64_t bias_at = start(params.bias, offset.bias);
    float bias[kItems][kVec] = {};
    if (params.bias.pointer && !bias_per_row) {
      load_elements(params.bias.pointer, params.bias.dtype, bias_at, bias[0]);
#pragma unroll
      for (int i = kVec; i < kItems * kVec; ++i) bias[i / kVec][i % kVec] = bias[0][i % kVec];
    }
    const float* from = staged + first_row * kPitch + col;
#pragma unroll 1
    for (int row = 0; row < rows_left; row += kItems * kRowStep) {
      EpilogueRuns<kItems> runs;
      float acc[kItems][kVec];
#pragma unroll
      for (int r = 0; r < kItems; ++r) {
        runs.valid[r] = row + r * kRowStep < rows_left;
        runs.out[r] = out;
        runs.residual[r] = residual;
        runs.preact[r] = preact;
        out += kRowStep * params.out.row_stride;
        residual += kRowStep * params.residual.row_stride;
        preact += kRowStep * params.preact.row_stride;
        load_elements(from + r * kRowStep * kPitch, DType::kFloat32, 0, acc[r]);
      }
      if (bias_per_row) {
#pragma unroll
        for (int r = 0; r < kItems; ++r) {
          if (runs.valid[r])
            load_elements(params.bias.pointer, params.bias.dtype, bias_at, bias[r]);
          bias_at += kRowStep * params.bias.row_stride;
        }
      }
      from += kItems * kRowStep * kPitch;
      finish_runs(params, runs, bias, acc);
    }
  }
}

// Writes a staged FP32 tile of (kRows, kCols), pitch kPitch floats, whose first element is output
// (m, n). `thread` in [0, kThreads) cooperates; the caller synchronises before (tile complete) and
// after (before the buffer is reused). Split-K partial sums go to the workspace instead. A thread
// finishes kMaxItems runs at a time: more hide more latency, and take more registers.
template <int kRows, int kCols, int kPitch, int kThreads, int kMaxItems = 4>
__device__ inline void store_tile(const GemmParams& params, const Tile& tile, int64_t m, int64_t n,
                                  const float* staged, int thread) {
  static_assert(kCols % 4 == 0 && kPitch % 4 == 0);
  if (params.split_k > 1) {
    constexpr int kPerRow = kCols / 4;
    float* partial = params.workspace + (tile.split * params.batch_count + tile.batch) * params.m *
                                            params.workspace_pitch;
#pragma unroll 2
    for (int i = thread; i < kRows * kPerRow; i += kThreads) {
      const int row = i / kPerRow;
      const int col = i % kPerRow * 4;
      if (m + row < params.m && n + col < params.n) {  // the pitch covers a partial last vector
        *reinterpret_cast<float4*>(partial + (m + row) * params.workspace_pitch + n + col) =
            *reinterpret_cast<const float4*>(staged + row * kPitch + col);
      }
    }
  } else if (params.vector_epilogue) {
    finish_tile<4, kRows, kCols, kPitch, kThreads, kMaxItems>(params, tile.offset, m, n, staged,
                                                              thread);
  } else {
    finish_tile<1, kRows, kCols, kPitch, kThreads, kMaxItems>(params, tile.offset, m, n, staged,
                                                              thread);
  }
}

}  // namespace tgemm
