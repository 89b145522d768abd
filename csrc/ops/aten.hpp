// The ops computed by ATen: the CPU implementation, and on CUDA what no kernel can compute.
#pragma once

#include "ops/arguments.hpp"

namespace tgemm {

// FP16, BF16 and FP32 operands are computed in FP32 and rounded once at the end; other dtypes as
// they are. Fills the results with contiguous tensors, or writes request.out.
void compute_with_aten(const Request& request, const Checked& checked, Results& results);

}  // namespace tgemm
