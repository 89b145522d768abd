// Whether a Problem written by hand is one that the kernels were made for. The ops need none of
// this: what lower() makes of tensors always is.
#pragma once

#include <string>

#include "gemm/plan.hpp"

namespace tgemm {

// Sizes, dtypes, strides and epilogue, before select(). Returns an empty string, or what is wrong,
// as one sentence.
std::string validate(const Problem& problem);

// The pointers that go with a valid problem, before launch(): none is missing that `plan` and
// `problem` need, and their addresses are aligned as the problem says. Returns as above. What they
// point to, and whether out overlaps an operand, it cannot know.
std::string validate(const Plan& plan, const Problem& problem, const Operands& operands);

}  // namespace tgemm
