#include "kernels/sm90/instances.cuh"

namespace tgemm::sm90 {

template std::string launch<Cooperative128x144>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x128>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x96>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x64>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative64x128>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::sm90
