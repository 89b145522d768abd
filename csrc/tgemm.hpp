// The C++ surface: what a CUDA program without torch needs to plan, explain and launch a GEMM on
// raw pointers. Installed as <tgemm.hpp>, see docs/cpp.md; examples/cpp_gemm is a whole program.
//
//   Problem    what to compute: sizes, strides, dtypes, epilogue; no pointers (gemm/problem.hpp)
//   Operands   the pointers that go with it, the workspace among them
//   Device     what selection needs to know of a GPU, read from CUDA or by hand (gemm/plan.hpp)
//   select     the cheapest Plan for a Problem on a Device, and why: needs no GPU
//   Plan       a kernel, its configuration, split-K, bytes of workspace, predicted time
//   launch     enqueues a Plan on a stream; allocates nothing, waits for nothing
//   describe_device   Device of a GPU in this machine (gemm/device.hpp) validate          what is
//   wrong with a Problem or Operands, in a sentence    (gemm/validate.hpp)
//
// Nothing here throws: functions that can fail return a sentence, empty where all went well. All of
// it may be called from several threads at once. What these headers declare besides (KernelEntry's
// functions, TileConfig, Packing) belongs to the kernels, and may change in any release.
#pragma once

#include "gemm/device.hpp"    // IWYU pragma: export
#include "gemm/plan.hpp"      // IWYU pragma: export
#include "gemm/problem.hpp"   // IWYU pragma: export
#include "gemm/validate.hpp"  // IWYU pragma: export
