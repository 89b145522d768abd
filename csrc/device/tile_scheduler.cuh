// Which output tile a CTA works on: one linear index over (K split, batch, tile), decoded so that
// CTAs that run together share operand rows and columns in L2.
#pragma once

#include <cstdint>

#include "device/params.hpp"

namespace tgemm {

__device__ inline BatchOffsets batch_offsets(const GemmParams& params, int64_t batch) {
  BatchOffsets offset{};
#pragma unroll 1  // six divisions at once take more registers than some kernels have
  for (int i = params.batch_dims - 1; i >= 0; --i) {
    const int64_t outer = i == 0 ? 0 : batch / params.batch_size[i];
    const int64_t index = batch - outer * params.batch_size[i];
    offset.a += index * params.a.batch_stride[i];
    offset.b += index * params.b.batch_stride[i];
    offset.out += index * params.out.batch_stride[i];
    offset.bias += index * params.bias.batch_stride[i];
    offset.residual += index * params.residual.batch_stride[i];
    offset.preact += index * params.preact.batch_stride[i];
    batch = outer;
  }
  return offset;
}

struct Tile {
  int64_t m;        // first row
  int64_t n;        // first column
  int64_t batch;    // linear batch index
  int64_t k_begin;  // this split's share of K
  int64_t k_end;
  int split;
  BatchOffsets offset;
};

// Hands out CTA tiles. The grid is one-dimensional (y and z are limited to 65535) and capped, so a
// kernel loops: for (int64_t i = blockIdx.x; i < scheduler.count(); i += gridDim.x) { ...
// scheduler.tile(i) ... } Decoding takes several divisions, so one thread does it and shares the
// tile.
template <int kBlockM, int kBlockN>
class TileScheduler {
 public:
  // Rows of tiles walked before moving to the next column of tiles. With about a hundred resident
  // CTAs this makes the footprint of a wave roughly square.
  static constexpr int kGroupM = kBlockN >= 2 * kBlockM ? 16 : 8;

  __device__ explicit TileScheduler(const GemmParams& params)
      : params_(params),
        tiles_m_((params.m + kBlockM - 1) / kBlockM),
        tiles_n_((params.n + kBlockN - 1) / kBlockN) {}

  __device__ int64_t count() const {
    return tiles_m_ * tiles_n_ * params_.batch_count * params_.split_k;
  }

  __device__ Tile tile(int64_t index) const {
    Tile tile;
    const int64_t per_batch = tiles_m_ * tiles_n_;
    int64_t slot = divide(index, per_batch);
    const int64_t in_batch = index - slot * per_batch;
    tile.split = static_cast<int>(divide(slot, params_.batch_count));
    tile.batch = slot - tile.split * params_.batch_count;

    const int64_t per_group = kGroupM * tiles_n_;
    const int64_t group = divide(in_batch, per_group);
    const int64_t first_m = group * kGroupM;
    const int64_t group_m = min(static_cast<int64_t>(kGroupM), tiles_m_ - first_m);
    const int64_t in_group = in_batch - group * per_group;
    const int64_t column = divide(in_group, group_m);
    tile.m = (first_m + in_group - column * group_m) * kBlockM;
    tile.n = column * kBlockN;

    tile.k_begin = min(params_.k, tile.split * params_.k_per_split);
    tile.k_end = min(params_.k, tile.k_begin + params_.k_per_split);
    tile.offset = batch_offsets(params_, tile.batch);
    return tile;
  }

 private:
  // Tile counts nearly always fit 32 bits, where division is much shorter.
  __device__ static int64_t divide(int64_t a, int64_t b) {
    if (a < b) return 0;
    if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return a / b;
  }

  const GemmParams& params_;
  int64_t tiles_m_;
  int64_t tiles_n_;
};

}  // namespace tgemm
