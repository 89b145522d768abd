// The tiny row of the kernel table.
#include "kernels/tiny/tiny.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cost_model.hpp"
#include "kernels/tiny/instances.hpp"

namespace tgemm {
namespace {

using tiny::Arguments;
using tiny::Load;
using tiny::Reading;

using Launch = std::string (*)(const Arguments&, const LaunchTarget&);

template <class Warp>
constexpr TileConfig config_of(std::string_view name) {
  return {.name = name,
          .block_m = Warp::kSize,
          .block_n = Warp::kSize,
          .block_k = Warp::kSize,
          .threads = 32 * tiny::kWarps,
          .stages = 1,
          .shared_memory_bytes = int{sizeof(float)} * tiny::kWarps * Warp::kStagedFloats,
          .ctas_per_sm = Warp::kCtasPerSm,
          .mac_per_cycle = 512.0,
          .tiles_per_cta = tiny::kWarps * Warp::kTiles};
}

constexpr std::array kConfigs = {config_of<tiny::Tile8>("8x8"), config_of<tiny::Tile16>("16x16"),
                                 config_of<tiny::Tile32>("32x32")};
constexpr std::array<Launch, kConfigs.size()> kLaunch = {
    tiny::launch<tiny::Tile8>, tiny::launch<tiny::Tile16>, tiny::launch<tiny::Tile32>};

// Fitted to small batches on an H200 (benchmarks/NOTES.md); microseconds.
constexpr double kTinyStartUs = 1.04;
// Of a wave of warps.
struct WaveCosts {
  double tile_us;     // decoding and storing
  double step_us;     // each step along K
  double shifted_us;  // more of a step for each operand whose runs are shifted
  double narrow_us;   // more of storing outputs in pieces that are shorter than runs
};
constexpr std::array<WaveCosts, kConfigs.size()> kWaveCosts = {
    {{1.89, 0.98, 0.45, 0.24}, {1.58, 0.69, 0.30, 0.15}, {1.48, 1.27, 0.38, 1.15}}};
// More of a step for an operand that is loaded element by element.
constexpr double kElementsUs = 0.8;
// More of a tile of 32x32 outputs whose epilogue is more than storing runs; twice that where it is
// done element by element.
constexpr double kEpilogueUs = 1.5;
// Latency and the memory's rate slow one another: a norm of them, not the larger.
constexpr double kNorm = 4.0;

// Elements that a lane loads or stores at once, at best.
int run_of(const TileConfig& config) { return config.block_k / 4; }

// Can `matrix` be read or written in runs of `run` elements along the dimension of `size` elements,
// lines of which are `stride` apart?
bool has_runs(const Matrix& matrix, int64_t size, int64_t stride, int run, int batch_dims) {
  return size % run == 0 && stride % run == 0 &&
         matrix.address_alignment >= run * bytes_per_element(matrix.dtype) &&
         std::all_of(matrix.batch_stride.begin(), matrix.batch_stride.begin() + batch_dims,
                     [run](int64_t batch_stride) { return batch_stride % run == 0; });
}

Load load_of(const Matrix& matrix, int64_t stride_mn, int64_t stride_k, int64_t mn_size,
             const Problem& problem, const TileConfig& config) {
  const int run = run_of(config);
  if (stride_k == 1) {
    const bool aligned = has_runs(matrix, problem.k, stride_mn, run, problem.batch_dims);
    return aligned ? Load::kKMajor : Load::kKMajorShifted;
  }
  if (stride_mn == 1) {
    const bool aligned = has_runs(matrix, mn_size, stride_k, run, problem.batch_dims);
    if (aligned) return Load::kMnMajor;
    // Shifted, the kernel counts on the operand's end lying at the end of K.
    if (stride_k > 0 || problem.k == 1) return Load::kMnMajorShifted;
  }
  return Load::kAnyStride;
}

Load load_of_a(const Problem& problem, const TileConfig& config) {
  return load_of(problem.a, problem.a.row_stride, problem.a.col_stride, problem.m, problem, config);
}

Load load_of_b(const Problem& problem, const TileConfig& config) {
  return load_of(problem.b, problem.b.col_stride, problem.b.row_stride, problem.n, problem, config);
}

// `end`: behind the operand's last element.
Reading reading_of(Load load, const void* end, const TileConfig& config) {
  const auto address = reinterpret_cast<uintptr_t>(end);
  const auto run_bytes = static_cast<uintptr_t>(run_of(config) * sizeof(uint16_t));
  return {load, reinterpret_cast<const uint16_t*>(address - address % run_bytes)};
}

// How many outputs the kernel's own epilogue, which knows alpha alone, can store at once; 0 where
// it takes the common one.
int store_width_of(const Problem& problem, const TileConfig& config) {
  const Epilogue& epilogue = problem.epilogue;
  if (epilogue.has_bias || epilogue.has_residual || epilogue.has_preact ||
      epilogue.activation != Activation::kNone || problem.out.dtype == DType::kFloat32 ||
      problem.out.col_stride != 1) {
    return 0;
  }
  int width = run_of(config);
  while (width > 1 &&
         !has_runs(problem.out, problem.n, problem.out.row_stride, width, problem.batch_dims)) {
    width /= 2;
  }
  return width;
}

const char* rejects(const Problem& problem, const Device& device, const TileConfig&) {
  if (device.compute_capability < 80) return "mma.sync m16n8k16 needs compute capability 8.0";
  if (problem.a.dtype == DType::kFloat32) return "it multiplies FP16 and BF16 operands";
  if (problem.k > std::numeric_limits<int32_t>::max()) return "K does not fit 32 bits";
  return nullptr;
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config, int) {
  const double tiles =
      static_cast<double>(ceil_div(problem.m, config.block_m) *
                          ceil_div(problem.n, config.block_n) * problem.batch_count());
  const double steps = static_cast<double>(ceil_div(problem.k, config.block_k));
  const double slots = std::max(1, device.sm_count) * config.ctas_per_sm * tiny::kWarps;
  const int per_warp = config.tiles_per_cta / tiny::kWarps;
  const double waves = std::max(1.0, std::ceil(tiles / per_warp) / slots);
  const WaveCosts& costs = kWaveCosts[static_cast<size_t>(&config - kConfigs.data())];
  double step_us = costs.step_us;
  for (const Load load : {load_of_a(problem, config), load_of_b(problem, config)}) {
    if (load == Load::kKMajorShifted || load == Load::kMnMajorShifted) step_us += costs.shifted_us;
    if (load == Load::kAnyStride) step_us += kElementsUs;
  }
  double tile_us = costs.tile_us;
  const double area = config.block_m * config.block_n / 1024.0;
  const int store_width = store_width_of(problem, config);
  if (store_width == 0) {
    const bool vectors = problem.n % 4 == 0 && problem.out.row_stride % 4 == 0;
    tile_us += kEpilogueUs * (vectors ? 1.0 : 2.0) * area;
  } else if (store_width < run_of(config)) {
    tile_us += costs.narrow_us;
  }
  const double latency_us = waves * (tile_us + steps * step_us);
  return kTinyStartUs +
         std::pow(std::pow(latency_us, kNorm) + std::pow(memory_us(problem, device), kNorm),
                  1.0 / kNorm);
}

std::string launch_tiny(const Plan& plan, const Problem& problem, const Operands& operands,
                        const LaunchTarget& target) {
  const TileConfig& config = *plan.config;
  const auto* end_a =
      static_cast<const uint16_t*>(operands.a) + problem.end_of(problem.a, problem.m, problem.k);
  const auto* end_b =
      static_cast<const uint16_t*>(operands.b) + problem.end_of(problem.b, problem.k, problem.n);
  const Arguments arguments{.gemm = make_params(plan, problem, operands),
                            .a = reading_of(load_of_a(problem, config), end_a, config),
                            .b = reading_of(load_of_b(problem, config), end_b, config),
                            .store_width = store_width_of(problem, config)};
  return kLaunch[static_cast<size_t>(&config - kConfigs.data())](arguments, target);
}

}  // namespace

KernelEntry tiny_entry() {
  return {"tiny",
          "many small products on Tensor Cores: a warp to a tile, operands straight into registers",
          /*automatic=*/true,
          /*splits_k=*/false,
          kConfigs,
          rejects,
          cost_us,
          launch_tiny};
}

}  // namespace tgemm
