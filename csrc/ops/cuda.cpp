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
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gemm/lowering.hpp"
#include "gemm/packing.hpp"
#include "gemm/plan.hpp"
#include "gemm/tuning.hpp"
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

// The sizes and strides of weight.T.
class TransposedWeight {
 public:
  // `weight` comes with its own.
  void transpose(TensorView& weight) {
    values_ = {weight.sizes[1], weight.sizes[0], weight.strides[1], weight.strides[0]};
    weight.sizes = std::span(values_).first(2);
    weight.strides = std::span(values_).last(2);
  }

 private:
  std::array<int64_t, 4> values_;
};
using TransposedWeights = std::array<TransposedWeight, 2>;

// The inputs of the request as lower() wants them; `out` is left to the caller. `transposed` keeps
// what is said of weight.T alive.
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

// How a gated product is computed.
struct GatedChoice {
  Selection whole;  // has a plan if one kernel computes all of it
  GatedSteps steps;
  Selection gate, up;  // otherwise
  bool tuned = false;  // whether one kernel or two was measured, not predicted
};

// A kernel with two weights has one A, writes one output, and is not asked to add up nothing.
bool has_whole(const Lowered& lowered) {
  const Problem& problem = lowered.problem;
  return !lowered.swapped && !problem.epilogue.has_preact && problem.k > 0;
}

// One kernel if it is named, or measured to be faster than two or predicted to take no longer.
// `choose` makes a Choice for a Problem.
template <class Choose>
GatedChoice choose_gated(const Request& request, const Lowered& lowered, const Choose& choose) {
  GatedChoice choice;
  choice.steps = split_gated(lowered);
  choice.gate = choose(choice.steps.gate).selection;
  choice.up = choose(choice.steps.up).selection;
  if (!has_whole(lowered)) return choice;
  Choice whole = choose(lowered.problem);
  choice.whole = std::move(whole.selection);
  choice.tuned = whole.tuned;
  const bool compare =
      !request.force_kernel.present() && !whole.tuned && choice.gate.plan && choice.up.plan;
  if (choice.whole.plan && compare &&
      choice.whole.plan->predicted_us >
          choice.gate.plan->predicted_us + choice.up.plan->predicted_us) {
    choice.whole.plan.reset();
  }
  return choice;
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

// A described card: the members of Device after its name, in their order, then the name:
// "90 132 232448 233472 52428800 1.98 4.45e6 NVIDIA H200".
Device read_card(std::string_view text) {
  std::istringstream words{std::string(text)};
  Device device;
  words >> device.compute_capability >> device.sm_count >> device.max_shared_memory_per_block >>
      device.max_shared_memory_per_sm >> device.l2_bytes >> device.clock_ghz >>
      device.memory_bytes_per_us >> std::ws;
  std::getline(words, device.name);
  check(!device.name.empty() && device.sm_count > 0 && device.clock_ghz > 0.0 &&
            device.memory_bytes_per_us > 0.0,
        "tgemm: '", text, "' does not describe a card");
  return device;
}

// The request as an op would lower it. `copies`: whether something had to be copied.
Lowered lower_for_plan(const PlanRequest& plan, const Checked& checked, bool* copies) {
  TransposedWeights transposed;
  LoweringRequest lowering = lowering_of(plan.request, checked, transposed);
  // The output that an op would allocate; only its strides matter.
  std::vector<int64_t> strides(checked.out_sizes.size());
  int64_t stride = 1;
  for (size_t i = strides.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(checked.out_sizes[i], 1);
  }
  const TensorView fresh = {checked.out_sizes, strides, kernel_dtype(checked.out_dtype), 0};
  lowering.out = plan.out ? view_of(plan.out) : fresh;
  if (plan.request.preact) lowering.preact = fresh;
  Lowered lowered = lower(lowering);
  *copies = !lowered.error.empty();
  if (*copies) {
    lowering.out = fresh;
    lowered = lower(lowering);
  }
  if (!lowered.error.empty()) {
    const BatchCopies batch(plan.request, checked, lowering);
    lowered = lower(lowering);
  }
  return lowered;
}

Json packing_json(Packing packing, bool swapped) {
  // The problem's operands: of a column-major out, those of its transpose.
  Json names = Json::array();
  if (packing.a) names.element(swapped ? "b" : "a");
  if (packing.b) names.element(swapped ? "a" : "b");
  return names;
}

// A candidate that can run: what it takes, and how its tiles fill the card.
Json candidate_json(const Problem& problem, bool swapped, const Device& device, const Plan& plan) {
  const TileConfig& config = *plan.config;
  const auto tiles_of = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  const int64_t columns = problem.gated ? 2 * problem.n : problem.n;
  const int64_t tiles = tiles_of(problem.m, config.block_m) * tiles_of(columns, config.block_n) *
                        problem.batch_count();
  Json json = Json::object();
  json.member("plan", to_string(plan))
      .member("kernel", plan.kernel->name)
      .member("config", config_json(config))
      .member("split_k", plan.split_k)
      .member("predicted_us", plan.predicted_us)
      .member("workspace_bytes", plan.workspace_bytes)
      .member("tiles", tiles)
      .member("ctas", tiles * plan.split_k)
      .member("slots", int64_t{device.sm_count} * config.ctas_per_sm);
  if (plan.packing.any()) {
    json.member("packing", packing_json(plan.packing, swapped))
        .member("packing_us", packing_us(problem, plan.packing, device));
  }
  return json;
}

// {"problem", "key", "m", "n", "k", "batch", "plan", "predicted_us", "workspace_bytes", "packing",
// "resources", "tuned", "aten", "can_use_aten", "error", "candidates": [candidate_json or
// {"plan", "reason"}]}; members that do not apply are left out. `swapped`: the problem's operands
// are not in the order of the op's. `resources`: whether the current device may be asked.
Json selection_json(const Problem& problem, bool swapped, const Device& device,
                    std::string_view force, bool ask_resources) {
  std::vector<Candidate> candidates;
  const Choice choice = force.empty()
                            ? choose(problem, device, &candidates)
                            : Choice{.selection = select(problem, device, force, &candidates)};
  const std::optional<Plan>& plan = choice.selection.plan;
  Json json = Json::object();
  json.member("problem", to_string(problem))
      .member("key", problem_key(problem))
      .member("m", problem.m)
      .member("n", problem.n)
      .member("k", problem.k)
      .member("batch", problem.batch_count());
  if (plan) {
    json.member("plan", to_string(*plan))
        .member("predicted_us", plan->predicted_us)
        .member("workspace_bytes", plan->workspace_bytes);
    if (plan->packing.any()) json.member("packing", packing_json(plan->packing, swapped));
    if (ask_resources) {
      if (const auto taken = resources(*plan, problem)) {
        json.member("resources", resources_json(*taken));
      }
    }
  } else {
    json.member("error", choice.selection.error);
  }
  if (choice.tuned) json.member("tuned", true);
  if (choice.aten) json.member("aten", true);
  if (aten_computes(problem)) json.member("can_use_aten", true);
  Json list = Json::array();
  for (const Candidate& candidate : candidates) {
    if (candidate.reason.empty()) {
      list.element(candidate_json(problem, swapped, device, candidate.plan));
    } else {
      list.element(Json::object()
                       .member("plan", to_string(candidate.plan))
                       .member("reason", candidate.reason));
    }
  }
  return json.member("candidates", list);
}

// {"plan", "tuned", "steps", "whole", "gate", "up"}: the plan is that of one kernel for the whole
// or, as "A + B", those of two, and left out where there is none; "steps" names which of the last
// three run, and those are what selection_json says of each. "whole" is left out where no kernel
// could be asked.
Json gated_json(const Request& request, const Lowered& lowered, const Device& device,
                bool ask_resources) {
  const std::string_view force = request.force_kernel.view();
  const GatedChoice choice = choose_gated(request, lowered, [&](const Problem& problem) {
    return force.empty() ? choose(problem, device)
                         : Choice{.selection = select(problem, device, force)};
  });
  Json json = Json::object();
  Json steps = Json::array();
  if (choice.whole.plan) {
    json.member("plan", to_string(*choice.whole.plan));
    steps.element("whole");
  } else if (choice.gate.plan && choice.up.plan) {
    json.member("plan", to_string(*choice.gate.plan) + " + " + to_string(*choice.up.plan));
    steps.element("gate").element("up");
  }
  json.member("steps", steps);
  if (choice.tuned) json.member("tuned", true);
  const auto described = [&](const Problem& problem) {
    return selection_json(problem, lowered.swapped, device, force, ask_resources);
  };
  if (has_whole(lowered)) json.member("whole", described(lowered.problem));
  return json.member("gate", described(choice.steps.gate)).member("up", described(choice.steps.up));
}

std::string no_plan_json(const char* reason) {
  return Json::object().member("error", reason).str();
}

// What selection_json or, for linear_glu, gated_json says, and "copies".
std::string plan_json(const PlanRequest& plan, const Checked& checked, const Device& device,
                      bool ask_resources) {
  const Request& request = plan.request;
  bool copies = false;
  const Lowered lowered = lower_for_plan(plan, checked, &copies);
  if (!lowered.error.empty()) fail(std::string(request.name) + ": " + lowered.error);
  if (lowered.problem.empty()) return no_plan_json("the result has no elements, so nothing runs");
  Json json = lowered.problem.gated ? gated_json(request, lowered, device, ask_resources)
                                    : selection_json(lowered.problem, lowered.swapped, device,
                                                     request.force_kernel.view(), ask_resources);
  return json.member("copies", copies).str();
}

std::string plan_json(PlanRequest plan) {
  Request& request = plan.request;
  const Checked checked = check_request(request);
  if (checked.compute != Compute::kGemm) {
    return no_plan_json("no kernel multiplies operands of this dtype; ATen does");
  }
  if (plan.card.present()) return plan_json(plan, checked, read_card(plan.card.view()), false);
  check(request.a.device_type == aoti_torch_device_type_cuda(), request.name, ": ", request.a.name,
        " is on ", DeviceName{request.a.device_type, request.a.device_index},
        "; without a card to plan for it has to be on CUDA");
  const Device& device = device_properties(request.a.device_index);
  const CurrentDevice current(request.a.device_index);
  return plan_json(plan, checked, device, true);
}

StableIValue boxed(const std::string& text) { return torch::stable::detail::from(text); }

void boxed_plan(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = boxed(plan_json(read_plan(stack)));
}

void boxed_linear_glu_plan(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = boxed(plan_json(read_linear_glu_plan(stack)));
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

void boxed_add_tuning(StableIValue* stack, uint64_t, uint64_t) {
  const Text card(torch::stable::detail::to<StringHandle>(stack[0]));
  const auto sm_count = static_cast<int>(torch::stable::detail::to<int64_t>(stack[1]));
  const Text table(torch::stable::detail::to<StringHandle>(stack[2]));
  const std::string error = add_tuning(card.view(), sm_count, table.view());
  if (!error.empty()) fail("tgemm: " + error);
}

void boxed_clear_tuning(StableIValue*, uint64_t, uint64_t) { clear_tuning(); }

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
  m.impl("_kernels", &boxed_kernels);
  m.impl("_device", &boxed_device);
  m.impl("_stats", &boxed_stats);
  m.impl("_reset_stats", &boxed_reset_stats);
  m.impl("_set_fallback", &boxed_set_fallback);
  m.impl("_set_warning_callback", &boxed_set_warning_callback);
  m.impl("_plan", &boxed_plan);
  m.impl("_linear_glu_plan", &boxed_linear_glu_plan);
  m.impl("_add_tuning", &boxed_add_tuning);
  m.impl("_clear_tuning", &boxed_clear_tuning);
}

}  // namespace
}  // namespace tgemm
