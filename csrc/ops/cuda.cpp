// The ops on CUDA: check, lower to one GEMM, select a kernel, allocate through torch, launch.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "gemm/lowering.hpp"
#include "gemm/plan.hpp"
#include "gemm/tuning.hpp"
#include "ops/arguments.hpp"
#include "ops/aten.hpp"
#include "ops/device_properties.hpp"
#include "ops/gemm_call.hpp"
#include "ops/plan_cache.hpp"
#include "ops/stats.hpp"

namespace tgemm {
namespace {

// --- Warnings

// torch's own function for them prints to stderr when called from an op, past Python's filters, so
// the Python package leaves a way to warn here. It may be called with or without the GIL; it
// returns true, with zero-terminated text in `error`, if the warning became an exception.
using WarningCallback = bool (*)(const char* sentence, char* error, size_t size);
std::atomic<WarningCallback> warning_callback{nullptr};

void warn(const std::string& sentence) {
  const WarningCallback callback = warning_callback;
  if (callback == nullptr) {  // no interpreter (AOTInductor), or one that is shutting down
    aoti_torch_warn("warn", "tgemm", 0, sentence.c_str());
    return;
  }
  char error[1024] = "";
  if (callback(sentence.c_str(), error, sizeof(error))) fail(error);
}

// --- Fallback to ATen

enum class FallbackPolicy : int { kAllow, kWarn, kError };
std::atomic<FallbackPolicy> fallback_policy{FallbackPolicy::kWarn};

void set_fallback(std::string_view policy) {
  if (policy == "allow") {
    fallback_policy = FallbackPolicy::kAllow;
  } else if (policy == "warn") {
    fallback_policy = FallbackPolicy::kWarn;
  } else if (policy == "error") {
    fallback_policy = FallbackPolicy::kError;
  } else {
    check(false, "tgemm: the fallback policy '", policy, "' is unknown; use allow, warn or error");
  }
}

void fall_back(const Request& request, const Checked& checked, Results& results) {
  check(!request.force_kernel.present(), request.name, ": force_kernel '",
        request.force_kernel.view(), "' cannot run ", DTypeName{request.a.dtype}, " operands");
  std::string sentence = request.name;
  append(sentence, ": ");
  append(sentence, request.a.name);
  append(sentence, " has dtype ");
  append(sentence, DTypeName{request.a.dtype});
  append(sentence, ", which no kernel of torch_gemm multiplies");
  const FallbackPolicy policy = fallback_policy;
  if (policy == FallbackPolicy::kError) fail(sentence + "; the fallback policy is 'error'");
  if (policy == FallbackPolicy::kWarn) warn(sentence + "; ATen computes it");
  std::string what = request.name + sizeof("tgemm.") - 1;
  append(what, ": ");
  append(what, DTypeName{request.a.dtype});
  count_fallback(what);
  compute_with_aten(request, checked, results);
}

// --- From tensors to a launch

// Module loading and attribute calls that come with a kernel's first launch are legal while this
// thread captures a CUDA graph in the strictest mode.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

Choice choose_for(const Request& request, const Device& device, const Problem& problem) {
  const std::string_view force = request.force_kernel.view();
  return force.empty() ? choose_cached(problem, device, request.a.device_index)
                       : Choice{.selection = select(problem, device, force)};
}

const Plan& plan_of(const Request& request, const Selection& selection) {
  if (!selection.plan) fail(std::string(request.name) + ": " + selection.error);
  return *selection.plan;
}

// Launches the plan with a workspace of its own.
void run_plan(const Request& request, const Plan& plan, const Problem& problem, Operands operands) {
  if (problem.empty()) return;
  const int32_t index = request.a.device_index;
  Tensor workspace;
  if (plan.workspace_bytes > 0) {
    const auto bytes = static_cast<int64_t>(plan.workspace_bytes);
    workspace = empty({&bytes, 1}, aoti_torch_dtype_uint8(), request.a.device_type, index);
    operands.workspace = workspace.mutable_data();
  }
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(index, &stream), "name the current stream");
  const std::string error = launch(plan, problem, operands, static_cast<CUstream_st*>(stream));
  if (!error.empty()) {
    fail(std::string(request.name) + ": " + to_string(plan) + " could not run " +
         to_string(problem) + ": " + error);
  }
  count_launch(plan);
}

void run_gated(const Request& request, const Device& device, const Lowered& lowered,
               const Operands& operands, void* up_preact) {
  const GatedChoice choice = choose_gated(request, lowered, [&](const Problem& problem) {
    return choose_for(request, device, problem);
  });
  if (choice.whole.plan) {
    run_plan(request, *choice.whole.plan, lowered.problem, operands);
    return;
  }
  // Nothing runs unless both can.
  const Plan& gate_plan = plan_of(request, choice.gate);
  const Plan& up_plan = plan_of(request, choice.up);
  const int64_t elements = choice.steps.between_elements;
  const Tensor between = empty({&elements, 1}, aoti_torch_dtype_float32(), request.a.device_type,
                               request.a.device_index);
  Operands gate = operands;
  gate.up = gate.up_bias = nullptr;
  gate.out = between.mutable_data();
  run_plan(request, gate_plan, choice.steps.gate, gate);

  Operands up = operands;
  (lowered.swapped ? up.a : up.b) = operands.up;
  up.bias = operands.up_bias;
  up.up = up.up_bias = nullptr;
  up.residual = gate.out;
  up.preact = up_preact;
  run_plan(request, up_plan, choice.steps.up, up);
}

// Whether the request is left to ATen because that was measured to be faster. Not where an op
// writes into a given tensor, which ATen would copy to, and not if nothing may be left to ATen.
bool left_to_aten(const Request& request, const Choice& choice) {
  if (!choice.aten || request.out || fallback_policy == FallbackPolicy::kError) return false;
  std::string what = request.name + sizeof("tgemm.") - 1;
  count_fallback(what.append(": measured to be faster"));
  return true;
}

void run(const Request& request, const Device& device, const LoweringRequest& lowering,
         const Lowered& lowered, Results& results) {
  if (lowered.problem.empty() && !request.force_kernel.present()) return;
  const auto pointer = [](const TensorView& view) { return reinterpret_cast<void*>(view.address); };
  Operands operands;
  operands.a = pointer(lowered.swapped ? lowering.b : lowering.a);
  operands.b = pointer(lowered.swapped ? lowering.a : lowering.b);
  if (lowering.bias) operands.bias = pointer(*lowering.bias);
  if (lowering.residual) operands.residual = pointer(*lowering.residual);
  if (lowering.up) operands.up = pointer(*lowering.up);
  if (lowering.up_bias) operands.up_bias = pointer(*lowering.up_bias);
  if (lowering.preact) operands.preact = pointer(*lowering.preact);
  operands.out = pointer(lowering.out);
  if (lowered.problem.gated) {
    void* const up_preact = results.up_preact ? results.up_preact.mutable_data() : nullptr;
    run_gated(request, device, lowered, operands, up_preact);
  } else {
    const Choice choice = choose_for(request, device, lowered.problem);
    if (left_to_aten(request, choice)) {
      results.out = product_with_aten(request);
      return;
    }
    run_plan(request, plan_of(request, choice.selection), lowered.problem, operands);
  }
}

void execute_cuda(Request& request, Results& results) {
  const Checked checked = check_request(request);
  if (checked.compute != Compute::kGemm) {
    fall_back(request, checked, results);
    return;
  }
  const int32_t index = request.a.device_index;
  const RelaxedCapture relaxed;
  const Device& device = device_properties(index);  // says what is wrong with the driver or the GPU
  const CurrentDevice current(index);

  TransposedWeights transposed;
  LoweringRequest lowering = lowering_of(request, checked, transposed);
  const auto allocate = [&] {
    return empty(checked.out_sizes, checked.out_dtype, request.a.device_type, index);
  };
  if (request.out) {
    lowering.out = view_of(request.out.tensor);
  } else {
    results.out = allocate();
    lowering.out = view_of(results.out);
  }
  if (request.preact) {
    results.preact = allocate();
    lowering.preact = view_of(results.preact);
    if (request.up) results.up_preact = allocate();
  }

  Lowered lowered = lower(lowering);
  if (lowered.error.empty()) [[likely]] {
    run(request, device, lowering, lowered, results);
    return;
  }
  // What cannot be addressed is copied: first an `out` with unit stride in neither rows nor
  // columns, then the batches of the inputs.
  Tensor fresh;
  if (request.out) {
    fresh = allocate();
    lowering.out = view_of(fresh);
    lowered = lower(lowering);
  }
  std::optional<BatchCopies> copies;
  if (!lowered.error.empty()) {
    copies.emplace(request, checked, lowering);
    lowered = lower(lowering);
  }
  if (!lowered.error.empty()) fail(std::string(request.name) + ": " + lowered.error);
  run(request, device, lowering, lowered, results);
  if (request.out) {
    check_torch(aoti_torch_copy_(request.out.tensor.get(), fresh.get(), 0), "copy into out");
  }
}

// --- Registration

void boxed_set_fallback(StableIValue* stack, uint64_t, uint64_t) {
  const Text policy(torch::stable::detail::to<StringHandle>(stack[0]));
  set_fallback(policy.view());
}

// 0: no callback.
void boxed_set_warning_callback(StableIValue* stack, uint64_t, uint64_t) {
  const auto address = torch::stable::detail::to<int64_t>(stack[0]);
  warning_callback = reinterpret_cast<WarningCallback>(static_cast<intptr_t>(address));
}

// Sparse and quantized tensors reach the same checks, which say that they are not supported.
using CudaOps = BoxedOps<execute_cuda>;

STABLE_TORCH_LIBRARY_IMPL(tgemm, CUDA, m) { CudaOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, SparseCUDA, m) { CudaOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, SparseCsrCUDA, m) { CudaOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, QuantizedCUDA, m) { CudaOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, CompositeExplicitAutograd, m) {
  m.impl("_set_fallback", &boxed_set_fallback);
  m.impl("_set_warning_callback", &boxed_set_warning_callback);
}

}  // namespace
}  // namespace tgemm
