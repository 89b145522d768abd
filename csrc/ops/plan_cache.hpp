// Plans of recent problems. Selection scores every configuration of every kernel, 1 to 8 us on the
// host; a model asks for the same few dozen problems again and again.
#pragma once

#include "gemm/plan.hpp"
#include "gemm/problem.hpp"
#include "gemm/tuning.hpp"

namespace tgemm {

// choose(problem, device) for the device with this index, remembered per thread until the tuning
// table changes.
Choice choose_cached(const Problem& problem, const Device& device, int device_index);

}  // namespace tgemm
