// The ops that torch sees, in the namespace `tgemm`. Implementations: cpu.cpp, cuda.cpp. Fake
// tensors, gradients and autocast: torch_gemm/_fake.py and torch_gemm/autograd.py.
//
// Rules that shaped the schemas: an argument named `kernel` breaks Inductor (hence `force_kernel`);
// one named `self` makes torch.compile warn (hence addmm's `input`); the .out overloads return
// nothing, because an op that returns its aliased `out` cannot be compiled.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(tgemm, m) {
  m.def(
      "matmul(Tensor a, Tensor b, *, ScalarType? out_dtype=None, str? precision=None, "
      "str? force_kernel=None) -> Tensor");
  m.def(
      "matmul.out(Tensor a, Tensor b, *, ScalarType? out_dtype=None, str? precision=None, "
      "str? force_kernel=None, Tensor(a!) out) -> ()");
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, Tensor? residual=None, *, "
      "str? activation=None, ScalarType? out_dtype=None, str? precision=None, "
      "bool static_weight=False, str? force_kernel=None) -> Tensor");
  m.def(
      "linear.out(Tensor input, Tensor weight, Tensor? bias=None, Tensor? residual=None, *, "
      "str? activation=None, ScalarType? out_dtype=None, str? precision=None, "
      "bool static_weight=False, str? force_kernel=None, Tensor(a!) out) -> ()");
  // linear that also returns activation's argument, in the output's dtype: what a gradient needs.
  m.def(
      "_linear_preact(Tensor input, Tensor weight, Tensor? bias=None, Tensor? residual=None, *, "
      "str activation, ScalarType? out_dtype=None, str? precision=None, "
      "bool static_weight=False, str? force_kernel=None) -> (Tensor, Tensor)");
  m.def(
      "linear_glu(Tensor input, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias=None, "
      "Tensor? up_bias=None, *, str activation=\"silu\", ScalarType? out_dtype=None, "
      "str? precision=None, bool static_weight=False, str? force_kernel=None) -> Tensor");
  m.def(
      "linear_glu.out(Tensor input, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias=None, "
      "Tensor? up_bias=None, *, str activation=\"silu\", ScalarType? out_dtype=None, "
      "str? precision=None, bool static_weight=False, str? force_kernel=None, "
      "Tensor(a!) out) -> ()");
  // linear_glu that also returns what a gradient needs, in the output's dtype: activation's
  // argument, and what its result is multiplied by.
  m.def(
      "_linear_glu_preact(Tensor input, Tensor gate_weight, Tensor up_weight, "
      "Tensor? gate_bias=None, Tensor? up_bias=None, *, str activation=\"silu\", "
      "ScalarType? out_dtype=None, str? precision=None, bool static_weight=False, "
      "str? force_kernel=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "addmm(Tensor input, Tensor mat1, Tensor mat2, *, float beta=1, float alpha=1, "
      "ScalarType? out_dtype=None, str? precision=None, str? force_kernel=None) -> Tensor");
  m.def(
      "addmm.out(Tensor input, Tensor mat1, Tensor mat2, *, float beta=1, float alpha=1, "
      "ScalarType? out_dtype=None, str? precision=None, str? force_kernel=None, "
      "Tensor(a!) out) -> ()");

  // Introspection; the strings are JSON. Implemented by the CUDA library.
  m.def("_kernels() -> str");
  m.def("_device(int index) -> str");
  m.def("_stats() -> str");
  m.def("_reset_stats() -> ()");
  m.def("_set_fallback(str policy) -> ()");
  // The address of cuda.cpp's WarningCallback, or 0.
  m.def("_set_warning_callback(int address) -> ()");
  // How act(alpha * (a @ b) + bias) + beta * residual would run. linear(input, weight) is a =
  // input, b = weight.T. `preact`: as the op that also returns act's argument; `out`: whose layout
  // counts. Tensors may be on any device, those without data included. `card` describes the GPU, in
  // the form of introspection.cpp's read_card(); without it, the operands' own is meant.
  m.def(
      "_plan(Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, *, "
      "str? activation=None, ScalarType? out_dtype=None, str? precision=None, "
      "str? force_kernel=None, float beta=1, float alpha=1, bool static_weight=False, "
      "bool preact=False, Tensor? out=None, str? card=None) -> str");
  // The same of linear_glu.
  m.def(
      "_linear_glu_plan(Tensor input, Tensor gate_weight, Tensor up_weight, "
      "Tensor? gate_bias=None, Tensor? up_bias=None, *, str activation=\"silu\", "
      "ScalarType? out_dtype=None, str? precision=None, bool static_weight=False, "
      "str? force_kernel=None, bool preact=False, Tensor? out=None, str? card=None) -> str");
  // What was measured on one card, as lines "WAY\\tKEY" (csrc/gemm/tuning.hpp).
  m.def("_add_tuning(str card, int sm_count, str table) -> ()");
  m.def("_clear_tuning() -> ()");
}
