// What the rungs of the ladder share, so that two of their files differ by one idea: the walk over
// tiles, loads that know where a matrix ends, and the way of a thread's sums to the epilogue.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/epilogue.cuh"
#include "device/params.hpp"
#include "device/tile_scheduler.cuh"

namespace tgemm::ladder {

// --- tiles ---

// Calls body(tile) for every output tile of this CTA. All threads of the CTA take part.
template <int kBlockM, int kBlockN, class Body>
__device__ inline void for_each_tile(const GemmParams& params, Body body) {
  __shared__ Tile tile;
  const TileScheduler<kBlockM, kBlockN> scheduler(params);
  for (int64_t index = blockIdx.x; index < scheduler.count(); index += gridDim.x) {
    if (threadIdx.x == 0) tile = scheduler.tile(index);
    __syncthreads();
    body(static_cast<const Tile&>(tile));
    __syncthreads();
  }
}

// --- operands ---

enum class Side { kA, kB };

// An operand as GEMM sees it: position mn along M (of A) or N (of B), and position k. Sizes,
// strides and the tile stay in the kernel's parameters and in shared memory, where they cost no
// registers.
template <Side kSide>
class Operand {
 public:
  __device__ Operand(const GemmParams& params, const Tile& tile) : params_(params), tile_(tile) {}

  __device__ const MatrixParams& matrix() const {
    return kSide == Side::kA ? params_.a : params_.b;
  }
  __device__ DType dtype() const { return matrix().dtype; }
  __device__ int64_t mn_stride() const {
    return kSide == Side::kA ? matrix().row_stride : matrix().col_stride;
  }
  __device__ int64_t k_stride() const {
    return kSide == Side::kA ? matrix().col_stride : matrix().row_stride;
  }
  __device__ int64_t mn_size() const { return kSide == Side::kA ? params_.m : params_.n; }
  __device__ int64_t k_size() const { return params_.k; }
  // First row (or column) of the tile.
  __device__ int64_t first() const { return kSide == Side::kA ? tile_.m : tile_.n; }

  template <class T>
  __device__ const T* at(int64_t mn, int64_t k) const {
    const int64_t offset = kSide == Side::kA ? tile_.offset.a : tile_.offset.b;
    return static_cast<const T*>(matrix().pointer) + offset + mn * mn_stride() + k * k_stride();
  }

  // Does the tile of `rows` by `ks` elements that starts at (mn, k) lie inside the matrix?
  __device__ bool contains(int64_t mn, int rows, int64_t k, int ks) const {
    return mn + rows <= mn_size() && k + ks <= k_size();
  }

  // Is each row (K-major: along K, else along M or N) contiguous, with a start that is a multiple
  // of `bytes`?
  __device__ bool aligned(bool k_major, int bytes) const {
    const int64_t contiguous = k_major ? k_stride() : mn_stride();
    const int64_t leading = k_major ? mn_stride() : k_stride();
    const bool wide = dtype() == DType::kFloat32;
    const void* origin = wide ? static_cast<const void*>(at<float>(0, 0)) : at<__half>(0, 0);
    return contiguous == 1 && leading * (wide ? 4 : 2) % bytes == 0 &&
           reinterpret_cast<uintptr_t>(origin) % bytes == 0;
  }

 private:
  const GemmParams& params_;
  const Tile& tile_;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  if constexpr (std::is_same_v<T, float>) return x;
}

// One element, zero outside the matrix.
template <class T, Side kSide>
__device__ inline T load_or_zero(const Operand<kSide>& operand, int64_t mn, int64_t k) {
  const bool inside = mn < operand.mn_size() && k < operand.k_size();
  return inside ? *operand.template at<T>(mn, k) : from_float<T>(0.0f);
}

// The same, FP32 operands rounded to T.
template <class T, Side kSide>
__device__ inline T load_as(const Operand<kSide>& operand, int64_t mn, int64_t k) {
  if (std::is_same_v<T, float> || operand.dtype() != DType::kFloat32) {
    return load_or_zero<T>(operand, mn, k);
  }
  return from_float<T>(load_or_zero<float>(operand, mn, k));
}

// Neighbouring elements that are moved together.
template <class T, int kCount>
struct __align__(sizeof(T) * kCount) Elements {
  T values[kCount];
};

template <class T, int kCount>
__device__ inline void put(T* at, const Elements<T, kCount>& elements) {
  *reinterpret_cast<Elements<T, kCount>*>(at) = elements;
}

// A tile of kMn by kK elements on its way through registers, in chunks of 16 bytes: fetch() starts
// the loads, store() hands on what has arrived, and a multiplication may lie between. Tiles that
// cross the edge of the matrix, and operands that 128-bit loads cannot read or that have to be
// converted, are loaded by store() instead, element by element where need be.
// kInFlight is how many of those a thread waits for at once.
template <class T, int kMn, int kK, bool kKMajor, int kThreads, Side kSide, int kInFlight = 1>
class TileCopy {
 public:
  static constexpr int kElements = 16 / sizeof(T);  // in a chunk
  static constexpr int kPerRow = (kKMajor ? kK : kMn) / kElements;
  static constexpr int kRowStep = kThreads / kPerRow;
  static constexpr int kChunks = (kKMajor ? kMn : kK) / kRowStep;  // per thread
  static_assert(kThreads % kPerRow == 0 && (kKMajor ? kMn : kK) % kRowStep == 0);

  // Without `wide`, no 128-bit loads.
  __device__ explicit TileCopy(const Operand<kSide>& operand, bool wide = true)
      : operand_(operand), from_(operand.template at<T>(operand.first() + mn_of(0), k_of(0))) {
    aligned_ = wide && operand.aligned(kKMajor, 16);
    whole_rows_ = aligned_ && operand.contains(operand.first(), kMn, 0, 0) &&
                  !(kConverts && operand.dtype() == DType::kFloat32);
  }

  // The tile that starts at k: tile after tile, from 0 on.
  __device__ void fetch(int64_t k) {
    if (!fast(k)) return;
    load_chunks(from_);
    from_ += kKMajor ? kK : kK * operand_.k_stride();
  }

  // Calls put(mn, k, elements) for all Elements of the tile that starts at k, with their place in
  // it. They run along K, or along M or N.
  template <class Put>
  __device__ void store(int64_t k, Put put) const {
    if (fast(k)) {
      store_fetched(put);
    } else {
      load_and_store(k, put);
    }
  }

  // Loads and stores in one, of any tile.
  template <class Put>
  __device__ void copy(int64_t k, Put put) {
    if (fast(k)) {
      load_chunks(operand_.template at<T>(operand_.first() + mn_of(0), k + k_of(0)));
      store_fetched(put);
    } else {
      load_and_store(k, put);
    }
  }

 private:
  static constexpr bool kConverts = !std::is_same_v<T, float>;
  __device__ bool fast(int64_t k) const { return whole_rows_ && k + kK <= operand_.k_size(); }

  __device__ void load_chunks(const T* from) {
    const int64_t step = kRowStep * (kKMajor ? operand_.mn_stride() : operand_.k_stride());
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      chunks_[i] = *reinterpret_cast<const uint4*>(from);
      from += step;
    }
  }

  template <class Put>
  __device__ void store_fetched(Put put) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      put(mn_of(i), k_of(i), reinterpret_cast<const Elements<T, kElements>&>(chunks_[i]));
    }
  }

  template <class Put>
  __device__ void load_and_store(int64_t k, Put put) const {
    if (kConverts && aligned_ && operand_.dtype() == DType::kFloat32 &&
        operand_.contains(operand_.first(), kMn, k, kK)) {
#pragma unroll kInFlight
      for (int i = 0; i < kChunks * kElements / 4; ++i) {
        const int mn = mn_of(i * 4 / kElements) + (kKMajor ? 0 : i * 4 % kElements);
        const int at_k = k_of(i * 4 / kElements) + (kKMajor ? i * 4 % kElements : 0);
        const float4 v = *reinterpret_cast<const float4*>(
            operand_.template at<float>(operand_.first() + mn, k + at_k));
        put(mn, at_k,
            Elements<T, 4>{from_float<T>(v.x), from_float<T>(v.y), from_float<T>(v.z),
                           from_float<T>(v.w)});
      }
    } else {
#pragma unroll kInFlight
      for (int i = 0; i < kChunks * kElements; ++i) {
        const int mn = mn_of(i / kElements) + (kKMajor ? 0 : i % kElements);
        const int at_k = k_of(i / kElements) + (kKMajor ? i % kElements : 0);
        put(mn, at_k, Elements<T, 1>{load_as<T>(operand_, operand_.first() + mn, k + at_k)});
      }
    }
  }

  __device__ static int mn_of(int i) {
    return kKMajor ? threadIdx.x / kPerRow + i * kRowStep : threadIdx.x % kPerRow * kElements;
  }
  __device__ static int k_of(int i) {
    return kKMajor ? threadIdx.x % kPerRow * kElements : threadIdx.x / kPerRow + i * kRowStep;
  }

  const Operand<kSide>& operand_;
  const T* from_;  // this thread's first chunk of the next tile
  bool aligned_, whole_rows_;
  uint4 chunks_[kChunks];
};

// --- outputs ---

// Finishes kVec neighbouring outputs of a row; kVec 4 needs params.vector_epilogue. One run at a
// time needs few registers beside a thread's sums.
template <int kVec>
__device__ inline void finish(const GemmParams& params, const BatchOffsets& offset, int64_t m,
                              int64_t n, float (&sums)[1][kVec]) {
  if (m >= params.m || n >= params.n) return;
  const auto index = [&](const MatrixParams& matrix, int64_t base) {
    return base + m * matrix.row_stride + n * matrix.col_stride;
  };
  float bias[1][kVec] = {};
  if (params.bias.pointer) {
    load_elements(params.bias.pointer, params.bias.dtype, index(params.bias, offset.bias), bias[0]);
  }
  const EpilogueRuns<1> run{{index(params.out, offset.out)},
                            {index(params.residual, offset.residual)},
                            {index(params.preact, offset.preact)},
                            {true}};
  finish_runs(params, run, bias, sums);
}

__device__ inline void finish_one(const GemmParams& params, const BatchOffsets& offset, int64_t m,
                                  int64_t n, float sum) {
  float sums[1][1] = {{sum}};
  finish(params, offset, m, n, sums);
}

__device__ inline void finish_four(const GemmParams& params, const BatchOffsets& offset, int64_t m,
                                   int64_t n, float4 sums) {
  if (params.vector_epilogue) {
    float four[1][4] = {{sums.x, sums.y, sums.z, sums.w}};
    finish(params, offset, m, n, four);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    finish_one(params, offset, m, n + i, sums.x);
    sums = make_float4(sums.y, sums.z, sums.w, sums.x);
  }
}

// A warp finishes kRows by kColumns outputs from (m, n) on, whose sums it has put into shared
// memory.
template <int kRows, int kColumns, int kPitch>
__device__ inline void finish_staged(const GemmParams& params, const BatchOffsets& offset,
                                     int64_t m, int64_t n, const float* staged) {
  __syncwarp();
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kRows * kColumns / 4; i += 32) {
    const int row = i / (kColumns / 4);
    const int column = i % (kColumns / 4) * 4;
    finish_four(params, offset, m + row, n + column,
                *reinterpret_cast<const float4*>(staged + row * kPitch + column));
  }
  __syncwarp();
}

}  // namespace tgemm::ladder
