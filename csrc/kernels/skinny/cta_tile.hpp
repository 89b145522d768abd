// Compile-time configuration of the skinny kernels, and what they keep in shared memory. Host and
// device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tgemm::skinny {

inline constexpr int kRowBytes = 128;  // of a box along K: the swizzle's width
inline constexpr int kBoxK = kRowBytes / 2;
inline constexpr int kMaxStages = 16;
inline constexpr int kMaxClusterSplit = 6;  // of clusters of 8, too few run at once

// A CTA multiplies kBlocks times 64 rows of the weight by kRows rows of x, kBoxes boxes of K at a
// time: memory delivers longer pieces of a row faster. Outputs are finished in
// units: of each block 16 rows, the part of one of the four consumer warps, by 8 rows of x.
template <int kRows_, int kBlocks_, int kBoxes_>
struct CtaTile {
  static constexpr int kRows = kRows_, kBlocks = kBlocks_, kBoxes = kBoxes_;
  static constexpr int kBlockK = kBoxes * kBoxK;
  static_assert(kRows == 8 || kRows == 16 || kRows == 32 || kRows == 64);
  static constexpr int kColumns = 64 * kBlocks;  // of outputs
  // The second weight's rows are the second block, so that a thread has both factors of its
  // outputs.
  static constexpr bool kCanGate = kBlocks == 2;
  static constexpr int kThreads = 128 + 32;  // a warpgroup that multiplies, a warp that loads
  // That registers leave room for: two, and of few rows two of the next kernel.
  static constexpr int kCtasPerSm = kRows <= 16 ? 4 : 3;

  static constexpr int kBlockBytes = 64 * kRowBytes;
  static constexpr int kWeightBytes = kBlocks * kBlockBytes;
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kBoxes * (kWeightBytes + kXBytes);

  static constexpr int kUnits = kRows / 2;  // 4 along the weight's rows, kRows / 8 along x's
  static constexpr int kUnitBytes = kBlocks * 16 * 8 * 4;
  // Where the CTAs of a cluster divide K, each finishes every splits-th unit, for which it gets the
  // others' sums.
  static constexpr int partial_bytes(int splits) {
    return (kUnits + splits - 1) / splits * (splits - 1) * kUnitBytes;
  }
  static constexpr int max_partial_bytes() {
    int most = 0;
    for (int splits = 2; splits <= kMaxClusterSplit; ++splits) {
      if (partial_bytes(splits) > most) most = partial_bytes(splits);
    }
    return most;
  }
  // Units of which a warp finishes the outputs together, so that their loads overlap.
  static constexpr int kUnitsAtOnce = kRows >= 32 ? 2 : 1;
};

// Stages: full when their tiles of both operands have arrived; empty when they have been
// multiplied. Partial: the other CTAs' sums of this CTA's units are there.
struct Barriers {
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  uint64_t partial;
};

// Behind the ring of stages, whose length is a matter of the launch.
template <class Cta>
struct SharedMemory {
  Barriers barriers;
  alignas(16) unsigned char partial[Cta::max_partial_bytes()];  // if K is divided
};

template <class Cta>
constexpr int shared_memory_bytes(int stages, bool divides_k) {
  return stages * Cta::kStageBytes + static_cast<int>(divides_k
                                                          ? sizeof(SharedMemory<Cta>)
                                                          : offsetof(SharedMemory<Cta>, partial));
}

}  // namespace tgemm::skinny
