// The row of the kernel table for few rows of x and a weight that lies as it likes.
#pragma once

#include <string>

#include "device/params.hpp"
#include "gemm/plan.hpp"

namespace tgemm {
namespace gemv {

constexpr int kRows = 8;      // of x, the eight columns of mma's B
constexpr int kColumns = 16;  // of the output: rows of the weight, the sixteen of mma's A
constexpr int kWarps = 8;     // which divide K
// K is divided among the warps and, within one, among the four lanes that share a row; each takes
// as many elements at a time.
constexpr int kStep = 16;

// Enqueues the kernel, or describes it.
std::string launch(const GemmParams& params, const LaunchTarget& target);

}  // namespace gemv

KernelEntry gemv_entry();

}  // namespace tgemm
