// The ops on CUDA: check, lower to one GEMM, select a kernel, allocate through torch, launch.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "gemm/lowering.hpp"
#include "gemm/plan.hpp"
#include "ops/arguments.hpp"
#include "ops/aten.hpp"
#include "ops/device_properties.hpp"
#include "ops/json.hpp"
#include "ops/plan_cache.hpp"
#include "ops/stats.hpp"

namespace tgemm {
namespace {

using torch::stable::accelerator::DeviceGuard;

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

TensorView view_of(const Argument& argument) {
  return {argument.sizes, argument.strides, kernel_dtype(argument.dtype),
          reinterpret_cast<uintptr_t>(argument.tensor.data())};
}

TensorView view_of(const Tensor& tensor) {
  return {tensor.sizes(), tensor.strides(), kernel_dtype(tensor.dtype()),
          reinterpret_cast<uintptr_t>(tensor.mutable_data())};
}

// The inputs of the request as lower() wants them; `out` is left to the caller. `transposed` keeps
// the sizes and strides of weight.T alive.
LoweringRequest lowering_of(const Request& request, const Checked& checked,
                            std::array<int64_t, 4>& transposed) {
  LoweringRequest lowering;
  lowering.a = view_of(request.a);
  lowering.b = view_of(request.b);
  if (request.op == Op::kLinear) {
    transposed = {request.b.sizes[1], request.b.sizes[0], request.b.strides[1],
                  request.b.strides[0]};
    lowering.b.sizes = std::span(transposed).first(2);
    lowering.b.strides = std::span(transposed).last(2);
  }
  if (request.bias) lowering.bias = view_of(request.bias);
  // With beta = 0 the residual is never read.
  if (request.residual && static_cast<float>(request.beta) != 0.0f) {
    lowering.residual = view_of(request.residual);
  }
  lowering.precision = checked.precision;
  lowering.activation = checked.activation;
  lowering.alpha = static_cast<float>(request.alpha);
  lowering.beta = static_cast<float>(request.beta);
  return lowering;
}

Tensor expanded_copy(const Tensor& tensor, std::span<const int64_t> sizes) {
  const Tensor expanded =
      DispatcherCall("aten::expand").add(tensor).add_sizes(sizes).add_bool(false).call();
  return DispatcherCall("aten::contiguous")
      .add(expanded)
      .add_int(aoti_torch_memory_format_contiguous_format())
      .call();
}

// Batch dimensions that no GEMM can address as they are (more of them than a Problem holds): every
// batched input becomes a contiguous copy with the output's batch.
struct BatchCopies {
  Tensor a, b, residual;

  BatchCopies(const Request& request, const Checked& checked, LoweringRequest& lowering) {
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
};

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

void run(const Request& request, const Device& device, const LoweringRequest& lowering,
         const Lowered& lowered) {
  const Problem& problem = lowered.problem;
  const std::string_view force = request.force_kernel.view();
  if (problem.empty() && force.empty()) return;
  const int32_t index = request.a.device_index;
  const Selection selection =
      force.empty() ? select_cached(problem, device, index) : select(problem, device, force);
  if (!selection.plan) fail(std::string(request.name) + ": " + selection.error);
  if (problem.empty()) return;
  const Plan& plan = *selection.plan;

  Tensor workspace;
  Operands operands;
  if (plan.workspace_bytes > 0) {
    const auto bytes = static_cast<int64_t>(plan.workspace_bytes);
    workspace = empty({&bytes, 1}, aoti_torch_dtype_uint8(), request.a.device_type, index);
    operands.workspace = workspace.mutable_data();
  }
  const auto pointer = [](const TensorView& view) { return reinterpret_cast<void*>(view.address); };
  operands.a = pointer(lowered.swapped ? lowering.b : lowering.a);
  operands.b = pointer(lowered.swapped ? lowering.a : lowering.b);
  if (lowering.bias) operands.bias = pointer(*lowering.bias);
  if (lowering.residual) operands.residual = pointer(*lowering.residual);
  if (lowering.preact) operands.preact = pointer(*lowering.preact);
  operands.out = pointer(lowering.out);

  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(index, &stream), "name the current stream");
  const std::string error = launch(plan, problem, operands, static_cast<CUstream_st*>(stream));
  if (!error.empty()) {
    fail(std::string(request.name) + ": " + to_string(plan) + " could not run " +
         to_string(problem) + ": " + error);
  }
  count_launch(plan);
}

// Makes `index` the current device for as long as it lives, at no cost where it already is.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t index) {
    int32_t current = -1;
    check_torch(aoti_torch_get_current_device_index(&current), "name the current device");
    if (current != index) guard_.emplace(index);
  }

 private:
  std::optional<DeviceGuard> guard_;
};

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

  std::array<int64_t, 4> transposed;
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
  }

  Lowered lowered = lower(lowering);
  if (lowered.error.empty()) [[likely]] {
    run(request, device, lowering, lowered);
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
  run(request, device, lowering, lowered);
  if (request.out) {
    check_torch(aoti_torch_copy_(request.out.tensor.get(), fresh.get(), 0), "copy into out");
  }
}

// --- Introspection

Json config_json(const TileConfig& config) {
  return Json::object()
      .member("name", config.name)
      .member("block_m", config.block_m)
      .member("block_n", config.block_n)
      .member("block_k", config.block_k)
      .member("threads", config.threads)
      .member("stages", config.stages)
      .member("shared_memory_bytes", config.shared_memory_bytes);
}

std::string kernels_json() {
  Json kernels = Json::array();
  for (const KernelEntry& entry : kernel_table()) {
    Json configs = Json::array();
    for (const TileConfig& config : entry.configs) configs.element(config_json(config));
    kernels.element(Json::object()
                        .member("name", entry.name)
                        .member("description", entry.description)
                        .member("automatic", entry.automatic)
                        .member("splits_k", entry.splits_k)
                        .member("configs", configs));
  }
  return kernels.str();
}

// A family belongs to a device if some configuration of it runs an ordinary GEMM there.
bool runs_on(const KernelEntry& entry, const Device& device) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    Problem problem;
    problem.m = problem.n = problem.k = 1024;
    problem.a = {.dtype = dtype, .row_stride = 1024, .col_stride = 1};
    problem.b = {.dtype = dtype, .row_stride = 1, .col_stride = 1024};
    problem.out = {.dtype = dtype, .row_stride = 1024, .col_stride = 1};
    for (const TileConfig& config : entry.configs) {
      if (entry.rejects(problem, device, config) == nullptr) return true;
    }
  }
  return false;
}

std::string device_json(int index) {
  const Device& device = device_properties(index);
  Json families = Json::array();
  for (const KernelEntry& entry : kernel_table()) {
    if (runs_on(entry, device)) families.element(entry.name);
  }
  return Json::object()
      .member("name", device.name)
      .member("compute_capability", device.compute_capability)
      .member("sm_count", device.sm_count)
      .member("max_shared_memory_per_block", device.max_shared_memory_per_block)
      .member("max_shared_memory_per_sm", device.max_shared_memory_per_sm)
      .member("l2_bytes", device.l2_bytes)
      .member("clock_ghz", device.clock_ghz)
      .member("memory_bytes_per_us", device.memory_bytes_per_us)
      .member("kernels", families)
      .str();
}

Json resources_json(const Resources& resources) {
  return Json::object()
      .member("registers", resources.registers)
      .member("threads", resources.threads)
      .member("static_shared_bytes", resources.static_shared_bytes)
      .member("dynamic_shared_bytes", resources.dynamic_shared_bytes)
      .member("local_bytes", resources.local_bytes)
      .member("ctas_per_sm", resources.ctas_per_sm)
      .member("occupancy", resources.occupancy);
}

// {"problem", "plan", "predicted_us", "workspace_bytes", "packing", "resources", "copies", "error",
// "candidates": [{"plan", "predicted_us"} or {"plan", "reason"}]}; members that do not apply are
// left out.
std::string plan_json(Request& request) {
  const Checked checked = check_request(request);
  Json json = Json::object();
  if (checked.compute != Compute::kGemm) {
    return json.member("error", "no kernel multiplies operands of this dtype; ATen does").str();
  }
  const Device& device = device_properties(request.a.device_index);
  const CurrentDevice current(request.a.device_index);
  std::array<int64_t, 4> transposed;
  LoweringRequest lowering = lowering_of(request, checked, transposed);
  // The output that an op would allocate; only its strides matter.
  std::vector<int64_t> strides(checked.out_sizes.size());
  int64_t stride = 1;
  for (size_t i = strides.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(checked.out_sizes[i], 1);
  }
  lowering.out = {checked.out_sizes, strides, kernel_dtype(checked.out_dtype), 0};
  Lowered lowered = lower(lowering);
  std::optional<BatchCopies> copies;
  if (!lowered.error.empty()) {
    copies.emplace(request, checked, lowering);
    lowered = lower(lowering);
  }
  std::vector<Candidate> candidates;
  const Selection selection =
      select(lowered.problem, device, request.force_kernel.view(), &candidates);
  json.member("problem", to_string(lowered.problem));
  json.member("copies", copies.has_value());
  if (selection.plan) {
    json.member("plan", to_string(*selection.plan))
        .member("predicted_us", selection.plan->predicted_us)
        .member("workspace_bytes", selection.plan->workspace_bytes);
    if (const Packing packing = selection.plan->packing; packing.any()) {
      // The problem's operands: of a column-major out, those of its transpose.
      Json names = Json::array();
      if (packing.a) names.element(lowered.swapped ? "b" : "a");
      if (packing.b) names.element(lowered.swapped ? "a" : "b");
      json.member("packing", names);
    }
    if (const auto taken = resources(*selection.plan, lowered.problem)) {
      json.member("resources", resources_json(*taken));
    }
  } else {
    json.member("error", selection.error);
  }
  Json list = Json::array();
  for (const Candidate& candidate : candidates) {
    Json entry = Json::object();
    entry.member("plan", to_string(candidate.plan));
    if (candidate.reason.empty()) {
      entry.member("predicted_us", candidate.plan.predicted_us);
    } else {
      entry.member("reason", candidate.reason);
    }
    list.element(entry);
  }
  return json.member("candidates", list).str();
}

StableIValue boxed(const std::string& text) { return torch::stable::detail::from(text); }

void boxed_plan(StableIValue* stack, uint64_t, uint64_t) {
  Request request = read_plan(stack);
  stack[0] = boxed(plan_json(request));
}

void boxed_kernels(StableIValue* stack, uint64_t, uint64_t) { stack[0] = boxed(kernels_json()); }

void boxed_device(StableIValue* stack, uint64_t, uint64_t) {
  const auto index = torch::stable::detail::to<int64_t>(stack[0]);
  check(index >= 0 && index <= std::numeric_limits<int>::max(), "tgemm: no CUDA device has index ",
        index);
  stack[0] = boxed(device_json(static_cast<int>(index)));
}

void boxed_stats(StableIValue* stack, uint64_t, uint64_t) { stack[0] = boxed(stats_json()); }

void boxed_reset_stats(StableIValue*, uint64_t, uint64_t) { reset_stats(); }

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

STABLE_TORCH_LIBRARY_IMPL(tgemm, CUDA, m) {
  CudaOps::register_in(m);
  m.impl("_plan", &boxed_plan);
}
STABLE_TORCH_LIBRARY_IMPL(tgemm, SparseCUDA, m) { CudaOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, SparseCsrCUDA, m) { CudaOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, QuantizedCUDA, m) { CudaOps::register_in(m); }
STABLE_TORCH_LIBRARY_IMPL(tgemm, CompositeExplicitAutograd, m) {
  m.impl("_kernels", &boxed_kernels);
  m.impl("_device", &boxed_device);
  m.impl("_stats", &boxed_stats);
  m.impl("_reset_stats", &boxed_reset_stats);
  m.impl("_set_fallback", &boxed_set_fallback);
  m.impl("_set_warning_callback", &boxed_set_warning_callback);
}

}  // namespace
}  // namespace tgemm
