#include "kernels/sm90/instances.cuh"

namespace tgemm::sm90 {

template std::string launch<PingPong128x128>(Arguments&, const LaunchTarget&);
template std::string launch<PingPong128x128Cluster>(Arguments&, const LaunchTarget&);
template std::string launch<PingPong64x160Cluster>(Arguments&, const LaunchTarget&);
template std::string launch<PingPong64x96>(Arguments&, const LaunchTarget&);
template std::string launch<PingPong64x128Cluster>(Arguments&, const LaunchTarget&);
template std::string launch<PingPong64x96Cluster>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::sm90
