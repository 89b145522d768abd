// Launching a kernel, or asking what it takes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "device/params.hpp"

namespace tgemm {

// Shared memory beyond the default 48 KB has to be asked for, once per kernel and device. The call
// is legal during stream capture, and repeating it from two threads is harmless.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> done{0};  // bit per device
  if (bytes <= 48 * 1024) return cudaSuccess;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (device < 64 && (done.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

template <class... Args>
cudaError_t describe_kernel(void (*kernel)(Args...), int threads, int shared_bytes,
                            Resources& resources) {
  cudaFuncAttributes attributes;
  int device = 0, sm_threads = 0, ctas = 0;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads, shared_bytes);
  }
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sm_threads, cudaDevAttrMaxThreadsPerMultiProcessor, device);
  }
  if (error != cudaSuccess) return error;
  resources = {.registers = attributes.numRegs,
               .threads = threads,
               .static_shared_bytes = static_cast<int>(attributes.sharedSizeBytes),
               .dynamic_shared_bytes = shared_bytes,
               .local_bytes = static_cast<int>(attributes.localSizeBytes),
               .ctas_per_sm = ctas,
               .occupancy = static_cast<double>(ctas) * threads / sm_threads};
  return cudaSuccess;
}

// Enqueues `ctas` CTAs (kernels loop over tiles, so the grid may be capped), or describes the
// kernel. Returns an empty string, or what went wrong.
template <auto kKernel, class... Args>
std::string launch_kernel(int64_t ctas, int threads, int shared_bytes, const LaunchTarget& target,
                          const Args&... args) {
  cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
  if (error == cudaSuccess && target.resources) {
    error = describe_kernel(kKernel, threads, shared_bytes, *target.resources);
  } else if (error == cudaSuccess) {
    const unsigned grid = static_cast<unsigned>(std::min<int64_t>(ctas, INT32_MAX));
    static_cast<void>(cudaGetLastError());  // an earlier call's, not to be blamed on this launch
    kKernel<<<grid, threads, shared_bytes, target.stream>>>(args...);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? std::string() : std::string("CUDA: ") + cudaGetErrorString(error);
}

// The same for a kernel whose CTAs, in clusters of `cluster`, walk over `tiles` tiles per cluster:
// as many as run at once. One CTA fits on an SM.
template <auto kKernel, class... Args>
std::string launch_persistent(int64_t tiles, int cluster, int threads, int shared_bytes,
                              const LaunchTarget& target, const Args&... args) {
  static std::atomic<int> resident[64];  // clusters, by device; 0: not asked yet
  const auto failed = [](cudaError_t error) {
    return std::string("CUDA: ") + cudaGetErrorString(error);
  };
  if (target.resources) {
    return launch_kernel<kKernel>(1, threads, shared_bytes, target, args...);
  }
  if (const cudaError_t error = allow_shared_memory<kKernel>(shared_bytes); error != cudaSuccess) {
    return failed(error);
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = target.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;

  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return failed(error);
  std::atomic<int>& known = resident[device % 64];
  int clusters = device < 64 ? known.load(std::memory_order_relaxed) : 0;
  if (clusters == 0) {
    config.gridDim = static_cast<unsigned>(cluster);
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config);
    if (error != cudaSuccess) return failed(error);
    if (clusters == 0) return "no cluster of " + std::to_string(cluster) + " CTAs fits on the GPU";
    known.store(clusters, std::memory_order_relaxed);
  }
  config.gridDim = static_cast<unsigned>(std::min<int64_t>(tiles, clusters) * cluster);
  static_cast<void>(cudaGetLastError());  // an earlier call's, not to be blamed on this launch
  const cudaError_t error = cudaLaunchKernelEx(&config, kKernel, args...);
  static_cast<void>(cudaGetLastError());
  return error == cudaSuccess ? std::string() : failed(error);
}

inline int64_t tile_count(const GemmParams& params, int block_m, int block_n) {
  return ((params.m + block_m - 1) / block_m) * ((params.n + block_n - 1) / block_n) *
         params.batch_count * params.split_k;
}

}  // namespace tgemm
