#include "kernels/simt/instances.cuh"

namespace tgemm::simt {

template std::string launch_async<std::tuple_element_t<2, AsyncTiles>>(Copy, Copy,
                                                                       const GemmParams&,
                                                                       const LaunchTarget&);

}  // namespace tgemm::simt
