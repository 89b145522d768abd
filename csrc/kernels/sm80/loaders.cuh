// Global to shared memory for mma.sync tiles: cp.async where the operand is 16-byte aligned, and
// through registers, element by element where need be, for everything else.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/params.hpp"
#include "device/ptx.cuh"
#include "kernels/sm80/shared_tile.cuh"

namespace tgemm::sm80 {

// cp.async of an operand with unit stride along one dimension, everything else in whole 16-byte
// chunks. Each thread owns one chunk column and every kRowsPerPass-th row of the tile.
//
// What lies outside the matrix along M or N only feeds outputs that nobody stores, so it is read
// from the nearest place inside instead. K beyond the end must be zeros: the partial k-tile comes
// first, so that the mainloop requests whole ones alone and needs no sizes.
template <class Tile, bool kKMajor, int kKBytes, int kElementBytes, int kThreads>
class AsyncLoader {
 public:
  static constexpr int kRowsPerPass = kThreads / Tile::kChunksPerRow;
  static constexpr int kPasses = Tile::kRows / kRowsPerPass;
  static_assert(kThreads % Tile::kChunksPerRow == 0 && Tile::kRows % kRowsPerPass == 0);
  static_assert(kRowsPerPass % Tile::kSwizzlePeriod == 0, "one shared offset serves all passes");

  // `base`: first element of this batch entry; `mn`: first row (column) of the tile, of `extent` in
  // all. The contiguous extent is a multiple of a chunk and a tile's rows span less than 2^31 bytes
  // (loads_async() in mma_sync.cpp).
  __device__ AsyncLoader(const void* base, int64_t mn_stride, int64_t k_stride, int64_t mn,
                         int64_t extent, int64_t k_begin, int thread) {
    constexpr int kChunkElements = kChunkBytes / kElementBytes;
    const int chunk = thread % Tile::kChunksPerRow;
    const int row = thread / Tile::kChunksPerRow;
    shared_offset_ = Tile::offset(row, chunk);
    const char* origin = static_cast<const char*>(base);
    if constexpr (kKMajor) {
      const int64_t last = extent - 1 - mn;
      const int first = static_cast<int>(min(int64_t{row}, last));
      last_row_ = static_cast<int>(min(last, int64_t{Tile::kRows})) - first;
      row_pitch_ = static_cast<int>(mn_stride * kElementBytes);
      global_ = origin + (mn + first) * (mn_stride * kElementBytes) + k_begin * kElementBytes +
                chunk * kChunkBytes;
    } else {
      const int64_t column = min(mn + chunk * kChunkElements, extent - kChunkElements);
      row_pitch_ = static_cast<int>(k_stride * kElementBytes);
      global_ = origin + (k_begin + row) * (k_stride * kElementBytes) + column * kElementBytes;
    }
  }

  // Requests the first k-tile, of which `k` are inside the matrix, and moves on.
  __device__ void copy_first(uint32_t tile, int k, int thread) {
    const int chunk = thread % Tile::kChunksPerRow;
    const int row = thread / Tile::kChunksPerRow;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool inside =
          kKMajor ? chunk * kChunkBytes < k * kElementBytes : row + pass * kRowsPerPass < k;
      ptx::cp_async_16_zfill(shared(tile, pass), source(pass), inside ? kChunkBytes : 0);
    }
    global_ += kKMajor ? k * kElementBytes : k * row_pitch_;
  }

  // Requests passes [begin, end) of the current k-tile, if `wanted`.
  __device__ void copy(uint32_t tile, int begin, int end, bool wanted) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass >= begin && pass < end)
        ptx::cp_async_16_if(wanted, shared(tile, pass), source(pass));
    }
  }

  __device__ void advance() { global_ += kKMajor ? kKBytes : Tile::kRows * row_pitch_; }

 private:
  __device__ uint32_t shared(uint32_t tile, int pass) const {
    return tile + shared_offset_ + pass * kRowsPerPass * Tile::kRowBytes;
  }
  __device__ const char* source(int pass) const {
    const int row = kKMajor ? min(pass * kRowsPerPass, last_row_) : pass * kRowsPerPass;
    return global_ + static_cast<uint32_t>(row) * static_cast<uint32_t>(row_pitch_);
  }

  const char* global_;  // this thread's chunk in pass 0 of the current k-tile
  int row_pitch_;       // bytes
  int last_row_ = 0;    // K-major: rows (along M or N) from this one to the last
  int shared_offset_;
};

// Any strides, any alignment, and conversion of FP32 to the Tensor Core type. Always fills a
// K-major shared tile. fetch() reads a k-tile into registers while the previous one is multiplied;
// store() converts and writes it.
template <class Tile, Math kMath, class Source, int kKBytes, int kThreads>
class StagedLoader {
 public:
  static constexpr int kElements = kChunkBytes / kElementBytesOf<kMath>;  // per chunk
  static constexpr int kChunks = Tile::kRows * Tile::kChunksPerRow;
  static constexpr int kPerThread = kChunks / kThreads;
  static constexpr int kTileK = kKBytes / kElementBytesOf<kMath>;
  static_assert(kChunks % kThreads == 0);

  __device__ StagedLoader(const void* base, int64_t mn_stride, int64_t k_stride, int64_t mn,
                          int64_t extent, int64_t k_begin, int64_t k_end, int thread)
      : global_(static_cast<const Source*>(base) + mn * mn_stride + k_begin * k_stride),
        mn_stride_(mn_stride),
        k_stride_(k_stride),
        rows_(static_cast<int>(min(extent - mn, int64_t{Tile::kRows}))),
        k_left_(k_end - k_begin),
        thread_(thread) {
    // Widest load that every chunk start allows.
    const uint64_t bits =
        reinterpret_cast<uint64_t>(global_) | (static_cast<uint64_t>(mn_stride) * sizeof(Source));
    width_ = k_stride != 1 ? 0 : bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 0;
  }

  __device__ void fetch() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const auto [row, chunk] = position(i);
      const int k = chunk * kElements;
      const Source* from = global_ + row * mn_stride_ + k * k_stride_;
      const int valid =
          row < rows_ ? static_cast<int>(max(int64_t{0}, min(k_left_ - k, int64_t{kElements}))) : 0;
      if (valid == kElements && width_ == 16) {
        load<uint4>(raw_[i], from);
      } else if (valid == kElements && width_ == 8) {
        load<uint2>(raw_[i], from);
      } else if (valid == kElements && width_ == 4) {
        load<uint32_t>(raw_[i], from);
      } else {
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          raw_[i].elements[j] = j < valid ? from[j * k_stride_] : Source(0.0f);
        }
      }
    }
    global_ += kTileK * k_stride_;
    k_left_ -= kTileK;
  }

  __device__ void store(uint32_t tile) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const auto [row, chunk] = position(i);
      uint32_t packed[4];
      pack(packed, raw_[i]);
      ptx::st_shared_v4(tile + Tile::offset(row, chunk), packed);
    }
  }

 private:
  union Raw {
    __device__ Raw() {}
    Source elements[kElements];
    uint32_t words[kElements * sizeof(Source) / 4];
  };
  struct Position {
    int row;
    int chunk;
  };

  // Neighbouring threads take neighbouring elements of global memory: along K when K is contiguous,
  // else along M or N.
  __device__ Position position(int i) const {
    const int index = thread_ + i * kThreads;
    if (k_stride_ == 1) return {index / Tile::kChunksPerRow, index % Tile::kChunksPerRow};
    return {index % Tile::kRows, index / Tile::kRows};
  }

  template <class Word>
  __device__ static void load(Raw& raw, const Source* from) {
    constexpr int kWords = kElements * sizeof(Source) / sizeof(Word);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const Word word = reinterpret_cast<const Word*>(from)[j];
      constexpr int kPer = sizeof(Word) / 4;
      const uint32_t* parts = reinterpret_cast<const uint32_t*>(&word);
#pragma unroll
      for (int q = 0; q < kPer; ++q) raw.words[j * kPer + q] = parts[q];
    }
  }

  __device__ static void pack(uint32_t (&packed)[4], const Raw& raw) {
    if constexpr (sizeof(Source) == kElementBytesOf<kMath>) {
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = raw.words[j];
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = raw.elements[2 * j];
        const float high = raw.elements[2 * j + 1];
        if constexpr (kMath == Math::kF16) {
          const __half2 pair = __floats2half2_rn(low, high);
          packed[j] = reinterpret_cast<const uint32_t&>(pair);
        } else {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
          packed[j] = reinterpret_cast<const uint32_t&>(pair);
        }
      }
    }
  }

  const Source* global_;
  int64_t mn_stride_;
  int64_t k_stride_;
  int rows_;
  int64_t k_left_;
  int thread_;
  int width_;  // bytes per load; 0: element by element
  Raw raw_[kPerThread];
};

}  // namespace tgemm::sm80
