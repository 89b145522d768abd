// Which ladder kernels exist: their tiles, and their launchers, one .cu file each.
#pragma once

#include <string>

#include "device/params.hpp"

namespace tgemm::ladder {

struct TileShape {
  int m, n, k;
  int threads;
  int stages;
};

inline constexpr TileShape kNaiveTile{8, 32, 1, 256, 1};
inline constexpr TileShape kTiledTile{32, 32, 32, 256, 1};
inline constexpr TileShape kVectorizedTile{128, 128, 16, 256, 1};
inline constexpr TileShape kWmmaTile{128, 128, 16, 128, 1};
inline constexpr TileShape kWmmaSharedTile{128, 128, 32, 256, 2};
inline constexpr TileShape kVoltaTile{128, 128, 32, 256, 2};

// The rungs on CUDA cores: operands FP32, FP16 or BF16, any strides.
std::string launch_naive(const GemmParams& params, const LaunchTarget& target);
std::string launch_tiled(const GemmParams& params, const LaunchTarget& target);
std::string launch_tiled_padded(const GemmParams& params, const LaunchTarget& target);
std::string launch_tiled_vectorized(bool wide_loads, const GemmParams& params,
                                    const LaunchTarget& target);

// What the Tensor Cores multiply, and the order in which tiles are read. Operands without a unit
// stride count as K-major.
struct TensorCoreOperands {
  bool bf16;  // else FP16
  bool a_k_major;
  bool b_k_major;
};

std::string launch_wmma(const TensorCoreOperands& operands, const GemmParams& params,
                        const LaunchTarget& target);
std::string launch_wmma_double_buffered(bool double_buffer, const TensorCoreOperands& operands,
                                        const GemmParams& params, const LaunchTarget& target);
std::string launch_volta_mma(const TensorCoreOperands& operands, const GemmParams& params,
                             const LaunchTarget& target);

}  // namespace tgemm::ladder
