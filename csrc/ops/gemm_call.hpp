// From a checked Request to the GEMM that computes it: what running an op and explaining it share.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "gemm/lowering.hpp"
#include "gemm/plan.hpp"
#include "gemm/tuning.hpp"
#include "ops/arguments.hpp"
#include "ops/tensor.hpp"

namespace tgemm {

TensorView view_of(const Argument& argument);
TensorView view_of(const Tensor& tensor);

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
                            TransposedWeights& transposed);

// Batch dimensions that no GEMM can address as they are (more of them than a Problem holds): every
// batched input becomes a contiguous copy with the output's batch.
struct BatchCopies {
  Tensor a, b, residual;

  BatchCopies(const Request& request, const Checked& checked, LoweringRequest& lowering);
};

// How a gated product is computed.
struct GatedChoice {
  Selection whole;  // has a plan if one kernel computes all of it
  GatedSteps steps;
  Selection gate, up;  // otherwise
  bool tuned = false;  // whether one kernel or two was measured, not predicted
};

// A kernel with two weights has one A, writes one output, and is not asked to add up nothing.
inline bool has_whole(const Lowered& lowered) {
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

// Makes `index` the current device for as long as it lives, at no cost where it already is.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t index) {
    int32_t current = -1;
    check_torch(aoti_torch_get_current_device_index(&current), "name the current device");
    if (current != index) guard_.emplace(index);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace tgemm
