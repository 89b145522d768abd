#include "kernels/simt/simt.hpp"

#include <algorithm>
#include <array>

#include "kernels/cost_model.hpp"
#include "kernels/simt/instances.hpp"

namespace tgemm {
namespace {

using simt::AsyncTiles;
using simt::Copy;
using simt::StagedTiles;

template <size_t kIndex>
using AsyncTile = std::tuple_element_t<kIndex, AsyncTiles>;
template <size_t kIndex>
using StagedTile = std::tuple_element_t<kIndex, StagedTiles>;

template <class Cta>
constexpr TileConfig config_of(std::string_view name, double mac_per_cycle) {
  return {name,         Cta::kBlockM,      Cta::kBlockN,    Cta::kBlockK, Cta::kThreads,
          Cta::kStages, Cta::kSharedBytes, Cta::kCtasPerSm, mac_per_cycle};
}

// The rates are multiply-adds per SM and cycle of the boost clock, measured on an H200
// (benchmarks/NOTES.md); the FMA pipes have 128 lanes.
constexpr std::array kConfigs = {
    config_of<AsyncTile<0>>("128x128", 96.0),
    config_of<AsyncTile<1>>("64x64", 93.0),
    config_of<AsyncTile<2>>("32x32", 55.0),
    config_of<simt::FewRowsTile>("16x128", 54.0),
    config_of<simt::FewColumnsTile>("128x16", 54.0),
    config_of<StagedTile<0>>("128x64_staged", 52.0),
    config_of<StagedTile<1>>("16x128_staged", 28.0),
};

// What each configuration asks of its operands: those copied with cp.async are FP32 with a unit
// stride.
struct Variant {
  bool async_a, async_b;
  // Per SM, measured where there is one CTA to an SM, or two.
  double warps_to_saturate;
  std::string (*launch)(Copy a, Copy b, const GemmParams& params, const LaunchTarget& target);
};

template <size_t kIndex>
std::string launch_staged(Copy, Copy, const GemmParams& params, const LaunchTarget& target) {
  return simt::launch_staged<StagedTile<kIndex>>(params, target);
}

constexpr std::array<Variant, kConfigs.size()> kVariants = {{
    {true, true, 7.0, simt::launch_async<AsyncTile<0>>},
    {true, true, 4.6, simt::launch_async<AsyncTile<1>>},
    {true, true, 8.0, simt::launch_async<AsyncTile<2>>},
    {false, true, kWarpsToSaturate,
     [](Copy, Copy b, const GemmParams& params, const LaunchTarget& target) {
       return simt::launch_few_rows(b, params, target);
     }},
    {true, false, kWarpsToSaturate,
     [](Copy a, Copy, const GemmParams& params, const LaunchTarget& target) {
       return simt::launch_few_columns(a, params, target);
     }},
    {false, false, kWarpsToSaturate, launch_staged<0>},
    {false, false, kWarpsToSaturate, launch_staged<1>},
}};

const Variant& variant_of(const TileConfig& config) { return kVariants[&config - kConfigs.data()]; }

// The fastest copy that can address an operand. `stride_mn` is the distance of A's rows, or B's
// columns, of which there are `mn_size`.
Copy copy_of(const Matrix& matrix, int64_t stride_mn, int64_t stride_k, int64_t mn_size,
             int batch_dims) {
  if (matrix.dtype != DType::kFloat32) return Copy::kAnyStride;
  if (stride_k == 1 && stride_mn <= simt::kMaxRowStride) return Copy::kKMajor;
  if (stride_mn != 1) return Copy::kAnyStride;
  const bool batches_aligned =
      std::all_of(matrix.batch_stride.begin(), matrix.batch_stride.begin() + batch_dims,
                  [](int64_t stride) { return stride % 4 == 0; });
  const bool vectors =
      mn_size % 4 == 0 && stride_k % 4 == 0 && matrix.address_alignment >= 16 && batches_aligned;
  return vectors ? Copy::kMnMajorVec4 : Copy::kMnMajor;
}

Copy copy_of_a(const Problem& problem) {
  const Copy copy =
      copy_of(problem.a, problem.a.row_stride, problem.a.col_stride, problem.m, problem.batch_dims);
  return copy == Copy::kMnMajorVec4 ? Copy::kMnMajor : copy;
}

Copy copy_of_b(const Problem& problem) {
  return copy_of(problem.b, problem.b.col_stride, problem.b.row_stride, problem.n,
                 problem.batch_dims);
}

const char* rejects(const Problem& problem, const Device& device, const TileConfig& config) {
  if (problem.a.dtype == DType::kFloat32) {
    switch (problem.precision) {
      case Precision::kIeee:
      case Precision::k3xTf32:  // asks for FP32's accuracy
        break;
      case Precision::kTf32:
        return "it multiplies in FP32; precision tf32 needs Tensor Cores";
      case Precision::kBf16:
        return "it multiplies in FP32; precision bf16 needs Tensor Cores";
      case Precision::kFp16:
        return "it multiplies in FP32; precision fp16 needs Tensor Cores";
    }
  }
  if (device.compute_capability < 75) return "it needs compute capability 7.5";
  if (config.shared_memory_bytes > device.max_shared_memory_per_block) {
    return "its tile needs more shared memory than a block can have on this device";
  }
  const Variant& variant = variant_of(config);
  if ((variant.async_a || variant.async_b) && device.compute_capability < 80) {
    return "cp.async needs compute capability 8.0; use a _staged configuration";
  }
  if (variant.async_a && copy_of_a(problem) == Copy::kAnyStride) {
    return "a is not float32 with a unit stride; use a _staged configuration";
  }
  if (variant.async_b && copy_of_b(problem) == Copy::kAnyStride) {
    return "b is not float32 with a unit stride; use a _staged configuration";
  }
  return nullptr;
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  return tile_cost_us(problem, device, config, split_k, /*slowdown=*/1.0,
                      variant_of(config).warps_to_saturate);
}

std::string launch_simt(const Plan& plan, const Problem& problem, const Operands& operands,
                        const LaunchTarget& target) {
  return variant_of(*plan.config)
      .launch(copy_of_a(problem), copy_of_b(problem), make_params(plan, problem, operands), target);
}

}  // namespace

KernelEntry simt_entry() {
  return {"simt",
          "true FP32 on the FMA pipes, any dtype and strides, multi-stage cp.async pipeline",
          /*automatic=*/true,
          /*splits_k=*/true,
          kConfigs,
          rejects,
          cost_us,
          launch_simt};
}

}  // namespace tgemm
