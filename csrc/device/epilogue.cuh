// The one epilogue of all kernels: out = activation(alpha * acc + bias) + beta * residual, in FP32, rounded
// once. Kernels stage their FP32 accumulators in shared memory and hand the tile over; the loop over it
// stays rolled, so that the activation switch costs a few hundred instructions per kernel instead of being
// multiplied by the accumulator count.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

// Two at a time in a rolled loop: half the code of four at once, and still two independent chains.
template <int kVec>
__device__ inline void activate(Activation activation, float (&x)[kVec]) {
  if constexpr (kVec == 1) {
    x[0] = apply_activation(activation, x[0]);
  } else {
#pragma unroll 1
    for (int i = 0; i < kVec; i += 2) {
      const float first = apply_activation(activation, x[0]);
      const float second = apply_activation(activation, x[1]);
#pragma unroll
      for (int j = 0; j + 2 < kVec; ++j) x[j] = x[j + 2];
      x[kVec - 2] = first;
      x[kVec - 1] = second;
    }
  }
}

// Offsets of one batch entry, in elements.
struct EpilogueBatch {
  int64_t out;
  int64_t bias;
  int64_t residual;
  int64_t preact;

  __device__ EpilogueBatch(const GemmParams& params, int64_t batch)
      : out(batch_offset(params, params.out, batch)), bias(0), residual(0), preact(0) {
    if (params.bias.pointer) bias = batch_offset(params, params.bias, batch);
    if (params.residual.pointer) residual = batch_offset(params, params.residual, batch);
    if (params.preact.pointer) preact = batch_offset(params, params.preact, batch);
  }
};

// Finishes kVec horizontally adjacent outputs at (m, n). kVec 4 needs params.vector_epilogue.
template <int kVec>
__device__ inline void finish_and_store(const GemmParams& params, const EpilogueBatch& batch, int64_t m,
                                        int64_t n, float (&acc)[kVec]) {
  const auto at = [m, n](const MatrixParams& matrix, int64_t base) {
    return base + m * matrix.row_stride + n * matrix.col_stride;
  };
  float bias[kVec] = {};
  float residual[kVec] = {};
  if (params.bias.pointer) {
    load_elements(params.bias.pointer, params.bias.dtype, at(params.bias, batch.bias), bias);
  }
  if (params.residual.pointer) {
    load_elements(params.residual.pointer, params.residual.dtype, at(params.residual, batch.residual),
                  residual);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) acc[i] = fmaf(params.alpha, acc[i], bias[i]);
  if (params.preact.pointer) {
    store_elements(params.preact.pointer, params.preact.dtype, at(params.preact, batch.preact), acc);
  }
  if (params.activation != Activation::kNone) activate(params.activation, acc);
  if (params.residual.pointer) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) acc[i] = fmaf(params.beta, residual[i], acc[i]);
  }
  store_elements(params.out.pointer, params.out.dtype, at(params.out, batch.out), acc);
}

// Writes a staged FP32 tile of (kRows, kCols), pitch kPitch floats, whose first element is output (m, n).
// `thread` in [0, kThreads) cooperates; the caller synchronises before (tile complete) and after (before
// the buffer is reused). Split-K partial sums go to the workspace instead.
template <int kRows, int kCols, int kPitch, int kThreads>
__device__ inline void store_tile(const GemmParams& params, const Tile& tile, int64_t m, int64_t n,
                                  const float* staged, int thread) {
  static_assert(kCols % 4 == 0 && kPitch % 4 == 0);
  constexpr int kVecCols = kCols / 4;
  if (params.split_k > 1) {
    float* partial = params.workspace + (tile.split * params.batch_count + tile.batch) * params.m *
                                            params.workspace_pitch;
#pragma unroll 4
    for (int i = thread; i < kRows * kVecCols; i += kThreads) {
      const int row = i / kVecCols;
      const int col = i % kVecCols * 4;
      if (m + row < params.m && n + col < params.n) {  // the pitch covers a partial last vector
        *reinterpret_cast<float4*>(partial + (m + row) * params.workspace_pitch + n + col) =
            *reinterpret_cast<const float4*>(staged + row * kPitch + col);
      }
    }
    return;
  }
  const EpilogueBatch batch(params, tile.batch);
  if (params.vector_epilogue) {
#pragma unroll 2
    for (int i = thread; i < kRows * kVecCols; i += kThreads) {
      const int row = i / kVecCols;
      const int col = i % kVecCols * 4;
      if (m + row < params.m && n + col < params.n) {
        const float4 v = *reinterpret_cast<const float4*>(staged + row * kPitch + col);
        float acc[4] = {v.x, v.y, v.z, v.w};
        finish_and_store(params, batch, m + row, n + col, acc);
      }
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < kRows * kCols; i += kThreads) {
      const int row = i / kCols;
      const int col = i % kCols;
      if (m + row < params.m && n + col < params.n) {
        float acc[1] = {staged[row * kPitch + col]};
        finish_and_store(params, batch, m + row, n + col, acc);
      }
    }
  }
}

}  // namespace tgemm
