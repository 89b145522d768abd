// Tensor maps: what the Tensor Memory Accelerator (TMA, sm_90) knows of an operand.
#pragma once

#include <cuda.h>

#include <string>

#include "device/params.hpp"

namespace tgemm {

inline constexpr int kMapBatchDims = 3;  // a map has five dimensions

// One matrix: its map, and the batch dimension that each of the map's last three dimensions is (-1:
// none). Dimensions in which the matrix repeats itself are not in the map.
struct OperandMap {
  CUtensorMap map;
  int batch_dim[kMapBatchDims];
};

// Null if TMA can read the operand, otherwise why not. `k_major`: contiguous along K.
const char* tma_rejects(const Matrix& matrix, bool k_major, bool is_a, const Problem& problem);

// The same for a matrix of the output's shape.
const char* tma_rejects_output(const Matrix& matrix, const Problem& problem);

// A map that copies boxes 128 bytes (the swizzle's width) wide in the contiguous dimension: of
// `box_mn` rows (columns) of an operand that is K-major, else of as many k as elements are 128
// bytes. FP32 arrives rounded to TF32, if it `rounds`. Returns an empty string, or what went wrong.
std::string make_operand_map(OperandMap& result, const GemmParams& params,
                             const MatrixParams& matrix, bool is_a, bool k_major, int box_mn,
                             bool rounds = true);

// The same for a matrix of the output's shape, in boxes of `box_m` rows, as it is.
std::string make_output_map(OperandMap& result, const GemmParams& params,
                            const MatrixParams& matrix, int box_m);

}  // namespace tgemm
