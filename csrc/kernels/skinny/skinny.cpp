// The skinny row of the kernel table.
#include "kernels/skinny/skinny.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "device/tensor_map.hpp"
#include "kernels/cost_model.hpp"
#include "kernels/skinny/instances.hpp"

namespace tgemm {
namespace {

using skinny::Arguments;

// What else selection and launch know of a configuration.
struct Traits {
  int split_ctas_per_sm;  // where the CTAs of a cluster divide K, which takes more shared memory
  bool can_gate;
  std::string (*launch)(Arguments&, const LaunchTarget&);
};

constexpr int kSharedBytesPerSm = 228 << 10;  // compute capability 9.0
constexpr int kReservedBytes = 1 << 10;       // per CTA, by the runtime

template <class Cta>
constexpr int ctas_per_sm(int stages, bool divides_k) {
  const int bytes = skinny::shared_memory_bytes<Cta>(stages, divides_k);
  return std::min(Cta::kCtasPerSm, kSharedBytesPerSm / (bytes + kReservedBytes));
}

template <class Cta>
constexpr TileConfig config_of(std::string_view name, int stages) {
  return {.name = name,
          .block_m = Cta::kRows,
          .block_n = Cta::kColumns,
          .block_k = Cta::kBlockK,
          .threads = Cta::kThreads,
          .stages = stages,
          .shared_memory_bytes = skinny::shared_memory_bytes<Cta>(stages, /*divides_k=*/false),
          .ctas_per_sm = ctas_per_sm<Cta>(stages, /*divides_k=*/false),
          // wgmma reads the weight from shared memory, 128 bytes a cycle.
          .mac_per_cycle = 64.0 * Cta::kRows,
          .max_cluster_split = skinny::kMaxClusterSplit};
}

template <class Cta>
constexpr Traits traits_of(int stages) {
  return {ctas_per_sm<Cta>(stages, /*divides_k=*/true), Cta::kCanGate, skinny::launch<Cta>};
}

// As many stages as let four CTAs onto an SM (64 columns) or two (128).
constexpr std::array kConfigs = {
    config_of<skinny::Cta8x64>("8x64", 3),     config_of<skinny::Cta8x128>("8x128", 6),
    config_of<skinny::Cta16x64>("16x64", 3),   config_of<skinny::Cta16x128>("16x128", 5),
    config_of<skinny::Cta32x64>("32x64", 6),   config_of<skinny::Cta32x128>("32x128", 4),
    config_of<skinny::Cta64x128>("64x128", 3),
};
constexpr std::array<Traits, kConfigs.size()> kTraits = {
    traits_of<skinny::Cta8x64>(kConfigs[0].stages),
    traits_of<skinny::Cta8x128>(kConfigs[1].stages),
    traits_of<skinny::Cta16x64>(kConfigs[2].stages),
    traits_of<skinny::Cta16x128>(kConfigs[3].stages),
    traits_of<skinny::Cta32x64>(kConfigs[4].stages),
    traits_of<skinny::Cta32x128>(kConfigs[5].stages),
    traits_of<skinny::Cta64x128>(kConfigs[6].stages),
};

// More rows are other kernels' business.
constexpr int64_t kAutomaticRows = 32;

// What a CTA brings to L2 before griddepcontrol.wait, of its part of a weight that is not static:
// while the kernel before ends, the memory would otherwise idle.
constexpr int64_t kPrefetchPercent = 5;

// Fitted to decoding shapes on an H200 (benchmarks/NOTES.md); microseconds.
constexpr double kStartUs = 2.90;
// From a request to its data, of which a CTA has one per stage under way.
constexpr double kStageLatencyUs = 1.59;
// What a CTA takes besides, where its place was another's before.
constexpr double kWaveUs = 1.53;
// How much longer reading the weight takes for each CTA that the fullest SM has more than the
// average, of which it can have twice as many at most.
constexpr double kImbalance = 0.169;
// What it takes of the time that memory's rate promises, where 1 to 6 CTAs of a cluster divide the
// K of 64 columns, or of 128: memory is the faster, the more of a line of the weight is asked for
// at once, and the fewer lines.
constexpr double kReadFactor[2][skinny::kMaxClusterSplit] = {
    {0.901, 0.893, 0.873, 0.912, 0.843, 0.833},
    {0.930, 0.959, 0.892, 0.916, 0.876, 0.868},
};
// Adding up within a cluster, and of that, for each CTA beyond the first, per 64x128 outputs of a
// tile.
constexpr double kClusterSplitUs = 0.03;
constexpr double kClusterSplitStepUs = 0.81;
constexpr double kSplitUs = 4.5;           // the second kernel of split-K, without its traffic
constexpr double kL2BytesPerCycle = 31.6;  // per SM
// Limits that lie close together slow one another: a norm of them, not the largest.
constexpr double kNorm = 3.14;

const Traits& traits(const TileConfig& config) {
  return kTraits[static_cast<size_t>(&config - kConfigs.data())];
}

// One value per column, the same in all of a batch.
bool is_row(const Matrix& bias) {
  return bias.row_stride == 0 && bias.batch_stride == BatchArray{};
}

const char* rejects(const Problem& problem, const Device& device, const TileConfig& config) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max() - (1 << 17);
  if (device.compute_capability != 90) return "wgmma needs compute capability 9.0";
  if (problem.a.dtype == DType::kFloat32) return "it multiplies FP16 and BF16 operands";
  if (std::max({problem.m, problem.n, problem.k, problem.batch_count()}) > kMaxSize) {
    return "a size does not fit TMA's 32-bit coordinates";
  }
  if (tma_rejects(problem.a, true, true, problem)) return "TMA cannot read a along K";
  if (tma_rejects(problem.b, problem.b_k_major(), false, problem)) return "TMA cannot read b";
  if (!problem.gated) return nullptr;
  if (!traits(config).can_gate) return "its tiles do not take two weights";
  if (tma_rejects(problem.up, problem.b_k_major(), false, problem)) return "TMA cannot read up";
  const bool rows = (!problem.epilogue.has_bias || is_row(problem.epilogue.bias)) &&
                    (!problem.has_up_bias || is_row(problem.up_bias));
  return rows ? nullptr : "a bias is not the same for all rows";
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  const bool in_cluster = split_k <= config.max_cluster_split;
  const int64_t columns = problem.gated ? config.block_n / 2 : config.block_n;
  const int64_t tiles =
      ceil_div(problem.m, config.block_m) * ceil_div(problem.n, columns) * problem.batch_count();
  const int64_t ctas = tiles * split_k;
  const int64_t sms = std::max(1, device.sm_count);
  const bool clusters = in_cluster && split_k > 1;
  const int64_t size = clusters ? split_k : 1;
  const int64_t at_once = resident_clusters(
      device, size, clusters ? traits(config).split_ctas_per_sm : config.ctas_per_sm);
  const auto waves = static_cast<double>(ceil_div(ceil_div(ctas, size), at_once));
  // CTAs of the fullest SM over the average.
  const double fullest = static_cast<double>(ceil_div(ctas, sms) * sms) / static_cast<double>(ctas);
  const double read_us = memory_us(problem, device) *
                         kReadFactor[config.block_n / 128][problem.b_k_major() ? size - 1 : 0] *
                         (1.0 + kImbalance * (std::min(fullest, 2.0) - 1.0));
  const auto k_tiles = static_cast<double>(ceil_div(ceil_div(problem.k, split_k), config.block_k));
  const double latency_us =
      waves * k_tiles * kStageLatencyUs / config.stages + (waves - 1.0) * kWaveUs;
  const double tile_bytes = (config.block_m + config.block_n) * k_tiles * config.block_k *
                            bytes_per_element(problem.a.dtype);
  const double l2_us = static_cast<double>(ctas) * tile_bytes /
                       (kL2BytesPerCycle * device.sm_count * device.clock_ghz * 1e3);
  double limits = 0.0;
  for (const double us : {read_us, latency_us, l2_us}) {
    limits += std::pow(us, kNorm);
  }
  double total_us = kStartUs + std::pow(limits, 1.0 / kNorm);
  if (!in_cluster) {
    total_us += kSplitUs + partial_sums_us(problem, device, split_k);
  } else if (split_k > 1) {
    const double area = config.block_m * config.block_n / (64.0 * 128.0);
    total_us += kClusterSplitUs + kClusterSplitStepUs * area * (split_k - 1);
  }
  return total_us;
}

std::string launch_skinny(const Plan& plan, const Problem& problem, const Operands& operands,
                          const LaunchTarget& target) {
  const TileConfig& config = *plan.config;
  Arguments arguments{};
  GemmParams& params = arguments.gemm;
  params = make_params(plan, problem, operands);
  arguments.b_k_major = problem.b_k_major();
  arguments.gated = problem.gated;
  arguments.static_weight = problem.static_weight;
  arguments.vectors = params.vector_epilogue;
  if (problem.gated) arguments.up_matrix = matrix_params(problem.up, operands.up);
  if (problem.has_up_bias) {
    const Matrix& bias = problem.up_bias;
    arguments.up_bias = matrix_params(bias, operands.up_bias);
    arguments.vectors = arguments.vectors && bias.col_stride == 1 &&
                        bias.address_alignment >= 4 * bytes_per_element(bias.dtype);
  }
  arguments.stages = config.stages;
  const int64_t k_tiles = ceil_div(params.k_per_split, config.block_k);
  arguments.prefetched = static_cast<int>((k_tiles * kPrefetchPercent + 50) / 100);
  if (plan.split_k <= config.max_cluster_split) {
    arguments.cluster = FastDivisor(static_cast<uint32_t>(plan.split_k));
    params.split_k = 1;
  } else {
    arguments.vectors = true;
  }
  return traits(config).launch(arguments, target);
}

}  // namespace

KernelEntry skinny_entry() {
  return {.name = "skinny",
          .description =
              "Hopper, few rows: the weight is wgmma's 64-row operand, small CTAs, "
              "K split within clusters",
          .splits_k = true,
          .configs = kConfigs,
          .rejects = rejects,
          .cost_us = cost_us,
          .launch = launch_skinny,
          .gated = true,
          .splits_gated = true,
          .automatic_rows = kAutomaticRows};
}

}  // namespace tgemm
