// The skinny row of the kernel table.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

KernelEntry skinny_entry();

}  // namespace tgemm
