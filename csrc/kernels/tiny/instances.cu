#include "kernels/launch.cuh"
#include "kernels/tiny/gemm.cuh"
#include "kernels/tiny/instances.hpp"

namespace tgemm::tiny {

template <class Warp>
std::string launch(const Arguments& arguments, const LaunchTarget& target) {
  const int64_t tiles = tile_count(arguments.gemm, Warp::kSize, Warp::kSize);
  constexpr int kPerCta = kWarps * Warp::kTiles;
  return launch_dependent<tiny_gemm<Warp>>((tiles + kPerCta - 1) / kPerCta, 32 * kWarps,
                                           /*shared_bytes=*/0, target, arguments.gemm, arguments.a,
                                           arguments.b, arguments.store_width);
}

template std::string launch<Tile8>(const Arguments&, const LaunchTarget&);
template std::string launch<Tile16>(const Arguments&, const LaunchTarget&);
template std::string launch<Tile32>(const Arguments&, const LaunchTarget&);

}  // namespace tgemm::tiny
