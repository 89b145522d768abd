// Which simt kernels exist. Each translation unit instance_*.cu compiles a part of this list.
#pragma once

#include <string>
#include <tuple>

#include "device/params.hpp"
#include "kernels/simt/cta_tile.hpp"

namespace tgemm::simt {

// FP32 operands with a unit stride, pipelined with cp.async. Two warps per scheduler saturate the
// FMA pipes, so registers are spent on (8, 16) outputs per thread: more would spill, fewer read
// more shared memory. The smallest is for batches of small products.
using AsyncTiles = std::tuple<                 //
    CtaTile<128, 128, 16, 8, 16, 2, 2, 3, 2>,  //
    CtaTile<64, 64, 16, 8, 8, 1, 2, 3, 4>,     //
    CtaTile<32, 32, 16, 4, 8, 1, 1, 3, 14>>;
// Few rows, or few columns: bound by reading the other operand. The small one may have any strides.
using FewRowsTile = CtaTile<16, 128, 16, 4, 8, 1, 2, 3, 4>;
using FewColumnsTile = CtaTile<128, 16, 8, 8, 4, 2, 1, 4, 4>;
// Any strides and dtypes, and devices without cp.async: through registers.
using StagedTiles = std::tuple<             //
    CtaTile<128, 64, 8, 8, 8, 2, 2, 2, 2>,  //
    CtaTile<16, 128, 8, 4, 8, 1, 2, 2, 4>>;

// One kernel per pair of copies. `a` is never kMnMajorVec4: the 16-byte copies save half a percent
// of the instructions, and an M-major A (a transposed view) is rarer than an N-major B (x @ w).
template <class Cta>
std::string launch_async(Copy a, Copy b, const GemmParams& params, const LaunchTarget& target);

std::string launch_few_rows(Copy b, const GemmParams& params, const LaunchTarget& target);
std::string launch_few_columns(Copy a, const GemmParams& params, const LaunchTarget& target);

template <class Cta>
std::string launch_staged(const GemmParams& params, const LaunchTarget& target);

}  // namespace tgemm::simt
