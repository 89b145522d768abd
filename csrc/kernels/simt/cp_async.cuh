// The forms of cp.async (PTX ISA 9.0, section 9.7.9.25.3.1) that only the simt kernels use. sm_80.
#pragma once

#include <cstdint>

namespace tgemm::ptx {

// 4 bytes to shared memory, which are read from global memory if `bytes` is 4 and zero if it is 0.
// The only size that every FP32 element's alignment allows. The hint fetches the 128-byte line to
// L2 as a whole: a K-major operand is read 32 bytes of a row at a time.
__device__ inline void cp_async_4_zfill(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// 4 bytes to shared memory if `enabled`, else nothing.
__device__ inline void cp_async_4_if(uint32_t shared, const void* global, bool enabled) {
  asm volatile(
      "{\n"
      ".reg .pred enabled;\n"
      "setp.ne.s32 enabled, %2, 0;\n"
      "@enabled cp.async.ca.shared.global.L2::128B [%0], [%1], 4;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(enabled))
      : "memory");
}

// 16 bytes to shared memory past L1 if `enabled`, else nothing; L2 fetches 128. Both addresses
// 16-byte aligned.
__device__ inline void cp_async_16_prefetch_if(uint32_t shared, const void* global, bool enabled) {
  asm volatile(
      "{\n"
      ".reg .pred enabled;\n"
      "setp.ne.s32 enabled, %2, 0;\n"
      "@enabled cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(enabled))
      : "memory");
}

}  // namespace tgemm::ptx
