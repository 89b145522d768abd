// Which sm90 kernels exist.
#pragma once

#include <cstdint>
#include <string>

#include "device/fast_divisor.hpp"
#include "device/params.hpp"
#include "device/tensor_map.hpp"
#include "kernels/sm90/cta_tile.hpp"

namespace tgemm::sm90 {

// How outputs leave: from the consumers' registers through the common epilogue; in boxes by way of
// shared memory, copied by a warp; the same, through TMA.
enum class Outputs : uint8_t { kCommon, kCopied, kTma };

// Everything that one of the kernels receives.
struct Arguments {
  GemmParams gemm;
  OperandMap a, b, up, out, residual;
  MatrixParams up_matrix, up_bias;  // a gated product's; `up` has the layout of `b`
  bool a_k_major, b_k_major;
  bool gated;
  // Output tiles (of clusters): of all batch entries and splits of K through the workspace; of one
  // batch entry; in a group of Cta::kGroupM rows of tiles; rows of tiles in the last group.
  int tiles;
  FastDivisor tiles_per_batch, batches, tiles_per_group, last_rows;
  Outputs outputs;
  bool reads_pairs;  // of a 16-bit residual that TMA refuses, which is aligned for that
  bool linear;  // outputs in boxes have 16 bits, and all that happens to them is alpha and bias
  bool simple;  // or, besides, relu and a residual
  int cluster_split;  // CTAs of a cluster that divide K of a tile among them
};

using PingPong128x128 = CtaTile<Schedule::kPingPong, 128, 128, 5>;
using PingPong128x128Cluster = CtaTile<Schedule::kPingPong, 128, 128, 5, 2>;
using PingPong64x160Cluster = CtaTile<Schedule::kPingPong, 64, 160, 6, 2>;
using PingPong64x128Cluster = CtaTile<Schedule::kPingPong, 64, 128, 8, 2>;
using PingPong64x96 = CtaTile<Schedule::kPingPong, 64, 96, 9>;
using PingPong64x96Cluster = CtaTile<Schedule::kPingPong, 64, 96, 9, 2>;
using Cooperative192x192 = CtaTile<Schedule::kCooperative, 192, 192, 3, 1, 3>;
using Cooperative192x128 = CtaTile<Schedule::kCooperative, 192, 128, 4, 1, 3>;
using Cooperative128x256 = CtaTile<Schedule::kCooperative, 128, 256, 3>;
using Cooperative128x256Cluster = CtaTile<Schedule::kCooperative, 128, 256, 3, 2>;
using Cooperative128x240 = CtaTile<Schedule::kCooperative, 128, 240, 3>;
using Cooperative128x224 = CtaTile<Schedule::kCooperative, 128, 224, 3>;
using Cooperative128x192 = CtaTile<Schedule::kCooperative, 128, 192, 4>;
using Cooperative128x176 = CtaTile<Schedule::kCooperative, 128, 176, 4>;
using Cooperative128x160 = CtaTile<Schedule::kCooperative, 128, 160, 4>;
using Cooperative128x160Cluster = CtaTile<Schedule::kCooperative, 128, 160, 4, 2>;
using Cooperative128x144 = CtaTile<Schedule::kCooperative, 128, 144, 5>;
using Cooperative128x128 = CtaTile<Schedule::kCooperative, 128, 128, 6>;
using Cooperative128x96 = CtaTile<Schedule::kCooperative, 128, 96, 6>;
using Cooperative128x64 = CtaTile<Schedule::kCooperative, 128, 64, 8>;
using Cooperative64x128 = CtaTile<Schedule::kCooperative, 64, 128, 8>;
using Parts128x128 = CtaTile<Schedule::kCooperative, 128, 128, 6, 1, 2, true>;
using Parts128x64 = CtaTile<Schedule::kCooperative, 128, 64, 8, 1, 2, true>;

// Makes the tensor maps and enqueues the kernel, or describes it.
template <class Cta>
std::string launch(Arguments& arguments, const LaunchTarget& target);

}  // namespace tgemm::sm90
