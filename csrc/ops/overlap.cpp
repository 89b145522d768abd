#include "ops/overlap.hpp"

#include <algorithm>
#include <vector>

namespace tgemm {
namespace {

// Both questions are one: is there a vector of integers d with low_k <= d_k <= high_k and
// sum(d_k * stride_k) = distance? For two tensors, d_k is the difference of their indices along
// stride_k.
struct Term {
  int64_t stride;  // > 0
  int64_t low;
  int64_t high;
};

// Largest stride first, equal strides merged: then each level has few candidates in practical
// layouts.
void normalise(std::vector<Term>& terms) {
  std::sort(terms.begin(), terms.end(),
            [](const Term& x, const Term& y) { return x.stride > y.stride; });
  size_t kept = 0;
  for (const Term& term : terms) {
    if (kept > 0 && terms[kept - 1].stride == term.stride) {
      terms[kept - 1].low += term.low;
      terms[kept - 1].high += term.high;
    } else {
      terms[kept++] = term;
    }
  }
  terms.resize(kept);
}

int64_t floor_div(int64_t x, int64_t y) { return x / y - (x % y != 0 && (x < 0) != (y < 0)); }
int64_t ceil_div(int64_t x, int64_t y) { return -floor_div(-x, y); }

struct Search {
  std::span<const Term> terms;
  std::vector<int64_t> reach_low;   // least value that the terms from k on can sum to
  std::vector<int64_t> reach_high;  // and the greatest
  bool nonzero;                     // d = 0 does not count
  int budget = 10000;               // visited nodes; beyond it the answer is "yes"

  explicit Search(std::span<const Term> all, bool nonzero) : terms(all), nonzero(nonzero) {
    reach_low.assign(all.size() + 1, 0);
    reach_high.assign(all.size() + 1, 0);
    for (size_t k = all.size(); k-- > 0;) {
      reach_low[k] = reach_low[k + 1] + all[k].low * all[k].stride;
      reach_high[k] = reach_high[k + 1] + all[k].high * all[k].stride;
    }
  }

  bool solve(size_t k, int64_t distance, bool any_nonzero) {
    if (--budget < 0) return true;
    if (distance < reach_low[k] || distance > reach_high[k]) return false;
    if (k == terms.size()) return any_nonzero || !nonzero;
    const Term& term = terms[k];
    // What is left for the later terms must be within their reach.
    const int64_t first = std::max(term.low, ceil_div(distance - reach_high[k + 1], term.stride));
    const int64_t last = std::min(term.high, floor_div(distance - reach_low[k + 1], term.stride));
    for (int64_t d = first; d <= last; ++d) {
      if (solve(k + 1, distance - d * term.stride, any_nonzero || d != 0)) return true;
    }
    return false;
  }
};

bool empty(const StridedRegion& x) {
  return std::find(x.sizes.begin(), x.sizes.end(), 0) != x.sizes.end();
}

}  // namespace

bool regions_overlap(const StridedRegion& x, const StridedRegion& y) {
  if (empty(x) || empty(y)) return false;
  std::vector<Term> terms;
  terms.reserve(x.sizes.size() + y.sizes.size() + 1);
  for (size_t i = 0; i < x.sizes.size(); ++i) {
    if (x.sizes[i] > 1 && x.strides[i] > 0) {
      terms.push_back({x.strides[i] * x.element_bytes, 0, x.sizes[i] - 1});
    }
  }
  for (size_t i = 0; i < y.sizes.size(); ++i) {
    if (y.sizes[i] > 1 && y.strides[i] > 0) {
      terms.push_back({y.strides[i] * y.element_bytes, -(y.sizes[i] - 1), 0});
    }
  }
  terms.push_back({1, -(y.element_bytes - 1), x.element_bytes - 1});  // bytes within an element
  normalise(terms);
  const auto distance = static_cast<int64_t>(y.address) - static_cast<int64_t>(x.address);
  return Search(terms, false).solve(0, distance, false);
}

bool overlaps_itself(const StridedRegion& x) {
  if (empty(x)) return false;
  std::vector<Term> terms;
  terms.reserve(x.sizes.size());
  for (size_t i = 0; i < x.sizes.size(); ++i) {
    if (x.sizes[i] <= 1) continue;
    if (x.strides[i] == 0) return true;
    terms.push_back({x.strides[i], -(x.sizes[i] - 1), x.sizes[i] - 1});
  }
  // Two dimensions of one stride meet: index (1, 0) is index (0, 1).
  std::sort(terms.begin(), terms.end(),
            [](const Term& a, const Term& b) { return a.stride > b.stride; });
  for (size_t k = 1; k < terms.size(); ++k) {
    if (terms[k].stride == terms[k - 1].stride) return true;
  }
  return Search(terms, true).solve(0, 0, false);
}

}  // namespace tgemm
