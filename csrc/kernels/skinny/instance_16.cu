#include "kernels/skinny/instances.cuh"

namespace tgemm::skinny {

template std::string launch<Cta16x64>(Arguments&, const LaunchTarget&);
template std::string launch<Cta16x128>(Arguments&, const LaunchTarget&);

}  // namespace tgemm::skinny
