#include "device/epilogue.cuh"
#include "device/ptx.cuh"
#include "kernels/launch.cuh"
#include "kernels/split_k_reduce.hpp"

namespace tgemm {
namespace {

constexpr int kThreads = 256;

// One thread per kVec adjacent outputs.
template <int kVec>
__global__ void __launch_bounds__(kThreads)
    split_k_reduce_kernel(const __grid_constant__ GemmParams params) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t per_row = params.workspace_pitch / kVec;
  const int64_t count = params.batch_count * params.m * per_row;
  const int64_t split_stride = params.batch_count * params.m * params.workspace_pitch;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / per_row;  // of all batches
    const int64_t n = (i - row * per_row) * kVec;
    if (n >= params.n) continue;
    const float* partial = params.workspace + row * params.workspace_pitch + n;
    float sum[1][kVec] = {};
#pragma unroll 4
    for (int split = 0; split < params.split_k; ++split) {
      float value[kVec];
      load_elements(partial + split * split_stride, DType::kFloat32, 0, value);
#pragma unroll
      for (int j = 0; j < kVec; ++j) sum[0][j] += value[j];
    }
    const int64_t batch = row / params.m;
    const int64_t m = row - batch * params.m;
    finish_at(params, batch_offsets(params, batch), m, n, sum);
  }
}

}  // namespace

std::string launch_split_k_reduce(const GemmParams& params, CUstream_st* stream) {
  const int vec = params.vector_epilogue ? 4 : 1;
  const int64_t count = params.batch_count * params.m * (params.workspace_pitch / vec);
  const int64_t ctas = (count + kThreads - 1) / kThreads;
  const LaunchTarget target{.stream = stream};
  return vec == 4 ? launch_dependent<split_k_reduce_kernel<4>>(ctas, kThreads, 0, target, params)
                  : launch_dependent<split_k_reduce_kernel<1>>(ctas, kThreads, 0, target, params);
}

}  // namespace tgemm
