// The wgmma kernels that exist, for sm_90a alone.
#pragma once

#include <string>

#include "device/tensor_map.hpp"
#include "kernels/ladder/rungs.hpp"

namespace tgemm::ladder {

inline constexpr TileShape kWgmmaTile{128, 256, 64, 384, 4};
// Four stages of A and B, and what aligning them to 1024 bytes may cost.
inline constexpr int kWgmmaSharedBytes =
    kWgmmaTile.stages * (kWgmmaTile.m + kWgmmaTile.n) * kWgmmaTile.k * 2 + 1024;

// Tiles by TMA: operands of 16 bits that tma_rejects() nothing of.
template <bool kBf16>
std::string launch_wgmma_tma(const TensorCoreOperands& operands, const GemmParams& params,
                             const LaunchTarget& target);

// Any strides and alignment, FP32 operands rounded on the way.
std::string launch_wgmma_staged(const TensorCoreOperands& operands, const GemmParams& params,
                                const LaunchTarget& target);

}  // namespace tgemm::ladder
