#include "ops/arguments.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>

#include "ops/overlap.hpp"

namespace tgemm {
namespace {

using torch::stable::detail::to;

// torch's codes, read once: the stable interface promises the functions, not the numbers.
const int32_t kFloat16Code = aoti_torch_dtype_float16();
const int32_t kBFloat16Code = aoti_torch_dtype_bfloat16();
const int32_t kFloat32Code = aoti_torch_dtype_float32();
const int32_t kFloat64Code = aoti_torch_dtype_float64();
const int32_t kComplex64Code = aoti_torch_dtype_complex64();
const int32_t kComplex128Code = aoti_torch_dtype_complex128();
const int32_t kStrided = aoti_torch_layout_strided();
const int32_t kCpu = aoti_torch_device_type_cpu();
const int32_t kCuda = aoti_torch_device_type_cuda();

const char* dtype_name(int32_t code) {
  struct Row {
    int32_t code;
    const char* name;
  };
  using torch::headeronly::ScalarType;
  static const Row rows[] = {
      {kFloat16Code, "float16"},
      {kBFloat16Code, "bfloat16"},
      {kFloat32Code, "float32"},
      {kFloat64Code, "float64"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {kComplex64Code, "complex64"},
      {kComplex128Code, "complex128"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
      // The stable interface has no functions for the following; torch does not renumber its
      // dtypes.
      {static_cast<int32_t>(ScalarType::QInt8), "qint8"},
      {static_cast<int32_t>(ScalarType::QUInt8), "quint8"},
      {static_cast<int32_t>(ScalarType::QInt32), "qint32"},
      {static_cast<int32_t>(ScalarType::QUInt4x2), "quint4x2"},
      {static_cast<int32_t>(ScalarType::QUInt2x4), "quint2x4"},
      {static_cast<int32_t>(ScalarType::Float8_e8m0fnu), "float8_e8m0fnu"},
      {static_cast<int32_t>(ScalarType::Float4_e2m1fn_x2), "float4_e2m1fn_x2"},
  };
  for (const Row& row : rows) {
    if (row.code == code) return row.name;
  }
  return "of another kind";
}

const char* layout_name(int32_t layout) {
  if (layout == aoti_torch_layout_sparse_coo()) return "sparse_coo";
  if (layout == aoti_torch_layout_sparse_csr()) return "sparse_csr";
  if (layout == aoti_torch_layout_sparse_csc()) return "sparse_csc";
  if (layout == aoti_torch_layout_sparse_bsr()) return "sparse_bsr";
  if (layout == aoti_torch_layout_sparse_bsc()) return "sparse_bsc";
  if (layout == aoti_torch_layout__mkldnn()) return "mkldnn";
  if (layout == aoti_torch_layout_jagged()) return "jagged";
  return "not strided";
}

bool is_gemm_dtype(int32_t code) {
  return code == kFloat16Code || code == kBFloat16Code || code == kFloat32Code;
}

bool is_complex(int32_t code) { return code == kComplex64Code || code == kComplex128Code; }

// The integers that torch.matmul multiplies on the CPU.
bool is_integer(int32_t code) {
  static const std::array<int32_t, 5> codes = {aoti_torch_dtype_uint8(), aoti_torch_dtype_int8(),
                                               aoti_torch_dtype_int16(), aoti_torch_dtype_int32(),
                                               aoti_torch_dtype_int64()};
  return std::find(codes.begin(), codes.end(), code) != codes.end();
}

Activation parse_activation(const Request& request) {
  if (!request.activation.present()) return Activation::kNone;
  const std::string_view name = request.activation.view();
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  check(false, request.name, ": activation '", name,
        "' is unknown; use relu, gelu, gelu_tanh or silu");
  return Activation::kNone;
}

Precision parse_precision(const Request& request) {
  if (!request.precision.present()) return Precision::kIeee;
  const std::string_view name = request.precision.view();
  if (name == "ieee") return Precision::kIeee;
  if (name == "tf32") return Precision::kTf32;
  if (name == "3xtf32") return Precision::k3xTf32;
  if (name == "bf16") return Precision::kBf16;
  if (name == "fp16") return Precision::kFp16;
  check(false, request.name, ": precision '", name,
        "' is unknown; use ieee, tf32, 3xtf32, bf16 or fp16");
  return Precision::kIeee;
}

void inspect(const Request& request, Argument& argument) {
  if (!argument) return;
  const AtenTensorHandle handle = argument.tensor.get();
  const char* action = "read what a tensor is";
  bool defined = false;
  check_torch(aoti_torch_is_defined(handle, &defined), action);
  check(defined, request.name, ": ", argument.name, " is None; a tensor was expected");
  int32_t layout = 0;
  check_torch(aoti_torch_get_layout(handle, &layout), action);
  check(layout == kStrided, request.name, ": ", argument.name, " has layout ", layout_name(layout),
        "; only strided tensors are supported");
  check_torch(aoti_torch_get_dtype(handle, &argument.dtype), action);
  check_torch(aoti_torch_get_device_type(handle, &argument.device_type), action);
  check_torch(aoti_torch_get_device_index(handle, &argument.device_index), action);
  int64_t dims = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  check_torch(aoti_torch_get_dim(handle, &dims), action);
  check_torch(aoti_torch_get_sizes(handle, &sizes), action);
  check_torch(aoti_torch_get_strides(handle, &strides), action);
  argument.sizes = {sizes, static_cast<size_t>(dims)};
  argument.strides = {strides, static_cast<size_t>(dims)};
}

void check_device(const Request& request, const Argument& argument) {
  if (!argument) return;
  check(argument.device_type == request.a.device_type &&
            (argument.device_type == kCpu || argument.device_index == request.a.device_index),
        request.name, ": ", argument.name, " is on ",
        DeviceName{argument.device_type, argument.device_index}, " but ", request.a.name, " is on ",
        DeviceName{request.a.device_type, request.a.device_index},
        "; all tensors must be on one device");
}

void check_dims(const Request& request) {
  const Argument& a = request.a;
  const Argument& b = request.b;
  switch (request.op) {
    case Op::kMatmul:
      for (const Argument* operand : {&a, &b}) {
        check(!operand->sizes.empty(), request.name, ": ", operand->name,
              " is a 0-d tensor; both operands need at least 1 dimension");
      }
      break;
    case Op::kLinear:
    case Op::kLinearGlu:
      check(!a.sizes.empty(), request.name,
            ": input is a 0-d tensor; it needs at least 1 dimension");
      check(b.sizes.size() == 2, request.name, ": ", b.name, " has shape ", Shape{b.sizes},
            " but must be 2-d, (out_features, in_features)");
      break;
    case Op::kAddmm:
      for (const Argument* operand : {&a, &b}) {
        check(operand->sizes.size() == 2, request.name, ": ", operand->name, " has shape ",
              Shape{operand->sizes}, " but must be 2-d");
      }
      break;
  }
}

Compute check_operand_dtypes(const Request& request) {
  const Argument& a = request.a;
  for (const Argument* operand : {&a, &request.b, &request.up}) {
    if (!*operand) continue;
    const int32_t dtype = operand->dtype;
    check(is_gemm_dtype(dtype) || dtype == kFloat64Code || is_complex(dtype) || is_integer(dtype),
          request.name, ": ", operand->name, " has dtype ", DTypeName{dtype},
          ", which is not supported; use float16, bfloat16 or float32");
  }
  for (const Argument* operand : {&request.b, &request.up}) {
    check(!*operand || operand->dtype == a.dtype, request.name, ": ", operand->name, " has dtype ",
          DTypeName{operand->dtype}, " but ", a.name, " has ", DTypeName{a.dtype}, "; ",
          request.up ? "all" : "both", " operands need one dtype");
  }
  if (is_gemm_dtype(a.dtype)) return Compute::kGemm;
  if (a.dtype == kFloat64Code) return Compute::kFloat64;
  if (is_complex(a.dtype)) return Compute::kComplex;
  check(request.op == Op::kMatmul, request.name, ": ", a.name, " has dtype ", DTypeName{a.dtype},
        "; integers are supported by tgemm.matmul alone");
  check(a.device_type == kCpu, request.name, ": ", a.name, " has dtype ", DTypeName{a.dtype},
        "; integers are supported on the CPU alone");
  return Compute::kInteger;
}

std::vector<int64_t> check_shapes(const Request& request) {
  const Argument& a = request.a;
  const Argument& b = request.b;
  std::vector<int64_t> out_sizes;
  switch (request.op) {
    case Op::kMatmul: {
      std::string error;
      if (!matmul_shape(a.sizes, b.sizes, &out_sizes, &error)) {
        fail(std::string(request.name) + ": " + error);
      }
      break;
    }
    case Op::kLinear:
    case Op::kLinearGlu:
      check(a.sizes.back() == b.sizes[1], request.name, ": input is ", Shape{a.sizes}, " and ",
            b.name, " is ", Shape{b.sizes}, ": the last sizes ", a.sizes.back(), " and ",
            b.sizes[1], " differ");
      check(!request.up || std::ranges::equal(request.up.sizes, b.sizes), request.name, ": ",
            request.up.name, " has shape ", Shape{request.up.sizes}, " but must be ",
            Shape{b.sizes}, ", the shape of ", b.name);
      out_sizes.assign(a.sizes.begin(), a.sizes.end());
      out_sizes.back() = b.sizes[0];
      break;
    case Op::kAddmm:
      check(a.sizes[1] == b.sizes[0], request.name, ": mat1 is ", Shape{a.sizes}, " and mat2 is ",
            Shape{b.sizes}, ": the inner sizes ", a.sizes[1], " and ", b.sizes[0], " differ");
      out_sizes = {a.sizes[0], b.sizes[1]};
      break;
  }
  return out_sizes;
}

int32_t check_out_dtype(const Request& request, Compute compute) {
  const int32_t operands = request.a.dtype;
  if (request.out_dtype < 0 || request.out_dtype == operands) return operands;
  if (compute == Compute::kGemm) {
    check(is_gemm_dtype(request.out_dtype), request.name, ": out_dtype ",
          DTypeName{request.out_dtype}, " is not supported for ", DTypeName{operands},
          " operands; use float16, bfloat16 or float32");
  } else {
    check(false, request.name, ": out_dtype ", DTypeName{request.out_dtype},
          " is not supported for ", DTypeName{operands}, " operands; use ", DTypeName{operands});
  }
  return request.out_dtype;
}

// bias and residual: the operands' dtype, the output's or float32.
void check_addend_dtype(const Request& request, const Argument& addend, const Checked& checked) {
  const int32_t usable[] = {request.a.dtype, checked.out_dtype,
                            checked.compute == Compute::kGemm ? kFloat32Code : request.a.dtype};
  if (std::find(std::begin(usable), std::end(usable), addend.dtype) != std::end(usable)) return;
  std::string names;
  for (const int32_t* dtype = std::begin(usable); dtype != std::end(usable); ++dtype) {
    if (std::find(std::begin(usable), dtype, *dtype) != dtype) continue;  // named already
    names.append(names.empty() ? "" : " or ").append(dtype_name(*dtype));
  }
  check(false, request.name, ": ", addend.name, " has dtype ", DTypeName{addend.dtype},
        " but must have ", names);
}

bool broadcasts_to(std::span<const int64_t> from, std::span<const int64_t> into) {
  if (from.size() > into.size()) return false;
  const size_t offset = into.size() - from.size();
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1 && from[i] != into[offset + i]) return false;
  }
  return true;
}

void check_addends(const Request& request, const Checked& checked) {
  for (const Argument* bias : {&request.bias, &request.up_bias}) {
    if (!*bias) continue;
    check_addend_dtype(request, *bias, checked);
    // Only a plan can ask for a bias of an output without dimensions.
    const int64_t features = checked.out_sizes.empty() ? 1 : checked.out_sizes.back();
    check(bias->sizes.size() == 1 && bias->sizes[0] == features, request.name, ": ", bias->name,
          " has shape ", Shape{bias->sizes}, " but must be ", Shape{{&features, 1}},
          ", one value per output feature");
  }
  if (request.residual) {
    check_addend_dtype(request, request.residual, checked);
    check(broadcasts_to(request.residual.sizes, checked.out_sizes), request.name, ": ",
          request.residual.name, " has shape ", Shape{request.residual.sizes},
          ", which does not broadcast to the output's ", Shape{checked.out_sizes});
  }
}

StridedRegion region(const Argument& argument) {
  size_t bytes = aoti_torch_dtype_element_size(argument.dtype);
  return {reinterpret_cast<uintptr_t>(argument.tensor.data()), argument.sizes, argument.strides,
          static_cast<int64_t>(bytes)};
}

// The same elements in the same order: computing in place is safe element by element.
bool identical(const Argument& x, const Argument& y) {
  return x.tensor.data() == y.tensor.data() && x.dtype == y.dtype &&
         std::equal(x.sizes.begin(), x.sizes.end(), y.sizes.begin(), y.sizes.end()) &&
         std::equal(x.strides.begin(), x.strides.end(), y.strides.begin(), y.strides.end());
}

void check_out(const Request& request, const Checked& checked) {
  const Argument& out = request.out;
  if (!out) return;
  check(out.dtype == checked.out_dtype, request.name, ": out has dtype ", DTypeName{out.dtype},
        " but the result has ", DTypeName{checked.out_dtype});
  check(std::equal(out.sizes.begin(), out.sizes.end(), checked.out_sizes.begin(),
                   checked.out_sizes.end()),
        request.name, ": out has shape ", Shape{out.sizes}, " but the result has ",
        Shape{checked.out_sizes});
  const StridedRegion written = region(out);
  check(!overlaps_itself(written), request.name,
        ": out has elements that share memory with each other");
  for (const Argument* input :
       {&request.a, &request.b, &request.up, &request.bias, &request.up_bias, &request.residual}) {
    if (!*input) continue;
    const bool may_be_identical = input == &request.residual;
    if (may_be_identical && identical(*input, out)) continue;
    check(!regions_overlap(written, region(*input)), request.name, ": out shares memory with ",
          input->name,
          may_be_identical ? " without being exactly the same view of it"
                           : ", which is read while out is written");
  }
}

Argument named(const char* name, StableIValue value) {
  Argument argument;
  argument.name = name;
  argument.tensor = Tensor(to<AtenTensorHandle>(value));
  return argument;
}

Argument named_optional(const char* name, StableIValue value) {
  Argument argument;
  argument.name = name;
  argument.tensor = Tensor(to<std::optional<AtenTensorHandle>>(value).value_or(nullptr));
  return argument;
}

Text text(StableIValue value) { return Text(to<std::optional<StringHandle>>(value)); }

int32_t dtype_or_none(StableIValue value) { return to<std::optional<int32_t>>(value).value_or(-1); }

}  // namespace

void fail(const std::string& sentence) { throw std::runtime_error(sentence); }

void append(std::string& sentence, std::string_view text) { sentence.append(text); }
void append(std::string& sentence, int64_t number) { sentence.append(std::to_string(number)); }
void append(std::string& sentence, DTypeName dtype) { sentence.append(dtype_name(dtype.dtype)); }
void append(std::string& sentence, Shape shape) { sentence.append(shape_string(shape.sizes)); }
void append(std::string& sentence, DeviceName device) {
  if (device.type == kCpu) {
    sentence.append("cpu");
  } else if (device.type == kCuda) {
    sentence.append("cuda:").append(std::to_string(device.index));
  } else if (device.type == aoti_torch_device_type_meta()) {
    sentence.append("meta");
  } else {
    sentence.append("another kind of device");
  }
}

DType kernel_dtype(int32_t torch_dtype) {
  if (torch_dtype == kFloat16Code) return DType::kFloat16;
  if (torch_dtype == kBFloat16Code) return DType::kBFloat16;
  return DType::kFloat32;
}

Checked check_request(Request& request) {
  Checked checked;
  checked.activation = parse_activation(request);
  check(!request.force_kernel.present() || !request.force_kernel.view().empty(), request.name,
        ": force_kernel is empty; name a kernel, or pass None");
  checked.precision = parse_precision(request);
  Argument* const arguments[] = {&request.a,       &request.b,        &request.up, &request.bias,
                                 &request.up_bias, &request.residual, &request.out};
  for (Argument* argument : arguments) inspect(request, *argument);
  for (const Argument* argument : arguments) check_device(request, *argument);
  checked.compute = check_operand_dtypes(request);
  check_dims(request);
  checked.out_sizes = check_shapes(request);
  checked.out_dtype = check_out_dtype(request, checked.compute);
  check(checked.compute != Compute::kComplex || checked.activation == Activation::kNone,
        request.name, ": activation '", request.activation.view(), "' is not defined for ",
        DTypeName{request.a.dtype});
  check_addends(request, checked);
  check_out(request, checked);
  return checked;
}

Request read_matmul(StableIValue* stack, bool with_out) {
  Request request;
  request.op = Op::kMatmul;
  request.name = "tgemm.matmul";
  request.a = named("a", stack[0]);
  request.b = named("b", stack[1]);
  request.out_dtype = dtype_or_none(stack[2]);
  request.precision = text(stack[3]);
  request.force_kernel = text(stack[4]);
  if (with_out) request.out = named("out", stack[5]);
  return request;
}

Request read_linear(StableIValue* stack, bool with_out) {
  Request request;
  request.op = Op::kLinear;
  request.name = "tgemm.linear";
  request.a = named("input", stack[0]);
  request.b = named("weight", stack[1]);
  request.bias = named_optional("bias", stack[2]);
  request.residual = named_optional("residual", stack[3]);
  request.activation = text(stack[4]);
  request.out_dtype = dtype_or_none(stack[5]);
  request.precision = text(stack[6]);
  request.static_weight = to<bool>(stack[7]);
  request.force_kernel = text(stack[8]);
  if (with_out) request.out = named("out", stack[9]);
  return request;
}

Request read_linear_preact(StableIValue* stack) {
  // Its activation is not optional: box it again, so that the rest of the stack reads as linear's.
  stack[4] = torch::stable::detail::from(std::optional<StringHandle>(to<StringHandle>(stack[4])));
  Request request = read_linear(stack, false);
  request.preact = true;
  return request;
}

Request read_linear_glu(StableIValue* stack, bool with_out) {
  Request request;
  request.op = Op::kLinearGlu;
  request.name = "tgemm.linear_glu";
  request.a = named("input", stack[0]);
  request.b = named("gate_weight", stack[1]);
  request.up = named("up_weight", stack[2]);
  request.bias = named_optional("gate_bias", stack[3]);
  request.up_bias = named_optional("up_bias", stack[4]);
  request.activation = Text(to<StringHandle>(stack[5]));
  request.out_dtype = dtype_or_none(stack[6]);
  request.precision = text(stack[7]);
  request.static_weight = to<bool>(stack[8]);
  request.force_kernel = text(stack[9]);
  if (with_out) request.out = named("out", stack[10]);
  return request;
}

Request read_linear_glu_preact(StableIValue* stack) {
  Request request = read_linear_glu(stack, false);
  request.preact = true;
  return request;
}

Request read_addmm(StableIValue* stack, bool with_out) {
  Request request;
  request.op = Op::kAddmm;
  request.name = "tgemm.addmm";
  request.residual = named("input", stack[0]);
  request.a = named("mat1", stack[1]);
  request.b = named("mat2", stack[2]);
  request.beta = to<double>(stack[3]);
  request.alpha = to<double>(stack[4]);
  request.out_dtype = dtype_or_none(stack[5]);
  request.precision = text(stack[6]);
  request.force_kernel = text(stack[7]);
  if (with_out) request.out = named("out", stack[8]);
  return request;
}

PlanRequest read_plan(StableIValue* stack) {
  PlanRequest plan;
  Request& request = plan.request;
  request.op = Op::kMatmul;
  request.name = "tgemm._plan";
  request.a = named("a", stack[0]);
  request.b = named("b", stack[1]);
  request.bias = named_optional("bias", stack[2]);
  request.residual = named_optional("residual", stack[3]);
  request.activation = text(stack[4]);
  request.out_dtype = dtype_or_none(stack[5]);
  request.precision = text(stack[6]);
  request.force_kernel = text(stack[7]);
  request.beta = to<double>(stack[8]);
  request.alpha = to<double>(stack[9]);
  request.static_weight = to<bool>(stack[10]);
  request.preact = to<bool>(stack[11]);
  plan.out = named_optional("out", stack[12]).tensor;
  plan.card = text(stack[13]);
  return plan;
}

PlanRequest read_linear_glu_plan(StableIValue* stack) {
  PlanRequest plan;
  plan.request = read_linear_glu(stack, false);
  plan.request.preact = to<bool>(stack[10]);
  plan.out = named_optional("out", stack[11]).tensor;
  plan.card = text(stack[12]);
  return plan;
}

}  // namespace tgemm
