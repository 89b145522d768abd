#include "gemm/validate.hpp"

#include <cstdint>

namespace tgemm {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;

// What is wrong with one matrix, or an empty string.
std::string matrix_error(const std::string& name, const Problem& problem, const Matrix& matrix) {
  if (matrix.row_stride < 0 || matrix.col_stride < 0) {
    return name + " has a negative stride: strides count elements, from 0 on";
  }
  for (int i = 0; i < problem.batch_dims; ++i) {
    if (matrix.batch_stride[i] < 0) return name + " has a negative batch stride";
  }
  const int alignment = matrix.address_alignment;
  if (alignment < bytes_per_element(matrix.dtype) || alignment > 16 ||
      (alignment & (alignment - 1)) != 0) {
    return name + " has an address_alignment of " + std::to_string(alignment) +
           ": it must be a power of two from the size of an element to 16 bytes";
  }
  return {};
}

// The same for what is written: no two of its elements may be one.
std::string output_error(const std::string& name, const Problem& problem, const Matrix& matrix) {
  if (std::string error = matrix_error(name, problem, matrix); !error.empty()) return error;
  if (matrix.col_stride != 1 && problem.n > 1) {
    return name + " has a column stride of " + std::to_string(matrix.col_stride) +
           ": it must be row-major; for a column-major one compute its transpose, B.T @ A.T";
  }
  if (problem.m > 1 && matrix.row_stride < problem.n) {
    return name + " has a row stride of " + std::to_string(matrix.row_stride) + " for " +
           std::to_string(problem.n) + " columns: its rows overlap";
  }
  for (int i = 0; i < problem.batch_dims; ++i) {
    if (problem.batch_size[i] > 1 && matrix.batch_stride[i] == 0) {
      return name + " has a batch stride of 0: its matrices overlap";
    }
  }
  return {};
}

std::string bias_error(const std::string& name, const Problem& problem, const Matrix& bias) {
  if (std::string error = matrix_error(name, problem, bias); !error.empty()) return error;
  if (bias.row_stride == 0 || bias.col_stride == 0) return {};
  return name + " is a vector: one of its strides must be 0";
}

std::string pointer_error(const std::string& name, const void* pointer, int alignment) {
  if (pointer == nullptr) return name + " is a null pointer, and the problem has it";
  if (reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return {};
  return name + " is not aligned to the " + std::to_string(alignment) +
         " bytes that the problem promises";
}

}  // namespace

std::string validate(const Problem& problem) {
  const Epilogue& epilogue = problem.epilogue;
  if (problem.m < 0 || problem.n < 0 || problem.k < 0) {
    return "m, n and k must not be negative, and are " + std::to_string(problem.m) + ", " +
           std::to_string(problem.n) + " and " + std::to_string(problem.k);
  }
  if (problem.batch_dims < 0 || problem.batch_dims > kMaxBatchDims) {
    return "batch_dims is " + std::to_string(problem.batch_dims) + ", and must be from 0 to " +
           std::to_string(kMaxBatchDims);
  }
  for (int i = 0; i < problem.batch_dims; ++i) {
    if (problem.batch_size[i] < 0) return "a batch size is negative";
  }
  if (problem.a.dtype != problem.b.dtype) {
    return std::string("a is ") + to_string(problem.a.dtype) + " and b is " +
           to_string(problem.b.dtype) + ": operands must have one dtype";
  }
  if (problem.gated) {
    if (problem.up.dtype != problem.b.dtype) return "b and up must have one dtype";
    if (problem.k == 0) return "a gated product needs a k of at least 1";
    if (epilogue.has_preact || epilogue.has_residual || epilogue.alpha != 1.0f) {
      return "a gated product has nothing but activation and biases in its epilogue";
    }
  }

  struct Part {
    bool exists;
    const char* name;
    const Matrix& matrix;
    std::string (*error)(const std::string&, const Problem&, const Matrix&);
  };
  const Part parts[] = {
      {true, "a", problem.a, matrix_error},
      {true, "b", problem.b, matrix_error},
      {problem.gated, "up", problem.up, matrix_error},
      {epilogue.has_bias, "bias", epilogue.bias, bias_error},
      {problem.has_up_bias, "up_bias", problem.up_bias, bias_error},
      {epilogue.has_residual, "residual", epilogue.residual, matrix_error},
      {epilogue.has_preact, "preact", epilogue.preact, output_error},
      {true, "out", problem.out, output_error},
  };
  for (const Part& part : parts) {
    if (!part.exists) continue;
    if (std::string error = part.error(part.name, problem, part.matrix); !error.empty()) {
      return error;
    }
  }
  return {};
}

std::string validate(const Plan& plan, const Problem& problem, const Operands& operands) {
  if (problem.empty()) return {};
  const Epilogue& epilogue = problem.epilogue;
  struct Part {
    bool needed;
    const char* name;
    const void* pointer;
    int alignment;
  };
  const Part parts[] = {
      {problem.k > 0, "a", operands.a, problem.a.address_alignment},
      {problem.k > 0, "b", operands.b, problem.b.address_alignment},
      {problem.gated, "up", operands.up, problem.up.address_alignment},
      {epilogue.has_bias, "bias", operands.bias, epilogue.bias.address_alignment},
      {problem.has_up_bias, "up_bias", operands.up_bias, problem.up_bias.address_alignment},
      {epilogue.has_residual, "residual", operands.residual, epilogue.residual.address_alignment},
      {epilogue.has_preact, "preact", operands.preact, epilogue.preact.address_alignment},
      {true, "out", operands.out, problem.out.address_alignment},
  };
  for (const Part& part : parts) {
    if (!part.needed) continue;
    std::string error = pointer_error(part.name, part.pointer, part.alignment);
    if (!error.empty()) return error;
  }
  if (plan.workspace_bytes == 0) return {};
  if (operands.workspace == nullptr) {
    return "workspace is a null pointer, and the plan needs " +
           std::to_string(plan.workspace_bytes) + " bytes";
  }
  if (reinterpret_cast<uintptr_t>(operands.workspace) % kWorkspaceAlignment != 0) {
    return "workspace is not aligned to " + std::to_string(kWorkspaceAlignment) + " bytes";
  }
  return {};
}

}  // namespace tgemm
