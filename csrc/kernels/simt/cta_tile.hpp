// The compile-time description of a simt CTA tile, and how operands reach shared memory. Shared by
// the kernels and the host code that chooses among them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tgemm::simt {

// How one operand travels from global to shared memory, where it is always MN-major: [k][mn].
enum class Copy : uint8_t {
  kKMajor,       // FP32, consecutive k adjacent: 4-byte cp.async, transposed on the way
  kMnMajor,      // FP32, consecutive rows of A (columns of B) adjacent: 4-byte cp.async
  kMnMajorVec4,  // the same, rows 16-byte aligned and a multiple of 4 long: 16-byte cp.async
  kAnyStride,    // any strides and dtype: element-wise through registers, no cp.async
};

// Rows of a K-major operand may be this far apart (elements): within a tile of up to 256 rows they
// are addressed by 32-bit offsets.
constexpr int64_t kMaxRowStride = (int64_t{1} << 24) - 1;

// A CTA of kWarpsM x kWarpsN warps computes (kBlockM, kBlockN); each thread (kThreadM, kThreadN),
// held as fragments of 4 adjacent rows and 4 adjacent columns so that every shared-memory read is
// 16 bytes wide.
template <int kBlockM_, int kBlockN_, int kBlockK_, int kThreadM_, int kThreadN_, int kWarpsM_,
          int kWarpsN_, int kStages_, int kCtasPerSm_>
struct CtaTile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_;
  static constexpr int kThreadM = kThreadM_, kThreadN = kThreadN_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_;
  static constexpr int kCtasPerSm = kCtasPerSm_;

  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kWarpM = kBlockM / kWarpsM, kWarpN = kBlockN / kWarpsN;
  static constexpr int kLanesM = kWarpM / kThreadM, kLanesN = kWarpN / kThreadN;
  static_assert(kLanesM * kLanesN == 32 && (kLanesM == 8 || kLanesM == 4));
  static_assert(kThreadM % 4 == 0 && kThreadN % 4 == 0 && kBlockK % 8 == 0 && kStages >= 2);

  // The pitch of a k row is an odd multiple of 4 floats: 16-byte aligned for the reads, and the
  // transposing copy, in which a warp writes 8 k x 4 rows, meets 32 different banks.
  static constexpr int kPitchA = kBlockM + 4, kPitchB = kBlockN + 4;
  static constexpr int kStageFloats = kBlockK * (kPitchA + kPitchB);

  // The epilogue stages 4 * kLanesM rows of each warp's tile at a time, over the pipeline's
  // buffers.
  static constexpr int kStagedRows = 4 * kLanesM, kStagedPitch = kWarpN + 4;
  static constexpr int kSharedBytes =
      4 * std::max(kStages * kStageFloats, kWarpsM* kWarpsN* kStagedRows* kStagedPitch);
};

}  // namespace tgemm::simt
