#include "kernels/sm90/instances.cuh"

namespace tgemm::sm90 {

template std::string launch<Cooperative192x128>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x192>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x176>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x160>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x160Cluster>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::sm90
