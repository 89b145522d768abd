// What a call of an op asks for, and the checks that the CPU and the CUDA implementation share.
// Every rule about dtypes, shapes, devices, layouts and aliasing is here; its counterpart for fake
// tensors is torch_gemm/_fake.py, with the same sentences.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/lowering.hpp"
#include "gemm/problem.hpp"
#include "ops/tensor.hpp"

namespace tgemm {

// --- Errors: one plain sentence, without function, file or line

[[noreturn]] void fail(const std::string& sentence);

// Parts of a sentence. They become text only when the check fails.
struct DTypeName {
  int32_t dtype;  // torch's code
};
struct Shape {
  std::span<const int64_t> sizes;
};
struct DeviceName {
  int32_t type;
  int32_t index;
};
void append(std::string& sentence, std::string_view text);
void append(std::string& sentence, int64_t number);
void append(std::string& sentence, DTypeName dtype);
void append(std::string& sentence, Shape shape);
void append(std::string& sentence, DeviceName device);

template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (condition) [[likely]]
    return;
  std::string sentence;
  (append(sentence, parts), ...);
  fail(sentence);
}

// --- Requests

enum class Op : uint8_t { kMatmul, kLinear, kLinearGlu, kAddmm };

// One tensor argument with the metadata that the checks read. Absent when `tensor` is null.
struct Argument {
  const char* name = "";
  Tensor tensor;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;
  int32_t dtype = -1;
  int32_t device_type = -1;
  int32_t device_index = -1;

  explicit operator bool() const { return static_cast<bool>(tensor); }
};

// out = activation(alpha * (a @ b) + bias) + beta * residual, as asked for. For linear, `b` holds
// the weight as it is, (N, K); for addmm, `residual` holds its input. For linear_glu,
// out = activation(a @ b + bias) * (a @ up + up_bias), with both weights as they are.
struct Request {
  Op op = Op::kMatmul;
  const char* name = "";  // "tgemm.linear", how every sentence begins
  Argument a, b, up, bias, up_bias, residual, out;
  Text activation, precision, force_kernel;
  int32_t out_dtype = -1;  // -1: as the operands
  double alpha = 1.0;
  double beta = 1.0;
  bool static_weight = false;
  bool preact = false;  // the pre-activation is a second result, of linear_glu `up` a third
};

// How the operands' dtype is computed.
enum class Compute : uint8_t {
  kGemm,     // float16, bfloat16, float32: the kernels; on the CPU in FP32
  kFloat64,  // and the rest only through ATen
  kComplex,
  kInteger,
};

// A Request that passed the checks.
struct Checked {
  std::vector<int64_t> out_sizes;
  int32_t out_dtype = -1;
  Compute compute = Compute::kGemm;
  Activation activation = Activation::kNone;
  Precision precision = Precision::kIeee;
};

// Fills in the metadata of the request's arguments, and throws one sentence if it breaks a rule.
Checked check_request(Request& request);

// The kernels' name of one of the three dtypes that they know.
DType kernel_dtype(int32_t torch_dtype);

struct Results {
  Tensor out;  // stays empty when the request brought its own
  Tensor preact;
  Tensor up_preact;
};

// --- Reading a Request from the stack of a boxed op
//
// The stack holds the arguments in the order of the schema; each reader takes ownership of all of
// them.

Request read_matmul(StableIValue* stack, bool with_out);
Request read_linear(StableIValue* stack, bool with_out);
Request read_linear_preact(StableIValue* stack);
Request read_linear_glu(StableIValue* stack, bool with_out);
Request read_linear_glu_preact(StableIValue* stack);
Request read_addmm(StableIValue* stack, bool with_out);

// What the ops that plan have beside a Request.
struct PlanRequest {
  Request request;
  Tensor out;  // absent: as the op would allocate it
  Text card;
};
PlanRequest read_plan(StableIValue* stack);
PlanRequest read_linear_glu_plan(StableIValue* stack);

// Boxed kernels of all ops over one implementation, `void execute(Request&, Results&)`.
template <void (*execute)(Request&, Results&)>
struct BoxedOps {
  static void matmul(StableIValue* stack, uint64_t, uint64_t) {
    run(read_matmul(stack, false), stack);
  }
  static void matmul_out(StableIValue* stack, uint64_t, uint64_t) {
    run(read_matmul(stack, true), stack);
  }
  static void linear(StableIValue* stack, uint64_t, uint64_t) {
    run(read_linear(stack, false), stack);
  }
  static void linear_out(StableIValue* stack, uint64_t, uint64_t) {
    run(read_linear(stack, true), stack);
  }
  static void linear_preact(StableIValue* stack, uint64_t, uint64_t) {
    run(read_linear_preact(stack), stack);
  }
  static void linear_glu(StableIValue* stack, uint64_t, uint64_t) {
    run(read_linear_glu(stack, false), stack);
  }
  static void linear_glu_out(StableIValue* stack, uint64_t, uint64_t) {
    run(read_linear_glu(stack, true), stack);
  }
  static void linear_glu_preact(StableIValue* stack, uint64_t, uint64_t) {
    run(read_linear_glu_preact(stack), stack);
  }
  static void addmm(StableIValue* stack, uint64_t, uint64_t) {
    run(read_addmm(stack, false), stack);
  }
  static void addmm_out(StableIValue* stack, uint64_t, uint64_t) {
    run(read_addmm(stack, true), stack);
  }

  template <class Library>
  static void register_in(Library& library) {
    library.impl("matmul", &matmul);
    library.impl("matmul.out", &matmul_out);
    library.impl("linear", &linear);
    library.impl("linear.out", &linear_out);
    library.impl("_linear_preact", &linear_preact);
    library.impl("linear_glu", &linear_glu);
    library.impl("linear_glu.out", &linear_glu_out);
    library.impl("_linear_glu_preact", &linear_glu_preact);
    library.impl("addmm", &addmm);
    library.impl("addmm.out", &addmm_out);
  }

 private:
  static void run(Request request, StableIValue* stack) {
    Results results;
    execute(request, results);
    if (!request.out) stack[0] = torch::stable::detail::from(results.out.release());
    if (request.preact) stack[1] = torch::stable::detail::from(results.preact.release());
    if (request.preact && request.up) {
      stack[2] = torch::stable::detail::from(results.up_preact.release());
    }
  }
};

}  // namespace tgemm
