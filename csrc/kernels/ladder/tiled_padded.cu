// Rung 3, tiled_padded: one float of padding per row. The 33rd word moves every row on by one bank,
// so the words of a column lie in 32 different banks.
#include "kernels/ladder/tiled.cuh"

namespace tgemm::ladder {

template <class T>
__global__ void __launch_bounds__(kTiledTile.threads, 4)
    tiled_padded(const __grid_constant__ GemmParams params) {
  multiply_tiled</*kPitch=*/33, T>(params);
}

std::string launch_tiled_padded(const GemmParams& params, const LaunchTarget& target) {
  return launch_by_dtype<tiled_padded<float>, tiled_padded<__half>, tiled_padded<__nv_bfloat16>>(
      kTiledTile, params, target);
}

}  // namespace tgemm::ladder
