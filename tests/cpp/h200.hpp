// A card that need not be in this machine.
#pragma once

#include "gemm/plan.hpp"

namespace tgemm {

// Figures from the vendor's data sheet; shared memory from the CUDA programming guide.
inline Device h200() { return {"H200", 90, 132, 227 << 10, 228 << 10, 50 << 20, 1.98, 4.45e6}; }

}  // namespace tgemm
