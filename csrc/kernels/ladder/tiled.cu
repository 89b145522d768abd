// Rung 2, tiled: shared memory. Rows of 32 floats: storing a column of the transposed tile is a
// 32-way bank conflict.
#include "kernels/ladder/tiled.cuh"

namespace tgemm::ladder {

template <class T>
__global__ void __launch_bounds__(kTiledTile.threads, 4)
    tiled(const __grid_constant__ GemmParams params) {
  multiply_tiled</*kPitch=*/32, T>(params);
}

std::string launch_tiled(const GemmParams& params, const LaunchTarget& target) {
  return launch_by_dtype<tiled<float>, tiled<__half>, tiled<__nv_bfloat16>>(kTiledTile, params,
                                                                            target);
}

}  // namespace tgemm::ladder
