// Plans of recent problems. Selection scores every configuration of every kernel, 1 to 8 us on the
// host; a model asks for the same few dozen problems again and again.
#pragma once

#include "gemm/plan.hpp"
#include "gemm/problem.hpp"

namespace tgemm {

// select(problem, device) for the device with this index, remembered per thread.
Selection select_cached(const Problem& problem, const Device& device, int device_index);

}  // namespace tgemm
