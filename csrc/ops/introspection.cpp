// What the library says of itself: the kernels, the GPU, counters, how a call would run and why;
// and the tuning table. The strings are JSON.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/lowering.hpp"
#include "gemm/packing.hpp"
#include "gemm/plan.hpp"
#include "gemm/tuning.hpp"
#include "kernels/cost_model.hpp"
#include "ops/arguments.hpp"
#include "ops/device_properties.hpp"
#include "ops/gemm_call.hpp"
#include "ops/json.hpp"
#include "ops/stats.hpp"

namespace tgemm {
namespace {

Json config_json(const TileConfig& config) {
  return Json::object()
      .member("name", config.name)
      .member("block_m", config.block_m)
      .member("block_n", config.block_n)
      .member("block_k", config.block_k)
      .member("threads", config.threads)
      .member("stages", config.stages)
      .member("shared_memory_bytes", config.shared_memory_bytes)
      .member("max_cluster_split", config.max_cluster_split);
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

// A candidate that can run: what it takes, how its tiles fill the card, and what of its predicted
// time is not the GEMM's own: copying operands, writing and reading partial sums.
Json candidate_json(const Problem& problem, bool swapped, const Device& device, const Plan& plan) {
  const TileConfig& config = *plan.config;
  const auto tiles_of = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  const int64_t columns = problem.gated ? 2 * problem.n : problem.n;
  const int64_t tiles = tiles_of(problem.m, config.block_m) * tiles_of(columns, config.block_n) *
                        problem.batch_count();
  const int64_t ctas = tiles_of(tiles, config.tiles_per_cta) * plan.split_k;
  Json json = Json::object();
  json.member("plan", to_string(plan))
      .member("kernel", plan.kernel->name)
      .member("config", config_json(config))
      .member("split_k", plan.split_k)
      .member("predicted_us", plan.predicted_us)
      .member("workspace_bytes", plan.workspace_bytes)
      .member("tiles", tiles)
      .member("ctas", ctas)
      .member("slots", int64_t{device.sm_count} * config.ctas_per_sm);
  if (plan.packing.any()) {
    json.member("packing", packing_json(plan.packing, swapped))
        .member("packing_us", packing_us(problem, plan.packing, device));
  }
  if (plan.split_k > config.max_cluster_split) {
    json.member("partial_sums_us", partial_sums_us(problem, device, plan.split_k));
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

void boxed_add_tuning(StableIValue* stack, uint64_t, uint64_t) {
  const Text card(torch::stable::detail::to<StringHandle>(stack[0]));
  const auto sm_count = torch::stable::detail::to<int64_t>(stack[1]);
  check(sm_count > 0 && sm_count <= std::numeric_limits<int>::max(), "tgemm: no card has ",
        sm_count, " SMs");
  const Text table(torch::stable::detail::to<StringHandle>(stack[2]));
  const std::string error = add_tuning(card.view(), static_cast<int>(sm_count), table.view());
  if (!error.empty()) fail("tgemm: " + error);
}

void boxed_clear_tuning(StableIValue*, uint64_t, uint64_t) { clear_tuning(); }

STABLE_TORCH_LIBRARY_IMPL(tgemm, CompositeExplicitAutograd, m) {
  m.impl("_kernels", &boxed_kernels);
  m.impl("_device", &boxed_device);
  m.impl("_stats", &boxed_stats);
  m.impl("_reset_stats", &boxed_reset_stats);
  m.impl("_plan", &boxed_plan);
  m.impl("_linear_glu_plan", &boxed_linear_glu_plan);
  m.impl("_add_tuning", &boxed_add_tuning);
  m.impl("_clear_tuning", &boxed_clear_tuning);
}

}  // namespace
}  // namespace tgemm
