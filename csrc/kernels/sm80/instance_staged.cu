#include "kernels/sm80/instances.cuh"

namespace tgemm::sm80 {

template std::string launch_staged<Math::kF16, __half>(int, const GemmParams&, const LaunchTarget&);
template std::string launch_staged<Math::kF16, float>(int, const GemmParams&, const LaunchTarget&);
template std::string launch_staged<Math::kBF16, __nv_bfloat16>(int, const GemmParams&,
                                                               const LaunchTarget&);
template std::string launch_staged<Math::kBF16, float>(int, const GemmParams&, const LaunchTarget&);
template std::string launch_staged<Math::kTf32, float>(int, const GemmParams&, const LaunchTarget&);

}  // namespace tgemm::sm80
