// The row of the kernel table for GEMM on mma.sync.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

KernelEntry mma_sync_entry();

}  // namespace tgemm
