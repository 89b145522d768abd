// What a tiled GEMM costs: named terms, shared by the kernel families.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "gemm/plan.hpp"

namespace tgemm {

// The constants were fitted to sweeps on an H200 (benchmarks/NOTES.md).

// From the start of a grid to its first loads (microseconds).
constexpr double kStartUs = 2.0;
// What a wave of CTAs pays before and after its mainloop, where nothing multiplies: filling the
// pipeline, and the epilogue of a tile, in proportion to its size (microseconds; per 128x256
// outputs).
constexpr double kPrologueUs = 1.5;
constexpr double kEpilogueUs = 4.0;
// The second kernel of split-K, without its traffic (microseconds).
constexpr double kReduceUs = 2.5;
// Partial sums stay in L2 mostly, which is this much faster than memory.
constexpr double kL2Speedup = 1.5;
// What reading and writing take of the time that memory's rate promises, where tiles are read.
constexpr double kMemoryFactor = 1.357;
// From a request to its data, of which a pipeline has one per free stage under way (microseconds).
constexpr double kLoadLatencyUs = 1.2;
// Warps that it takes to keep an SM's multipliers busy, unless a kernel knows better.
constexpr double kWarpsToSaturate = 4.0;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Clusters of `size` CTAs that run at once.
inline int64_t resident_clusters(const Device& device, int64_t size, int ctas_per_sm = 1) {
  const auto sizes = static_cast<int64_t>(device.cluster_shares.size());
  const double share =
      device.cluster_shares[static_cast<size_t>(std::clamp<int64_t>(size, 1, sizes) - 1)];
  const double clusters = device.sm_count * ctas_per_sm * share / static_cast<double>(size);
  return std::max<int64_t>(1, std::lround(clusters));
}

// Reading operands and residual and writing outputs at the memory's rate, microseconds.
inline double memory_us(const Problem& problem, const Device& device) {
  const Epilogue& epilogue = problem.epilogue;
  const double element = bytes_per_element(problem.a.dtype);
  const double out_bytes =
      bytes_per_element(problem.out.dtype) +
      (epilogue.has_residual ? bytes_per_element(epilogue.residual.dtype) : 0) +
      (epilogue.has_preact ? bytes_per_element(epilogue.preact.dtype) : 0);
  const auto m = static_cast<double>(problem.m);
  const auto n = static_cast<double>(problem.n);
  const auto k = static_cast<double>(problem.k);
  const auto batches = [&](const Matrix& matrix) {
    return static_cast<double>(problem.distinct_batches(matrix));
  };
  const double weights = problem.gated ? 2.0 : 1.0;
  const double operand_bytes =
      (batches(problem.a) * m * k + weights * batches(problem.b) * k * n) * element;
  return (operand_bytes + batches(problem.out) * m * n * out_bytes) / device.memory_bytes_per_us;
}

// Writing and reading split-K's partial sums, microseconds.
inline double partial_sums_us(const Problem& problem, const Device& device, int split_k) {
  const double bytes = static_cast<double>(problem.batch_count()) * static_cast<double>(problem.m) *
                       static_cast<double>(problem.n) * split_k * sizeof(float);
  return 2.0 * bytes / (kL2Speedup * device.memory_bytes_per_us);
}

// The time that limits allow which each alone would take these: close together, they slow one
// another, so that it is a norm of them, not the largest.
inline double limit_us(std::initializer_list<double> limits) {
  double sum = 0.0;
  for (const double us : limits) sum += us * us * us * us;
  return std::sqrt(std::sqrt(sum));
}

// Kernel time of a GEMM in CTA tiles of `config`, microseconds. `slowdown` scales the mainloop's
// rate for operand types that multiply slower than the rate was measured with.
inline double tile_cost_us(const Problem& problem, const Device& device, const TileConfig& config,
                           int split_k, double slowdown,
                           double warps_to_saturate = kWarpsToSaturate) {
  const int64_t tiles = ceil_div(problem.m, config.block_m) * ceil_div(problem.n, config.block_n) *
                        problem.batch_count() * split_k;

  // The busiest SM decides; the CTAs resident on it share its multipliers and hide each other's
  // prologue and epilogue.
  const int64_t per_sm = ceil_div(tiles, std::max(1, device.sm_count));
  const int64_t resident = std::min<int64_t>(per_sm, config.ctas_per_sm);
  const double warps = static_cast<double>(resident) * config.threads / 32.0;
  const double rate = config.mac_per_cycle * std::min(1.0, warps / warps_to_saturate);
  const double k_per_cta =
      static_cast<double>(ceil_div(ceil_div(problem.k, split_k), config.block_k) * config.block_k);
  const double area = static_cast<double>(config.block_m) * config.block_n;
  const double multiply_us =
      static_cast<double>(per_sm) * area * k_per_cta * slowdown / (rate * device.clock_ghz * 1e3);
  const double waves = static_cast<double>(ceil_div(per_sm, config.ctas_per_sm));
  const double latency_us =
      waves * k_per_cta / config.block_k * kLoadLatencyUs / std::max(1, config.stages - 1);
  const double mainloop_us = std::max(multiply_us, latency_us);
  const double edges_us = waves * (kPrologueUs + kEpilogueUs * area / (128.0 * 256.0));

  const double reduce_us =
      split_k > 1 ? kReduceUs + partial_sums_us(problem, device, split_k) : 0.0;
  return kStartUs + limit_us({mainloop_us + edges_us, kMemoryFactor * memory_us(problem, device)}) +
         reduce_us;
}

}  // namespace tgemm
