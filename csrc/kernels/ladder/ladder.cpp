#include "kernels/ladder/ladder.hpp"

#include <array>

#include "kernels/cost_model.hpp"
#include "kernels/ladder/rungs.hpp"
#include "kernels/ladder/wgmma.hpp"

namespace tgemm {
namespace {

using ladder::TensorCoreOperands;
using ladder::TileShape;

// The rates are multiply-adds per SM and cycle of the boost clock, measured on an H200 in FP16
// (benchmarks/results/ladder_nn_fp16.json). Most rungs' shared memory is static: none to ask for.
constexpr TileConfig config_of(std::string_view name, const TileShape& tile, double mac_per_cycle,
                               int shared_memory_bytes = 0) {
  return {.name = name,
          .block_m = tile.m,
          .block_n = tile.n,
          .block_k = tile.k,
          .threads = tile.threads,
          .stages = tile.stages,
          .shared_memory_bytes = shared_memory_bytes,
          .ctas_per_sm = 1,
          .mac_per_cycle = mac_per_cycle};
}

constexpr std::array kNaive = {config_of("8x32", ladder::kNaiveTile, 10.0)};
constexpr std::array kTiled = {config_of("32x32", ladder::kTiledTile, 12.0)};
constexpr std::array kVectorized = {
    config_of("128x128", ladder::kVectorizedTile, 70.0),
    config_of("128x128_scalar", ladder::kVectorizedTile, 50.0),
};
constexpr std::array kWmma = {config_of("128x128", ladder::kWmmaTile, 200.0)};
constexpr std::array kWmmaShared = {
    config_of("128x128", ladder::kWmmaSharedTile, 500.0),
    config_of("128x128_single", ladder::kWmmaSharedTile, 400.0),
};
constexpr std::array kVolta = {config_of("128x128", ladder::kVoltaTile, 20.0)};
constexpr std::array kWgmma = {
    config_of("128x256", ladder::kWgmmaTile, 1500.0, ladder::kWgmmaSharedBytes),
    config_of("128x256_staged", ladder::kWgmmaTile, 200.0, ladder::kWgmmaSharedBytes),
};

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  return tile_cost_us(problem, device, config, split_k, /*slowdown=*/1.0);
}

// --- CUDA cores

const char* rejects_on_fma(const Problem& problem, const Device& device, const TileConfig&) {
  if (device.compute_capability < 75) return "it needs compute capability 7.5";
  if (problem.a.dtype == DType::kFloat32 && problem.precision != Precision::kIeee) {
    return "it multiplies in FP32; other precisions of float32 operands need Tensor Cores";
  }
  return nullptr;
}

template <std::string (*kLaunch)(const GemmParams&, const LaunchTarget&)>
std::string launch_fma(const Plan& plan, const Problem& problem, const Operands& operands,
                       const LaunchTarget& target) {
  return kLaunch(make_params(plan, problem, operands), target);
}

std::string launch_vectorized(const Plan& plan, const Problem& problem, const Operands& operands,
                              const LaunchTarget& target) {
  return ladder::launch_tiled_vectorized(plan.config == &kVectorized[0],
                                         make_params(plan, problem, operands), target);
}

template <size_t kCount>
KernelEntry fma_entry(std::string_view name, std::string_view description,
                      const std::array<TileConfig, kCount>& configs,
                      decltype(KernelEntry::launch) launch) {
  return {name,
          description,
          /*automatic=*/false,
          /*splits_k=*/false,
          configs,
          rejects_on_fma,
          cost_us,
          launch};
}

// --- Tensor Cores

TensorCoreOperands operands_of(const Problem& problem) {
  return {.bf16 = problem.a.dtype == DType::kBFloat16 ||
                  (problem.a.dtype == DType::kFloat32 && problem.precision == Precision::kBf16),
          .a_k_major = problem.a_k_major() || !problem.a_m_major(),
          .b_k_major = problem.b_k_major() || !problem.b_n_major()};
}

const char* rejects_on_tensor_cores(const Problem& problem, const Device& device,
                                    const TileConfig&) {
  if (device.compute_capability < 75) return "it needs compute capability 7.5";
  if (problem.a.dtype == DType::kFloat32 && problem.precision != Precision::kFp16 &&
      problem.precision != Precision::kBf16) {
    return "it multiplies FP16 and BF16; float32 operands need precision fp16 or bf16";
  }
  if (operands_of(problem).bf16 && device.compute_capability < 80) {
    return "BF16 on Tensor Cores needs compute capability 8.0";
  }
  return nullptr;
}

const char* rejects_volta(const Problem& problem, const Device& device, const TileConfig& config) {
  if (const char* reason = rejects_on_tensor_cores(problem, device, config)) return reason;
  if (operands_of(problem).bf16) return "mma.m8n8k4 multiplies FP16 only";
  return nullptr;
}

std::string launch_wmma(const Plan& plan, const Problem& problem, const Operands& operands,
                        const LaunchTarget& target) {
  return ladder::launch_wmma(operands_of(problem), make_params(plan, problem, operands), target);
}

std::string launch_wmma_shared(const Plan& plan, const Problem& problem, const Operands& operands,
                               const LaunchTarget& target) {
  return ladder::launch_wmma_double_buffered(plan.config == &kWmmaShared[0], operands_of(problem),
                                             make_params(plan, problem, operands), target);
}

std::string launch_volta(const Plan& plan, const Problem& problem, const Operands& operands,
                         const LaunchTarget& target) {
  return ladder::launch_volta_mma(operands_of(problem), make_params(plan, problem, operands),
                                  target);
}

const char* rejects_wgmma(const Problem& problem, const Device& device, const TileConfig& config) {
  if (device.compute_capability != 90) return "wgmma needs compute capability 9.0";
  if (const char* reason = rejects_on_tensor_cores(problem, device, config)) return reason;
  if (&config == &kWgmma[1]) return nullptr;
  if (problem.a.dtype == DType::kFloat32) {
    return "rounding float32 operands on the way needs a _staged configuration";
  }
  const TensorCoreOperands operands = operands_of(problem);
  if (tma_rejects(problem.a, operands.a_k_major, true, problem)) return "TMA cannot read a";
  if (tma_rejects(problem.b, operands.b_k_major, false, problem)) return "TMA cannot read b";
  return nullptr;
}

std::string launch_wgmma(const Plan& plan, const Problem& problem, const Operands& operands,
                         const LaunchTarget& target) {
  const GemmParams params = make_params(plan, problem, operands);
  const TensorCoreOperands inputs = operands_of(problem);
  if (plan.config == &kWgmma[1]) return ladder::launch_wgmma_staged(inputs, params, target);
  return inputs.bf16 ? ladder::launch_wgmma_tma<true>(inputs, params, target)
                     : ladder::launch_wgmma_tma<false>(inputs, params, target);
}

}  // namespace

KernelEntry naive_entry() {
  return fma_entry("naive", "ladder: one thread, one output", kNaive,
                   launch_fma<ladder::launch_naive>);
}

KernelEntry tiled_entry() {
  return fma_entry("tiled", "ladder: 32x32 tiles in shared memory, one stored transposed", kTiled,
                   launch_fma<ladder::launch_tiled>);
}

KernelEntry tiled_padded_entry() {
  return fma_entry("tiled_padded", "ladder: tiled without bank conflicts", kTiled,
                   launch_fma<ladder::launch_tiled_padded>);
}

KernelEntry tiled_vectorized_entry() {
  return fma_entry("tiled_vectorized", "ladder: 128-bit loads, 8x8 outputs per thread", kVectorized,
                   launch_vectorized);
}

KernelEntry wmma_entry() {
  return {"wmma",
          "ladder: Tensor Cores through WMMA, fragments from global memory",
          /*automatic=*/false,
          /*splits_k=*/false,
          kWmma,
          rejects_on_tensor_cores,
          cost_us,
          launch_wmma};
}

KernelEntry wmma_double_buffered_entry() {
  return {"wmma_double_buffered",  "ladder: WMMA from shared memory, the next tile in flight",
          /*automatic=*/false,
          /*splits_k=*/false,      kWmmaShared,
          rejects_on_tensor_cores, cost_us,
          launch_wmma_shared};
}

KernelEntry volta_mma_entry() {
  return {"volta_mma",
          "ladder: mma.m8n8k4 (native on sm_75, emulated on later cards), permuted shared memory",
          /*automatic=*/false,
          /*splits_k=*/false,
          kVolta,
          rejects_volta,
          cost_us,
          launch_volta};
}

KernelEntry wgmma_entry() {
  return {"wgmma",
          "ladder: wgmma on tiles that TMA brings, specialised warps, mbarriers",
          /*automatic=*/false,
          /*splits_k=*/false,
          kWgmma,
          rejects_wgmma,
          cost_us,
          launch_wgmma};
}

}  // namespace tgemm
