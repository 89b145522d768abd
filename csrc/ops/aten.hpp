// The ops computed by ATen: the CPU implementation, and on CUDA what no kernel can compute.
#pragma once

#include "ops/arguments.hpp"

namespace tgemm {

// FP16, BF16 and FP32 operands are computed in FP32 and rounded once at the end; other dtypes as
// they are. Fills the results with contiguous tensors, or writes request.out.
void compute_with_aten(const Request& request, const Checked& checked, Results& results);

// input @ weight.T + bias or a @ b as torch itself computes it, in the operands' dtype; contiguous.
// For requests that ask for no more (aten_computes() in gemm/tuning.hpp).
Tensor product_with_aten(const Request& request);

}  // namespace tgemm
