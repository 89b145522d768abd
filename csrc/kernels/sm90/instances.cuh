// Definition of launch(), for the instance_*.cu files alone.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/launch.cuh"
#include "kernels/sm90/gemm.cuh"
#include "kernels/sm90/instances.hpp"

namespace tgemm::sm90 {

template <class Cta, bool kBf16, bool kAKMajor, bool kBKMajor>
std::string launch_one(const GemmParams& params, const LaunchTarget& target) {
  OperandMap a{}, b{};
  if (!target.resources && params.k > 0) {
    constexpr int kShareN = Cta::kBlockN / Cta::kCluster;
    std::string error =
        make_operand_map(a, params, true, kAKMajor, kAKMajor ? Cta::kBlockM : 64, kTmaTileK);
    if (error.empty()) {
      error = make_operand_map(b, params, false, kBKMajor, kBKMajor ? kShareN : 64, kTmaTileK);
    }
    if (!error.empty()) return error;
  }
  const int64_t tiles = tile_count(params, Cta::kBlockM * Cta::kCluster, Cta::kBlockN);
  return launch_persistent<sm90_gemm<Cta, kBf16, kAKMajor, kBKMajor>>(
      tiles, Cta::kCluster, Cta::kThreads, Cta::kSharedBytes, target, params, a, b);
}

template <bool kBf16>
std::string launch(int tile, bool a_k_major, bool b_k_major, const GemmParams& params,
                   const LaunchTarget& target) {
  return [&]<class... Ctas>(std::type_identity<std::tuple<Ctas...>>) {
    using Launcher = std::string (*)(const GemmParams&, const LaunchTarget&);
    static constexpr Launcher kLaunchers[][4] = {
        {launch_one<Ctas, kBf16, false, false>, launch_one<Ctas, kBf16, false, true>,
         launch_one<Ctas, kBf16, true, false>, launch_one<Ctas, kBf16, true, true>}...};
    return kLaunchers[tile][(a_k_major ? 2 : 0) + (b_k_major ? 1 : 0)](params, target);
  }(std::type_identity<Tiles>());
}

}  // namespace tgemm::sm90
