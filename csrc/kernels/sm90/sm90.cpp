// The sm90 row of the kernel table.
#include "kernels/sm90/sm90.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "device/tensor_map.hpp"
#include "kernels/cost_model.hpp"
#include "kernels/sm90/instances.hpp"

namespace tgemm {
namespace {

using sm90::Arguments;

// What a configuration costs besides multiplying, microseconds, and what else differs.
struct Traits {
  double start_us;  // from the start of the grid to the first multiplication, and after the last
  double tile_us;   // of each output tile: what of its epilogue no other work hides
  int cluster;
  std::string (*launch)(Arguments&, const LaunchTarget&);
};

template <class Cta>
constexpr TileConfig config_of(std::string_view name, double mac_per_cycle) {
  return {.name = name,
          .block_m = Cta::kBlockM,
          .block_n = Cta::kBlockN,
          .block_k = Cta::kBlockK,
          .threads = Cta::kThreads,
          .stages = Cta::kStages,
          .shared_memory_bytes = sizeof(sm90::SharedMemory<Cta>),
          .mac_per_cycle = mac_per_cycle,
          .max_cluster_split = Cta::max_split()};
}

template <class Cta>
constexpr Traits traits_of(double start_us, double tile_us) {
  return {start_us, tile_us, Cta::kCluster, sm90::launch<Cta>};
}

// Fitted to a sweep on an H200 under its power limit (benchmarks/NOTES.md). The rates are
// multiply-adds per SM and cycle of the boost clock.
constexpr std::array kConfigs = {
    config_of<sm90::Cooperative128x256>("128x256", 1400.0),
    config_of<sm90::Cooperative128x256Cluster>("128x256_cluster", 1400.0),
    config_of<sm90::Cooperative128x192>("128x192", 1400.0),
    config_of<sm90::Cooperative128x128>("128x128", 1250.0),
    config_of<sm90::Cooperative128x64>("128x64", 900.0),
    config_of<sm90::Cooperative64x256>("64x256", 1000.0),
    config_of<sm90::Cooperative64x128>("64x128", 900.0),
    config_of<sm90::PingPong128x128>("128x128_pingpong", 1250.0),
    config_of<sm90::PingPong128x128Cluster>("128x128_pingpong_cluster", 1250.0),
};
constexpr std::array<Traits, kConfigs.size()> kTraits = {
    traits_of<sm90::Cooperative128x256>(3.0, 1.0),
    traits_of<sm90::Cooperative128x256Cluster>(3.0, 1.0),
    traits_of<sm90::Cooperative128x192>(3.0, 1.0),
    traits_of<sm90::Cooperative128x128>(3.0, 1.0),
    traits_of<sm90::Cooperative128x64>(3.0, 1.0),
    traits_of<sm90::Cooperative64x256>(3.0, 1.0),
    traits_of<sm90::Cooperative64x128>(3.0, 1.0),
    traits_of<sm90::PingPong128x128>(3.0, 0.2),
    traits_of<sm90::PingPong128x128Cluster>(3.0, 0.2),
};
constexpr double kClusterSplitUs = 1.5;  // adding up through the cluster's shared memory
constexpr double kSplitUs = 4.5;         // the second kernel of split-K, without its traffic

const Traits& traits(const TileConfig& config) {
  return kTraits[static_cast<size_t>(&config - kConfigs.data())];
}

const char* rejects(const Problem& problem, const Device& device, const TileConfig&) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max() - 1024;
  if (device.compute_capability != 90) return "wgmma needs compute capability 9.0";
  if (problem.k == 0) return "K is 0";
  if (std::max({problem.m, problem.n, problem.k, problem.batch_count()}) > kMaxSize) {
    return "a size does not fit TMA's 32-bit coordinates";
  }
  if (problem.a.dtype == DType::kFloat32) {
    if (problem.precision != Precision::kTf32) return "it multiplies FP16, BF16 and TF32 operands";
    if (!problem.a_k_major() || !problem.b_k_major()) return "TF32 operands have to be K-major";
  }
  if (tma_rejects(problem.a, problem.a_k_major(), true, problem)) return "TMA cannot read a";
  if (tma_rejects(problem.b, problem.b_k_major(), false, problem)) return "TMA cannot read b";
  return nullptr;
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  const Traits& trait = traits(config);
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t rows = ceil_div(problem.m, config.block_m * trait.cluster) * trait.cluster;
  const int64_t tiles =
      rows * ceil_div(problem.n, config.block_n) * problem.batch_count() * split_k;
  const double tiles_per_sm = static_cast<double>(ceil_div(tiles, std::max(1, device.sm_count)));
  const int64_t k = ceil_div(ceil_div(problem.k, split_k), config.block_k) * config.block_k;
  const double slowdown = problem.a.dtype == DType::kFloat32 ? 2.0 : 1.0;
  const double tile_us = slowdown * config.block_m * config.block_n * static_cast<double>(k) /
                         (config.mac_per_cycle * device.clock_ghz * 1e3);
  const double compute_us = tiles_per_sm * (tile_us + trait.tile_us);
  double total_us = trait.start_us + std::max(compute_us, memory_us(problem, device));
  if (split_k > config.max_cluster_split) {
    total_us += kSplitUs + partial_sums_us(problem, device, split_k);
  } else if (split_k > 1) {
    total_us += kClusterSplitUs;
  }
  return total_us;
}

// Can the outputs leave through TMA, with all that is done to them?
bool fuses(const Problem& problem, const Plan& plan) {
  const Epilogue& epilogue = problem.epilogue;
  if (plan.split_k > plan.config->max_cluster_split || epilogue.has_preact ||
      problem.out.dtype == DType::kFloat32) {
    return false;
  }
  if (tma_rejects_output(problem.out, problem)) return false;
  if (epilogue.has_bias) {
    if (epilogue.bias.row_stride != 0 || epilogue.bias.col_stride != 1) return false;
    for (const int64_t stride : epilogue.bias.batch_stride) {
      if (stride != 0) return false;
    }
  }
  return !epilogue.has_residual || (epilogue.residual.dtype == problem.out.dtype &&
                                    !tma_rejects_output(epilogue.residual, problem));
}

std::string launch_sm90(const Plan& plan, const Problem& problem, const Operands& operands,
                        const LaunchTarget& target) {
  Arguments arguments{};
  arguments.gemm = make_params(plan, problem, operands);
  arguments.a_k_major = problem.a_k_major();
  arguments.b_k_major = problem.b_k_major();
  arguments.fused = fuses(problem, plan);
  arguments.linear =
      problem.epilogue.activation == Activation::kNone && !problem.epilogue.has_residual;
  arguments.cluster_split = 1;
  if (plan.split_k <= plan.config->max_cluster_split) {
    arguments.cluster_split = plan.split_k;
    arguments.gemm.split_k = 1;
  }
  return traits(*plan.config).launch(arguments, target);
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
