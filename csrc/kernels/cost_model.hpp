// What a tiled GEMM costs: named terms, shared by the kernel families.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/plan.hpp"

namespace tgemm {

// Launch to first multiply, and last multiply to the end: filling the pipeline and writing the tile, paid
// once per wave of CTAs that nothing overlaps (microseconds, measured on an H200).
constexpr double kPrologueEpilogueUs = 2.5;
// The second kernel of split-K: its launch and drain.
constexpr double kReduceLaunchUs = 2.0;

// Kernel time of a GEMM in CTA tiles of `config`, microseconds. `slowdown` scales the mainloop's rate for
// operand types that multiply slower than the rate was measured with.
inline double tile_cost_us(const Problem& problem, const Device& device, const TileConfig& config,
                           int split_k, double slowdown) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const double batches = static_cast<double>(problem.batch_count());
  const int64_t tiles = ceil_div(problem.m, config.block_m) * ceil_div(problem.n, config.block_n) *
                        problem.batch_count() * split_k;

  // The busiest SM decides. Fewer CTAs on it than fit hide less latency: one CTA alone reaches about 60 %
  // of the rate of two or more.
  const int64_t per_sm = ceil_div(tiles, std::max(1, device.sm_count));
  const double occupancy = std::min(1.0, static_cast<double>(per_sm) / config.ctas_per_sm);
  const double rate = config.mac_per_cycle * (config.ctas_per_sm == 1 ? 1.0 : 0.4 + 0.6 * occupancy);
  const double k_per_cta =
      static_cast<double>(ceil_div(ceil_div(problem.k, split_k), config.block_k) * config.block_k);
  const double cycles = static_cast<double>(per_sm) * config.block_m * config.block_n * k_per_cta *
                        slowdown / rate;
  const double compute_us = cycles / (device.clock_ghz * 1e3);

  const double element = bytes_per_element(problem.a.dtype);
  const double out_bytes = bytes_per_element(problem.out.dtype) +
                           (problem.epilogue.has_residual ? bytes_per_element(problem.epilogue.residual.dtype) : 0) +
                           (problem.epilogue.has_preact ? bytes_per_element(problem.epilogue.preact.dtype) : 0);
  const double m = static_cast<double>(problem.m), n = static_cast<double>(problem.n),
               k = static_cast<double>(problem.k);
  const double bytes = batches * ((m * k + k * n) * element + m * n * out_bytes);
  const double memory_us = bytes / device.memory_bytes_per_us;

  double reduce_us = 0.0;
  if (split_k > 1) {
    // Partial sums are written and read once each, mostly in L2 at about twice the memory's bandwidth.
    reduce_us = kReduceLaunchUs +
                batches * m * n * split_k * 2.0 * sizeof(float) / (2.0 * device.memory_bytes_per_us);
  }
  return std::max(compute_us, memory_us) + kPrologueEpilogueUs + reduce_us;
}

}  // namespace tgemm
