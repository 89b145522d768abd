// Operand tiles in shared memory for mma.sync: XOR-swizzled so that neither the 16-byte copies in
// nor the fragment reads out meet a bank conflict, in both orders an operand can have in global
// memory.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"
#include "kernels/sm80/cta_tile.hpp"

namespace tgemm::sm80 {

constexpr int kChunkBytes = 16;  // unit of copying and of swizzling
constexpr int kKStepBytes = 32;

// A tile of kExtent rows of A (or columns of B) by kKBytes of K.
//   K-major:  row = position along M or N, kKBytes (64 or 128) of K in it
//   MN-major: row = position along K, kExtent elements in it
template <bool kKMajor, int kExtent, int kKBytes, int kElementBytes>
struct SharedTile {
  static constexpr int kRows = kKMajor ? kExtent : kKBytes / kElementBytes;
  static constexpr int kRowBytes = kKMajor ? kKBytes : kExtent * kElementBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunksPerRow = kRowBytes / kChunkBytes;
  static_assert(kKMajor ? (kRowBytes == 64 || kRowBytes == 128) : kRowBytes % 128 == 0);

  // The chunk bits to flip in `row`: eight consecutive rows at one chunk (ldmatrix) land in eight
  // different 16-byte bank groups; for MN-major TF32, read 4 bytes at a time, four rows by eight
  // columns land in 32 different banks.
  __device__ static constexpr int swizzle(int row) {
    if constexpr (kKMajor) return kRowBytes == 128 ? row & 7 : (row >> 1) & 3;
    return kElementBytes == 2 ? row & 7 : (row & 3) << 1;
  }

  static constexpr int kSwizzlePeriod = !kKMajor && kElementBytes == 4 ? 4 : 8;  // rows

  // Byte offset of 16-byte chunk `chunk` of row `row`.
  __device__ static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ swizzle(row)) * kChunkBytes);
  }
};

enum class Operand { kA, kB };

// Reads 16 (M or N) x 32-byte (K) fragments of a warp's share of a tile into the register layout of
// mma.sync: for A the four registers of one m16 fragment, for B the two registers of two adjacent
// n8 fragments.
template <Operand kOperand, class Tile, bool kKMajor, Math kMath>
class FragmentReader {
 public:
  // `first`: where the warp's share starts along M or N, a multiple of 32.
  __device__ FragmentReader(int first, int lane) {
    // Matrix i of an ldmatrix.x4 is addressed by lanes 8i to 8i+7. A wants (mn 0, k 0), (mn 8, k
    // 0), (mn 0, k 8), (mn 8, k 8); B the same with the middle two exchanged.
    const int low = (lane >> 3) & 1;
    const int high = lane >> 4;
    const int mn_half = kOperand == Operand::kA ? low : high;
    const int k_half = kOperand == Operand::kA ? high : low;
    if constexpr (kKMajor) {
      lane_offset_ = Tile::offset(first + (lane & 7) + 8 * mn_half, k_half);
    } else if constexpr (kMath != Math::kTf32) {
      lane_offset_ = Tile::offset((lane & 7) + 8 * k_half, first / 8 + mn_half);
    } else {
      const int group = lane >> 2;    // position along M or N
      const int in_group = lane & 3;  // position along K
      lane_offset_ = Tile::offset(in_group, (first + group) / 4) + (group & 3) * 4;
    }
  }

  // Fragment `i` (16 rows or columns each) at k-step `step` of the tile at shared address `tile`.
  // All the bits that i and step contribute are clear in lane_offset_ before swizzling, so they are
  // XORed in.
  __device__ void read(uint32_t (&fragment)[4], uint32_t tile, int i, int step) const {
    if constexpr (kKMajor) {
      ptx::ldmatrix_x4(fragment,
                       tile + i * 16 * Tile::kRowBytes + (lane_offset_ ^ (step * kKStepBytes)));
    } else if constexpr (kMath != Math::kTf32) {
      ptx::ldmatrix_x4_trans(fragment,
                             tile + step * 16 * Tile::kRowBytes + (lane_offset_ ^ (i * 32)));
    } else {
      const uint32_t at = tile + step * 8 * Tile::kRowBytes;
      const uint32_t mn0 = lane_offset_ ^ (i * 64);
      const uint32_t mn8 = mn0 ^ 32;
      constexpr int kFour = 4 * Tile::kRowBytes;  // k + 4
      constexpr bool kIsA = kOperand == Operand::kA;
      fragment[0] = ptx::ld_shared_u32(at + mn0);
      fragment[kIsA ? 1 : 2] = ptx::ld_shared_u32(at + mn8);
      fragment[kIsA ? 2 : 1] = ptx::ld_shared_u32(at + kFour + mn0);
      fragment[3] = ptx::ld_shared_u32(at + kFour + mn8);
    }
    if constexpr (kMath == Math::kTf32) {
#pragma unroll
      for (int j = 0; j < 4; ++j) fragment[j] = ptx::cvt_rna_tf32(fragment[j]);
    }
  }

 private:
  uint32_t lane_offset_;
};

template <Math kMath>
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kMath == Math::kF16) ptx::mma_m16n8k16_f16(d, a, b0, b1);
  if constexpr (kMath == Math::kBF16) ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  if constexpr (kMath == Math::kTf32) ptx::mma_m16n8k8_tf32(d, a, b0, b1);
}

}  // namespace tgemm::sm80
