// Which skinny kernels exist.
#pragma once

#include <string>

#include "device/fast_divisor.hpp"
#include "device/params.hpp"
#include "device/tensor_map.hpp"
#include "kernels/skinny/cta_tile.hpp"

namespace tgemm::skinny {

// Everything that one of the kernels receives.
struct Arguments {
  GemmParams gemm;
  OperandMap a, b, up;
  MatrixParams up_matrix, up_bias;  // a gated product's; `up` has the layout of `b`
  bool b_k_major;
  bool gated;
  bool static_weight;
  bool vectors;  // outputs go four at a time, or to the workspace
  int stages;
  int prefetched;  // k-tiles of the weight that go to L2 before griddepcontrol.wait
  // CTAs of a cluster, which divide K of a tile; rows and columns of tiles; batch entries.
  FastDivisor cluster, tiles_m, tiles_n, batches;
};

using Cta8x64 = CtaTile<8, 1, 2>;
using Cta8x128 = CtaTile<8, 2, 1>;
using Cta16x64 = CtaTile<16, 1, 2>;
using Cta16x128 = CtaTile<16, 2, 1>;
using Cta32x64 = CtaTile<32, 1, 1>;
using Cta32x128 = CtaTile<32, 2, 1>;
using Cta64x128 = CtaTile<64, 2, 1>;

// Makes the tensor maps and enqueues the kernel, or describes it.
template <class Cta>
std::string launch(Arguments& arguments, const LaunchTarget& target);

}  // namespace tgemm::skinny
