// Definitions of launch_async and launch_staged, for the instance_*.cu files alone.
#pragma once

#include <type_traits>

#include "kernels/launch.cuh"
#include "kernels/sm80/instances.hpp"
#include "kernels/sm80/mma_sync.cuh"

namespace tgemm::sm80 {

using AsyncLauncher = std::string (*)(const GemmParams&, const LaunchTarget&);

template <class Cta, Math kMath, bool kAKMajor, bool kBKMajor>
std::string launch_one_async(const GemmParams& params, const LaunchTarget& target) {
  if constexpr (exists<Cta>(kMath, kAKMajor)) {
    return launch_dependent<mma_sync_kernel<Cta, kMath, kAKMajor, kBKMajor>>(
        tile_count(params, Cta::kBlockM, Cta::kBlockN), Cta::kThreads, Cta::kSharedBytes, target,
        params);
  } else {
    return "mma_sync: this tile is not built for these operands";  // rejected before
  }
}

template <class Cta, Math kMath, class Source>
std::string launch_one_staged(const GemmParams& params, const LaunchTarget& target) {
  return launch_dependent<mma_sync_staged_kernel<Cta, kMath, Source>>(
      tile_count(params, Cta::kBlockM, Cta::kBlockN), Cta::kThreads, Cta::kSharedBytes, target,
      params);
}

template <Math kMath>
std::string launch_async(int tile, bool a_k_major, bool b_k_major, const GemmParams& params,
                         const LaunchTarget& target) {
  return [&]<class... Ctas>(std::type_identity<std::tuple<Ctas...>>) {
    static constexpr AsyncLauncher kLaunchers[][4] = {
        {launch_one_async<Ctas, kMath, false, false>, launch_one_async<Ctas, kMath, false, true>,
         launch_one_async<Ctas, kMath, true, false>, launch_one_async<Ctas, kMath, true, true>}...};
    return kLaunchers[tile][(a_k_major ? 2 : 0) + (b_k_major ? 1 : 0)](params, target);
  }(std::type_identity<AsyncTiles>());
}

template <Math kMath, class Source>
std::string launch_staged(int tile, const GemmParams& params, const LaunchTarget& target) {
  return [&]<class... Ctas>(std::type_identity<std::tuple<Ctas...>>) {
    static constexpr AsyncLauncher kLaunchers[] = {launch_one_staged<Ctas, kMath, Source>...};
    return kLaunchers[tile](params, target);
  }(std::type_identity<StagedTiles>());
}

}  // namespace tgemm::sm80
