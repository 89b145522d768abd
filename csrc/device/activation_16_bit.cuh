// Activations for outputs in 16 bits: FP32 in and out, within about 1e-6 of the value, relative, in
// a third of the instructions of epilogue.cuh's.
#pragma once

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

// The instruction above makes subnormal powers zero, which results in BF16 do not have to be: so
// powers are kept 2^24 times as large until something else has been multiplied with them.
constexpr float kPowerScale = 0x1p24f, kPowerScaleLog2 = 24.0f;

// x / (1 + exp(-argument)), by a power with a negative exponent: nothing overflows.
__device__ inline float times_sigmoid(float x, float argument) {
  const float e = exp2_approx(fmaf(-1.4426950408889634f, fabsf(argument), kPowerScaleLog2));
  const float upper = x * reciprocal_approx(fmaf(e, 1.0f / kPowerScale, 1.0f));
  return argument < 0.0f ? upper * e * (1.0f / kPowerScale) : upper;
}

// max(x, 0) - |x| Phi(-|x|). Phi(-t) exp(t^2 / 2) is smooth, and between 0 and 14 a polynomial of
// degree 7 in 1 / (1 + 0.265 t) is within 6.3e-7 of it (least squares, reweighted until level).
__device__ inline float gelu_16_bit(float x) {
  const float t = fminf(fabsf(x), 128.0f);
  const float u = reciprocal_approx(fmaf(0.265f, t, 1.0f));
  float p = -0.06778517918900735f;
  p = fmaf(p, u, 0.195266646706066f);
  p = fmaf(p, u, -0.06635390716612644f);
  p = fmaf(p, u, 0.14248689060066688f);
  p = fmaf(p, u, 0.08294907419247062f);
  p = fmaf(p, u, 0.10783629240161885f);
  p = fmaf(p, u, 0.10559987284356762f);
  const float e = exp2_approx(fmaf(-0.7213475204444817f * t, t, kPowerScaleLog2));  // log2(e) / 2
  float positive;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return fmaf(-(1.0f / kPowerScale) * t * u, p * e, positive);
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
    case Activation::kGeluTanh:  // 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y))
#pragma unroll
      for (float& v : x) {
        v = times_sigmoid(v, v * fmaf(0.07135481627268218f, v * v, 1.5957691216057308f));
      }
      return;
    case Activation::kSilu:
#pragma unroll
      for (float& v : x) v = times_sigmoid(v, v);
      return;
  }
}

}  // namespace tgemm
