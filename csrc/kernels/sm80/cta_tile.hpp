// Compile-time configuration of the mma_sync kernels. Host and device.
#pragma once

namespace tgemm::sm80 {

// What the Tensor Cores multiply. One k-step is 32 bytes of K: 16 elements of FP16/BF16, 8 of TF32.
enum class Math { kF16, kBF16, kTf32 };

template <Math kMath>
inline constexpr int kElementBytesOf = kMath == Math::kTf32 ? 4 : 2;

// CTA tile (kBlockM, kBlockN) shared by kWarpsM x kWarpsN warps; kKBytes of K per stage.
template <int kBlockM_, int kBlockN_, int kKBytes_, int kWarpsM_, int kWarpsN_, int kStages_,
          int kCtasPerSm_>
struct CtaTile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kKBytes = kKBytes_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_, kCtasPerSm = kCtasPerSm_;
  static constexpr int kWarpM = kBlockM / kWarpsM, kWarpN = kBlockN / kWarpsN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kStageBytes = (kBlockM + kBlockN) * kKBytes;
  // Accumulators staged for the epilogue: a pitch of 8 modulo 32 floats spreads the eight rows that
  // a half-warp writes over all banks.
  static constexpr int kStagedPitch = kWarpN + 8;
  static constexpr int kStagedFloatsPerWarp = kWarpM * kStagedPitch;
  static constexpr int kSharedBytes =
      kStages * kStageBytes > kThreads / 32 * kStagedFloatsPerWarp * 4
          ? kStages* kStageBytes
          : kThreads / 32 * kStagedFloatsPerWarp * 4;
  static_assert(kWarpM % 32 == 0 && kWarpN % 32 == 0 && kStagedPitch % 32 == 8);
};

}  // namespace tgemm::sm80
