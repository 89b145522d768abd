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

constexpr int kPieceElements = 8;  // of the 16 bytes that are read at once

// Enqueues the kernel, or describes it. `tail`: elements at the end of K for which no pieces may be
// read, fewer than a piece has.
std::string launch(const GemmParams& params, int tail, const LaunchTarget& target);

}  // namespace gemv

KernelEntry gemv_entry();

}  // namespace tgemm
