// Compile-time configuration of the sm90 kernels, and what they keep in shared memory. Host and
// device.
#pragma once

#include <cstdint>

#include "device/params.hpp"

namespace tgemm::sm90 {

// How the consumer warpgroups share the work: a part of every tile each, or, the two of them, whole
// tiles in turn, so that one multiplies while the other is in its epilogue.
enum class Schedule { kCooperative, kPingPong };

// A CTA computes kBlockM x kBlockN outputs at a time; kCluster CTAs, one below the other, share the
// columns of B: each loads its part of a tile of B for all of them. With kParts, operands are FP32
// in two TF32 parts, as gemm/packing.hpp has them: K is that of both.
template <Schedule kSchedule_, int kBlockM_, int kBlockN_, int kStages_, int kCluster_ = 1,
          int kConsumers_ = 2, bool kParts_ = false>
struct CtaTile {
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr bool kPingPong = kSchedule == Schedule::kPingPong;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kRowBytes = 128;  // of a tile along K: the swizzle's width
  static constexpr int kBlockK = kRowBytes / 2;
  static constexpr bool kParts = kParts_;
  // An output tile's share of K is a multiple of this many tiles of the operands.
  static constexpr int kTilesAtOnce = kParts ? 2 : 1;
  static constexpr int kStages = kStages_, kCluster = kCluster_;
  // Rows of tiles walked before moving to the next column of tiles. With about a hundred resident
  // CTAs this makes the footprint of a wave roughly square.
  static constexpr int kGroupM = kBlockN >= 2 * kBlockM ? 16 : 8;
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // The first warpgroup has an epilogue warp for each consumer; the others produce: A and B by one
  // each, or one both.
  static constexpr int kProducers = 4 - kConsumers;
  static_assert(kConsumers == 2 || (kConsumers == 3 && !kPingPong));

  // What a consumer multiplies: kBlocks times 64 rows by kColumns. Cooperating consumers divide
  // the rows, or, of 64 rows, the columns.
  static constexpr bool kSplitColumns = !kPingPong && kBlockM == 64;
  static constexpr int kConsumersPerTile = kPingPong ? 1 : kConsumers;
  static constexpr int kColumns = kSplitColumns ? kBlockN / kConsumers : kBlockN;
  static constexpr int kBlocks = kSplitColumns ? 1 : kBlockM / 64 / kConsumersPerTile;
  static constexpr int kSums = kBlocks * kColumns / 2;  // per thread
  static_assert(kBlocks >= 1 && kBlocks <= 2);
  // Outputs leave in boxes of 64 columns, or, FP32, of half as many. Where these do not divide a
  // consumer's columns, its last box begins earlier, and has some of the one before it once more.
  static constexpr int kBoxesAcross = (kColumns + 63) / 64;
  static constexpr bool kWholeBoxes = kColumns % 64 == 0;
  static_assert(kWholeBoxes || (kColumns % 16 == 0 && kColumns > 64));
  // Columns of a tile that an epilogue finishes, those of two boxes twice.
  static constexpr int kFinishedColumns = kBoxesAcross * 64 * (kBlockN / kColumns);
  // First of the columns of the i-th half of a box, row of boxes by row of boxes.
  static constexpr int half_box_column(int i) {
    if (kWholeBoxes) return i * 32 % kColumns;
    const int box = i / 2 % kBoxesAcross * 64;
    return (box + 64 <= kColumns ? box : kColumns - 64) + i % 2 * 32;
  }
  // Columns of two weights alternate in a tile of B, 64 at a time, so that a consumer has both
  // factors of its outputs.
  static constexpr bool kCanGate = kColumns % 128 == 0 && !kParts;

  // setmaxnreg: what the first warpgroup gives up, the consumers get.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  // The largest sums leave the others too few to copy outputs quickly.
  static constexpr bool kShortOfRegisters = kSums * kConsumers > (kParts ? 64 : 256);
  static constexpr int kProducerRegisters = kShortOfRegisters ? 56 : 64;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters * kThreads - kProducerRegisters * 128) / (128 * kConsumers) / 8 * 8;
  static_assert((kParts ? 3 * kSums + 32 : kSums + 40) <= kConsumerRegisters);
  static_assert(!kParts || (kBlocks == 1 && !kPingPong && kStages % 2 == 0));
  // The common epilogue takes more, and finishes no output twice.
  static constexpr bool kCommonEpilogue = kConsumerRegisters >= 200 && kWholeBoxes;
  // So does bringing a residual to registers ahead of its use.
  static constexpr bool kUnrollsResiduals = kConsumerRegisters - kSums >= 80 && !kParts;

  static constexpr int kBytesA = kBlockM * kRowBytes;
  static constexpr int kBytesB = kBlockN * kRowBytes;
  static constexpr int kShareB = kBlockN / kCluster;  // columns that a CTA loads
  static_assert(kShareB % 8 == 0);
  // Of an N-major B, 64 columns are one box.
  static constexpr bool kOnlyKMajorB = kShareB % 64 != 0;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  // Outputs leave by way of shared memory, in boxes of 64 rows by 128 bytes: all of a tile's at
  // once if they have 16 bits, half of them if they are FP32.
  static constexpr int kSlots = kBlocks * kBoxesAcross;  // per consumer
  static constexpr int kSlotBytes = 64 * 128;
  // Where the CTAs of a cluster divide K, each finishes some of the tile's boxes, for which it gets
  // the others' sums where its stages were. Every Hopper GPU can run clusters of 8.
  static constexpr bool kSplits = !kPingPong && kCluster == 1 && kConsumers == 2 && kWholeBoxes;
  static constexpr int kPartialBytes = 64 * 64 * 4;
  static constexpr bool fits(int splits) {
    const int mine = (kConsumers * kSlots + splits - 1) / splits;
    return mine * (splits - 1) * kPartialBytes <= kStages * kStageBytes;
  }
  static constexpr int max_split() {
    int splits = 1;
    while (kSplits && splits < 8 && fits(splits + 1)) ++splits;
    return splits;
  }
};

// Stages: full when their tiles have arrived in this CTA; empty when all consumers of the cluster
// have read theirs, so that any of its CTAs may write to all. Residual: a consumer's part of a
// tile of the residual has arrived where its outputs will be. Outputs: a box of them is there.
// Partial: so are the other CTAs' sums of this CTA's boxes.
template <class Cta>
struct Barriers {
  uint64_t full[Cta::kStages];
  uint64_t empty[Cta::kStages];
  uint64_t residual[Cta::kConsumers];
  uint64_t outputs[Cta::kConsumers][Cta::kSlots];
  uint64_t partial;
};

template <class Cta>
struct alignas(1024) SharedMemory {  // 1024: the swizzle's pattern
  unsigned char stages[Cta::kStages][Cta::kStageBytes];
  unsigned char staged[Cta::kConsumers][Cta::kSlots * Cta::kSlotBytes];
  float bias[Cta::kConsumers][Cta::kColumns];
  Barriers<Cta> barriers;
  BatchOffsets offset[Cta::kConsumers * 4];  // for outputs that do not leave through TMA
};

}  // namespace tgemm::sm90
