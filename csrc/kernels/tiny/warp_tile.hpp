// The compile-time description of a tiny_gemm tile, and how operands reach a warp's registers.
// Shared by the kernels and the host code that chooses among them.
#pragma once

#include <cstdint>

namespace tgemm::tiny {

// How a warp loads an operand of 16-bit elements. Runs are as long as a tile has blocks of eight,
// in pairs: 2, 4 or 8 elements.
enum class Load {
  kKMajor,         // runs of consecutive k, aligned
  kMnMajor,        // runs of consecutive rows of A (columns of B), aligned; transposed in registers
  kKMajorShifted,  // runs that begin anywhere, read by aligned loads and shifted
  kMnMajorShifted,
  kAnyStride,  // element by element
};

struct Reading {
  Load load;
  // Aligned loads end here: one from here on would reach beyond the operand's last element. What
  // shifted runs have of it is loaded element by element.
  const uint16_t* whole_runs_end;
};

constexpr int kWarps = 4;  // per CTA, which share nothing

// A warp computes a tile of kSize x kSize outputs, kSize of K at a time, or, of the smallest,
// kTiles of them at once: one alone would leave most of its loads' latency to wait for.
template <int kBlocks_, int kTiles_, int kCtasPerSm_>
struct WarpTile {
  static constexpr int kBlocks = kBlocks_;  // of 8 rows, columns and k each: one 8x8 matrix of mma
  static constexpr int kTiles = kTiles_;
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr int kSize = 8 * kBlocks;
  static constexpr int kRun = 2 * kBlocks;  // elements
  // FP32 outputs on their way to the common epilogue.
  static constexpr int kPitch = kSize + 4;
  static constexpr int kStagedFloats = kTiles * kSize * kPitch;  // per warp
};

using Tile8 = WarpTile<1, 4, 4>;
using Tile16 = WarpTile<2, 1, 5>;
using Tile32 = WarpTile<4, 1, 4>;

}  // namespace tgemm::tiny
