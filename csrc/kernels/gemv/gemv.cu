// out = x @ weight.T for few rows of x, where rows may begin anywhere in memory: an odd K, a
// storage offset, a stride that is no multiple of 8.
//
// Rows of the weight and of x are read by 16-byte loads at aligned addresses, whatever the rows'
// own, and shifted into place in registers; nothing is copied before.
// Which k a lane multiplies is free as long as x and the weight agree, so each lane walks down a
// part of K of its own, and what the next step needs of a piece of 16 bytes is still in its
// registers.
//
// A piece of 16 bytes that lies across the end of x or of the weight has no more than 7 elements of
// them, the last of the last row: no piece is read for as many elements of K (the tail), and one
// warp multiplies them of every row, read one by one.
#include <cstdint>

#include "device/epilogue.cuh"
#include "device/params.hpp"
#include "device/ptx.cuh"
#include "device/tile_scheduler.cuh"
#include "kernels/gemv/gemv.hpp"
#include "kernels/launch.cuh"

namespace tgemm::gemv {
namespace {

constexpr int kThreads = 32 * kWarps;
constexpr int kWords = kStep / 2;  // of two elements, per step
constexpr int kWarpStep = 4 * kStep;

// The elements that a lane multiplies of a row of 16-bit elements: kStep of every kWarpStep.
class RowStream {
 public:
  // The first step begins at element `begin`; the row's part ends before `end`. With nothing to
  // read it reads nothing, and gives zeros.
  __device__ RowStream(const uint16_t* row, int begin, int end) {
    const auto address = reinterpret_cast<uintptr_t>(row + begin);
    shift_ = static_cast<int>(address % 16) / 2;
    piece_ = reinterpret_cast<const uint4*>(address - address % 16);
    left_ = end - begin;
    request(next_);
  }

  // This step's elements, zeros beyond the end. The next step's are requested before these are
  // waited for.
  __device__ void take(uint32_t (&words)[kWords]) {
    uint4 pieces[3] = {next_[0], next_[1], next_[2]};
    const int left = left_;
    left_ -= kWarpStep;
    piece_ += kWarpStep / kPieceElements;
    request(next_);
    const auto word = [&](int i) {
      const uint4& piece = pieces[i / 4];
      return i % 4 == 0 ? piece.x : i % 4 == 1 ? piece.y : i % 4 == 2 ? piece.z : piece.w;
    };
    // Down by shift_ elements: by four, two and one, of which the last is half a word.
    uint32_t down[kWords + 2];
#pragma unroll
    for (int i = 0; i < kWords + 2; ++i) down[i] = shift_ & 4 ? word(i + 2) : word(i);
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) down[i] = shift_ & 2 ? down[i + 1] : down[i];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = __funnelshift_r(down[i], down[i + 1], shift_ & 1 ? 16 : 0);
    }
    if (left < kStep) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (2 * i + 1 >= left) words[i] = 2 * i < left ? words[i] & 0xffffu : 0u;
      }
    }
  }

 private:
  // Pieces without an element of this step may not be there.
  __device__ void request(uint4 (&pieces)[3]) const {
    const int elements = left_ > 0 ? shift_ + min(left_, kStep) : 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      pieces[i] = i * kPieceElements < elements ? __ldg(piece_ + i) : uint4{};
    }
  }

  uint4 next_[3];
  const uint4* piece_;
  int shift_;  // elements
  int left_;   // from the next step's first element on
};

// A row of x or of the weight. Nothing is read of one beyond the matrix, for which its first row
// stands.
struct Row {
  const uint16_t* first;
  bool exists;

  __device__ Row(const MatrixParams& matrix, int64_t offset, int64_t stride, int64_t row,
                 int64_t size)
      : first(static_cast<const uint16_t*>(matrix.pointer) + offset +
              (row < size ? row : 0) * stride),
        exists(row < size) {}

  __device__ RowStream stream(int begin, int end) const {
    return RowStream(first, begin, exists ? end : 0);
  }
  // The elements `begin` and the next; zeros from `end` on.
  __device__ uint32_t pair(int begin, int end) const {
    const uint32_t low = exists && begin < end ? __ldg(first + begin) : 0u;
    const uint32_t high = exists && begin + 1 < end ? __ldg(first + begin + 1) : 0u;
    return low | high << 16;
  }
};

__global__ void __launch_bounds__(kThreads, 2)
    gemv_kernel(const __grid_constant__ GemmParams params, int tail) {
#if __CUDA_ARCH__ < 800
  __trap();
#else
  __shared__ float sums[kWarps][kRows][kColumns];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, quad = lane % 4;  // as mma has its fragments
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();

  const int k_size = static_cast<int>(params.k) - tail;
  const int part_size = ((k_size + kWarps - 1) / kWarps + kWarpStep - 1) / kWarpStep * kWarpStep;
  const int end = min((warp + 1) * part_size, k_size);
  const int begin = warp * part_size + quad * kStep;

  const TileScheduler<kRows, kColumns> scheduler(params);
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < scheduler.count(); index += gridDim.x) {
    const Tile tile = scheduler.tile(index);
    const Row x_row(params.a, tile.offset.a, params.a.row_stride, tile.m + group, params.m);
    const Row upper_row(params.b, tile.offset.b, params.b.col_stride, tile.n + group, params.n);
    const Row lower_row(params.b, tile.offset.b, params.b.col_stride, tile.n + group + 8, params.n);
    RowStream x = x_row.stream(begin, end);
    RowStream upper = upper_row.stream(begin, end);
    RowStream lower = lower_row.stream(begin, end);
    float acc[4] = {};
    if (tail > 0 && warp == kWarps - 1) {
      const int first = k_size + 2 * quad, last = k_size + tail;
      const uint32_t a[2] = {upper_row.pair(first, last), lower_row.pair(first, last)};
      const uint32_t b = x_row.pair(first, last);
      if (params.a.dtype == DType::kFloat16) {
        ptx::mma_m16n8k8_f16(acc, a, b);
      } else {
        ptx::mma_m16n8k8_bf16(acc, a, b);
      }
    }
#pragma unroll 1
    for (int k = 0; k < part_size; k += kWarpStep) {
      uint32_t a0[kWords], a1[kWords], b[kWords];
      upper.take(a0);
      lower.take(a1);
      x.take(b);
#pragma unroll
      for (int i = 0; i < kWords; i += 2) {
        const uint32_t a[4] = {a0[i], a1[i], a0[i + 1], a1[i + 1]};
        if (params.a.dtype == DType::kFloat16) {
          ptx::mma_m16n8k16_f16(acc, a, b[i], b[i + 1]);
        } else {
          ptx::mma_m16n8k16_bf16(acc, a, b[i], b[i + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][2 * quad + i % 2][group + i / 2 * 8] = acc[i];
    __syncthreads();
    if (threadIdx.x < kRows * kColumns) {
      const int row = static_cast<int>(threadIdx.x) / kColumns;
      const int column = static_cast<int>(threadIdx.x) % kColumns;
      float sum[1][1] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum[0][0] += sums[w][row][column];
      if (tile.m + row < params.m && tile.n + column < params.n) {
        finish_at(params, tile.offset, tile.m + row, tile.n + column, sum);
      }
    }
    __syncthreads();  // the next tile's sums go to the same place
  }
#endif
}

}  // namespace

std::string launch(const GemmParams& params, int tail, const LaunchTarget& target) {
  return launch_dependent<gemv_kernel>(tile_count(params, kRows, kColumns), kThreads,
                                       /*shared_bytes=*/0, target, params, tail);
}

}  // namespace tgemm::gemv
