// Whether strided tensors share memory, exactly. Torch-free.
#pragma once

#include <cstdint>
#include <span>

namespace tgemm {

struct StridedRegion {
  uintptr_t address = 0;
  std::span<const int64_t> sizes;
  std::span<const int64_t> strides;  // elements
  int64_t element_bytes = 0;
};

// True if some byte belongs to both. Disjoint slices of one buffer, interleaved ones included, do
// not overlap. Where deciding would take too long (strides that divide each other in no useful
// order), the answer is true.
bool regions_overlap(const StridedRegion& x, const StridedRegion& y);

// True if two different indices of `x` name the same element, as in an expanded tensor.
bool overlaps_itself(const StridedRegion& x);

}  // namespace tgemm
