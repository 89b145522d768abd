#include "gemm/packing.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#include "device/tf32_parts.hpp"
#include "kernels/cost_model.hpp"

namespace tgemm {
namespace {

// Lines that straddle the 128-byte lines of L2 cost TMA twice.
constexpr int64_t kPitchBytes = 128;
constexpr int64_t kOffsetBytes = 256;

// From the start of the kernel to its first loads, and the wait of the kernel behind it
// (microseconds, estimated).
constexpr double kPackStartUs = 2.0;

int64_t round_up(int64_t value, int64_t step) { return ceil_div(value, step) * step; }

// Never more than kMaxPackedBytes.
int64_t saturated_product(int64_t a, int64_t b) {
  int64_t product = 0;
  const bool overflows = __builtin_mul_overflow(a, b, &product);
  return overflows ? kMaxPackedBytes : std::min(product, kMaxPackedBytes);
}

DType multiplied_dtype(const Problem& problem) {
  if (problem.a.dtype != DType::kFloat32) return problem.a.dtype;
  if (problem.precision == Precision::kBf16) return DType::kBFloat16;
  if (problem.precision == Precision::kFp16) return DType::kFloat16;
  return DType::kFloat32;
}

// Are the operands taken apart, each into two parts?
bool takes_apart(const Problem& problem) {
  return problem.a.dtype == DType::kFloat32 && problem.precision == Precision::k3xTf32;
}

// K as the kernel sees it: of both parts.
int64_t k_of_parts(int64_t k) { return 2 * round_up(k, kPartsK); }

// One of the operands as lines of adjacent elements, before and after packing.
struct Lines {
  bool k_major;  // lines run along K
  int64_t width;
  int64_t count;  // of a batch entry
  int64_t unit_stride;
  int64_t line_stride;
  int64_t pitch;  // of the packed operand, elements
};

Lines lines_of(const Problem& problem, bool is_a) {
  const Matrix& matrix = is_a ? problem.a : problem.b;
  const int64_t mn = is_a ? problem.m : problem.n;
  const int64_t mn_stride = is_a ? matrix.row_stride : matrix.col_stride;
  const int64_t k_stride = is_a ? matrix.col_stride : matrix.row_stride;
  const DType dtype = multiplied_dtype(problem);
  // wgmma knows no transposed TF32 operands. Otherwise the layout stays, because that is cheapest,
  // unless every element would become a line of its own.
  const bool k_major =
      dtype == DType::kFloat32 || k_stride == 1 || mn_stride != 1 || (mn == 1 && problem.k > 1);
  const int64_t width = k_major ? problem.k : mn;
  const int64_t packed_width = takes_apart(problem) ? k_of_parts(width) : width;
  const int64_t pitch =
      round_up(std::max<int64_t>(packed_width, 1), kPitchBytes / bytes_per_element(dtype));
  return {.k_major = k_major,
          .width = width,
          .count = k_major ? mn : problem.k,
          .unit_stride = k_major ? k_stride : mn_stride,
          .line_stride = k_major ? mn_stride : k_stride,
          .pitch = pitch};
}

Matrix packed_matrix(const Problem& problem, bool is_a) {
  const Matrix& source = is_a ? problem.a : problem.b;
  const Lines lines = lines_of(problem, is_a);
  const bool unit_columns = lines.k_major == is_a;
  Matrix matrix{.dtype = multiplied_dtype(problem),
                .row_stride = unit_columns ? lines.pitch : 1,
                .col_stride = unit_columns ? 1 : lines.pitch};
  int64_t stride = saturated_product(lines.pitch, lines.count);
  for (int i = problem.batch_dims - 1; i >= 0; --i) {
    if (source.batch_stride[i] == 0) continue;
    matrix.batch_stride[i] = stride;
    stride = saturated_product(stride, problem.batch_size[i]);
  }
  return matrix;
}

int64_t packed_bytes(const Problem& problem, bool is_a) {
  if (problem.k == 0 || problem.empty()) return 0;
  const Lines lines = lines_of(problem, is_a);
  const int64_t elements =
      saturated_product(saturated_product(lines.pitch, lines.count),
                        problem.distinct_batches(is_a ? problem.a : problem.b));
  return round_up(saturated_product(elements, bytes_per_element(multiplied_dtype(problem))),
                  kOffsetBytes);
}

void* workspace_at(const Operands& operands, int64_t offset) {
  std::byte* workspace = static_cast<std::byte*>(operands.workspace);
  return workspace ? workspace + offset : nullptr;
}

// Packing can make neighbouring batch dimensions nest in every matrix: a tensor map has few.
void merge_batch_dims(Problem& problem) {
  const std::array<Matrix*, 8> matrices = {&problem.a,
                                           &problem.b,
                                           &problem.out,
                                           &problem.epilogue.bias,
                                           &problem.up,
                                           &problem.up_bias,
                                           &problem.epilogue.residual,
                                           &problem.epilogue.preact};
  int used = 0;  // dimensions that are left
  for (int i = 0; i < problem.batch_dims; ++i) {
    const int64_t size = problem.batch_size[i];
    const bool nests =
        used > 0 && std::all_of(matrices.begin(), matrices.end(), [&](const Matrix* matrix) {
          return matrix->batch_stride[used - 1] == saturated_product(matrix->batch_stride[i], size);
        });
    const int target = nests ? used - 1 : used++;
    problem.batch_size[target] = nests ? problem.batch_size[target] * size : size;
    for (Matrix* matrix : matrices) matrix->batch_stride[target] = matrix->batch_stride[i];
  }
  for (int i = used; i < problem.batch_dims; ++i) {
    problem.batch_size[i] = 0;
    for (Matrix* matrix : matrices) matrix->batch_stride[i] = 0;
  }
  problem.batch_dims = used;
}

}  // namespace

Problem packed(const Problem& problem, Packing packing) {
  if (!packing.any()) return problem;
  Problem result = problem;
  if (packing.a) result.a = packed_matrix(problem, true);
  if (packing.b) {
    result.b = packed_matrix(problem, false);
    result.static_weight = false;  // it has just been written
  }
  if (takes_apart(problem)) result.k = k_of_parts(problem.k);
  merge_batch_dims(result);
  return result;
}

PackedOffsets packed_offsets(const Problem& problem, Packing packing) {
  const int64_t a = packing.a ? packed_bytes(problem, true) : 0;
  const int64_t b = packing.b ? packed_bytes(problem, false) : 0;
  return {.a = 0, .b = a, .end = std::min(a + b, kMaxPackedBytes)};
}

Operands packed_operands(const Problem& problem, Packing packing, const Operands& operands) {
  const PackedOffsets offsets = packed_offsets(problem, packing);
  Operands result = operands;
  if (packing.a) result.a = workspace_at(operands, offsets.a);
  if (packing.b) result.b = workspace_at(operands, offsets.b);
  result.workspace = workspace_at(operands, offsets.end);
  return result;
}

std::vector<PackedCopy> packed_copies(const Problem& problem, Packing packing,
                                      const Operands& operands) {
  const PackedOffsets offsets = packed_offsets(problem, packing);
  const auto copy_of = [&](bool is_a) {
    const Matrix& matrix = is_a ? problem.a : problem.b;
    const Lines lines = lines_of(problem, is_a);
    PackedCopy copy{};
    copy.source = is_a ? operands.a : operands.b;
    copy.target = workspace_at(operands, is_a ? offsets.a : offsets.b);
    copy.source_dtype = matrix.dtype;
    copy.target_dtype = multiplied_dtype(problem);
    copy.width = lines.width;
    copy.lines = lines.count;
    copy.batch_count = problem.distinct_batches(matrix);
    copy.unit_stride = lines.unit_stride;
    copy.line_stride = lines.line_stride;
    copy.pitch = lines.pitch;
    if (takes_apart(problem)) copy.parts = is_a ? PackedParts::kLowHigh : PackedParts::kHighLow;
    for (int i = 0; i < problem.batch_dims; ++i) {
      if (matrix.batch_stride[i] == 0) continue;
      copy.batch_size[copy.batch_dims] = problem.batch_size[i];
      copy.batch_stride[copy.batch_dims++] = matrix.batch_stride[i];
    }
    return copy;
  };
  std::vector<PackedCopy> copies;
  if (packing.a) copies.push_back(copy_of(true));
  if (packing.b) copies.push_back(copy_of(false));
  return copies;
}

double packing_us(const Problem& problem, Packing packing, const Device& device) {
  if (!packing.any()) return 0.0;
  double read_bytes = 0.0, written_bytes = 0.0;
  for (const PackedCopy& copy : packed_copies(problem, packing, {})) {
    const double elements = static_cast<double>(copy.width) * static_cast<double>(copy.lines) *
                            static_cast<double>(copy.batch_count);
    read_bytes += elements * bytes_per_element(copy.source_dtype);
    written_bytes += elements * bytes_per_element(copy.target_dtype) *
                     (copy.parts == PackedParts::kNone ? 1.0 : 2.0);
  }
  // What is written stays in L2, in part.
  return kPackStartUs + (read_bytes + written_bytes / kL2Speedup) / device.memory_bytes_per_us;
}

}  // namespace tgemm
