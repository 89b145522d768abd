// Answers, for each line of its input, whether an H200 would run a call: tests/test_promises.py
// asks.
//
//   FORCE PRECISION ACTIVATION {NAME DTYPE ADDRESS RANK SIZE... STRIDE...}...
//
// An answer is the name of a plan, those of two ("A + B"), or the sentence of the refusal.
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "gemm/lowering.hpp"
#include "gemm/plan.hpp"
#include "h200.hpp"
#include "tensor.hpp"

namespace tgemm {
namespace {

// The value that prints as `name`.
template <class Enum>
Enum named(const std::string& name) {
  auto value = Enum{};
  while (name != to_string(value)) value = static_cast<Enum>(static_cast<int>(value) + 1);
  return value;
}

testing::Tensor read_tensor(std::istream& words) {
  std::string dtype;
  uintptr_t address = 0;
  size_t rank = 0;
  words >> dtype >> address >> rank;
  testing::Sizes sizes(rank), strides(rank);
  for (int64_t& size : sizes) words >> size;
  for (int64_t& stride : strides) words >> stride;
  testing::Tensor tensor(sizes, strides);
  tensor.dtype = named<DType>(dtype);
  tensor.address = address;
  return tensor;
}

// As the ops on CUDA choose (csrc/ops/cuda.cpp) where a kernel is forced.
std::string answer(std::istream& words) {
  std::string force, precision, activation, name;
  words >> force >> precision >> activation;
  std::map<std::string, testing::Tensor> tensors;
  while (words >> name) tensors.emplace(name, read_tensor(words));
  const auto optional = [&](const char* which) -> std::optional<TensorView> {
    const auto found = tensors.find(which);
    return found == tensors.end() ? std::nullopt : std::optional<TensorView>(found->second);
  };
  LoweringRequest request;
  request.a = tensors.at("a");
  request.b = tensors.at("b");
  request.out = tensors.at("out");
  request.bias = optional("bias");
  request.residual = optional("residual");
  request.preact = optional("preact");
  request.up = optional("up");
  request.up_bias = optional("up_bias");
  request.precision = named<Precision>(precision);
  request.activation = named<Activation>(activation);
  const Lowered lowered = lower(request);
  if (!lowered.error.empty()) return lowered.error;

  const auto choose = [&](const Problem& problem) { return select(problem, h200(), force); };
  const auto text = [](const Selection& selection) {
    return selection.plan ? to_string(*selection.plan) : selection.error;
  };
  if (!lowered.problem.gated) return text(choose(lowered.problem));
  if (!lowered.swapped && !request.preact && lowered.problem.k > 0) {
    if (const Selection whole = choose(lowered.problem); whole.plan) return text(whole);
  }
  const GatedSteps steps = split_gated(lowered);
  const Selection gate = choose(steps.gate), up = choose(steps.up);
  if (!gate.plan || !up.plan) return text(gate.plan ? up : gate);
  return text(gate) + " + " + text(up);
}

}  // namespace
}  // namespace tgemm

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::cout << tgemm::answer(words) << '\n';
  }
}
