// Launching one of a rung's instantiations.
#pragma once

#include "kernels/ladder/rungs.hpp"
#include "kernels/launch.cuh"

namespace tgemm::ladder {

template <auto kFloat, auto kHalf, auto kBFloat16>
std::string launch_by_dtype(const TileShape& tile, const GemmParams& params,
                            const LaunchTarget& target) {
  const int64_t ctas = tile_count(params, tile.m, tile.n);
  switch (params.a.dtype) {
    case DType::kFloat32:
      return launch_kernel<kFloat>(ctas, tile.threads, 0, target, params);
    case DType::kFloat16:
      return launch_kernel<kHalf>(ctas, tile.threads, 0, target, params);
    case DType::kBFloat16:
      return launch_kernel<kBFloat16>(ctas, tile.threads, 0, target, params);
  }
  return "unknown operand type";
}

}  // namespace tgemm::ladder
