#include "kernels/simt/instances.cuh"

namespace tgemm::simt {

template <class Cta>
std::string launch_staged(const GemmParams& params, cudaStream_t stream) {
  return launch_one<Cta, Copy::kAnyStride, Copy::kAnyStride>(params, stream);
}

template std::string launch_staged<std::tuple_element_t<0, StagedTiles>>(const GemmParams&,
                                                                         cudaStream_t);
template std::string launch_staged<std::tuple_element_t<1, StagedTiles>>(const GemmParams&,
                                                                         cudaStream_t);

}  // namespace tgemm::simt
