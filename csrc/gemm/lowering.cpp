#include "gemm/lowering.hpp"

#include <algorithm>
#include <utility>

namespace tgemm {
namespace {

// A tensor seen as (batch dimensions..., rows, columns) of the output's logical shape. Rank is not
// limited here: merging comes first.
struct Logical {
  Matrix matrix;
  std::vector<int64_t> batch_stride;
};

int address_alignment(uintptr_t address) {
  int alignment = 16;
  while (address % alignment != 0) alignment /= 2;
  return alignment;
}

// A size-1 dimension may have any stride. Gives it the one that makes the matrix look like an
// ordinary contiguous one: unit stride along the other dimension, or else along this one; an
// aligned leading stride, and a small one, since no second row exists to be far away.
void normalise(Matrix* matrix, int64_t rows, int64_t cols) {
  constexpr int64_t kAlignedStride = 16;
  if (cols <= 1) matrix->col_stride = matrix->row_stride == 1 && rows > 1 ? kAlignedStride : 1;
  if (rows <= 1) matrix->row_stride = matrix->col_stride == 1 ? kAlignedStride : 1;
}

void transpose(Matrix* matrix) { std::swap(matrix->row_stride, matrix->col_stride); }

// Aligns `view` from the right with out's dimensions. `has_rows` and `has_cols` say whether out's
// last dimensions are rows and columns (a 1-d operand of matmul removes one of them).
Logical broadcast_to_out(const TensorView& view, std::span<const int64_t> out_sizes, bool has_rows,
                         bool has_cols) {
  std::vector<int64_t> strides(out_sizes.size(), 0);
  const size_t missing = out_sizes.size() - view.sizes.size();
  for (size_t i = missing; i < out_sizes.size(); ++i) {
    const size_t from = i - missing;
    const bool repeated = view.sizes[from] == 1 && out_sizes[i] != 1;
    strides[i] = repeated ? 0 : view.strides[from];
  }
  Logical logical;
  logical.matrix.dtype = view.dtype;
  logical.matrix.address_alignment = address_alignment(view.address);
  if (has_cols) {
    logical.matrix.col_stride = strides.back();
    strides.pop_back();
  }
  if (has_rows) {
    logical.matrix.row_stride = strides.back();
    strides.pop_back();
  }
  logical.batch_stride = std::move(strides);
  return logical;
}

// Strides of an operand's batch dimensions against out's.
std::vector<int64_t> operand_batch_strides(const TensorView& view,
                                           std::span<const int64_t> batch_sizes) {
  std::vector<int64_t> strides(batch_sizes.size(), 0);
  if (view.sizes.size() <= 2) return strides;
  const size_t own = view.sizes.size() - 2;
  const size_t missing = batch_sizes.size() - own;
  for (size_t i = 0; i < own; ++i) {
    strides[missing + i] =
        view.sizes[i] == 1 && batch_sizes[missing + i] != 1 ? 0 : view.strides[i];
  }
  return strides;
}

}  // namespace

std::string shape_string(std::span<const int64_t> sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  if (sizes.size() == 1) text += ",";
  return text + ")";
}

bool matmul_shape(std::span<const int64_t> a, std::span<const int64_t> b,
                  std::vector<int64_t>* shape, std::string* error) {
  const auto fail = [&](const std::string& why) {
    *error = "a is " + shape_string(a) + " and b is " + shape_string(b) + ": " + why;
    return false;
  };
  if (a.empty() || b.empty()) return fail("both need at least one dimension");
  const int64_t inner_a = a.back();
  const int64_t inner_b = b.size() == 1 ? b[0] : b[b.size() - 2];
  if (inner_a != inner_b) {
    return fail("the inner sizes " + std::to_string(inner_a) + " and " + std::to_string(inner_b) +
                " differ");
  }
  const size_t batch_a = a.size() > 2 ? a.size() - 2 : 0;
  const size_t batch_b = b.size() > 2 ? b.size() - 2 : 0;
  const size_t batch = std::max(batch_a, batch_b);
  shape->assign(batch, 1);
  for (size_t i = 0; i < batch; ++i) {
    const int64_t size_a = i + batch_a >= batch ? a[i + batch_a - batch] : 1;
    const int64_t size_b = i + batch_b >= batch ? b[i + batch_b - batch] : 1;
    if (size_a != size_b && size_a != 1 && size_b != 1) {
      return fail("the batch sizes " + std::to_string(size_a) + " and " + std::to_string(size_b) +
                  " do not broadcast");
    }
    (*shape)[i] = size_a == 1 ? size_b : size_a;
  }
  if (a.size() > 1) shape->push_back(a[a.size() - 2]);
  if (b.size() > 1) shape->push_back(b.back());
  return true;
}

Lowered lower(const LoweringRequest& request) {
  Lowered lowered;
  Problem& problem = lowered.problem;
  const TensorView& a = request.a;
  const TensorView& b = request.b;
  const bool has_rows = a.sizes.size() > 1;
  const bool has_cols = b.sizes.size() > 1;

  problem.precision = request.precision;
  problem.static_weight = request.static_weight;
  problem.epilogue.activation = request.activation;
  problem.epilogue.alpha = request.alpha;
  problem.epilogue.beta = request.beta;
  problem.k = a.sizes.back();
  problem.m = has_rows ? a.sizes[a.sizes.size() - 2] : 1;
  problem.n = has_cols ? b.sizes.back() : 1;

  const size_t batch_rank = request.out.sizes.size() - (has_rows ? 1 : 0) - (has_cols ? 1 : 0);
  std::vector<int64_t> sizes(request.out.sizes.begin(), request.out.sizes.begin() + batch_rank);

  // Order: a, b, out, then whatever the epilogue reads and writes.
  std::vector<Logical> operands(3);
  operands[0].matrix = {a.dtype,
                        has_rows ? a.strides[a.strides.size() - 2] : 0,
                        a.strides.back(),
                        {},
                        address_alignment(a.address)};
  operands[0].batch_stride = operand_batch_strides(a, sizes);
  operands[1].matrix = {b.dtype,
                        has_cols ? b.strides[b.strides.size() - 2] : b.strides.back(),
                        has_cols ? b.strides.back() : 0,
                        {},
                        address_alignment(b.address)};
  operands[1].batch_stride = operand_batch_strides(b, sizes);
  operands[2] = broadcast_to_out(request.out, request.out.sizes, has_rows, has_cols);
  for (const auto* extra : {&request.bias, &request.residual, &request.preact, &request.up_bias}) {
    if (*extra)
      operands.push_back(broadcast_to_out(**extra, request.out.sizes, has_rows, has_cols));
  }

  // Drop size-1 batch dimensions, merge neighbours whose strides nest in every operand.
  std::vector<int64_t> merged;
  std::vector<std::vector<int64_t>> merged_stride(operands.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    bool nests = !merged.empty();
    for (size_t o = 0; o < operands.size() && nests; ++o) {
      nests = merged_stride[o].back() == operands[o].batch_stride[i] * sizes[i];
    }
    if (nests) {
      merged.back() *= sizes[i];
      for (size_t o = 0; o < operands.size(); ++o) {
        merged_stride[o].back() = operands[o].batch_stride[i];
      }
    } else {
      merged.push_back(sizes[i]);
      for (size_t o = 0; o < operands.size(); ++o) {
        merged_stride[o].push_back(operands[o].batch_stride[i]);
      }
    }
  }

  // Fold the innermost batch dimension into M while b is the same for all of it and the rows of
  // everything else continue from one matrix to the next.
  while (!merged.empty()) {
    bool folds = merged_stride[1].back() == 0;
    for (size_t o = 0; o < operands.size() && folds; ++o) {
      if (o == 1) continue;
      folds =
          problem.m == 1 || merged_stride[o].back() == operands[o].matrix.row_stride * problem.m;
    }
    if (!folds) break;
    for (size_t o = 0; o < operands.size(); ++o) {
      if (problem.m == 1 && o != 1) operands[o].matrix.row_stride = merged_stride[o].back();
      merged_stride[o].pop_back();
    }
    problem.m *= merged.back();
    merged.pop_back();
  }

  if (merged.size() > static_cast<size_t>(kMaxBatchDims)) {
    lowered.error = "more than " + std::to_string(kMaxBatchDims) +
                    " batch dimensions cannot be merged with these strides";
    return lowered;
  }
  problem.batch_dims = static_cast<int>(merged.size());
  std::copy(merged.begin(), merged.end(), problem.batch_size.begin());
  for (size_t o = 0; o < operands.size(); ++o) {
    std::copy(merged_stride[o].begin(), merged_stride[o].end(),
              operands[o].matrix.batch_stride.begin());
  }

  normalise(&operands[0].matrix, problem.m, problem.k);
  normalise(&operands[1].matrix, problem.k, problem.n);
  for (size_t o = 2; o < operands.size(); ++o) normalise(&operands[o].matrix, problem.m, problem.n);

  problem.a = operands[0].matrix;
  problem.b = operands[1].matrix;
  problem.out = operands[2].matrix;
  size_t next = 3;
  if (request.bias) {
    problem.epilogue.has_bias = true;
    problem.epilogue.bias = operands[next++].matrix;
  }
  if (request.residual) {
    problem.epilogue.has_residual = true;
    problem.epilogue.residual = operands[next++].matrix;
  }
  if (request.preact) {
    problem.epilogue.has_preact = true;
    problem.epilogue.preact = operands[next++].matrix;
  }
  if (request.up_bias) {
    problem.has_up_bias = true;
    problem.up_bias = operands[next++].matrix;
  }
  // A bias is the same for all rows, also where there is at most one.
  if (problem.m <= 1) problem.epilogue.bias.row_stride = problem.up_bias.row_stride = 0;
  if (request.up) {
    problem.gated = true;
    problem.up = {request.up->dtype,
                  request.up->strides[0],
                  request.up->strides[1],
                  {},
                  address_alignment(request.up->address)};
    normalise(&problem.up, problem.k, problem.n);
  }

  if (problem.out.col_stride != 1) {
    if (problem.out.row_stride != 1 && !problem.empty()) {
      lowered.error = "out has strides " + shape_string(request.out.strides) +
                      ": neither its rows nor its columns are contiguous";
      return lowered;
    }
    // Column-major out: compute its transpose. Its weight is not the second operand.
    lowered.swapped = true;
    problem.static_weight = false;
    std::swap(problem.m, problem.n);
    std::swap(problem.a, problem.b);
    for (Matrix* matrix :
         {&problem.a, &problem.b, &problem.out, &problem.epilogue.bias, &problem.epilogue.residual,
          &problem.epilogue.preact, &problem.up, &problem.up_bias}) {
      transpose(matrix);
    }
  }
  return lowered;
}

GatedSteps split_gated(const Lowered& lowered) {
  const Problem& gated = lowered.problem;
  Problem plain = gated;
  plain.gated = plain.has_up_bias = false;
  plain.up = plain.up_bias = {};

  // Rows of whole 16-byte vectors, so that an odd n makes neither step slow.
  Matrix between{.dtype = DType::kFloat32, .row_stride = (gated.n + 3) / 4 * 4, .col_stride = 1};
  int64_t elements = gated.m * between.row_stride;
  for (int i = gated.batch_dims; i-- > 0;) {
    between.batch_stride[i] = elements;
    elements *= gated.batch_size[i];
  }

  GatedSteps steps{.gate = plain, .up = plain, .between_elements = elements};
  steps.gate.out = between;
  (lowered.swapped ? steps.up.a : steps.up.b) = gated.up;
  Epilogue& epilogue = steps.up.epilogue;
  epilogue.activation = Activation::kNone;
  epilogue.has_bias = gated.has_up_bias;
  epilogue.bias = gated.up_bias;
  epilogue.has_residual = epilogue.multiplies = true;
  epilogue.residual = between;
  return steps;
}

}  // namespace tgemm
