#include "gemm/device.hpp"

#include <cuda_runtime.h>

namespace tgemm {
namespace {

constexpr int kMinComputeCapability = 75;
// Share of the theoretical memory bandwidth that a kernel reading a large array reaches: 4.45
// to 4.54 of 4.9 TB/s measured on an H200.
constexpr double kReadEfficiency = 0.92;

// Of CUDA, from 13020 for 13.2.
std::string version_string(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string driver_error() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver <= 0) {
    return "no NVIDIA driver was found; the CUDA kernels need one";
  }
  // Within one major version, any driver runs what any toolkit built.
  if (driver / 1000 >= CUDART_VERSION / 1000) return {};
  return "the NVIDIA driver supports CUDA " + version_string(driver) +
         " but the kernels are built with CUDA " + version_string(CUDART_VERSION) +
         "; update the driver" + (CUDART_VERSION / 1000 == 13 ? " to 580 or newer" : "");
}

}  // namespace

std::string describe_device(int index, Device* device) {
  if (std::string error = driver_error(); !error.empty()) return error;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    return std::string("CUDA found no usable GPU: ") + cudaGetErrorString(error);
  }
  if (index < 0 || index >= count) {
    return "there is no CUDA device " + std::to_string(index) + "; this process sees " +
           std::to_string(count);
  }

  cudaError_t failed = cudaSuccess;
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    if (const cudaError_t error = cudaDeviceGetAttribute(&value, which, index);
        error != cudaSuccess) {
      failed = error;
    }
    return value;
  };
  *device = {};
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) device->name = properties.name;
  device->compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                               attribute(cudaDevAttrComputeCapabilityMinor);
  device->sm_count = attribute(cudaDevAttrMultiProcessorCount);
  device->max_shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device->max_shared_memory_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device->l2_bytes = attribute(cudaDevAttrL2CacheSize);
  device->clock_ghz = attribute(cudaDevAttrClockRate) * 1e-6;  // from kHz
  // Two transfers per clock; kHz and bits to bytes per microsecond.
  device->memory_bytes_per_us = kReadEfficiency * 2.0 * attribute(cudaDevAttrMemoryClockRate) *
                                1e-3 * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  if (failed != cudaSuccess) {
    return "CUDA could not describe device " + std::to_string(index) + ": " +
           cudaGetErrorString(failed);
  }
  if (device->compute_capability < kMinComputeCapability) {
    return device->name + " has compute capability " +
           std::to_string(device->compute_capability / 10) + "." +
           std::to_string(device->compute_capability % 10) + "; the kernels need 7.5 or newer";
  }
  // A virtual GPU may keep its clocks to itself; only the choice of a kernel depends on them.
  if (device->clock_ghz <= 0.0) device->clock_ghz = 1.5;
  if (device->memory_bytes_per_us <= 0.0) device->memory_bytes_per_us = 1e6;
  return {};
}

}  // namespace tgemm
