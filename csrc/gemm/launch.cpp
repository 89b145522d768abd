#include "device/params.hpp"
#include "gemm/packing.hpp"
#include "gemm/plan.hpp"
#include "kernels/pack.hpp"
#include "kernels/split_k_reduce.hpp"

namespace tgemm {
namespace {

// Can (row, 4 * j) always be accessed as one aligned vector of four elements?
bool vectorises(const Matrix& matrix) {
  if (matrix.col_stride != 1 || matrix.row_stride % 4 != 0) return false;
  if (matrix.address_alignment < 4 * bytes_per_element(matrix.dtype)) return false;
  for (int64_t stride : matrix.batch_stride) {
    if (stride % 4 != 0) return false;
  }
  return true;
}

// The kernel, and what adds up its partial sums, on the problem that the kernel sees.
std::string launch_gemm(const Plan& plan, const Problem& problem, const Operands& operands,
                        CUstream_st* stream) {
  std::string error = plan.kernel->launch(plan, problem, operands, {.stream = stream});
  if (error.empty() && plan.split_k > plan.config->max_cluster_split) {
    error = launch_split_k_reduce(make_params(plan, problem, operands), stream);
  }
  return error;
}

}  // namespace

MatrixParams matrix_params(const Matrix& matrix, const void* pointer) {
  MatrixParams params{};
  params.pointer = const_cast<void*>(pointer);
  params.row_stride = matrix.row_stride;
  params.col_stride = matrix.col_stride;
  for (int i = 0; i < kMaxBatchDims; ++i) params.batch_stride[i] = matrix.batch_stride[i];
  params.dtype = matrix.dtype;
  return params;
}

GemmParams make_params(const Plan& plan, const Problem& problem, const Operands& operands) {
  const Epilogue& epilogue = problem.epilogue;
  GemmParams params{};
  params.m = problem.m;
  params.n = problem.n;
  params.k = problem.k;
  params.batch_count = problem.batch_count();
  params.batch_dims = problem.batch_dims;
  for (int i = 0; i < kMaxBatchDims; ++i) params.batch_size[i] = problem.batch_size[i];
  params.a = matrix_params(problem.a, operands.a);
  params.b = matrix_params(problem.b, operands.b);
  params.out = matrix_params(problem.out, operands.out);
  params.vector_epilogue = problem.n % 4 == 0 && vectorises(problem.out);
  if (epilogue.has_bias) {
    params.bias = matrix_params(epilogue.bias, operands.bias);
    params.vector_epilogue = params.vector_epilogue && vectorises(epilogue.bias);
  }
  if (epilogue.has_residual) {
    params.residual = matrix_params(epilogue.residual, operands.residual);
    params.vector_epilogue = params.vector_epilogue && vectorises(epilogue.residual);
  }
  if (epilogue.has_preact) {
    params.preact = matrix_params(epilogue.preact, operands.preact);
    params.vector_epilogue = params.vector_epilogue && vectorises(epilogue.preact);
  }
  params.alpha = epilogue.alpha;
  params.beta = epilogue.beta;
  params.activation = epilogue.activation;
  params.multiplies = epilogue.multiplies;
  params.split_k = plan.split_k;
  const int64_t block_k = plan.config->block_k;
  const int64_t per_split = (problem.k + plan.split_k - 1) / plan.split_k;
  params.k_per_split =
      plan.split_k == 1 ? problem.k : (per_split + block_k - 1) / block_k * block_k;
  params.workspace_pitch = (problem.n + 3) / 4 * 4;
  params.workspace = static_cast<float*>(operands.workspace);
  return params;
}

std::string launch(const Plan& plan, const Problem& problem, const Operands& operands,
                   CUstream_st* stream) {
  if (problem.empty()) return {};
  if (problem.k == 0) {  // nothing to multiply: the epilogue of a sum of no partial sums
    GemmParams params = make_params(plan, problem, operands);
    params.split_k = 0;
    return launch_split_k_reduce(params, stream);
  }
  if (!plan.packing.any()) return launch_gemm(plan, problem, operands, stream);
  const std::string error = launch_pack(packed_copies(problem, plan.packing, operands), stream);
  if (!error.empty()) return error;
  return launch_gemm(plan, packed(problem, plan.packing),
                     packed_operands(problem, plan.packing, operands), stream);
}

std::optional<Resources> resources(const Plan& plan, const Problem& problem) {
  Resources found;
  const std::string error =
      plan.kernel->launch(plan, packed(problem, plan.packing), {}, {.resources = &found});
  if (!error.empty()) return std::nullopt;
  return found;
}

}  // namespace tgemm
