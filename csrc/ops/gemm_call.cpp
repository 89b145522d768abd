#include "ops/gemm_call.hpp"

#include <cstddef>
#include <vector>

namespace tgemm {
namespace {

Tensor expanded_copy(const Tensor& tensor, std::span<const int64_t> sizes) {
  const Tensor expanded =
      DispatcherCall("aten::expand").add(tensor).add_sizes(sizes).add_bool(false).call();
  return DispatcherCall("aten::contiguous")
      .add(expanded)
      .add_int(aoti_torch_memory_format_contiguous_format())
      .call();
}

}  // namespace

TensorView view_of(const Argument& argument) {
  return {argument.sizes, argument.strides, kernel_dtype(argument.dtype),
          reinterpret_cast<uintptr_t>(argument.tensor.data())};
}

TensorView view_of(const Tensor& tensor) {
  return {tensor.sizes(), tensor.strides(), kernel_dtype(tensor.dtype()),
          reinterpret_cast<uintptr_t>(tensor.mutable_data())};
}

LoweringRequest lowering_of(const Request& request, const Checked& checked,
                            TransposedWeights& transposed) {
  LoweringRequest lowering;
  lowering.a = view_of(request.a);
  lowering.b = view_of(request.b);
  if (request.op == Op::kLinear || request.op == Op::kLinearGlu) {
    transposed[0].transpose(lowering.b);
  }
  if (request.up) {
    lowering.up = view_of(request.up);
    transposed[1].transpose(*lowering.up);
  }
  if (request.up_bias) lowering.up_bias = view_of(request.up_bias);
  if (request.bias) lowering.bias = view_of(request.bias);
  // With beta = 0 the residual is never read.
  if (request.residual && static_cast<float>(request.beta) != 0.0f) {
    lowering.residual = view_of(request.residual);
  }
  lowering.precision = checked.precision;
  lowering.activation = checked.activation;
  lowering.alpha = static_cast<float>(request.alpha);
  lowering.beta = static_cast<float>(request.beta);
  lowering.static_weight = request.static_weight;
  return lowering;
}

BatchCopies::BatchCopies(const Request& request, const Checked& checked,
                         LoweringRequest& lowering) {
  const size_t matrix_dims =
      (request.a.sizes.size() > 1 ? 1 : 0) + (request.b.sizes.size() > 1 ? 1 : 0);
  const std::span<const int64_t> out(checked.out_sizes);
  const std::span<const int64_t> batch = out.first(out.size() - matrix_dims);
  const auto copy_operand = [&](const Argument& operand, TensorView& view) {
    if (operand.sizes.size() <= 2) return Tensor();
    std::vector<int64_t> sizes(batch.begin(), batch.end());
    sizes.insert(sizes.end(), operand.sizes.end() - 2, operand.sizes.end());
    Tensor copy = expanded_copy(operand.tensor, sizes);
    view = view_of(copy);
    return copy;
  };
  a = copy_operand(request.a, lowering.a);
  b = copy_operand(request.b, lowering.b);
  if (lowering.residual) {
    residual = expanded_copy(request.residual.tensor, out);
    lowering.residual = view_of(residual);
  }
}

}  // namespace tgemm
