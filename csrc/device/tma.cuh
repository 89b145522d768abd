// Tiles that TMA brings to shared memory (sm_90), and the mbarriers that say when they are there.
// The instructions themselves are libcu++'s (cuda::ptx).
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "device/params.hpp"
#include "device/ptx.cuh"
#include "device/tensor_map.hpp"

namespace tgemm {

namespace cptx = cuda::ptx;

// Elements of a tile along K: as wide as the 128-byte swizzle.
inline constexpr int kTmaTileK = 64;

__device__ inline void wait(uint64_t& barrier, uint32_t parity) {
  while (!cptx::mbarrier_try_wait_parity(&barrier, parity)) {
  }
}

__device__ inline void arrive(uint64_t& barrier) {
  cptx::mbarrier_arrive(cptx::sem_release, cptx::scope_cta, cptx::space_shared, &barrier);
}

// Goes round the stages; each round flips the parity that the barriers are waited for with.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ void advance(int count) {
    parity ^= (stage + count) / kStages & 1;
    stage = (stage + count) % kStages;
  }
};

// Where TMA finds a batch entry of an operand: its coordinates in the map.
struct MapCoordinates {
  int32_t batch[kMapBatchDims] = {};
  __device__ MapCoordinates(const OperandMap& operand, const GemmParams& params, int64_t index) {
    auto rest = static_cast<uint32_t>(index);  // a map's sizes have no more bits
#pragma unroll 1
    for (int dim = params.batch_dims - 1; dim >= 0; --dim) {
      const auto size = static_cast<uint32_t>(params.batch_size[dim]);
      const uint32_t outer = dim == 0 ? 0 : rest / size;
#pragma unroll
      for (int i = 0; i < kMapBatchDims; ++i) {
        if (operand.batch_dim[i] == dim) batch[i] = static_cast<int32_t>(rest - outer * size);
      }
      rest = outer;
    }
  }
};

// Asks TMA for one box of an operand. With a `multicast` mask, every CTA of the cluster that it
// names gets the box, at the same address, and hears of it at its own barrier.
__device__ inline void request_box(unsigned char* to, const OperandMap& operand,
                                   const MapCoordinates& at, bool k_major, int32_t mn, int32_t k,
                                   uint64_t& barrier, uint16_t multicast = 0) {
  const int32_t coordinates[5] = {k_major ? k : mn, k_major ? mn : k, at.batch[0], at.batch[1],
                                  at.batch[2]};
  if (multicast == 0) {
    cptx::cp_async_bulk_tensor(cptx::space_cluster, cptx::space_global, to, &operand.map,
                               coordinates, &barrier);
  } else {
    cptx::cp_async_bulk_tensor(cptx::space_cluster, cptx::space_global, to, &operand.map,
                               coordinates, &barrier, multicast);
  }
}

// Asks for the same box in L2 alone (9.7.9.25.5.3 cp.async.bulk.prefetch.tensor). A hint: nothing
// says when it has arrived.
__device__ inline void prefetch_box(const OperandMap& operand, const MapCoordinates& at,
                                    bool k_major, int32_t mn, int32_t k) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(
                   &operand.map),
               "r"(k_major ? k : mn), "r"(k_major ? mn : k), "r"(at.batch[0]), "r"(at.batch[1]),
               "r"(at.batch[2])
               : "memory");
}

// Asks TMA for kMn by 64 elements from (mn, k) on. K-major, they are one box; else one box for each
// 64 rows (columns), because a box is as wide as the swizzle. `multicast` as in request_box.
template <int kMn, bool kKMajor>
__device__ inline void request_tile(unsigned char* tile, const OperandMap& operand,
                                    const MapCoordinates& at, int64_t mn, int64_t k,
                                    uint64_t& barrier, uint16_t multicast = 0) {
  constexpr int kBox = kKMajor ? kMn : 64;
#pragma unroll
  for (int i = 0; i < kMn / kBox; ++i) {
    request_box(tile + i * kBox * kTmaTileK * 2, operand, at, kKMajor,
                static_cast<int32_t>(mn + i * kBox), static_cast<int32_t>(k), barrier, multicast);
  }
}

}  // namespace tgemm
