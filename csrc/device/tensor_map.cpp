#include "device/tensor_map.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace tgemm {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that is loaded: the library is not linked to libcuda, which machines without a
// GPU lack.
Encode encode_function() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return usable ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return encode;
}

constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
constexpr int64_t kMaxSize = int64_t{1} << 32;

// Null if TMA can access `lines` lines of `width` adjacent elements for each batch entry.
const char* rejects(const Matrix& matrix, const Problem& problem, int64_t width, int64_t lines,
                    int64_t unit, int64_t pitch) {
  const int64_t bytes = bytes_per_element(matrix.dtype);
  const auto allowed = [&](int64_t stride) {
    return stride > 0 && stride * bytes % 16 == 0 && stride < kMaxStrideBytes / bytes;
  };
  if (width > 1 && unit != 1) return "it has no unit stride";
  if (matrix.address_alignment < 16) return "its address is no multiple of 16 bytes";
  if (lines > 1 && !allowed(pitch)) return "its leading stride is no multiple of 16 bytes";
  if (std::max(width, lines) > kMaxSize) return "it is too large";
  int dims = 0;
  for (int i = 0; i < problem.batch_dims; ++i) {
    if (matrix.batch_stride[i] == 0) continue;
    if (!allowed(matrix.batch_stride[i])) return "a batch stride is no multiple of 16 bytes";
    if (problem.batch_size[i] > kMaxSize) return "it is too large";
    ++dims;
  }
  return dims <= kMapBatchDims ? nullptr : "it has more batch dimensions than a tensor map";
}

CUtensorMapDataType data_type(DType dtype, bool rounds) {
  switch (dtype) {
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat32:
      return rounds ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// Of `lines` lines of `width` adjacent elements, `pitch` elements apart, for each batch entry.
// `rounds`: FP32 to TF32.
std::string make_map(OperandMap& result, const GemmParams& params, const MatrixParams& matrix,
                     int64_t width, int64_t lines, int64_t pitch, int box_lines, bool rounds) {
  const int64_t bytes = bytes_per_element(matrix.dtype);
  cuuint64_t sizes[5] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(lines), 1, 1, 1};
  // The stride of a dimension of size 1 is never used, but has to be valid.
  cuuint64_t strides[4] = {lines > 1 ? static_cast<cuuint64_t>(pitch * bytes) : 16, 16, 16, 16};
  std::fill_n(result.batch_dim, kMapBatchDims, -1);
  int used = 0;
  for (int i = params.batch_dims - 1; i >= 0; --i) {
    if (matrix.batch_stride[i] == 0) continue;
    sizes[2 + used] = static_cast<cuuint64_t>(params.batch_size[i]);
    strides[1 + used] = static_cast<cuuint64_t>(matrix.batch_stride[i] * bytes);
    result.batch_dim[used++] = i;
  }
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(128 / bytes),
                             static_cast<cuuint32_t>(box_lines), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const Encode encode = encode_function();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled";
  const CUresult error =
      encode(&result.map, data_type(matrix.dtype, rounds), 5, matrix.pointer, sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error == CUDA_SUCCESS) return {};
  return "the driver refused a tensor map (error " + std::to_string(error) + ")";
}

}  // namespace

const char* tma_rejects(const Matrix& matrix, bool k_major, bool is_a, const Problem& problem) {
  const int64_t mn = is_a ? problem.m : problem.n;
  const int64_t mn_stride = is_a ? matrix.row_stride : matrix.col_stride;
  const int64_t k_stride = is_a ? matrix.col_stride : matrix.row_stride;
  return k_major ? rejects(matrix, problem, problem.k, mn, k_stride, mn_stride)
                 : rejects(matrix, problem, mn, problem.k, mn_stride, k_stride);
}

const char* tma_rejects_output(const Matrix& matrix, const Problem& problem) {
  return rejects(matrix, problem, problem.n, problem.m, matrix.col_stride, matrix.row_stride);
}

std::string make_operand_map(OperandMap& result, const GemmParams& params,
                             const MatrixParams& matrix, bool is_a, bool k_major, int box_mn,
                             bool rounds) {
  const int64_t mn = is_a ? params.m : params.n;
  const int64_t mn_stride = is_a ? matrix.row_stride : matrix.col_stride;
  const int64_t k_stride = is_a ? matrix.col_stride : matrix.row_stride;
  return k_major ? make_map(result, params, matrix, params.k, mn, mn_stride, box_mn, rounds)
                 : make_map(result, params, matrix, mn, params.k, k_stride,
                            128 / bytes_per_element(matrix.dtype), rounds);
}

std::string make_output_map(OperandMap& result, const GemmParams& params,
                            const MatrixParams& matrix, int box_m) {
  return make_map(result, params, matrix, params.n, params.m, matrix.row_stride, box_m, false);
}

}  // namespace tgemm
