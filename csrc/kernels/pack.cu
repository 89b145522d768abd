// Packs operands: whatever their strides and alignment, into lines that TMA can read, rounded to 16
// bits or taken apart for 3xTF32 where that is asked for. Bound by memory: reads are coalesced,
// element by element, which serves any alignment, writes are 16 bytes wide, and tiles in shared
// memory lie between the two.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "device/ptx.cuh"
#include "device/tf32_parts.hpp"
#include "kernels/launch.cuh"
#include "kernels/pack.hpp"

namespace tgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;  // elements in flight
constexpr int kTileElements = kThreads * kPerThread;
constexpr int kCtasPerSm = 4;  // with fewer registers, ptxas spills

// How tiles of an operand are read.
enum class Reading {
  kWide,        // 8 lines of 512 adjacent elements, along the lines
  kNarrow,      // 64 lines of 64 adjacent elements, along the lines
  kTransposed,  // 64 lines of 64 elements, which need not be adjacent, across the lines
};
constexpr int tile_width(Reading reading) { return reading == Reading::kWide ? 512 : 64; }
constexpr int tile_lines(Reading reading) { return kTileElements / tile_width(reading); }

struct PackParams {
  struct Operand {
    PackedCopy copy;
    Reading reading;
    int64_t tiles_across;  // of a line
    int64_t tiles_down;    // of a batch entry
  };
  Operand operands[2];
  int64_t first_tiles;  // of operands[0]
  int64_t tiles;        // of both
};

// A tile in shared memory. Lines begin at 16 bytes, and 16 bytes further in the banks than the line
// before: so neither 16-byte accesses to eight lines nor accesses along a line meet in a bank.
template <class Target, Reading kReading>
struct Tile {
  static constexpr int kPerChunk = 16 / sizeof(Target);  // elements that are written at once
  static constexpr int kWidth = tile_width(kReading), kLines = tile_lines(kReading);
  static constexpr int kPitch = kWidth + kPerChunk;
  static constexpr int kElements = kLines * kPitch;
};

template <class Target>
constexpr int kSharedElements =
    std::max({Tile<Target, Reading::kWide>::kElements, Tile<Target, Reading::kNarrow>::kElements,
              Tile<Target, Reading::kTransposed>::kElements});

__device__ inline uint32_t convert(uint32_t bits, uint32_t) { return bits; }
__device__ inline uint16_t convert(uint16_t bits, uint16_t) { return bits; }
__device__ inline __half convert(float value, __half) { return __float2half_rn(value); }
__device__ inline __nv_bfloat16 convert(float value, __nv_bfloat16) {
  return __float2bfloat16_rn(value);
}

// From where the tile begins in the source; `width` and `lines` of it are inside the operand, the
// rest is zero. A warp reads 32 adjacent elements of a line at a time.
template <class Source, class Target, Reading kReading>
__device__ inline void read_along(const Source* source, const PackedCopy& copy, int width,
                                  int lines, Target* tile) {
  using Shape = Tile<Target, kReading>;
  constexpr int kSteps = Shape::kWidth / 32;
  constexpr int kLinesPerWarp = kPerThread / kSteps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_line = static_cast<int>(threadIdx.x) / 32 * kLinesPerWarp;
  Source values[kLinesPerWarp][kSteps];
#pragma unroll
  for (int i = 0; i < kLinesPerWarp; ++i) {
    const Source* line = source + (first_line + i) * copy.line_stride + lane;
    const int end = first_line + i < lines ? width : 0;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      values[i][j] = lane + 32 * j < end ? line[32 * j] : Source();
    }
  }
#pragma unroll
  for (int i = 0; i < kLinesPerWarp; ++i) {
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      tile[(first_line + i) * Shape::kPitch + lane + 32 * j] = convert(values[i][j], Target());
    }
  }
}

// The same where lines lie side by side: a warp reads one element each of 32 lines at a time, and a
// thread 16 of its line.
template <class Source, class Target>
__device__ inline void read_across(const Source* source, const PackedCopy& copy, int width,
                                   int lines, Target* tile) {
  using Shape = Tile<Target, Reading::kTransposed>;
  constexpr int kChunk = Shape::kPerChunk;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int line = warp % 2 * 32 + static_cast<int>(threadIdx.x) % 32;
  const int first = warp / 2 * kPerThread;
  const int end = line < lines ? width - first : 0;
  const Source* from = source + line * copy.line_stride + first * copy.unit_stride;
  Source values[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i, from += copy.unit_stride) {
    values[i] = i < end ? *from : Source();
  }
#pragma unroll
  for (int i = 0; i < kPerThread; i += kChunk) {
    alignas(16) Target converted[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) converted[j] = convert(values[i + j], Target());
    *reinterpret_cast<uint4*>(tile + line * Shape::kPitch + first + i) =
        *reinterpret_cast<const uint4*>(converted);
  }
}

// The parts of four elements, each part with its own.
__device__ inline void write_parts(uint32_t* to, const uint4& four, PackedParts parts) {
  const uint32_t bits[4] = {four.x, four.y, four.z, four.w};
  alignas(16) uint32_t first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Tf32Parts both = tf32_parts(__uint_as_float(bits[i]));
    first[i] = parts == PackedParts::kHighLow ? both.high : both.low;
    second[i] = parts == PackedParts::kHighLow ? both.low : both.high;
  }
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(first);
  *reinterpret_cast<uint4*>(to + kPartsK) = *reinterpret_cast<const uint4*>(second);
}

template <class Source, class Target, Reading kReading, bool kParts>
__device__ inline void pack_tile(const PackParams::Operand& operand, int64_t index, Target* tile) {
  using Shape = Tile<Target, kReading>;
  static_assert(Shape::kLines * Shape::kWidth == kTileElements);
  const PackedCopy& copy = operand.copy;
  const int64_t down = index / operand.tiles_across;
  const int64_t batch = down / operand.tiles_down;
  const int64_t first_element = (index - down * operand.tiles_across) * Shape::kWidth;
  const int64_t first_line = (down - batch * operand.tiles_down) * Shape::kLines;
  const int width = static_cast<int>(min(copy.width - first_element, int64_t{Shape::kWidth}));
  const int lines = static_cast<int>(min(copy.lines - first_line, int64_t{Shape::kLines}));

  const Source* source = static_cast<const Source*>(copy.source) +
                         first_element * copy.unit_stride + first_line * copy.line_stride;
  int64_t rest = batch;
  for (int i = copy.batch_dims - 1; i >= 0; --i) {
    const int64_t outer = rest / copy.batch_size[i];
    source += (rest - outer * copy.batch_size[i]) * copy.batch_stride[i];
    rest = outer;
  }
  if constexpr (kReading == Reading::kTransposed) {
    read_across<Source, Target>(source, copy, width, lines, tile);
  } else {
    read_along<Source, Target, kReading>(source, copy, width, lines, tile);
  }
  __syncthreads();

  Target* target = static_cast<Target*>(copy.target) +
                   (batch * copy.lines + first_line) * copy.pitch +
                   first_element * (kParts ? 2 : 1);
  constexpr int kChunksPerLine = Shape::kWidth / Shape::kPerChunk;
  constexpr int kChunks = kPerThread / Shape::kPerChunk;
  constexpr int kAtOnce = kParts ? 1 : kChunks;  // else ptxas spills
#pragma unroll kAtOnce
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = i * kThreads + static_cast<int>(threadIdx.x);
    const int line = chunk / kChunksPerLine;
    const int element = chunk % kChunksPerLine * Shape::kPerChunk;
    const uint4 value = *reinterpret_cast<const uint4*>(tile + line * Shape::kPitch + element);
    Target* const to = target + line * copy.pitch + element;
    if constexpr (kParts) {
      if (line < lines && element / kPartsK * kPartsK < width) {
        write_parts(to + element / kPartsK * kPartsK, value, copy.parts);
      }
    } else if (line < lines && element < width) {  // the last 16 bytes may reach into the gap
      *reinterpret_cast<uint4*>(to) = value;
    }
  }
}

template <class Source, class Target, bool kParts>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    pack_kernel(const __grid_constant__ PackParams params) {
  __shared__ alignas(16) Target tile[kSharedElements<Target>];
  // The kernel that reads the packed operands may start, up to its wait for this one.
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  for (int64_t i = blockIdx.x; i < params.tiles; i += gridDim.x) {
    const bool first = i < params.first_tiles;
    const PackParams::Operand& operand = params.operands[first ? 0 : 1];
    const int64_t index = first ? i : i - params.first_tiles;
    switch (operand.reading) {
      case Reading::kWide:
        pack_tile<Source, Target, Reading::kWide, kParts>(operand, index, tile);
        break;
      case Reading::kNarrow:
        pack_tile<Source, Target, Reading::kNarrow, kParts>(operand, index, tile);
        break;
      case Reading::kTransposed:
        pack_tile<Source, Target, Reading::kTransposed, kParts>(operand, index, tile);
        break;
    }
    __syncthreads();  // the tile may be overwritten
  }
}

PackParams::Operand operand_of(const PackedCopy& copy) {
  const Reading reading = copy.unit_stride != 1                           ? Reading::kTransposed
                          : copy.width > tile_width(Reading::kNarrow) * 2 ? Reading::kWide
                                                                          : Reading::kNarrow;
  const auto tiles = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  return {.copy = copy,
          .reading = reading,
          .tiles_across = tiles(copy.width, tile_width(reading)),
          .tiles_down = tiles(copy.lines, tile_lines(reading))};
}

template <class Source, class Target, bool kParts = false>
std::string launch_as(const PackParams& params, CUstream_st* stream) {
  const LaunchTarget target{.stream = stream};
  return launch_clusters<pack_kernel<Source, Target, kParts>>(
      std::min<int64_t>(params.tiles, INT32_MAX), 1,
      /*persistent=*/false, kThreads, 0, target, params);
}

}  // namespace

std::string launch_pack(std::span<const PackedCopy> copies, CUstream_st* stream) {
  if (copies.empty()) return {};
  if (copies.size() > 2) return "more than two operands to pack";
  PackParams params{};
  for (size_t i = 0; i < copies.size(); ++i) {
    PackParams::Operand& operand = params.operands[i] = operand_of(copies[i]);
    params.tiles += operand.tiles_across * operand.tiles_down * operand.copy.batch_count;
    if (i == 0) params.first_tiles = params.tiles;
  }
  const DType target = copies[0].target_dtype;
  if (copies[0].parts != PackedParts::kNone) {
    return launch_as<uint32_t, uint32_t, true>(params, stream);
  }
  if (copies[0].source_dtype == target) {
    return bytes_per_element(target) == 4 ? launch_as<uint32_t, uint32_t>(params, stream)
                                          : launch_as<uint16_t, uint16_t>(params, stream);
  }
  return target == DType::kFloat16 ? launch_as<float, __half>(params, stream)
                                   : launch_as<float, __nv_bfloat16>(params, stream);
}

}  // namespace tgemm
