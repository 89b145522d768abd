#include "kernels/simt/instances.cuh"

namespace tgemm::simt {

template <class Cta>
std::string launch_staged(const GemmParams& params, const LaunchTarget& target) {
  return launch_one<Cta, Copy::kAnyStride, Copy::kAnyStride>(params, target);
}

template std::string launch_staged<std::tuple_element_t<0, StagedTiles>>(const GemmParams&,
                                                                         const LaunchTarget&);
template std::string launch_staged<std::tuple_element_t<1, StagedTiles>>(const GemmParams&,
                                                                         const LaunchTarget&);

}  // namespace tgemm::simt
