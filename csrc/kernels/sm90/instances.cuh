// Definition of launch(), for the instance_*.cu files alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/launch.cuh"
#include "kernels/sm90/gemm.cuh"

namespace tgemm::sm90 {

template <class Cta>
std::string make_maps(Arguments& arguments) {
  const GemmParams& params = arguments.gemm;
  constexpr bool kRounds = !Cta::kParts;  // parts are TF32 as they are
  std::string error = make_operand_map(arguments.a, params, params.a, true, arguments.a_k_major,
                                       Cta::kBlockM, kRounds);
  const int box_n = arguments.gated ? 64 : Cta::kShareB;
  if (error.empty()) {
    error =
        make_operand_map(arguments.b, params, params.b, false, arguments.b_k_major, box_n, kRounds);
  }
  if (error.empty() && arguments.gated) {
    error = make_operand_map(arguments.up, params, arguments.up_matrix, false, arguments.b_k_major,
                             box_n);
  }
  if (arguments.outputs != Outputs::kTma) return error;
  if (error.empty()) error = make_output_map(arguments.out, params, params.out, 64);
  if (error.empty() && params.residual.pointer) {
    error = make_output_map(arguments.residual, params, params.residual, 64);
  }
  return error;
}

template <class Cta>
std::string launch(Arguments& arguments, const LaunchTarget& target) {
  if (!target.resources) {
    if (std::string error = make_maps<Cta>(arguments); !error.empty()) return error;
  }
  const GemmParams& params = arguments.gemm;
  constexpr int64_t kRows = Cta::kBlockM * Cta::kCluster;
  const int64_t tiles_m = (params.m + kRows - 1) / kRows;
  const int64_t columns = arguments.gated ? Cta::kBlockN / 2 : Cta::kBlockN;
  const int64_t tiles_n = (params.n + columns - 1) / columns;
  const int64_t tiles = tiles_m * tiles_n * params.batch_count * params.split_k;
  if (tiles > INT32_MAX / 2) return "more than 2^30 tiles";
  const auto divisor = [](int64_t n) { return FastDivisor(static_cast<uint32_t>(n)); };
  arguments.tiles = static_cast<int>(tiles);
  arguments.tiles_per_batch = divisor(tiles_m * tiles_n);
  arguments.batches = divisor(params.batch_count);
  arguments.tiles_per_group = divisor(std::min<int64_t>(Cta::kGroupM * tiles_n, INT32_MAX));
  arguments.last_rows = divisor((tiles_m - 1) % Cta::kGroupM + 1);
  return launch_clusters<sm90_gemm<Cta>>(tiles, Cta::kCluster * arguments.cluster_split,
                                         /*persistent=*/arguments.cluster_split == 1, Cta::kThreads,
                                         sizeof(SharedMemory<Cta>), target, arguments);
}

}  // namespace tgemm::sm90
