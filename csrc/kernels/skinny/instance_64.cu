#include "kernels/skinny/instances.cuh"

namespace tgemm::skinny {

template std::string launch<Cta32x64>(Arguments&, const LaunchTarget&);
template std::string launch<Cta32x128>(Arguments&, const LaunchTarget&);
template std::string launch<Cta64x128>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::skinny
