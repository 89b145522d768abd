// Definition of launch(), for the instance_*.cu files alone.
#pragma once

#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/skinny/gemm.cuh"

namespace tgemm::skinny {

template <class Cta>
std::string make_maps(Arguments& arguments) {
  const GemmParams& params = arguments.gemm;
  const bool k_major = arguments.b_k_major;
  const int rows = k_major && !arguments.gated ? Cta::kColumns : 64;  // of the weight, in a box
  std::string error = make_operand_map(arguments.a, params, params.a, true, true, Cta::kRows);
  if (error.empty()) {
    error = make_operand_map(arguments.b, params, params.b, false, k_major, rows);
  }
  if (error.empty() && arguments.gated) {
    error = make_operand_map(arguments.up, params, arguments.up_matrix, false, k_major, rows);
  }
  return error;
}

template <class Cta>
std::string launch(Arguments& arguments, const LaunchTarget& target) {
  const GemmParams& params = arguments.gemm;
  const auto cluster = static_cast<int>(arguments.cluster.divisor());
  const int columns = arguments.gated ? Cta::kColumns / 2 : Cta::kColumns;
  const int64_t tiles_m = (params.m + Cta::kRows - 1) / Cta::kRows;
  const int64_t tiles_n = (params.n + columns - 1) / columns;
  const auto divisor = [](int64_t n) { return FastDivisor(static_cast<uint32_t>(n)); };
  arguments.tiles_m = divisor(tiles_m);
  arguments.tiles_n = divisor(tiles_n);
  arguments.batches = divisor(params.batch_count);
  if (!target.resources) {
    if (std::string error = make_maps<Cta>(arguments); !error.empty()) return error;
  }
  return launch_clusters<skinny_gemm<Cta>>(
      tiles_m * tiles_n * params.batch_count * params.split_k, cluster, /*persistent=*/false,
      Cta::kThreads, shared_memory_bytes<Cta>(arguments.stages, cluster > 1), target, arguments);
}

}  // namespace tgemm::skinny
