// Rung 6, wmma_double_buffered: WMMA from shared memory. The tiles of the next step are loaded into
// registers while the present ones are multiplied, and stored to the other half of shared memory;
// with kBuffers = 1 loading and multiplying take turns.
#include "kernels/ladder/wmma_warp.cuh"

namespace tgemm::ladder {

namespace {

constexpr TileShape kTile = kWmmaSharedTile;
constexpr int kWarpM = 64;
constexpr int kWarpN = 32;
constexpr int kWarpsN = kTile.n / kWarpN;
constexpr int kWarps = kTile.threads / 32;
using Sums = WarpSums<kWarpM, kWarpN>;

// Rows of K, or of M or N, in the operand's own order. 8 elements of padding put the eight rows
// that are read together into different banks.
template <int kMn, bool kKMajor>
struct PaddedLayout {
  static constexpr int kPitch = (kKMajor ? kTile.k : kMn) + 8;
  static constexpr int kElements = (kKMajor ? kMn : kTile.k) * kPitch;
  __device__ static int offset(int mn, int k) {
    return kKMajor ? mn * kPitch + k : k * kPitch + mn;
  }
};

}  // namespace

template <int kBuffers, class T, bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(kTile.threads, 2)
    wmma_double_buffered(const __grid_constant__ GemmParams params) {
  if constexpr (kExists<T>) {
    using LayoutA = PaddedLayout<kTile.m, kAKMajor>;
    using LayoutB = PaddedLayout<kTile.n, kBKMajor>;
    struct Stage {
      __align__(32) T a[LayoutA::kElements];
      __align__(32) T b[LayoutB::kElements];
    };
    union Shared {
      Stage stages[kBuffers];
      float staged[kWarps][Sums::kStagedFloats];
    };
    __shared__ __align__(32) unsigned char shared_bytes[sizeof(Shared)];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const int warp = threadIdx.x / 32;
    const int m = warp / kWarpsN * kWarpM;
    const int n = warp % kWarpsN * kWarpN;

    for_each_tile<kTile.m, kTile.n>(params, [&](const Tile& tile) {
      const Operand<Side::kA> a(params, tile);
      const Operand<Side::kB> b(params, tile);
      TileCopy<T, kTile.m, kTile.k, kAKMajor, kTile.threads, Side::kA> copy_a(a);
      TileCopy<T, kTile.n, kTile.k, kBKMajor, kTile.threads, Side::kB> copy_b(b);
      Sums sums;
      const auto fetch = [&](int64_t k) {
        copy_a.fetch(k);
        copy_b.fetch(k);
      };
      const auto store = [&](Stage& stage, int64_t k) {
        const auto put_a = [&](int at_mn, int at_k, const auto& elements) {
          put(stage.a + LayoutA::offset(at_mn, at_k), elements);
        };
        const auto put_b = [&](int at_mn, int at_k, const auto& elements) {
          put(stage.b + LayoutB::offset(at_mn, at_k), elements);
        };
        if (kBuffers == 1) {
          copy_a.copy(k, put_a);
          copy_b.copy(k, put_b);
        } else {
          copy_a.store(k, put_a);
          copy_b.store(k, put_b);
        }
        __syncthreads();
      };
      if (kBuffers == 2 && params.k > 0) {
        fetch(0);
        store(shared.stages[0], 0);
      }
      int current = 0;
      for (int64_t k = 0; k < params.k; k += kTile.k) {
        const bool more = k + kTile.k < params.k;
        if (kBuffers == 1) {
          store(shared.stages[0], k);
        } else if (more) {
          fetch(k + kTile.k);
        }
        const Stage& stage = shared.stages[current];
#pragma unroll 1  // fits 128 registers on every architecture
        for (int step = 0; step < kTile.k; step += kFragment) {
          FragmentB<T, kBKMajor> from_b[Sums::kFragmentsN];
#pragma unroll
          for (int j = 0; j < Sums::kFragmentsN; ++j) {
            wmma::load_matrix_sync(from_b[j], stage.b + LayoutB::offset(n + j * kFragment, step),
                                   LayoutB::kPitch);
          }
#pragma unroll
          for (int i = 0; i < Sums::kFragmentsM; ++i) {
            FragmentA<T, kAKMajor> from_a;
            wmma::load_matrix_sync(from_a, stage.a + LayoutA::offset(m + i * kFragment, step),
                                   LayoutA::kPitch);
            sums.multiply(i, from_a, from_b);
          }
        }
        if (kBuffers == 1) {
          __syncthreads();  // all warps have read the only buffer
        } else {
          current = 1 - current;
          if (more) store(shared.stages[current], k + kTile.k);
        }
      }
      __syncthreads();  // the sums are staged over the tiles
      sums.finish(params, tile, tile.m + m, tile.n + n, shared.staged[warp]);
    });
  }
}

std::string launch_wmma_double_buffered(bool double_buffer, const TensorCoreOperands& operands,
                                        const GemmParams& params, const LaunchTarget& target) {
  return with_operands(operands, [&](auto type, auto a_k_major, auto b_k_major) {
    using T = decltype(type);
    const int64_t ctas = tile_count(params, kTile.m, kTile.n);
    return double_buffer ? launch_kernel<wmma_double_buffered<2, T, a_k_major, b_k_major>>(
                               ctas, kTile.threads, 0, target, params)
                         : launch_kernel<wmma_double_buffered<1, T, a_k_major, b_k_major>>(
                               ctas, kTile.threads, 0, target, params);
  });
}

}  // namespace tgemm::ladder
