#include "device/epilogue.cuh"
#include "device/ptx.cuh"
#include "kernels/launch.cuh"
#include "kernels/split_k_reduce.hpp"

namespace tgemm {
namespace {

constexpr int kThreads = 256;
// Many partial sums are added by groups of threads, a run of splits each, whose sums are then added
// in order: one thread alone would wait for memory many times.
constexpr int kManyGroups = 16;
constexpr int kManySplits = 8;

// kOutputs threads of each group take kVec adjacent outputs each.
template <int kVec, int kGroups>
__global__ void __launch_bounds__(kThreads)
    split_k_reduce_kernel(const __grid_constant__ GemmParams params) {
  constexpr int kOutputs = kThreads / kGroups;
  // Of the few splits that one group adds up, more loads at once would spill.
  constexpr int kAtOnce = kGroups == 1 ? 4 : 8;
  __shared__ float sums[kGroups][kOutputs][kVec];
  const int group = static_cast<int>(threadIdx.x) / kOutputs;
  const int output = static_cast<int>(threadIdx.x) % kOutputs;
  const int per_group = (params.split_k + kGroups - 1) / kGroups;
  const int first_split = group * per_group;
  const int last_split = min(params.split_k, first_split + per_group);
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int64_t per_row = params.workspace_pitch / kVec;
  const int64_t count = params.batch_count * params.m * per_row;
  const int64_t split_stride = params.batch_count * params.m * params.workspace_pitch;
  for (int64_t first = blockIdx.x * int64_t{kOutputs}; first < count;
       first += int64_t{gridDim.x} * kOutputs) {
    const int64_t i = first + output;
    const int64_t row = i / per_row;  // of all batches
    const int64_t n = (i - row * per_row) * kVec;
    const bool exists = i < count && n < params.n;
    const float* partial = params.workspace + row * params.workspace_pitch + n;
    float sum[1][kVec] = {};
    if (exists) {
#pragma unroll kAtOnce
      for (int split = first_split; split < last_split; ++split) {
        float value[kVec];
        load_elements(partial + split * split_stride, DType::kFloat32, 0, value);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[0][j] += value[j];
      }
    }
    if constexpr (kGroups > 1) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[group][output][j] = sum[0][j];
      __syncthreads();
      if (group == 0) {
#pragma unroll
        for (int g = 1; g < kGroups; ++g) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) sum[0][j] += sums[g][output][j];
        }
      }
      __syncthreads();  // the next outputs' sums go to the same place
    }
    if (exists && group == 0) {
      const int64_t batch = row / params.m;
      const int64_t m = row - batch * params.m;
      finish_at(params, batch_offsets(params, batch), m, n, sum);
    }
  }
}

template <int kVec, int kGroups>
std::string launch_reduce(const GemmParams& params, CUstream_st* stream) {
  constexpr int kOutputs = kThreads / kGroups;
  const int64_t count = params.batch_count * params.m * (params.workspace_pitch / kVec);
  return launch_dependent<split_k_reduce_kernel<kVec, kGroups>>(
      (count + kOutputs - 1) / kOutputs, kThreads, 0, LaunchTarget{.stream = stream}, params);
}

template <int kVec>
std::string launch_reduce(const GemmParams& params, CUstream_st* stream) {
  return params.split_k >= kManySplits ? launch_reduce<kVec, kManyGroups>(params, stream)
                                       : launch_reduce<kVec, 1>(params, stream);
}

}  // namespace

std::string launch_split_k_reduce(const GemmParams& params, CUstream_st* stream) {
  return params.vector_epilogue ? launch_reduce<4>(params, stream)
                                : launch_reduce<1>(params, stream);
}

}  // namespace tgemm
