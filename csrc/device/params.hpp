// What every GEMM kernel receives, by value. Built once per launch by make_params() from a Problem
// and its Operands; plain data, shared by host and device.
#pragma once

#include <cstdint>

#include "gemm/plan.hpp"
#include "gemm/problem.hpp"

namespace tgemm {

struct MatrixParams {
  void* pointer;  // inputs are never written through it
  int64_t row_stride;
  int64_t col_stride;
  int64_t batch_stride[kMaxBatchDims];
  DType dtype;
};

struct GemmParams {
  int64_t m, n, k;
  int64_t batch_count;
  int64_t batch_size[kMaxBatchDims];
  int batch_dims;
  MatrixParams a, b, out;
  MatrixParams bias, residual, preact;  // null pointer: absent
  float alpha, beta;
  Activation activation;
  bool multiplies;  // by the residual, instead of adding beta times it
  // True when out, bias, residual and preact can be accessed four columns at a time, aligned.
  bool vector_epilogue;
  // Split-K: slice s of split_k covers k in [s * k_per_split, min(k, (s + 1) * k_per_split)) and
  // stores its FP32 partial sums to workspace[s][batch][m][workspace_pitch]; split_k_reduce adds
  // them in order.
  int split_k;
  int64_t k_per_split;
  int64_t workspace_pitch;  // n rounded up to 4
  float* workspace;
};

// Where one batch entry starts in each matrix, in elements. Plain data, so that it can live in
// shared memory.
struct BatchOffsets {
  int64_t a, b, out, bias, residual, preact;
};

MatrixParams matrix_params(const Matrix& matrix, const void* pointer);

GemmParams make_params(const Plan& plan, const Problem& problem, const Operands& operands);

}  // namespace tgemm
