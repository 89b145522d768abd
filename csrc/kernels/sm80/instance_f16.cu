#include "kernels/sm80/instances.cuh"

namespace tgemm::sm80 {

template std::string launch_async<Math::kF16>(int, bool, bool, const GemmParams&,
                                              const LaunchTarget&);

}  // namespace tgemm::sm80
