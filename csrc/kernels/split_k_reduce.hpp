// The second half of every split-K GEMM: adds the FP32 partial sums in the order of the splits, so
// that the same inputs give the same bits, and applies the epilogue.
#pragma once

#include <string>

#include "device/params.hpp"

namespace tgemm {

std::string launch_split_k_reduce(const GemmParams& params, CUstream_st* stream);

}  // namespace tgemm
