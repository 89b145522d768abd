// Rung 1, naive: one thread, one output. Neighbouring threads take neighbouring columns, so that a
// warp reads one element of A and a contiguous piece of a row of B at a time.
#include "kernels/ladder/common.cuh"
#include "kernels/ladder/launch_by_dtype.cuh"

namespace tgemm::ladder {

template <class T>
__global__ void __launch_bounds__(kNaiveTile.threads)
    naive(const __grid_constant__ GemmParams params) {
  for_each_tile<kNaiveTile.m, kNaiveTile.n>(params, [&](const Tile& tile) {
    const int64_t m = tile.m + threadIdx.x / kNaiveTile.n;
    const int64_t n = tile.n + threadIdx.x % kNaiveTile.n;
    if (m >= params.m || n >= params.n) return;
    const T* a = Operand<Side::kA>(params, tile).at<T>(m, 0);
    const T* b = Operand<Side::kB>(params, tile).at<T>(n, 0);
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t k = 0; k < params.k; ++k) {
      sum = fmaf(to_float(*a), to_float(*b), sum);
      a += params.a.col_stride;
      b += params.b.row_stride;
    }
    finish_one(params, tile.offset, m, n, sum);
  });
}

std::string launch_naive(const GemmParams& params, const LaunchTarget& target) {
  return launch_by_dtype<naive<float>, naive<__half>, naive<__nv_bfloat16>>(kNaiveTile, params,
                                                                            target);
}

}  // namespace tgemm::ladder
