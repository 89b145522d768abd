// Rung 5, wmma: Tensor Cores, by the API that CUDA C++ has for them. Each warp loads 16x16
// fragments of A and B straight from global memory; what neighbouring warps share, they share
// through L1.
#include "kernels/ladder/wmma_warp.cuh"

namespace tgemm::ladder {

namespace {

constexpr TileShape kTile = kWmmaTile;
constexpr int kWarpM = 64;
constexpr int kWarpN = 64;
constexpr int kWarpsN = kTile.n / kWarpN;
constexpr int kWarps = kTile.threads / 32;
using Sums = WarpSums<kWarpM, kWarpN>;

// Fragments of 16 rows each from global memory.
template <class T, bool kKMajor, Side kSide>
class FragmentLoader {
 public:
  // `mn`: the warp's first row (or column), of kRows.
  __device__ FragmentLoader(const Operand<kSide>& operand, int64_t mn, int rows, T* patch)
      : operand_(operand),
        mn_(mn),
        leading_(kKMajor ? operand.mn_stride() : operand.k_stride()),
        from_(operand.template at<T>(mn, 0)),
        patch_(patch) {
    // wmma reads rows that start at multiples of 32 bytes.
    direct_ = operand.dtype() != DType::kFloat32 && operand.aligned(kKMajor, 32) &&
              leading_ < int64_t{1} << 31 && operand.contains(mn, rows, 0, 0);
  }

  // Can the fragments at k be loaded straight from memory: do they lie inside the matrix, in rows
  // that wmma can read?
  __device__ bool direct(int64_t k) const { return direct_ && k + kFragment <= operand_.k_size(); }

  template <class Fragment>
  __device__ void load(Fragment& fragment, int i, int64_t k) const {
    wmma::load_matrix_sync(fragment,
                           from_ + i * kFragment * operand_.mn_stride() + k * operand_.k_stride(),
                           static_cast<unsigned>(leading_));
  }

  // The same for any fragment, through 16x16 elements of shared memory.
  template <class Fragment>
  __device__ void load_any(Fragment& fragment, int i, int64_t k) const {
    __syncwarp();
#pragma unroll 4
    for (int e = threadIdx.x % 32; e < kFragment * kFragment; e += 32) {
      const int mn = i * kFragment + (kKMajor ? e / kFragment : e % kFragment);
      patch_[e] = load_as<T>(operand_, mn_ + mn, k + (kKMajor ? e % kFragment : e / kFragment));
    }
    __syncwarp();
    wmma::load_matrix_sync(fragment, patch_, kFragment);
  }

 private:
  const Operand<kSide>& operand_;
  int64_t mn_, leading_;
  const T* from_;
  T* patch_;
  bool direct_;
};

}  // namespace

template <class T, bool kAKMajor, bool kBKMajor>
__global__ void __launch_bounds__(kTile.threads, 2)
    wmma_global(const __grid_constant__ GemmParams params) {
  if constexpr (kExists<T>) {
    __shared__ __align__(32) T patches[kWarps][kFragment * kFragment];
    __shared__ __align__(32) float staged[kWarps][Sums::kStagedFloats];
    const int warp = threadIdx.x / 32;

    for_each_tile<kTile.m, kTile.n>(params, [&](const Tile& tile) {
      const Operand<Side::kA> a(params, tile);
      const Operand<Side::kB> b(params, tile);
      const int64_t m = tile.m + warp / kWarpsN * kWarpM;
      const int64_t n = tile.n + warp % kWarpsN * kWarpN;
      const FragmentLoader<T, kAKMajor, Side::kA> load_a(a, m, kWarpM, patches[warp]);
      const FragmentLoader<T, kBKMajor, Side::kB> load_b(b, n, kWarpN, patches[warp]);
      Sums sums;
      for (int64_t k = 0; k < params.k; k += kFragment) {
        FragmentA<T, kAKMajor> from_a[Sums::kFragmentsM];
        FragmentB<T, kBKMajor> from_b[Sums::kFragmentsN];
        // All loads first: one wait for memory instead of one for each fragment.
        if (load_a.direct(k) && load_b.direct(k)) {
#pragma unroll
          for (int j = 0; j < Sums::kFragmentsN; ++j) load_b.load(from_b[j], j, k);
#pragma unroll
          for (int i = 0; i < Sums::kFragmentsM; ++i) load_a.load(from_a[i], i, k);
        } else {
#pragma unroll
          for (int j = 0; j < Sums::kFragmentsN; ++j) load_b.load_any(from_b[j], j, k);
#pragma unroll
          for (int i = 0; i < Sums::kFragmentsM; ++i) load_a.load_any(from_a[i], i, k);
        }
#pragma unroll
        for (int i = 0; i < Sums::kFragmentsM; ++i) sums.multiply(i, from_a[i], from_b);
      }
      sums.finish(params, tile, m, n, staged[warp]);
    });
  }
}

std::string launch_wmma(const TensorCoreOperands& operands, const GemmParams& params,
                        const LaunchTarget& target) {
  return with_operands(operands, [&](auto type, auto a_k_major, auto b_k_major) {
    return launch_kernel<wmma_global<decltype(type), a_k_major, b_k_major>>(
        tile_count(params, kTile.m, kTile.n), kTile.threads, 0, target, params);
  });
}

}  // namespace tgemm::ladder
