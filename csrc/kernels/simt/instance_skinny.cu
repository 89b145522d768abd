#include "kernels/simt/instances.cuh"

namespace tgemm::simt {

std::string launch_few_rows(Copy b, const GemmParams& params, cudaStream_t stream) {
  return launch_with_a<FewRowsTile, Copy::kAnyStride>(b, params, stream);
}

std::string launch_few_columns(Copy a, const GemmParams& params, cudaStream_t stream) {
  return a == Copy::kKMajor
             ? launch_one<FewColumnsTile, Copy::kKMajor, Copy::kAnyStride>(params, stream)
             : launch_one<FewColumnsTile, Copy::kMnMajor, Copy::kAnyStride>(params, stream);
}

}  // namespace tgemm::simt
