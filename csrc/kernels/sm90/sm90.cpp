#include "kernels/sm90/sm90.hpp"

#include <array>

#include "device/tensor_map.hpp"
#include "kernels/cost_model.hpp"
#include "kernels/sm90/instances.hpp"

namespace tgemm {
namespace {

using sm90::Tiles;

template <size_t kIndex>
constexpr TileConfig config_of(std::string_view name, double mac_per_cycle) {
  using Cta = std::tuple_element_t<kIndex, Tiles>;
  return {name,          Cta::kBlockM, Cta::kBlockN,      Cta::kBlockK,
          Cta::kThreads, Cta::kStages, Cta::kSharedBytes, 1,
          mac_per_cycle};
}

// The rates are multiply-adds per SM and cycle of the boost clock, measured on an H200 under its
// power limit (benchmarks/NOTES.md).
constexpr std::array<TileConfig, std::tuple_size_v<Tiles>> kConfigs = {
    config_of<0>("128x256_cluster2", 1500.0),
    config_of<1>("128x256", 1450.0),
    config_of<2>("128x128_cluster2", 1300.0),
    config_of<3>("128x128", 1250.0),
};

const char* rejects(const Problem& problem, const Device& device, const TileConfig&) {
  if (device.compute_capability != 90) return "wgmma needs compute capability 9.0";
  if (problem.a.dtype == DType::kFloat32) return "it multiplies FP16 and BF16 operands";
  if (tma_rejects(problem.a, problem.a_k_major(), true, problem)) return "TMA cannot read a";
  if (tma_rejects(problem.b, problem.b_k_major(), false, problem)) return "TMA cannot read b";
  return nullptr;
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  return tile_cost_us(problem, device, config, split_k, /*slowdown=*/1.0);
}

std::string launch_sm90(const Plan& plan, const Problem& problem, const Operands& operands,
                        const LaunchTarget& target) {
  const GemmParams params = make_params(plan, problem, operands);
  const int tile = static_cast<int>(plan.config - kConfigs.data());
  return problem.a.dtype == DType::kBFloat16
             ? sm90::launch<true>(tile, problem.a_k_major(), problem.b_k_major(), params, target)
             : sm90::launch<false>(tile, problem.a_k_major(), problem.b_k_major(), params, target);
}

}  // namespace

KernelEntry sm90_entry() {
  return {"sm90",
          "Hopper: wgmma on tiles that TMA brings, specialised warps, persistent CTAs, clusters",
          /*automatic=*/true,
          /*splits_k=*/true,
          kConfigs,
          rejects,
          cost_us,
          launch_sm90};
}

}  // namespace tgemm
