// What CUDA says of the GPUs of this process.
#pragma once

#include <string>

#include "gemm/plan.hpp"

namespace tgemm {

// Fills `device` for select(). Returns an empty string, or one sentence: the driver is missing or
// too old, there is no such device, or it is older than compute capability 7.5. Legal during CUDA
// graph capture; reads the runtime at every call, so keep what it says.
std::string describe_device(int index, Device* device);

}  // namespace tgemm
