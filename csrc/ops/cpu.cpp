// The ops on the CPU, through ATen.
#include <torch/csrc/stable/library.h>

#include "ops/arguments.hpp"
#include "ops/aten.hpp"

namespace tgemm {
namespace {

void execute_cpu(Request& request, Results& results) {
  const Checked checked = check_request(request);
  check(!request.force_kernel.present(), request.name, ": force_kernel '",
        request.force_kernel.view(), "' names a CUDA kernel, but ", request.a.name,
        " is on the CPU");
  compute_with_aten(request, checked, results);
}

// A nested tensor has no sizes to check, so it cannot reach check_request.
[[noreturn]] void reject_nested(Request& request, Results&) {
  fail(std::string(request.name) + ": nested tensors are not supported; use padded or packed ones");
}

// Sparse, quantized and mkldnn tensors reach the same checks, which say that they are not
// supported.
using CpuOps = BoxedOps<execute_cpu>;

STABLE_TORCH_LIBRARY_IMPL(tgemm, CPU, m) { CpuOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, SparseCPU, m) { CpuOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, SparseCsrCPU, m) { CpuOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, MkldnnCPU, m) { CpuOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, QuantizedCPU, m) { CpuOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, NestedTensorCPU, m) { BoxedOps<reject_nested>::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, NestedTensorCUDA, m) { BoxedOps<reject_nested>::register_in(m); }

}  // namespace
}  // namespace tgemm
