// Launching a kernel, or asking what it takes.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "device/params.hpp"

namespace tgemm {

// Shared memory beyond the default 48 KB has to be asked for, once per kernel and device: all that
// there is, because not every launch takes the same. The call is legal during stream capture, and
// repeating it from two threads is harmless.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> done{0};  // bit per device
  if (bytes <= 48 * 1024) return cudaSuccess;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (device < 64 && (done.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  int most = 0;
  cudaFuncAttributes attributes;
  cudaError_t error =
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kKernel);
  if (error == cudaSuccess) {
    most -= static_cast<int>(attributes.sharedSizeBytes);
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  }
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

// Does the code of this kernel for the current device have griddepcontrol.wait? Code that a driver
// makes of PTX for older GPUs has not, whatever the device is.
template <auto kKernel>
cudaError_t waits_for_kernels_before(bool& waits) {
  static std::atomic<uint64_t> known{0}, yes{0};  // bit per device
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((known.load(std::memory_order_acquire) & bit) == 0) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kKernel);
    if (error != cudaSuccess) return error;
    waits = attributes.ptxVersion >= 90;
    if (waits) yes.fetch_or(bit, std::memory_order_relaxed);
    known.fetch_or(bit, std::memory_order_release);
  } else {
    waits = (yes.load(std::memory_order_relaxed) & bit) != 0;
  }
  return cudaSuccess;
}

// launch_kernel for a kernel that calls griddepcontrol.wait before it touches global memory: it may
// start while the one before it is still running, on GPUs that can do that.
template <auto kKernel, class... Args>
std::string launch_dependent(int64_t ctas, int threads, int shared_bytes,
                             const LaunchTarget& target, const Args&... args) {
  if (target.resources) {
    return launch_kernel<kKernel>(ctas, threads, shared_bytes, target, args...);
  }
  bool waits = false;
  cudaError_t error = allow_shared_memory<kKernel>(shared_bytes);
  if (error == cudaSuccess) error = waits_for_kernels_before<kKernel>(waits);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(std::min<int64_t>(ctas, INT32_MAX));
    config.blockDim = static_cast<unsigned>(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = target.stream;
    config.attrs = &attribute;
    config.numAttrs = waits ? 1 : 0;
    static_cast<void>(cudaGetLastError());  // an earlier call's, not to be blamed on this launch
    error = cudaLaunchKernelEx(&config, kKernel, args...);
    static_cast<void>(cudaGetLastError());
  }
  return error == cudaSuccess ? std::string() : std::string("CUDA: ") + cudaGetErrorString(error);
}

// Launches a kernel whose CTAs form clusters of `cluster` that each work on `tiles` tiles: one
// cluster for each, or, `persistent`, as many as run at once, one CTA on an SM. The kernel calls
// griddepcontrol.wait before it touches global memory, because it may start while the one before it
// is still running.
template <auto kKernel, class... Args>
std::string launch_clusters(int64_t tiles, int cluster, bool persistent, int threads,
                            int shared_bytes, const LaunchTarget& target, const Args&... args) {
  constexpr int kDevices = 64, kMaxCluster = 8;
  static std::atomic<int> resident[kDevices][kMaxCluster + 1];  // clusters; 0: not asked yet
  const auto failed = [](cudaError_t error) {
    return std::string("CUDA: ") + cudaGetErrorString(error);
  };
  if (target.resources) {
    return launch_kernel<kKernel>(1, threads, shared_bytes, target, args...);
  }
  if (const cudaError_t error = allow_shared_memory<kKernel>(shared_bytes); error != cudaSuccess) {
    return failed(error);
  }
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = target.stream;

  int64_t clusters = tiles;
  if (persistent) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
      return failed(error);
    }
    std::atomic<int>& known = resident[device % kDevices][cluster];
    int at_once = device < kDevices ? known.load(std::memory_order_relaxed) : 0;
    if (at_once == 0) {
      config.gridDim = static_cast<unsigned>(cluster);
      config.attrs = attributes + 1;
      config.numAttrs = 1;
      const cudaError_t error = cudaOccupancyMaxActiveClusters(&at_once, kKernel, &config);
      if (error != cudaSuccess) return failed(error);
      if (at_once == 0) {
        return "no cluster of " + std::to_string(cluster) + " CTAs fits on the GPU";
      }
      known.store(at_once, std::memory_order_relaxed);
    }
    clusters = std::min<int64_t>(tiles, at_once);
  }
  if (clusters * cluster > INT32_MAX) return "more CTAs than a grid can have";
  config.gridDim = static_cast<unsigned>(clusters * cluster);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;  // a grid of clusters of one starts 0.2 us later
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
