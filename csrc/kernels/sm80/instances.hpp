// Which mma_sync kernels exist. Each translation unit instance_*.cu compiles one column of this
// list.
#pragma once

#include <string>
#include <tuple>

#include "device/params.hpp"
#include "kernels/sm80/cta_tile.hpp"

namespace tgemm::sm80 {

// 16-byte aligned operands, pipelined with cp.async. Warp tiles of 64x64 read the least shared
// memory per multiply-add that the register file allows.
using AsyncTiles = std::tuple<           //
    CtaTile<128, 256, 128, 2, 4, 3, 1>,  //
    CtaTile<128, 128, 128, 2, 2, 3, 2>,  //
    CtaTile<64, 64, 128, 2, 2, 4, 3>>;

// Each kernel costs seconds of building for each architecture, so the largest tile is left out
// where A is M-major (gradients, mostly), and TF32 has one tile.
template <class Cta>
constexpr bool exists(Math math, bool a_k_major) {
  if (math == Math::kTf32) return Cta::kBlockM == 128 && Cta::kBlockN == 128;
  return a_k_major || Cta::kBlockN < 256;
}

// Everything else, through registers.
using StagedTiles = std::tuple<CtaTile<128, 128, 64, 2, 4, 2, 1>, CtaTile<64, 64, 64, 2, 2, 2, 2>>;

// `tile` indexes AsyncTiles.
template <Math kMath>
std::string launch_async(int tile, bool a_k_major, bool b_k_major, const GemmParams& params,
                         const LaunchTarget& target);

// `tile` indexes StagedTiles.
template <Math kMath, class Source>
std::string launch_staged(int tile, const GemmParams& params, const LaunchTarget& target);

}  // namespace tgemm::sm80
