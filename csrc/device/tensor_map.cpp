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

}  // namespace

const char* tma_rejects(const Matrix& matrix, bool k_major, bool is_a, const Problem& problem) {
  const int64_t bytes = bytes_per_element(matrix.dtype);
  const int64_t mn_stride = is_a ? matrix.row_stride : matrix.col_stride;
  const int64_t k_stride = is_a ? matrix.col_stride : matrix.row_stride;
  const int64_t mn = is_a ? problem.m : problem.n;
  if ((k_major ? k_stride : mn_stride) != 1) return "it has no unit stride";
  const int64_t leading = k_major ? mn_stride : k_stride;
  const int64_t lines = k_major ? mn : problem.k;
  const auto allowed = [&](int64_t stride) {
    return stride > 0 && stride * bytes % 16 == 0 && stride < kMaxStrideBytes / bytes;
  };
  if (matrix.address_alignment < 16) return "its address is no multiple of 16 bytes";
  if (lines > 1 && !allowed(leading)) return "its leading stride is no multiple of 16 bytes";
  if (std::max(mn, problem.k) > kMaxSize) return "it is too large";
  int dims = 0;
  for (int i = 0; i < problem.batch_dims; ++i) {
    if (matrix.batch_stride[i] == 0) continue;
    if (!allowed(matrix.batch_stride[i])) return "a batch stride is no multiple of 16 bytes";
    if (problem.batch_size[i] > kMaxSize) return "it is too large";
    ++dims;
  }
  return dims <= kMapBatchDims ? nullptr : "it has more batch dimensions than a tensor map";
}

std::string make_operand_map(OperandMap& result, const GemmParams& params, bool is_a, bool k_major,
                             int box_mn, int box_k) {
  const MatrixParams& matrix = is_a ? params.a : params.b;
  const int64_t bytes = bytes_per_element(matrix.dtype);
  const int64_t mn_stride = is_a ? matrix.row_stride : matrix.col_stride;
  const int64_t k_stride = is_a ? matrix.col_stride : matrix.row_stride;
  const auto mn = static_cast<cuuint64_t>(is_a ? params.m : params.n);
  const auto k = static_cast<cuuint64_t>(params.k);

  cuuint64_t sizes[5] = {k_major ? k : mn, k_major ? mn : k, 1, 1, 1};
  const int64_t leading = k_major ? mn_stride : k_stride;
  // The stride of a dimension of size 1 is never used, but has to be valid.
  const cuuint64_t first = sizes[1] > 1 ? static_cast<cuuint64_t>(leading * bytes) : 16;
  cuuint64_t strides[4] = {first, 16, 16, 16};
  std::fill_n(result.batch_dim, kMapBatchDims, -1);
  int used = 0;
  for (int i = params.batch_dims - 1; i >= 0; --i) {
    if (matrix.batch_stride[i] == 0) continue;
    sizes[2 + used] = static_cast<cuuint64_t>(params.batch_size[i]);
    strides[1 + used] = static_cast<cuuint64_t>(matrix.batch_stride[i] * bytes);
    result.batch_dim[used++] = i;
  }
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(k_major ? box_k : box_mn),
                             static_cast<cuuint32_t>(k_major ? box_mn : box_k), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = matrix.dtype == DType::kFloat16
                                       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const Encode encode = encode_function();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled";
  const CUresult error =
      encode(&result.map, type, 5, matrix.pointer, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error == CUDA_SUCCESS) return {};
  return "the driver refused a tensor map (error " + std::to_string(error) + ")";
}

}  // namespace tgemm
