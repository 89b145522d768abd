#include "ops/aten.hpp"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

namespace tgemm {
namespace {

Tensor convert(const Tensor& tensor, int32_t dtype) {
  if (tensor.dtype() == dtype) return tensor.share();
  return DispatcherCall("aten::to", "dtype")
      .add(tensor)
      .add_dtype(dtype)
      .add_bool(false)  // non_blocking
      .add_bool(false)  // copy
      .add_none()       // memory_format
      .call();
}

Tensor contiguous(const Tensor& tensor) {
  return DispatcherCall("aten::contiguous")
      .add(tensor)
      .add_int(aoti_torch_memory_format_contiguous_format())
      .call();
}

Tensor add(const Tensor& x, const Tensor& y) {
  // aten::add takes a Scalar, which the stable interface cannot convert; subtract has a function.
  AtenTensorHandle sum = nullptr;
  check_torch(aoti_torch_aten_subtract_Tensor(x.get(), y.get(), -1.0, &sum), "add two tensors");
  return Tensor(sum);
}

// alpha and beta as the kernels take them: in FP32, unless the operands are of a type that none
// multiplies.
double scalar(double value, const Checked& checked) {
  return checked.compute == Compute::kGemm ? static_cast<float>(value) : value;
}

Tensor scale(const Tensor& tensor, double factor, const Argument& like) {
  if (factor == 1.0) return tensor.share();
  int32_t dtype = tensor.dtype();
  int32_t device_type = like.device_type;
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_aten_full(nullptr, 0, factor, &dtype, nullptr, &device_type,
                                   like.device_index, nullptr, &handle),
              "make a scalar");
  const Tensor scalar(handle);
  return DispatcherCall("aten::mul", "Tensor").add(tensor).add(scalar).call();
}

Tensor activate(const Tensor& tensor, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return tensor.share();
    case Activation::kRelu:
      return DispatcherCall("aten::relu").add(tensor).call();
    case Activation::kGelu:
      return DispatcherCall("aten::gelu").add(tensor).add_string("none").call();
    case Activation::kGeluTanh:
      return DispatcherCall("aten::gelu").add(tensor).add_string("tanh").call();
    case Activation::kSilu:
      return DispatcherCall("aten::silu").add(tensor).call();
  }
  return tensor.share();
}

// The operand as it enters the multiplication: with precision "bf16" or "fp16", FP32 is rounded
// first.
Tensor operand(const Argument& argument, const Checked& checked, int32_t compute_dtype) {
  if (checked.compute == Compute::kGemm && argument.dtype == aoti_torch_dtype_float32()) {
    if (checked.precision == Precision::kBf16) {
      return convert(convert(argument.tensor, aoti_torch_dtype_bfloat16()), compute_dtype);
    }
    if (checked.precision == Precision::kFp16) {
      return convert(convert(argument.tensor, aoti_torch_dtype_float16()), compute_dtype);
    }
  }
  return convert(argument.tensor, compute_dtype);
}

Tensor linear(const Tensor& a, const Argument& weight, const Argument& bias, const Checked& checked,
              int32_t compute_dtype) {
  const Tensor b = operand(weight, checked, compute_dtype);
  const Tensor addend = bias ? convert(bias.tensor, compute_dtype) : Tensor();
  return DispatcherCall("aten::linear").add(a).add(b).add_optional(addend).call();
}

Tensor multiply(const Request& request, const Checked& checked, const Tensor& a,
                int32_t compute_dtype) {
  if (request.op == Op::kLinear || request.op == Op::kLinearGlu) {
    return linear(a, request.b, request.bias, checked, compute_dtype);
  }
  const Tensor b = operand(request.b, checked, compute_dtype);
  return scale(DispatcherCall("aten::matmul").add(a).add(b).call(), scalar(request.alpha, checked),
               request.a);
}

}  // namespace

Tensor product_with_aten(const Request& request) {
  if (request.op != Op::kLinear) {
    return contiguous(
        DispatcherCall("aten::matmul").add(request.a.tensor).add(request.b.tensor).call());
  }
  return contiguous(DispatcherCall("aten::linear")
                        .add(request.a.tensor)
                        .add(request.b.tensor)
                        .add_optional(request.bias.tensor)
                        .call());
}

void compute_with_aten(const Request& request, const Checked& checked, Results& results) {
  const int32_t compute_dtype =
      checked.compute == Compute::kGemm ? aoti_torch_dtype_float32() : request.a.dtype;
  const Tensor a = operand(request.a, checked, compute_dtype);
  Tensor value = multiply(request, checked, a, compute_dtype);
  if (request.preact) results.preact = contiguous(convert(value, checked.out_dtype));
  value = activate(value, checked.activation);
  if (request.up) {
    const Tensor up = linear(a, request.up, request.up_bias, checked, compute_dtype);
    if (request.preact) results.up_preact = contiguous(convert(up, checked.out_dtype));
    value = DispatcherCall("aten::mul", "Tensor").add(value).add(up).call();
  }
  const double beta = scalar(request.beta, checked);
  if (request.residual && beta != 0.0) {
    const Tensor residual = convert(request.residual.tensor, compute_dtype);
    value = add(value, scale(residual, beta, request.a));
  }
  if (request.out) {
    check_torch(aoti_torch_copy_(request.out.tensor.get(), value.get(), 0), "copy into out");
  } else {
    results.out = contiguous(convert(value, checked.out_dtype));
  }
}

}  // namespace tgemm
