// Operands that a kernel cannot read where they lie are packed before it runs: copied to the
// beginning of the workspace, in the type and layout that it can read.
#pragma once

#include <cstdint>
#include <vector>

#include "gemm/plan.hpp"
#include "kernels/pack.hpp"

namespace tgemm {

// The problem as the kernel sees it. A packed operand has the type that is multiplied, lines whose
// pitch is a multiple of 128 bytes, and contiguous batches, those in which it repeats itself
// excepted. FP32 that is rounded to 16 bits is packed in both operands or in none. For 3xTF32 both
// are, and twice as long in K: kPartsK low parts of A alternate with their high parts, and in B
// high parts with their low ones. So the first halves multiply to low times high and the second to
// high times low; the kernel multiplies the high ones, too.
Problem packed(const Problem& problem, Packing packing);

// Where the packed operands begin in the workspace, in bytes, all multiples of 256, and where they
// end: there split-K's partial sums begin.
struct PackedOffsets {
  int64_t a = 0;
  int64_t b = 0;
  int64_t end = 0;
};
PackedOffsets packed_offsets(const Problem& problem, Packing packing);

// Where offsets and strides saturate, instead of overflowing: no memory is that large.
constexpr int64_t kMaxPackedBytes = int64_t{1} << 50;

// `operands` with those that are packed, and the workspace, where packed_offsets() says.
Operands packed_operands(const Problem& problem, Packing packing, const Operands& operands);

// The copies that packing takes.
std::vector<PackedCopy> packed_copies(const Problem& problem, Packing packing,
                                      const Operands& operands);

// What they take, microseconds.
double packing_us(const Problem& problem, Packing packing, const Device& device);

}  // namespace tgemm
