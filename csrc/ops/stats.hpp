// Counters of what ran, for torch_gemm.stats(). Thread-safe.
#pragma once

#include <string>

#include "gemm/plan.hpp"

namespace tgemm {

void count_launch(const Plan& plan);
// `what` is "matmul: float64".
void count_fallback(const std::string& what);
void reset_stats();
// {"kernels": {"mma_sync:128x256": 12}, "fallbacks": {"matmul: float64": 1}}
std::string stats_json();

}  // namespace tgemm
