#include "ops/device_properties.hpp"

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "gemm/device.hpp"
#include "ops/arguments.hpp"

namespace tgemm {

const Device& device_properties(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::atomic<bool>, kMaxDevices> known{};
  static std::mutex mutex;

  check(index >= 0 && index < kMaxDevices, "tgemm: there is no CUDA device ", int64_t{index});
  if (!known[index].load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex);
    if (!known[index].load(std::memory_order_relaxed)) {
      Device device;
      const std::string error = describe_device(index, &device);
      check(error.empty(), "tgemm: ", error);
      devices[index] = device;
      known[index].store(true, std::memory_order_release);
    }
  }
  return devices[index];
}

}  // namespace tgemm
