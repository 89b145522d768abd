// The sm90 rows of the kernel table.
#include "kernels/sm90/sm90.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "device/tensor_map.hpp"
#include "kernels/cost_model.hpp"
#include "kernels/sm90/instances.hpp"

namespace tgemm {
namespace {

using sm90::Outputs;

using sm90::Arguments;

// What else selection and launch know of a configuration.
struct Traits {
  double start_us;     // from the start of the grid to the first multiplication, and after the last
  double tile_us;      // of each output tile: what of its epilogue no other work hides
  double power_share;  // of the Tensor Cores' peak, what the card's power limit lets through
  int cluster;
  int consumers_per_tile;  // one where they compute whole tiles in turn
  bool can_gate;
  bool only_k_major_b;
  bool whole_boxes;
  int finished_columns;
  bool common_epilogue;
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
constexpr Traits traits_of(double start_us, double tile_us, double power_share) {
  return {.start_us = start_us,
          .tile_us = tile_us,
          .power_share = power_share,
          .cluster = Cta::kCluster,
          .consumers_per_tile = Cta::kConsumersPerTile,
          .can_gate = Cta::kCanGate,
          .only_k_major_b = Cta::kOnlyKMajorB,
          .whole_boxes = Cta::kWholeBoxes,
          .finished_columns = Cta::kFinishedColumns,
          .common_epilogue = Cta::kCommonEpilogue,
          .launch = sm90::launch<Cta>};
}

// All constants are fitted to a sweep on an H200: `python -m benchmarks.calibrate`. The rates are
// multiply-adds per SM and cycle of the boost clock.
constexpr std::array kConfigs = {
    // These take B along K alone.
    config_of<sm90::PingPong64x160Cluster>("64x160_pingpong_cluster", 1232.0),
    config_of<sm90::PingPong64x96Cluster>("64x96_pingpong_cluster", 1122.0),
    config_of<sm90::PingPong64x96>("64x96_pingpong", 1235.0),
    config_of<sm90::Cooperative128x240>("128x240", 1484.0),
    config_of<sm90::Cooperative128x224>("128x224", 1551.0),
    config_of<sm90::Cooperative128x176>("128x176", 1671.0),
    config_of<sm90::Cooperative128x160Cluster>("128x160_cluster", 1539.0),
    config_of<sm90::Cooperative128x160>("128x160", 1503.0),
    config_of<sm90::Cooperative128x144>("128x144", 1623.0),
    config_of<sm90::Cooperative128x96>("128x96", 1539.0),
    // These take any operands.
    config_of<sm90::PingPong128x128Cluster>("128x128_pingpong_cluster", 1539.0),
    config_of<sm90::PingPong128x128>("128x128_pingpong", 1626.0),
    config_of<sm90::PingPong64x128Cluster>("64x128_pingpong_cluster", 1158.0),
    config_of<sm90::Cooperative192x192>("192x192", 1520.0),
    config_of<sm90::Cooperative192x128>("192x128", 1461.0),
    config_of<sm90::Cooperative128x256Cluster>("128x256_cluster", 1405.0),
    config_of<sm90::Cooperative128x256>("128x256", 1565.0),
    config_of<sm90::Cooperative128x192>("128x192", 1591.0),
    config_of<sm90::Cooperative128x128>("128x128", 1542.0),
    config_of<sm90::Cooperative128x64>("128x64", 1376.0),
    config_of<sm90::Cooperative64x128>("64x128", 1131.0),
    // Of sm90_3xtf32 alone; by hand, from the shapes in NOTES.md.
    config_of<sm90::Parts128x128>("128x128", 1800.0),
    config_of<sm90::Parts128x64>("128x64", 1200.0),
};
constexpr size_t kAlongKConfigs = 10;  // the first ones
constexpr size_t kPartsConfigs = 2;    // the last ones
constexpr std::array<Traits, kConfigs.size()> kTraits = {
    traits_of<sm90::PingPong64x160Cluster>(2.42, 0.27, 1.395),
    traits_of<sm90::PingPong64x96Cluster>(2.25, 0.29, 0.694),
    traits_of<sm90::PingPong64x96>(2.08, 0.36, 0.672),
    traits_of<sm90::Cooperative128x240>(2.14, 1.04, 0.940),
    traits_of<sm90::Cooperative128x224>(2.30, 1.20, 0.863),
    traits_of<sm90::Cooperative128x176>(2.35, 1.14, 0.811),
    traits_of<sm90::Cooperative128x160Cluster>(2.16, 1.19, 0.833),
    traits_of<sm90::Cooperative128x160>(2.18, 0.96, 0.999),
    traits_of<sm90::Cooperative128x144>(2.14, 1.26, 0.903),
    traits_of<sm90::Cooperative128x96>(2.31, 0.64, 0.835),
    traits_of<sm90::PingPong128x128Cluster>(2.78, 0.52, 0.900),
    traits_of<sm90::PingPong128x128>(2.42, 0.48, 0.847),
    traits_of<sm90::PingPong64x128Cluster>(2.36, 0.35, 1.094),
    traits_of<sm90::Cooperative192x192>(1.89, 1.21, 0.753),
    traits_of<sm90::Cooperative192x128>(2.34, 0.77, 0.859),
    traits_of<sm90::Cooperative128x256Cluster>(2.04, 1.40, 0.986),
    traits_of<sm90::Cooperative128x256>(1.73, 1.94, 0.817),
    traits_of<sm90::Cooperative128x192>(2.21, 1.39, 0.864),
    traits_of<sm90::Cooperative128x128>(2.51, 1.03, 1.118),
    traits_of<sm90::Cooperative128x64>(2.55, 0.22, 0.973),
    traits_of<sm90::Cooperative64x128>(2.15, 0.46, 0.830),
    traits_of<sm90::Parts128x128>(1.55, 1.54, 0.95),
    traits_of<sm90::Parts128x64>(1.69, 0.92, 0.95),
};
static_assert(std::ranges::all_of(std::span(kTraits).first(kAlongKConfigs),
                                  &Traits::only_k_major_b));
static_assert(std::ranges::none_of(std::span(kTraits).subspan(kAlongKConfigs),
                                   &Traits::only_k_major_b));
// With a smaller K, an FP32 kernel's rounding errors are smaller than what three products leave
// out.
constexpr int64_t kMinPartsK = 128;
constexpr double kPeakMacPerCycle = 2048.0;  // per SM, 16-bit operands
constexpr double kL2BytesPerCycle = 61.4;    // per SM
// Adding up within a cluster that divides K, and of that, for each CTA beyond the first, per
// 128x128 outputs of a tile.
constexpr double kClusterSplitUs = 0.53;
constexpr double kClusterSplitStepUs = 0.84;
constexpr double kSplitUs = 2.2;  // the second kernel of split-K, without its traffic
// Per 128x128 outputs of a tile, by consumers per tile: little of it is hidden (NOTES.md). And what
// an activation or a residual takes of the power for each output, as multiply-adds.
constexpr double kActivationUs[] = {1.9, 2.0, 1.7};
constexpr double kResidualUs[] = {0.8, 0.75, 0.95};
constexpr double kEpilogueMacs = 100.0;
constexpr double kCommonEpilogueUs[] = {2.0, 3.0, 3.0};  // estimated
constexpr double kCopiedUs[] = {5.0, 2.5, 1.7};

const Traits& traits(const TileConfig& config) {
  return kTraits[static_cast<size_t>(&config - kConfigs.data())];
}

// One value per column, the same in all of a batch.
bool is_row(const Matrix& bias) {
  return bias.row_stride == 0 && bias.col_stride == 1 && bias.batch_stride == BatchArray{};
}

// Can every pair of 16-bit elements in a row, from an even column on, be accessed at once?
bool pairs(const Matrix& matrix) {
  const auto even = [](int64_t stride) { return stride % 2 == 0; };
  return matrix.address_alignment >= 4 && even(matrix.row_stride) &&
         std::ranges::all_of(matrix.batch_stride, even);
}

Outputs outputs_of(const Problem& problem, const TileConfig& config, int split_k) {
  const Epilogue& epilogue = problem.epilogue;
  const bool wide = problem.out.dtype == DType::kFloat32;
  const auto row_major = [&](const Matrix& matrix) {
    return matrix.col_stride == 1 || problem.n <= 1;
  };
  if (split_k > config.max_cluster_split || epilogue.has_preact || epilogue.multiplies ||
      !row_major(problem.out)) {
    return Outputs::kCommon;
  }
  // Activations on the way to a box are as accurate as 16 bits need.
  if (wide && (problem.gated || epilogue.activation > Activation::kRelu)) return Outputs::kCommon;
  // Of boxes that share columns, an FP32 one can be brought after another has left.
  if (wide && epilogue.has_residual && !traits(config).whole_boxes) return Outputs::kCommon;
  if (epilogue.has_bias && !is_row(epilogue.bias)) return Outputs::kCommon;
  if (problem.has_up_bias && !is_row(problem.up_bias)) return Outputs::kCommon;
  if (epilogue.has_residual &&
      (epilogue.residual.dtype != problem.out.dtype || !row_major(epilogue.residual))) {
    return Outputs::kCommon;
  }
  // TMA writes whole 16 bytes, beyond the end of a row too.
  const bool whole = problem.n * bytes_per_element(problem.out.dtype) % 16 == 0;
  const bool tma = whole && !tma_rejects_output(problem.out, problem) &&
                   !(epilogue.has_residual && tma_rejects_output(epilogue.residual, problem));
  return tma ? Outputs::kTma : Outputs::kCopied;
}

const char* cannot_run(const Problem& problem, const Device& device, const TileConfig& config,
                       bool a_k_major, bool b_k_major) {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max() - (1 << 17);
  if (device.compute_capability != 90) return "wgmma needs compute capability 9.0";
  if (std::max({problem.m, problem.n, problem.k, problem.batch_count()}) > kMaxSize) {
    return "a size does not fit TMA's 32-bit coordinates";
  }
  if (tma_rejects(problem.a, a_k_major, true, problem)) return "TMA cannot read a";
  if (tma_rejects(problem.b, b_k_major, false, problem)) return "TMA cannot read b";
  if (traits(config).only_k_major_b && !b_k_major) return "its tiles take b contiguous along K";
  if ((problem.gated || !traits(config).common_epilogue) &&
      outputs_of(problem, config, 1) == Outputs::kCommon) {
    return "it does not have the epilogue that this takes";
  }
  return nullptr;
}

const char* rejects(const Problem& problem, const Device& device, const TileConfig& config) {
  if (problem.a.dtype == DType::kFloat32) return "it multiplies FP16 and BF16 operands";
  if (problem.gated) {
    if (!traits(config).can_gate) return "its tiles do not take two weights";
    if (tma_rejects(problem.up, problem.b_k_major(), false, problem)) return "TMA cannot read up";
  }
  // With one k, or none, any order is K-major.
  const bool b_k_major = problem.b_k_major() || (traits(config).only_k_major_b && problem.k <= 1);
  return cannot_run(problem, device, config, problem.a_k_major(), b_k_major);
}

const char* rejects_tf32(const Problem& problem, const Device& device, const TileConfig& config) {
  if (problem.gated) return "it multiplies one weight";
  if (problem.a.dtype != DType::kFloat32 || problem.precision != Precision::kTf32) {
    return "it multiplies FP32 operands as TF32";
  }
  // With one k, or none, any order is K-major.
  if (problem.k > 1 && (!problem.a_k_major() || !problem.b_k_major())) {
    return "TF32 operands have to be K-major";
  }
  return cannot_run(problem, device, config, true, true);
}

// Sees operands that are packed, always.
const char* rejects_3xtf32(const Problem& problem, const Device& device, const TileConfig& config) {
  if (problem.a.dtype != DType::kFloat32 || problem.precision != Precision::k3xTf32) {
    return "it multiplies FP32 operands as three products of TF32";
  }
  return cannot_run(problem, device, config, true, true);
}

// Bytes that TMA moves from L2 for one row (column) of an operand: lines that are no multiple of
// 128 bytes straddle two of L2's.
double l2_bytes(const Matrix& matrix, int64_t width, int64_t k) {
  const double bytes = bytes_per_element(matrix.dtype);
  const int64_t pitch = std::max({width, matrix.row_stride, matrix.col_stride});
  const bool whole_lines = pitch * bytes_per_element(matrix.dtype) % 128 == 0;
  return static_cast<double>(k) * bytes * (whole_lines ? 1.0 : 2.0);
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  const Traits& trait = traits(config);
  const Epilogue& epilogue = problem.epilogue;
  const int cluster_split = split_k <= config.max_cluster_split ? split_k : 1;
  const int64_t size = trait.cluster * cluster_split;
  const int64_t columns = problem.gated ? config.block_n / 2 : config.block_n;
  const int64_t tiles = ceil_div(problem.m, config.block_m * trait.cluster) * trait.cluster *
                        ceil_div(problem.n, columns) * problem.batch_count();
  const auto rounds = static_cast<double>(
      ceil_div(ceil_div(tiles * split_k, size), resident_clusters(device, size)));
  const int64_t k = ceil_div(ceil_div(problem.k, split_k), config.block_k) * config.block_k;
  // TF32 multiplies at half the rate; and of the parts, whose K is twice as long, three products.
  const bool parts = problem.precision == Precision::k3xTf32;
  const double slowdown = problem.a.dtype != DType::kFloat32 ? 1.0 : parts ? 3.0 : 2.0;
  const double macs =
      slowdown * config.block_m * config.block_n * static_cast<double>(k);  // of a tile
  const double cycles_per_us = device.clock_ghz * 1e3;
  const double sm_cycles_per_us = device.sm_count * cycles_per_us;

  // An epilogue is the shorter, the fewer of a tile's rows exist.
  const int64_t rows = ceil_div(problem.m, config.block_m) * config.block_m;
  double tile_us = trait.tile_us * static_cast<double>(problem.m) / static_cast<double>(rows);
  const double area = static_cast<double>(config.block_m * columns) / (128.0 * 128.0);
  const double finished = area * trait.finished_columns / config.block_n;
  const int schedule = trait.consumers_per_tile - 1;
  double power_macs = macs;
  if (epilogue.activation > Activation::kRelu) {
    tile_us += finished * kActivationUs[schedule];
    power_macs += kEpilogueMacs * config.block_m * config.block_n;
  }
  if (epilogue.has_residual) {
    tile_us += finished * kResidualUs[schedule];
    power_macs += kEpilogueMacs * config.block_m * config.block_n;
  }
  const Outputs outputs = outputs_of(problem, config, split_k);
  if (outputs == Outputs::kCommon) tile_us += finished * kCommonEpilogueUs[schedule];
  // Copies run beside the next tile's multiplications, but after the last.
  const double copied_us = outputs == Outputs::kCopied ? finished * kCopiedUs[schedule] : 0.0;
  const double copies_us = rounds * copied_us / (schedule == 0 ? 2.0 : 1.0);
  const double mac_per_us = config.mac_per_cycle * cycles_per_us;
  const double compute_us = rounds * (macs / mac_per_us + tile_us);
  const double power_us = static_cast<double>(tiles) * split_k * power_macs /
                          (trait.power_share * kPeakMacPerCycle * sm_cycles_per_us);
  const int64_t line_a = problem.a_k_major() ? problem.k : problem.m;
  const int64_t line_b = problem.b_k_major() ? problem.k : problem.n;
  const double l2_us = static_cast<double>(tiles) *
                       (config.block_m * l2_bytes(problem.a, line_a, problem.k) +
                        config.block_n * l2_bytes(problem.b, line_b, problem.k) / trait.cluster) /
                       (kL2BytesPerCycle * sm_cycles_per_us);
  double total_us = trait.start_us + copied_us +
                    limit_us({compute_us, power_us, l2_us, copies_us,
                              kMemoryFactor * memory_us(problem, device)});
  if (split_k > config.max_cluster_split) {
    total_us += kSplitUs + partial_sums_us(problem, device, split_k);
  } else if (split_k > 1) {
    total_us += kClusterSplitUs + kClusterSplitStepUs * area * (split_k - 1);
  }
  return total_us;
}

std::string launch_sm90(const Plan& plan, const Problem& problem, const Operands& operands,
                        const LaunchTarget& target) {
  Arguments arguments{};
  arguments.gemm = make_params(plan, problem, operands);
  const bool tf32 = problem.a.dtype == DType::kFloat32;
  arguments.a_k_major = tf32 || problem.a_k_major();
  arguments.b_k_major = tf32 || traits(*plan.config).only_k_major_b || problem.b_k_major();
  arguments.outputs = outputs_of(problem, *plan.config, plan.split_k);
  arguments.reads_pairs =
      problem.n % 2 == 0 && problem.epilogue.has_residual && pairs(problem.epilogue.residual);
  arguments.simple = problem.out.dtype != DType::kFloat32 && !problem.gated &&
                     problem.epilogue.activation <= Activation::kRelu;
  arguments.linear = arguments.simple && !problem.epilogue.has_residual &&
                     problem.epilogue.activation == Activation::kNone;
  arguments.gated = problem.gated;
  if (problem.gated) arguments.up_matrix = matrix_params(problem.up, operands.up);
  if (problem.has_up_bias) arguments.up_bias = matrix_params(problem.up_bias, operands.up_bias);
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
          std::span(kConfigs).first(kConfigs.size() - kPartsConfigs),
          rejects,
          cost_us,
          launch_sm90,
          /*gated=*/true};
}

// wgmma knows no transposed TF32 operands.
KernelEntry sm90_tf32_entry() {
  KernelEntry entry = sm90_entry();
  entry.name = "sm90_tf32";
  entry.description = "the same kernels on FP32 operands, rounded to TF32 by TMA";
  entry.rejects = rejects_tf32;
  return entry;
}

// What the two rows above refuse because of types, strides or addresses.
KernelEntry sm90_packed_entry() {
  KernelEntry entry = sm90_entry();
  entry.name = "sm90_packed";
  entry.description =
      "the same kernels on operands that are first copied to where TMA can read them";
  entry.gated = false;
  // A packed operand keeps its order: only tiles for any.
  entry.configs = entry.configs.subspan(kAlongKConfigs);
  entry.rejects = [](const Problem& problem, const Device& device, const TileConfig& config) {
    const bool full = problem.a.dtype == DType::kFloat32;
    return full ? rejects_tf32(problem, device, config) : rejects(problem, device, config);
  };
  entry.packs = [](const Problem& problem) -> Packing {
    const bool full = problem.a.dtype == DType::kFloat32;
    if (full && problem.precision == Precision::kIeee) return {};
    if (full && problem.precision == Precision::k3xTf32) return {};
    if (full && problem.precision != Precision::kTf32) return {.a = true, .b = true};
    return {.a = tma_rejects(problem.a, full || problem.a_k_major(), true, problem) != nullptr,
            .b = tma_rejects(problem.b, full || problem.b_k_major(), false, problem) != nullptr};
  };
  return entry;
}

KernelEntry sm90_3xtf32_entry() {
  KernelEntry entry = sm90_entry();
  entry.name = "sm90_3xtf32";
  entry.description =
      "as accurate as FP32: operands are taken apart into two TF32 parts, of which three products "
      "are added up";
  entry.configs = std::span(kConfigs).last(kPartsConfigs);
  entry.gated = false;
  entry.rejects = rejects_3xtf32;
  entry.packs = [](const Problem& problem) -> Packing {
    const bool parts =
        problem.a.dtype == DType::kFloat32 && problem.precision == Precision::k3xTf32;
    return {.a = parts, .b = parts};
  };
  entry.automatic_k = kMinPartsK;
  return entry;
}

}  // namespace tgemm
