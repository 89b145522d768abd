#include "gemm/problem.hpp"

namespace tgemm {

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
  }
  return "?";
}

const char* to_string(Precision precision) {
  switch (precision) {
    case Precision::kIeee:
      return "ieee";
    case Precision::kTf32:
      return "tf32";
    case Precision::k3xTf32:
      return "3xtf32";
    case Precision::kBf16:
      return "bf16";
    case Precision::kFp16:
      return "fp16";
  }
  return "?";
}

const char* to_string(Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return "none";
    case Activation::kRelu:
      return "relu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kSilu:
      return "silu";
  }
  return "?";
}

std::string to_string(const Problem& problem) {
  std::string text;
  if (problem.batch_count() != 1) {
    for (int i = 0; i < problem.batch_dims; ++i) {
      text += std::to_string(problem.batch_size[i]) + (i + 1 < problem.batch_dims ? "x" : " x ");
    }
  }
  text +=
      std::to_string(problem.m) + "x" + std::to_string(problem.n) + "x" + std::to_string(problem.k);
  // BLAS letters: n is row-major, t its transpose, s neither (general strides).
  text += ' ';
  text += problem.a_k_major() ? 'n' : problem.a_m_major() ? 't' : 's';
  text += problem.b_n_major() ? 'n' : problem.b_k_major() ? 't' : 's';
  text += std::string(" ") + to_string(problem.a.dtype);
  if (problem.a.dtype == DType::kFloat32)
    text += std::string(" (") + to_string(problem.precision) + ")";
  text += std::string(" -> ") + to_string(problem.out.dtype);
  const Epilogue& epilogue = problem.epilogue;
  if (epilogue.has_bias) text += ", bias";
  if (epilogue.activation != Activation::kNone)
    text += std::string(", ") + to_string(epilogue.activation);
  if (problem.gated) text += ", gated";
  if (epilogue.has_residual) text += epilogue.multiplies ? ", times residual" : ", residual";
  if (epilogue.has_preact) text += ", pre-activation";
  if (problem.static_weight) text += ", static weight";
  return text;
}

}  // namespace tgemm
