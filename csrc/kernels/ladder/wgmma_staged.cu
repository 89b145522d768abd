#include "kernels/ladder/wgmma.cuh"
#include "kernels/launch.cuh"

namespace tgemm::ladder {

std::string launch_wgmma_staged(const TensorCoreOperands& operands, const GemmParams& params,
                                const LaunchTarget& target) {
  const int64_t ctas = tile_count(params, kTile.m, kTile.n);
  return operands.bf16 ? launch_kernel<wgmma_staged<true>>(ctas, kTile.threads, kWgmmaSharedBytes,
                                                           target, params)
                       : launch_kernel<wgmma_staged<false>>(ctas, kTile.threads, kWgmmaSharedBytes,
                                                            target, params);
}

}  // namespace tgemm::ladder
