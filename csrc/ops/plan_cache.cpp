#include "ops/plan_cache.hpp"

#include <array>
#include <cstdint>
#include <memory>

namespace tgemm {
namespace {

// More than the distinct problems of a transformer's forward pass at one batch size; about 90 KB.
constexpr size_t kSlots = 128;

struct Slot {
  int device_index = -1;
  Problem problem;
  Choice choice;  // "no kernel can" included
};

struct Cache {
  uint64_t tuning = 0;  // the table's version that the choices follow
  std::array<Slot, kSlots> slots;
};

// Of what usually differs between the problems of one model; equality decides.
size_t slot_of(const Problem& problem) {
  uint64_t hash = 0;
  for (const int64_t value :
       {problem.m, problem.n, problem.k, problem.batch_count(), problem.a.row_stride,
        problem.b.row_stride, problem.b.col_stride, problem.out.row_stride,
        int64_t{problem.a.address_alignment}, int64_t{static_cast<int>(problem.a.dtype)},
        int64_t{static_cast<int>(problem.epilogue.activation)},
        int64_t{problem.epilogue.has_bias + 2 * problem.epilogue.has_residual +
                4 * problem.gated}}) {
    // The multiplier is 2^64 divided by the golden ratio (Knuth, TAOCP 3, 6.4).
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  }
  return hash % kSlots;
}

}  // namespace

Choice choose_cached(const Problem& problem, const Device& device, int device_index) {
  thread_local std::unique_ptr<Cache> cache;
  const uint64_t tuning = tuning_version();
  if (!cache || cache->tuning != tuning) {
    cache = std::make_unique<Cache>();
    cache->tuning = tuning;
  }
  Slot& slot = cache->slots[slot_of(problem)];
  if (slot.device_index != device_index || slot.problem != problem) {
    slot = {device_index, problem, choose(problem, device)};
  }
  return slot.choice;
}

}  // namespace tgemm
