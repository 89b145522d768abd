// The row of the kernel table for many small products.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

KernelEntry tiny_entry();

}  // namespace tgemm
