// Which sm90 kernels exist.
#pragma once

#include <string>
#include <tuple>

#include "device/params.hpp"
#include "kernels/sm90/cta_tile.hpp"

namespace tgemm::sm90 {

using Tiles = std::tuple<                        //
    CtaTile<Schedule::kCooperative, 256, 4, 1>,  //
    CtaTile<Schedule::kCooperative, 256, 4, 2>,  //
    CtaTile<Schedule::kPingPong, 128, 6, 1>>;

// `tile` indexes Tiles.
template <bool kBf16>
std::string launch(int tile, bool a_k_major, bool b_k_major, const GemmParams& params,
                   const LaunchTarget& target);

}  // namespace tgemm::sm90
