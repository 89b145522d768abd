#include "gemm/plan.hpp"
#include "kernels/gemv/gemv.hpp"
#include "kernels/ladder/ladder.hpp"
#include "kernels/simt/simt.hpp"
#include "kernels/skinny/skinny.hpp"
#include "kernels/sm80/mma_sync.hpp"
#include "kernels/sm90/sm90.hpp"
#include "kernels/tiny/tiny.hpp"

namespace tgemm {

// A kernel joins the library by one row here.
std::span<const KernelEntry> kernel_table() {
  static const KernelEntry table[] = {
      // Compute capability 9.0.
      skinny_entry(),
      sm90_entry(),
      sm90_tf32_entry(),
      sm90_packed_entry(),
      sm90_3xtf32_entry(),
      // Any card, or nearly.
      gemv_entry(),
      tiny_entry(),
      mma_sync_entry(),
      simt_entry(),
      // The ladder.
      naive_entry(),
      tiled_entry(),
      tiled_padded_entry(),
      tiled_vectorized_entry(),
      wmma_entry(),
      wmma_double_buffered_entry(),
      volta_mma_entry(),
      wgmma_entry(),
  };
  return table;
}

}  // namespace tgemm
