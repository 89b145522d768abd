#include "ops/device_properties.hpp"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "ops/arguments.hpp"

namespace tgemm {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kMinComputeCapability = 75;
// Share of the theoretical memory bandwidth that a kernel reading a large array reaches: 4.45
// to 4.54 of 4.9 TB/s measured on an H200.
constexpr double kReadEfficiency = 0.92;

std::string version_string(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void check_driver() {
  int driver = 0;
  const cudaError_t error = cudaDriverGetVersion(&driver);
  check(error == cudaSuccess && driver > 0,
        "tgemm: no NVIDIA driver was found; the CUDA kernels need one");
  // Within one major version, any driver runs what any toolkit built.
  check(driver / 1000 >= CUDART_VERSION / 1000, "tgemm: the NVIDIA driver supports CUDA ",
        version_string(driver), " but the kernels are built with CUDA ",
        version_string(CUDART_VERSION), "; update the driver",
        CUDART_VERSION / 1000 == 13 ? " to 580 or newer" : "");
}

int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, index);
  check(error == cudaSuccess, "tgemm: CUDA could not describe device ", int64_t{index}, ": ",
        cudaGetErrorString(error));
  return value;
}

Device read_properties(int index) {
  check_driver();
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  check(error == cudaSuccess, "tgemm: CUDA found no usable GPU: ", cudaGetErrorString(error));
  check(index >= 0 && index < count, "tgemm: there is no CUDA device ", int64_t{index},
        "; this process sees ", int64_t{count});

  Device device;
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) == cudaSuccess) device.name = properties.name;
  device.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                              attribute(cudaDevAttrComputeCapabilityMinor, index);
  check(device.compute_capability >= kMinComputeCapability, "tgemm: ", device.name,
        " has compute capability ", int64_t{device.compute_capability / 10}, ".",
        int64_t{device.compute_capability % 10}, "; the kernels need 7.5 or newer");
  device.sm_count = attribute(cudaDevAttrMultiProcessorCount, index);
  device.max_shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  device.max_shared_memory_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  device.clock_ghz = attribute(cudaDevAttrClockRate, index) * 1e-6;  // from kHz
  // Two transfers per clock; kHz and bits to bytes per microsecond.
  device.memory_bytes_per_us = kReadEfficiency * 2.0 *
                               attribute(cudaDevAttrMemoryClockRate, index) * 1e-3 *
                               attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8;
  // A virtual GPU may keep its clocks to itself; only the choice of a kernel depends on them.
  if (device.clock_ghz <= 0.0) device.clock_ghz = 1.5;
  if (device.memory_bytes_per_us <= 0.0) device.memory_bytes_per_us = 1e6;
  return device;
}

}  // namespace

const Device& device_properties(int index) {
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::atomic<bool>, kMaxDevices> known{};
  static std::mutex mutex;

  check(index >= 0 && index < kMaxDevices, "tgemm: there is no CUDA device ", int64_t{index});
  if (!known[index].load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex);
    if (!known[index].load(std::memory_order_relaxed)) {
      devices[index] = read_properties(index);
      known[index].store(true, std::memory_order_release);
    }
  }
  return devices[index];
}

}  // namespace tgemm
