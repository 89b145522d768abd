// Tensor maps: what the Tensor Memory Accelerator (TMA, sm_90) knows of an operand.
#pragma once

#include <cuda.h>

#include <string>

#include "device/params.hpp"

namespace tgemm {

inline constexpr int kMapBatchDims = 3;  // a map has five dimensions

// One operand: its map, and the batch dimension that each of the map's last three dimensions is
// (-1: none). Dimensions in which the operand repeats itself are not in the map.
struct OperandMap {
  CUtensorMap map;
  int batch_dim[kMapBatchDims];
};

// Null if TMA can read the operand, otherwise why not. `k_major`: contiguous along K.
const char* tma_rejects(const Matrix& matrix, bool k_major, bool is_a, const Problem& problem);

// A map that copies boxes of `box_mn` by `box_k` elements, one of them 64 (128 bytes, the swizzle's
// width) along the contiguous dimension. Returns an empty string, or what went wrong.
std::string make_operand_map(OperandMap& result, const GemmParams& params, bool is_a, bool k_major,
                             int box_mn, int box_k);

}  // namespace tgemm
