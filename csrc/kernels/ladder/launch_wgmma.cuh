// Definition of launch_wgmma_tma, for the wgmma_*.cu files alone.
#pragma once

#include "kernels/ladder/wgmma.cuh"
#include "kernels/launch.cuh"

namespace tgemm::ladder {

template <bool kBf16, bool kAKMajor, bool kBKMajor>
std::string launch_one_wgmma(const GemmParams& params, const LaunchTarget& target) {
  OperandMap a{}, b{};
  if (!target.resources && params.k > 0) {
    std::string error = make_operand_map(a, params, params.a, true, kAKMajor, kTile.m);
    if (error.empty()) {
      error = make_operand_map(b, params, params.b, false, kBKMajor, kTile.n);
    }
    if (!error.empty()) return error;
  }
  return launch_kernel<wgmma_tma<kBf16, kAKMajor, kBKMajor>>(
      tile_count(params, kTile.m, kTile.n), kTile.threads, kWgmmaSharedBytes, target, params, a, b);
}

template <bool kBf16>
std::string launch_wgmma_tma(const TensorCoreOperands& operands, const GemmParams& params,
                             const LaunchTarget& target) {
  if (operands.a_k_major) {
    return operands.b_k_major ? launch_one_wgmma<kBf16, true, true>(params, target)
                              : launch_one_wgmma<kBf16, true, false>(params, target);
  }
  return operands.b_k_major ? launch_one_wgmma<kBf16, false, true>(params, target)
                            : launch_one_wgmma<kBf16, false, false>(params, target);
}

}  // namespace tgemm::ladder
