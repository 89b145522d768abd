#include "kernels/skinny/instances.cuh"

namespace tgemm::skinny {

template std::string launch<Cta8x64>(Arguments&, const LaunchTarget&);
template std::string launch<Cta8x128>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::skinny
