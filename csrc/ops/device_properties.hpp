// What the runtime says about the GPUs of this process, read once per device and kept.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

// Throws one sentence if the driver is too old, the device does not exist or no kernel can run on
// it. Legal during CUDA graph capture.
const Device& device_properties(int index);

}  // namespace tgemm
