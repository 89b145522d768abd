// The gemv row of the kernel table.
#include "kernels/gemv/gemv.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "kernels/cost_model.hpp"

namespace tgemm {
namespace {

constexpr std::array kConfigs = {
    TileConfig{
        .name = "8x16",
        .block_m = gemv::kRows,
        .block_n = gemv::kColumns,
        .block_k = gemv::kStep,
        .threads = 32 * gemv::kWarps,
        .stages = 2,
        .shared_memory_bytes = int{sizeof(float)} * gemv::kWarps * gemv::kRows * gemv::kColumns,
        .ctas_per_sm = 2,
        .mac_per_cycle = 512.0},
};

// More rows are other kernels' business. Eight more read the weight again, from L2, which a copy of
// it does not come near.
constexpr int64_t kAutomaticRows = 2 * gemv::kRows;

// Measured on an H200 (benchmarks/NOTES.md); microseconds.
constexpr double kStartUs = 3.0;
constexpr double kStepUs = 0.45;  // of each step along K, which two CTAs on an SM share
constexpr double kTileUs = 1.0;
constexpr double kMemoryShare = 0.77;  // of the memory's rate that it reaches
constexpr double kReadAgain = 0.5;     // the time of reading the weight from L2; estimated

const char* rejects(const Problem& problem, const Device& device, const TileConfig&) {
  if (device.compute_capability < 80) return "mma.sync m16n8k16 needs compute capability 8.0";
  if (problem.a.dtype == DType::kFloat32) return "it multiplies FP16 and BF16 operands";
  if (problem.k > 1 && !problem.a_k_major()) return "it reads a along K";
  if (problem.k > 1 && !problem.b_k_major()) return "it reads b along K";
  if (problem.k > std::numeric_limits<int32_t>::max() / 2)
    return "K is too large for its 32-bit offsets";
  return nullptr;
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config, int) {
  const int64_t tiles = ceil_div(problem.m, config.block_m) * ceil_div(problem.n, config.block_n) *
                        problem.batch_count();
  const double slots = static_cast<double>(std::max(1, device.sm_count)) * config.ctas_per_sm;
  const double waves = std::max(1.0, static_cast<double>(tiles) / slots);
  const auto steps =
      static_cast<double>(ceil_div(problem.k, int64_t{4} * gemv::kWarps * gemv::kStep));
  const auto more_rows = static_cast<double>(ceil_div(problem.m, config.block_m) - 1);
  const double read_us = memory_us(problem, device) / kMemoryShare * (1.0 + kReadAgain * more_rows);
  return kStartUs + std::max(waves * (kTileUs + steps * kStepUs), read_us);
}

// Elements of an operand in a piece that lies across its end.
int64_t elements_at_end(const void* pointer, int64_t end) {
  const auto address = reinterpret_cast<uintptr_t>(static_cast<const uint16_t*>(pointer) + end);
  return static_cast<int64_t>(address / sizeof(uint16_t) % gemv::kPieceElements);
}

std::string launch_gemv(const Plan& plan, const Problem& problem, const Operands& operands,
                        const LaunchTarget& target) {
  const int64_t tail =
      std::max(elements_at_end(operands.a, problem.end_of(problem.a, problem.m, problem.k)),
               elements_at_end(operands.b, problem.end_of(problem.b, problem.k, problem.n)));
  return gemv::launch(make_params(plan, problem, operands),
                      static_cast<int>(std::min(tail, problem.k)), target);
}

}  // namespace

KernelEntry gemv_entry() {
  return {.name = "gemv",
          .description =
              "few rows and a weight that begins anywhere: aligned loads, shifted in registers",
          .configs = kConfigs,
          .rejects = rejects,
          .cost_us = cost_us,
          .launch = launch_gemv,
          .automatic_rows = kAutomaticRows};
}

}  // namespace tgemm
