#include "kernels/sm80/mma_sync.hpp"

#include <algorithm>
#include <array>
#include <type_traits>

#include "kernels/cost_model.hpp"
#include "kernels/sm80/instances.hpp"

// Declared only: this file compiles without nvcc.
struct __half;
struct __nv_bfloat16;

namespace tgemm {
namespace {

using sm80::AsyncTiles;
using sm80::Math;
using sm80::StagedTiles;

constexpr size_t kAsyncTiles = std::tuple_size_v<AsyncTiles>;
constexpr size_t kConfigs = kAsyncTiles + std::tuple_size_v<StagedTiles>;

// K is counted in 16-bit elements; a stage holds half as many of TF32.
template <class Cta>
constexpr TileConfig config_of(std::string_view name, double mac_per_cycle) {
  return {name,         Cta::kBlockM,      Cta::kBlockN,    Cta::kKBytes / 2, Cta::kThreads,
          Cta::kStages, Cta::kSharedBytes, Cta::kCtasPerSm, mac_per_cycle};
}

// The rates are FP16 multiply-adds per SM and cycle of the boost clock, measured on an H200 under
// its power limit (benchmarks/NOTES.md).
constexpr std::array<TileConfig, kConfigs> kConfigTable = {
    config_of<std::tuple_element_t<0, AsyncTiles>>("128x256", 1020.0),
    config_of<std::tuple_element_t<1, AsyncTiles>>("128x128", 965.0),
    config_of<std::tuple_element_t<2, AsyncTiles>>("64x64", 540.0),
    config_of<std::tuple_element_t<0, StagedTiles>>("128x128_staged", 250.0),
    config_of<std::tuple_element_t<1, StagedTiles>>("64x64_staged", 250.0),
};

size_t index_of(const TileConfig& config) {
  return static_cast<size_t>(&config - kConfigTable.data());
}
bool staged(const TileConfig& config) { return index_of(config) >= kAsyncTiles; }

Math math_of(const Problem& problem) {
  if (problem.a.dtype == DType::kFloat16) return Math::kF16;
  if (problem.a.dtype == DType::kBFloat16) return Math::kBF16;
  if (problem.precision == Precision::kFp16) return Math::kF16;
  if (problem.precision == Precision::kBf16) return Math::kBF16;
  return Math::kTf32;
}

// cp.async moves 16 bytes: one unit stride, along which the matrix is a whole number of 16-byte
// chunks, and everything else a multiple of 16 bytes; a tile's rows within 2^31 bytes of each
// other.
bool loads_async(const Matrix& matrix, int64_t contiguous_extent, int64_t leading_stride,
                 int batch_dims) {
  const int64_t per_chunk = 16 / bytes_per_element(matrix.dtype);
  constexpr int64_t kMaxLeadingStride = int64_t{1} << 20;
  if (contiguous_extent % per_chunk != 0 || leading_stride % per_chunk != 0) return false;
  if (leading_stride > kMaxLeadingStride || matrix.address_alignment < 16) return false;
  return std::all_of(matrix.batch_stride.begin(), matrix.batch_stride.begin() + batch_dims,
                     [=](int64_t stride) { return stride % per_chunk == 0; });
}

bool a_loads_async(const Problem& problem) {
  const Matrix& a = problem.a;
  if (problem.a_k_major()) return loads_async(a, problem.k, a.row_stride, problem.batch_dims);
  return problem.a_m_major() && loads_async(a, problem.m, a.col_stride, problem.batch_dims);
}

bool b_loads_async(const Problem& problem) {
  const Matrix& b = problem.b;
  if (problem.b_k_major()) return loads_async(b, problem.k, b.col_stride, problem.batch_dims);
  return problem.b_n_major() && loads_async(b, problem.n, b.row_stride, problem.batch_dims);
}

// Is this tile built for the operand type and the layout of A?
bool async_exists(const TileConfig& config, Math math, bool a_k_major) {
  return [&]<class... Ctas>(std::type_identity<std::tuple<Ctas...>>) {
    const bool exist[] = {sm80::exists<Ctas>(math, a_k_major)...};
    return exist[index_of(config)];
  }(std::type_identity<AsyncTiles>());
}

const char* rejects(const Problem& problem, const Device& device, const TileConfig& config) {
  if (device.compute_capability < 80) return "mma.sync m16n8k16 needs compute capability 8.0";
  if (config.shared_memory_bytes > device.max_shared_memory_per_block) {
    return "its tile needs more shared memory than a block can have on this device";
  }
  if (problem.a.dtype == DType::kFloat32) {
    if (problem.precision == Precision::kIeee) {
      return "float32 operands at full precision do not run on Tensor Cores";
    }
    if (problem.precision == Precision::k3xTf32)
      return "it makes one product of float32 operands; precision 3xtf32 takes three";
  }
  if (!staged(config)) {
    if (problem.a.dtype == DType::kFloat32 && problem.precision != Precision::kTf32) {
      return "rounding float32 operands on the way needs a _staged configuration";
    }
    if (!async_exists(config, math_of(problem), true)) return "this tile is not built for tf32";
    if (!async_exists(config, math_of(problem), problem.a_k_major())) {
      return "this tile is built for a K-major a only";
    }
    if (!a_loads_async(problem)) return "a cannot be copied in aligned 16-byte pieces";
    if (!b_loads_async(problem)) return "b cannot be copied in aligned 16-byte pieces";
  }
  return nullptr;
}

double cost_us(const Problem& problem, const Device& device, const TileConfig& config,
               int split_k) {
  // TF32 runs at half the rate of FP16.
  const double slowdown = math_of(problem) == Math::kTf32 ? 2.0 : 1.0;
  return tile_cost_us(problem, device, config, split_k, slowdown);
}

std::string launch_mma_sync(const Plan& plan, const Problem& problem, const Operands& operands,
                            const LaunchTarget& target) {
  const GemmParams params = make_params(plan, problem, operands);
  const int index = static_cast<int>(index_of(*plan.config));
  const Math math = math_of(problem);
  if (staged(*plan.config)) {
    const int tile = index - static_cast<int>(kAsyncTiles);
    const bool from_float = problem.a.dtype == DType::kFloat32;
    switch (math) {
      case Math::kF16:
        return from_float ? sm80::launch_staged<Math::kF16, float>(tile, params, target)
                          : sm80::launch_staged<Math::kF16, __half>(tile, params, target);
      case Math::kBF16:
        return from_float ? sm80::launch_staged<Math::kBF16, float>(tile, params, target)
                          : sm80::launch_staged<Math::kBF16, __nv_bfloat16>(tile, params, target);
      case Math::kTf32:
        return sm80::launch_staged<Math::kTf32, float>(tile, params, target);
    }
  }
  const bool a_k_major = problem.a_k_major();
  const bool b_k_major = problem.b_k_major();
  switch (math) {
    case Math::kF16:
      return sm80::launch_async<Math::kF16>(index, a_k_major, b_k_major, params, target);
    case Math::kBF16:
      return sm80::launch_async<Math::kBF16>(index, a_k_major, b_k_major, params, target);
    case Math::kTf32:
      return sm80::launch_async<Math::kTf32>(index, a_k_major, b_k_major, params, target);
  }
  return "mma_sync: unknown operand type";
}

}  // namespace

KernelEntry mma_sync_entry() {
  return {"mma_sync",
          "Tensor Cores through mma.sync, ldmatrix and a multi-stage cp.async pipeline",
          /*automatic=*/true,
          /*splits_k=*/true,
          kConfigTable,
          rejects,
          cost_us,
          launch_mma_sync};
}

}  // namespace tgemm
