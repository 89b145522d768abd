// The kernel that packs operands (gemm/packing.hpp).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "gemm/plan.hpp"
#include "gemm/problem.hpp"

namespace tgemm {

// FP32 elements become two TF32 parts (device/tf32_parts.hpp), which alternate kPartsK at a time:
// the high parts come first, or the low ones.
enum class PackedParts : uint8_t { kNone, kHighLow, kLowHigh };

// Element i of line j of a batch entry comes from
// source[i * unit_stride + j * line_stride + sum of index * batch_stride]
// and goes to target[i + (j + lines * linear index of the entry) * pitch], or, in parts, to
// i + i / kPartsK * kPartsK in the same line and to kPartsK further. Strides in elements.
struct PackedCopy {
  const void* source;
  void* target;  // 16-byte aligned
  DType source_dtype;
  DType target_dtype;
  int64_t width;  // elements of a line
  int64_t lines;  // of a batch entry
  int64_t batch_count;
  int64_t unit_stride;
  int64_t line_stride;
  int64_t pitch;      // of the target's lines, of which nothing beyond the pitch is written
  PackedParts parts;  // if any, lines end with zeros, up to a multiple of kPartsK elements
  int batch_dims;     // without those in which the operand repeats itself
  int64_t batch_size[kMaxBatchDims];
  int64_t batch_stride[kMaxBatchDims];
};

// At most two copies of the same types in one launch. Returns an empty string, or what went wrong.
std::string launch_pack(std::span<const PackedCopy> copies, CUstream_st* stream);

}  // namespace tgemm
