// From N-d tensors with torch.matmul's broadcasting to one GEMM Problem. Torch-free: a tensor is
// its sizes, strides, dtype and address.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gemm/problem.hpp"

namespace tgemm {

struct TensorView {
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  DType dtype = DType::kFloat32;
  uintptr_t address = 0;  // of the first element; only its alignment is used
};

// The operands of out = activation(alpha * (a @ b) + bias) + beta * residual. `a` and `b` follow
// torch.matmul (1-d operands included). linear() passes weight.T as `b`, i.e. sizes and strides
// swapped. With `up`, a gated product: out = activation(a @ b + bias) * (a @ up + up_bias).
struct LoweringRequest {
  TensorView a;
  TensorView b;
  TensorView out;                      // sizes must be matmul_shape(a, b)
  std::optional<TensorView> bias;      // broadcast to out's shape, from the right
  std::optional<TensorView> residual;  // broadcast to out's shape
  std::optional<TensorView> preact;    // exactly out's shape
  std::optional<TensorView> up;        // the shape of b, which must be 2-d then
  std::optional<TensorView> up_bias;   // as the bias
  Precision precision = Precision::kIeee;
  Activation activation = Activation::kNone;
  float alpha = 1.0f;
  float beta = 1.0f;
  bool static_weight = false;  // no kernel that still runs writes b (and up)
};

// Shape of torch.matmul(a, b). Returns false and sets `error` ("a is (3, 4) and b is (5, 6): the
// inner sizes 4 and 5 differ") when the shapes do not multiply.
bool matmul_shape(std::span<const int64_t> a, std::span<const int64_t> b,
                  std::vector<int64_t>* shape, std::string* error);

struct Lowered {
  Problem problem;
  bool swapped = false;  // out is column-major: computes out.T = b.T @ a.T, so exchange the
                         // pointers of a and b. A gated product then has a second A in place of a
                         // second B, which split_gated() alone understands
  std::string error;     // non-empty: this cannot be expressed; one sentence
};

// Folds batch dimensions into M where strides allow, merges the others, normalises the strides of
// size-1 dimensions, and swaps the operands when out is column-major. Nothing is copied.
Lowered lower(const LoweringRequest& request);

// A gated product as two plain ones, for kernels with one weight. The first writes the activated
// gate in FP32, so that the result is still rounded once.
struct GatedSteps {
  Problem gate;  // between = activation(A @ B + bias)
  Problem up;    // out = (A @ up + up_bias) * between
  int64_t between_elements = 0;
};

// `lowered` holds a gated problem; where it asks for the pre-activation, so do both steps, each for
// its own in a matrix of the same strides.
GatedSteps split_gated(const Lowered& lowered);

// "(2, 3, 4)", torch's way of printing a shape.
std::string shape_string(std::span<const int64_t> sizes);

}  // namespace tgemm
