// Which tiny_gemm kernels exist.
#pragma once

#include <string>

#include "device/params.hpp"
#include "kernels/tiny/warp_tile.hpp"

namespace tgemm::tiny {

struct Arguments {
  GemmParams gemm;
  Reading a, b;
  int store_width;
};

// Enqueues the kernel, or describes it.
template <class Warp>
std::string launch(const Arguments& arguments, const LaunchTarget& target);

}  // namespace tgemm::tiny
