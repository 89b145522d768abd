// Definitions of the launchers in instances.hpp, for the instance_*.cu files alone.
#pragma once

#include "kernels/launch.cuh"
#include "kernels/simt/instances.hpp"
#include "kernels/simt/simt.cuh"

namespace tgemm::simt {

template <class Cta, Copy kCopyA, Copy kCopyB>
std::string launch_one(const GemmParams& params, const LaunchTarget& target) {
  return launch_dependent<simt_gemm<Cta, kCopyA, kCopyB>>(
      tile_count(params, Cta::kBlockM, Cta::kBlockN), Cta::kThreads, Cta::kSharedBytes, target,
      params);
}

template <class Cta, Copy kCopyA>
std::string launch_with_a(Copy b, const GemmParams& params, const LaunchTarget& target) {
  switch (b) {
    case Copy::kKMajor:
      return launch_one<Cta, kCopyA, Copy::kKMajor>(params, target);
    case Copy::kMnMajor:
      return launch_one<Cta, kCopyA, Copy::kMnMajor>(params, target);
    case Copy::kMnMajorVec4:
      return launch_one<Cta, kCopyA, Copy::kMnMajorVec4>(params, target);
    case Copy::kAnyStride:
      break;
  }
  return "simt: this tile cannot copy b";
}

template <class Cta>
std::string launch_async(Copy a, Copy b, const GemmParams& params, const LaunchTarget& target) {
  switch (a) {
    case Copy::kKMajor:
      return launch_with_a<Cta, Copy::kKMajor>(b, params, target);
    case Copy::kMnMajor:
      return launch_with_a<Cta, Copy::kMnMajor>(b, params, target);
    case Copy::kMnMajorVec4:
    case Copy::kAnyStride:
      break;
  }
  return "simt: this tile cannot copy a";
}

}  // namespace tgemm::simt
