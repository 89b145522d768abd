// Compile-time configuration of the sm90 kernels. Host and device.
#pragma once

#include <algorithm>

namespace tgemm::sm90 {

// How the two consumer warpgroups share the work: 64 rows each of every tile, or whole tiles in
// turn, so that one multiplies while the other is in its epilogue.
enum class Schedule { kCooperative, kPingPong };

// A CTA computes 128 x kBlockN outputs at a time; kCluster CTAs, one below the other, share the
// columns of B: each loads its part of a tile of B for all of them.
template <Schedule kSchedule_, int kBlockN_, int kStages_, int kCluster_>
struct CtaTile {
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr bool kPingPong = kSchedule == Schedule::kPingPong;
  static constexpr int kBlockM = 128, kBlockN = kBlockN_, kBlockK = 64;
  static constexpr int kStages = kStages_, kCluster = kCluster_;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kConsumersPerTile = kPingPong ? 1 : kConsumers;
  static constexpr int kBlocks = kBlockM / 64 / kConsumersPerTile;  // of 64 rows, per consumer
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kBytesA = kBlockM * kBlockK * 2;
  static constexpr int kBytesB = kBlockN * kBlockK * 2;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  // A warp's sums pass through shared memory on their way out: 16 rows of 64 outputs in 16 bits, or
  // of 32 in FP32. The pitches spread the rows that are accessed together over the banks.
  static constexpr int kChunk = 64, kChunkPitch = kChunk + 8;
  static constexpr int kWideChunk = 32, kWidePitch = kWideChunk + 8;
  static constexpr int kStagedBytesPerWarp = 16 * std::max(2 * kChunkPitch, 4 * kWidePitch);
  static constexpr int kStagedBytes = kConsumers * 4 * kStagedBytesPerWarp;
  // 1024: what aligning the stages to the swizzle's pattern may cost.
  static constexpr int kSharedBytes = kStages * kStageBytes + kStagedBytes + 1024;
};

}  // namespace tgemm::sm90
