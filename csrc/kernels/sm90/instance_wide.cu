#include "kernels/sm90/instances.cuh"

namespace tgemm::sm90 {

template std::string launch<Cooperative192x192>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x256>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x256Cluster>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x240>(Arguments&, const LaunchTarget&);
template std::string launch<Cooperative128x224>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::sm90
