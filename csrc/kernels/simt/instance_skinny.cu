#include "kernels/simt/instances.cuh"

namespace tgemm::simt {

std::string launch_few_rows(Copy b, const GemmParams& params, const LaunchTarget& target) {
  return launch_with_a<FewRowsTile, Copy::kAnyStride>(b, params, target);
}

std::string launch_few_columns(Copy a, const GemmParams& params, const LaunchTarget& target) {
  return a == Copy::kKMajor
             ? launch_one<FewColumnsTile, Copy::kKMajor, Copy::kAnyStride>(params, target)
             : launch_one<FewColumnsTile, Copy::kMnMajor, Copy::kAnyStride>(params, target);
}

}  // namespace tgemm::simt
