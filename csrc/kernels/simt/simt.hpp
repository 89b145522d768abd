// The row of the kernel table for GEMM on the FMA pipes, in true FP32.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

KernelEntry simt_entry();

}  // namespace tgemm
