#include "kernels/sm90/instances.cuh"

namespace tgemm::sm90 {

template std::string launch<false>(int, bool, bool, const GemmParams&, const LaunchTarget&);

}  // namespace tgemm::sm90
