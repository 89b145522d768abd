// What was measured on one card, in place of what is predicted: a table from problems to the ways
// in which they run. It is filled from files that torch_gemm.tune() writes. Torch-free;
// thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/plan.hpp"
#include "gemm/problem.hpp"

namespace tgemm {

// Beside the names of plans, ways to run a problem: torch's own product, and, for a gated problem,
// two plain GEMMs.
constexpr std::string_view kAtenWay = "aten";
constexpr std::string_view kTwoGemmsWay = "two GEMMs";

// All that selection sees of a problem, as one line of text: equal problems have equal keys, and
// problems with equal keys run alike.
std::string problem_key(const Problem& problem);

// Whether torch computes the problem in one op of its own, with one rounding: a product of 16-bit
// operands with no epilogue but a bias.
bool aten_computes(const Problem& problem);

// Empty if `plan` ("mma_sync:128x256,split_k=2", as `force` of select()) names a kernel and a
// configuration of the table, and one that may run without being named by a call; otherwise a
// sentence.
std::string untunable_plan(std::string_view plan);

// Adds the lines "WAY\tKEY" of `table` for cards of this name and number of SMs; a key that is
// known gets the new way. Returns an empty string or, having added nothing, what is wrong.
std::string add_tuning(std::string_view card, int sm_count, std::string_view table);
void clear_tuning();
// Changes whenever the table does.
uint64_t tuning_version();

struct Choice {
  Selection selection;
  bool tuned = false;  // measured, not predicted. A gated problem without a plan: as two GEMMs
  bool aten = false;   // as kAtenWay; `selection` is for those who cannot do that
};

// select() for a problem whose kernel nobody names: from the table where it knows the problem on
// this card. A way that cannot run it, which only an edited file has, is passed over.
Choice choose(const Problem& problem, const Device& device,
              std::vector<Candidate>* report = nullptr);

}  // namespace tgemm
