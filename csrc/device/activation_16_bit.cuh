// Activations for outputs in 16 bits: FP32 in and out, within 5e-6 of the value, relative, in a
// quarter of the instructions of epilogue.cuh's.
#pragma once

#include "device/ptx.cuh"
#include "gemm/problem.hpp"

namespace tgemm {

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Both make subnormal results zero, which those in 16 bits do not have to be: so a power is kept
// 2^24 times as large, or as small, until something else has been multiplied with it.
constexpr float kPowerScale = 0x1p24f, kPowerScaleLog2 = 24.0f;

// x / (1 + 2^power).
__device__ inline float over_one_plus_exp2(float x, float power) {
  const float e = exp2_approx(power - kPowerScaleLog2);
  return x * (1.0f / kPowerScale * reciprocal_approx(e + 1.0f / kPowerScale));
}

// max(x, 0) - |x| Phi(-|x|). Phi(-t) exp(t^2 / 2) is smooth, and between 0 and 14 a polynomial of
// degree 6 in u = 1 / (1 + 0.3075 t) is within 4.2e-6 of it, relative (least squares, reweighted
// until level).
__device__ inline float gelu_16_bit(float x) {
  const float t = fminf(fabsf(x), 128.0f);
  const float u = reciprocal_approx(fmaf(0.3075f, t, 1.0f));
  float p = -0.07553489837689795f / kPowerScale;
  p = fmaf(p, u, 0.1911812166576836f / kPowerScale);
  p = fmaf(p, u, 0.0059106730955990425f / kPowerScale);
  p = fmaf(p, u, 0.13693295891742863f / kPowerScale);
  p = fmaf(p, u, 0.1185789589914385f / kPowerScale);
  p = fmaf(p, u, 0.12293058173174726f / kPowerScale);
  const float e = exp2_approx(fmaf(-0.7213475204444817f * t, t, kPowerScaleLog2));  // log2(e) / 2
  return fmaf(-t * u, p * e, ptx::max_nan(x, 0.0f));
}

template <int kCount>
__device__ inline void activate_16_bit(Activation activation, float (&x)[kCount]) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
#pragma unroll
      for (float& v : x) v = v < 0.0f ? 0.0f : v;
      return;
    case Activation::kGelu:
#pragma unroll
      for (float& v : x) v = gelu_16_bit(v);
      return;
    case Activation::kGeluTanh:  // 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y)), in powers of 2
#pragma unroll
      for (float& v : x) {
        v = over_one_plus_exp2(v, v * fmaf(-0.10294324f, v * v, -2.3022082f));
      }
      return;
    case Activation::kSilu:
#pragma unroll
      for (float& v : x) v = over_one_plus_exp2(v, -1.4426950408889634f * v);
      return;
  }
}

}  // namespace tgemm
