#include "kernels/ladder/launch_wgmma.cuh"

namespace tgemm::ladder {

template std::string launch_wgmma_tma<true>(const TensorCoreOperands&, const GemmParams&,
                                            const LaunchTarget&);

}  // namespace tgemm::ladder
