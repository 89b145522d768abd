#include "kernels/sm90/instances.cuh"

namespace tgemm::sm90 {

template std::string launch<Parts128x128>(Arguments&, const LaunchTarget&);
template std::string launch<Parts128x64>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::sm90
