// The ladder: the classic path of GEMM optimisation, one kernel for each idea. Its rung between
// volta_mma and wgmma is the production kernel mma_sync (kernels/sm80). These kernels run when they
// are asked for by name.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

KernelEntry naive_entry();
KernelEntry tiled_entry();
KernelEntry tiled_padded_entry();
KernelEntry tiled_vectorized_entry();
KernelEntry wmma_entry();
KernelEntry wmma_double_buffered_entry();
KernelEntry volta_mma_entry();
KernelEntry wgmma_entry();

}  // namespace tgemm
