// Rung 7, volta_mma: the Tensor Core instruction itself instead of the API around it. Knowing which
// thread holds what lets every access to shared memory be 128 bits wide and free of bank conflicts.
//
// mma.m8n8k4 is Volta's instruction, native on sm_70 and sm_75 (HMMA.884). Later cards emulate it
// on the FMA pipes: there this kernel shows that it is right, not how fast it is.
#include "device/ptx.cuh"
#include "kernels/ladder/common.cuh"
#include "kernels/ladder/launch_tensor_core.cuh"

namespace tgemm::ladder {

namespace {

constexpr TileShape kTile = kVoltaTile;
constexpr int kWarpM = 64;
constexpr int kWarpN = 32;
constexpr int kWarpsN = kTile.n / kWarpN;
constexpr int kWarps = kTile.threads / 32;
constexpr int kChunk = 8;  // elements in 16 bytes

// Where a chunk of 8 elements lies. A row of K-major tiles has 4 chunks, so two rows fill the 32
// banks; a row of the others has 16. The chunks of a row are permuted such that the 8 threads whose
// 128-bit accesses are served together always meet 8 different groups of 4 banks: 8 rows of one
// chunk column when K-major fragments are read, 4 rows of two neighbouring chunks when others are.
template <int kMn, bool kKMajor>
struct PermutedLayout {
  static constexpr int kElements = kMn * kTile.k;
  __device__ static int offset(int mn, int k) {
    return kKMajor ? mn * kTile.k + (k / kChunk ^ (mn / 2 % 4)) * kChunk + k % kChunk
                   : k * kMn + (mn / kChunk ^ (k % 4 * 2)) * kChunk + mn % kChunk;
  }
};

// mma.m8n8k4 is four products of 8x4 by 4x8 at once, one for each "quad pair" of 8 threads: quad q
// of the lower and quad q of the upper half-warp. Two by two they cover 16x16 outputs.
struct Lane {
  int quad, half, in_quad;
  __device__ Lane()
      : quad(threadIdx.x % 16 / 4), half(threadIdx.x % 32 / 16), in_quad(threadIdx.x % 4) {}
  __device__ int pair_m() const { return quad % 2; }
  __device__ int pair_n() const { return quad / 2; }
};

// Position along M (or N) within the warp's share of row `j` of 4, in half `half` of the 8 that
// quad pair `pair` multiplies for fragment `f`. Any one-to-one mapping will do, as long as the sums
// are stored by it: these let a thread's 16 bytes serve two instructions. K-major, they are 8 k;
// else 4 positions of this fragment and 4 of its neighbour.
template <bool kKMajor>
__device__ inline int position(int f, int pair, int half, int j) {
  return kKMajor ? f * 16 + half * 8 + pair * 4 + j
                 : f / 2 * 32 + half * 16 + pair * 8 + f % 2 * 4 + j;
}

// Fragments of kFragments * 16 positions from `first` on and 8 k, for two instructions each.
template <int kMn, bool kKMajor, int kFragments>
__device__ inline void read_fragments(uint32_t (&fragments)[kFragments][2][2], const __half* tile,
                                      int first, int k, int pair, const Lane& lane) {
  using Layout = PermutedLayout<kMn, kKMajor>;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    // K-major: fragment i, both instructions. Else: fragments of pair i / 2, instruction i % 2.
    const int mn = kKMajor ? position<true>(i, pair, lane.half, lane.in_quad)
                           : position<false>(i / 2 * 2, pair, lane.half, 0);
    const int at_k = kKMajor ? k : k + i % 2 * 4 + lane.in_quad;
    const uint4 v = *reinterpret_cast<const uint4*>(tile + Layout::offset(first + mn, at_k));
    uint32_t (&low)[2] = kKMajor ? fragments[i][0] : fragments[i / 2 * 2][i % 2];
    uint32_t (&high)[2] = kKMajor ? fragments[i][1] : fragments[i / 2 * 2 + 1][i % 2];
    low[0] = v.x, low[1] = v.y;
    high[0] = v.z, high[1] = v.w;
  }
}

class WarpSums {
 public:
  static constexpr int kFragmentsM = kWarpM / 16;
  static constexpr int kFragmentsN = kWarpN / 16;
  static constexpr int kStagedRows = 32;  // two fragments
  static constexpr int kStagedPitch = kWarpN + 8;
  static constexpr int kStagedFloats = kStagedRows * kStagedPitch;  // per warp

  template <bool kAKMajor, bool kBKMajor>
  __device__ void multiply(const __half* tile_a, const __half* tile_b, int m, int n, int k,
                           const Lane& lane) {
    uint32_t a[kFragmentsM][2][2], b[kFragmentsN][2][2];
    read_fragments<kTile.m, kAKMajor>(a, tile_a, m, k, lane.pair_m(), lane);
    read_fragments<kTile.n, kBKMajor>(b, tile_b, n, k, lane.pair_n(), lane);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
          ptx::mma_m8n8k4_f16<kAKMajor, kBKMajor>(sums_[i][j], a[i][step], b[j][step]);
        }
      }
    }
  }

  // Writes out the sums, whose first is output (m, n), through this warp's `staged` floats.
  template <bool kAKMajor, bool kBKMajor>
  __device__ void finish(const GemmParams& params, const Tile& tile, int64_t m, int64_t n,
                         float* staged, const Lane& lane) const {
    // Rolled, to keep one copy of the epilogue; picking the rows in it keeps the sums in registers.
#pragma unroll 1
    for (int part = 0; part < kFragmentsM / 2; ++part) {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        if (i / 2 != part) continue;
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const int row =
                position<kAKMajor>(i % 2, lane.pair_m(), lane.half, lane.in_quad % 2 + (e & 2));
            const int column =
                position<kBKMajor>(j, lane.pair_n(), e / 4, lane.in_quad / 2 * 2 + e % 2);
            staged[row * kStagedPitch + column] = sums_[i][j][e];
          }
        }
      }
      finish_staged<kStagedRows, kWarpN, kStagedPitch>(params, tile.offset, m + part * kStagedRows,
                                                       n, staged);
    }
  }

 private:
  float sums_[kFragmentsM][kFragmentsN][8] = {};
};

}  // namespace

template <bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(kTile.threads)
    volta_mma(const __grid_constant__ GemmParams params) {
  using LayoutA = PermutedLayout<kTile.m, kAKMajor>;
  using LayoutB = PermutedLayout<kTile.n, kBKMajor>;
  struct Stage {
    __align__(16) __half a[LayoutA::kElements];
    __align__(16) __half b[LayoutB::kElements];
  };
  union Shared {
    Stage stages[2];
    float staged[kWarps][WarpSums::kStagedFloats];
  };
  __shared__ __align__(16) unsigned char shared_bytes[sizeof(Shared)];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Lane lane;
  const int warp = threadIdx.x / 32;
  const int m = warp / kWarpsN * kWarpM;
  const int n = warp % kWarpsN * kWarpN;

  for_each_tile<kTile.m, kTile.n>(params, [&](const Tile& tile) {
    const Operand<Side::kA> a(params, tile);
    const Operand<Side::kB> b(params, tile);
    TileCopy<__half, kTile.m, kTile.k, kAKMajor, kTile.threads, Side::kA> copy_a(a);
    TileCopy<__half, kTile.n, kTile.k, kBKMajor, kTile.threads, Side::kB> copy_b(b);
    WarpSums sums;
    const auto fetch = [&](int64_t k) {
      copy_a.fetch(k);
      copy_b.fetch(k);
    };
    const auto store = [&](Stage& stage, int64_t k) {
      copy_a.store(k, [&](int at_mn, int at_k, const auto& elements) {
        put(stage.a + LayoutA::offset(at_mn, at_k), elements);
      });
      copy_b.store(k, [&](int at_mn, int at_k, const auto& elements) {
        put(stage.b + LayoutB::offset(at_mn, at_k), elements);
      });
      __syncthreads();
    };
    if (params.k > 0) {
      fetch(0);
      store(shared.stages[0], 0);
    }
    int current = 0;
    for (int64_t k = 0; k < params.k; k += kTile.k) {
      const bool more = k + kTile.k < params.k;
      if (more) fetch(k + kTile.k);
      const Stage& stage = shared.stages[current];
#pragma unroll 1
      for (int step = 0; step < kTile.k; step += kChunk) {
        sums.multiply<kAKMajor, kBKMajor>(stage.a, stage.b, m, n, step, lane);
      }
      current = 1 - current;
      if (more) store(shared.stages[current], k + kTile.k);
    }
    __syncthreads();  // the sums are staged over the tiles
    sums.finish<kAKMajor, kBKMajor>(params, tile, tile.m + m, tile.n + n, shared.staged[warp],
                                    lane);
  });
}

std::string launch_volta_mma(const TensorCoreOperands& operands, const GemmParams& params,
                             const LaunchTarget& target) {
  const auto launch = [&]<bool kAKMajor, bool kBKMajor>() {
    return launch_kernel<volta_mma<kAKMajor, kBKMajor>>(tile_count(params, kTile.m, kTile.n),
                                                        kTile.threads, 0, target, params);
  };
  if (operands.a_k_major) {
    return operands.b_k_major ? launch.operator()<true, true>() : launch.operator()<true, false>();
  }
  return operands.b_k_major ? launch.operator()<false, true>() : launch.operator()<false, false>();
}

}  // namespace tgemm::ladder
