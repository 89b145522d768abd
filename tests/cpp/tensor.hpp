// A host tensor for the tests: sizes, strides and values, with torch's rules for broadcasting.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gemm/lowering.hpp"

namespace tgemm::testing {

using Sizes = std::vector<int64_t>;

inline Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size(), 1);
  for (int i = static_cast<int>(sizes.size()) - 2; i >= 0; --i) {
    strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
  }
  return strides;
}

struct Tensor {
  Sizes sizes;
  Sizes strides;
  DType dtype = DType::kFloat32;
  uintptr_t address = 0x1000;
  std::vector<double> values;  // as long as the strides reach; empty where a test needs no data

  Tensor(Sizes sizes_, Sizes strides_) : sizes(std::move(sizes_)), strides(std::move(strides_)) {}
  explicit Tensor(Sizes sizes_) : sizes(sizes_), strides(contiguous_strides(sizes_)) {}

  // NOLINTNEXTLINE: converting silently is the point; it keeps requests readable.
  operator TensorView() const { return {sizes, strides, dtype, address}; }

  // Dimensions `i` and `j` exchanged, as torch.Tensor.transpose.
  Tensor transposed(int i, int j) const {
    Tensor result = *this;
    std::swap(result.sizes[i], result.sizes[j]);
    std::swap(result.strides[i], result.strides[j]);
    return result;
  }

  int64_t reach() const {
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) return 0;
      last += (sizes[i] - 1) * strides[i];
    }
    return last + 1;
  }

  // The element that `index`, of a shape this tensor broadcasts to, refers to.
  int64_t offset(const Sizes& index) const {
    int64_t offset = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t at = index[index.size() - sizes.size() + i];
      offset += (sizes[i] == 1 ? 0 : at) * strides[i];
    }
    return offset;
  }
};

// Calls `visit(index)` for each index of `sizes`, in row-major order.
template <typename Visit>
void for_each_index(const Sizes& sizes, Visit visit) {
  for (int64_t size : sizes) {
    if (size == 0) return;
  }
  Sizes index(sizes.size(), 0);
  while (true) {
    visit(index);
    int i = static_cast<int>(sizes.size()) - 1;
    for (; i >= 0; --i) {
      if (++index[i] < sizes[i]) break;
      index[i] = 0;
    }
    if (i < 0) return;
  }
}

}  // namespace tgemm::testing
