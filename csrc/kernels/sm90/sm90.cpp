#include "kernels/sm90/sm90.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

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

// What a configuration costs besides multiplying, microseconds.
struct Overhead {
  double start_us;  // from the start of the grid to the first multiplication, and after the last
  double tile_us;   // of each output tile: what of its epilogue no other work hides
  int cluster;
};

// Fitted to a sweep on an H200 under its power limit (benchmarks/NOTES.md): 6 to 9 % RMS. The rates
// are multiply-adds per SM and cycle of the boost clock.
constexpr std::array<TileConfig, std::tuple_size_v<Tiles>> kConfigs = {
    config_of<0>("128x256", 1400.0),
    config_of<1>("128x256_cluster2", 1400.0),
    config_of<2>("128x128", 1250.0),
};
constexpr std::array<Overhead, kConfigs.size()> kOverheads = {{
    {3.0, 2.5, 1},
    {3.0, 3.0, 2},
    {5.5, 0.0, 1},
}};
constexpr size_t kCooperativeConfigs = 2;  // the ping-pong one is a row of its own
constexpr double kSplitUs = 4.5;           // the second kernel of split-K, without its traffic

const char* rejects(const Problem& problem, const Device& device, const TileConfig&) {
  if (device.compute_capability != 90) return "wgmma needs compute capability 9.0";
  if (problem.a.dtype == DType::kFloat32) return "it multiplies FP16 and BF16 operands";
  if (tma_rejects(problem.a, problem.a_k_major(), true, problem)) return "TMA cannot read a";
  if (tma_rejects(problem.b, problem.b_k_major(), false, problem)) return "TMA cannot read b";
  return nullptr;
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  const Overhead& overhead = kOverheads[static_cast<size_t>(&config - kConfigs.data())];
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t rows = ceil_div(problem.m, config.block_m * overhead.cluster) * overhead.cluster;
  const int64_t tiles =
      rows * ceil_div(problem.n, config.block_n) * problem.batch_count() * split_k;
  const double tiles_per_sm = static_cast<double>(ceil_div(tiles, std::max(1, device.sm_count)));
  const int64_t k = ceil_div(ceil_div(problem.k, split_k), config.block_k) * config.block_k;
  const double tile_us = static_cast<double>(config.block_m) * config.block_n *
                         static_cast<double>(k) / (config.mac_per_cycle * device.clock_ghz * 1e3);
  const double compute_us = tiles_per_sm * (tile_us + overhead.tile_us);
  double total_us = overhead.start_us + std::max(compute_us, memory_us(problem, device));
  if (split_k > 1) total_us += kSplitUs + partial_sums_us(problem, device, split_k);
  return total_us;
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
          std::span(kConfigs).first<kCooperativeConfigs>(),
          rejects,
          cost_us,
          launch_sm90};
}

// Not chosen by itself until a complete run of the GPU suite has passed with the barrier at which
// its consumers meet when the turn changes (benchmarks/NOTES.md).
KernelEntry sm90_pingpong_entry() {
  return {"sm90_pingpong",
          "Hopper: the same with 128x128 tiles, one multiplied while another is in its epilogue",
          /*automatic=*/false,
          /*splits_k=*/true,
          std::span(kConfigs).subspan<kCooperativeConfigs>(),
          rejects,
          cost_us,
          launch_sm90};
}

}  // namespace tgemm
