// The sm90 rows of the kernel table.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

KernelEntry sm90_entry();
KernelEntry sm90_tf32_entry();
KernelEntry sm90_packed_entry();
KernelEntry sm90_3xtf32_entry();

}  // namespace tgemm
