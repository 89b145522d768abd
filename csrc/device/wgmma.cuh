// One function per wgmma instruction (sm_90a), and the descriptors of its operands. Sections refer
// to the PTX ISA, version 9.0.
#pragma once

#include <cstdint>

#include "device/ptx.cuh"

namespace tgemm::ptx {

// 9.7.15.7.1 wgmma.fence: before a warpgroup's first wgmma, and after its registers were changed.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// 9.7.15.7.2 wgmma.commit_group.
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// 9.7.15.7.3 wgmma.wait_group: at most kPending groups still running.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// 9.7.15.5.1.2 An operand in shared memory with the 128-byte swizzle, 1024-byte aligned: atoms of 8
// rows of 128 bytes. K-major, a row is 64 k of one m (or n), and atoms follow one another along M
// or N. Otherwise a row is 64 m (or n) of one k, atoms follow one another along K, and the next 64
// m (or n) are `block_bytes` further on.
template <bool kKMajor>
__device__ inline uint64_t wgmma_descriptor(uint32_t shared, uint32_t block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kAtomStride = uint64_t{1024 / 16} << 32;
  const uint64_t block_stride = kKMajor ? 1 : block_bytes / 16;
  return kSwizzle128 | kAtomStride | block_stride << 16 | (shared & 0x3FFFF) / 16;
}

// How far a descriptor moves for the next 32 bytes of k.
template <bool kKMajor>
inline constexpr uint64_t kWgmmaStepK = kKMajor ? 32 / 16 : 2 * 1024 / 16;

// What the operands are: 16 k of them to an instruction, or 8 of TF32, 32 bytes in each case.
enum class WgmmaType { kF16, kBf16, kTf32 };

// The operands of an asm statement: registers %0 to %(n / 2 - 1) and what is in them.
#define TGEMM_REGISTERS_4 "%0, %1, %2, %3"
#define TGEMM_REGISTERS_8 TGEMM_REGISTERS_4 ", %4, %5, %6, %7"
#define TGEMM_REGISTERS_16 TGEMM_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TGEMM_REGISTERS_32                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TGEMM_REGISTERS_48 \
  TGEMM_REGISTERS_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TGEMM_REGISTERS_64                                                           \
  TGEMM_REGISTERS_32                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TGEMM_REGISTERS_72 TGEMM_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TGEMM_REGISTERS_80 TGEMM_REGISTERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TGEMM_REGISTERS_88 TGEMM_REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TGEMM_REGISTERS_96                                                           \
  TGEMM_REGISTERS_64                                                                 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TGEMM_REGISTERS_112 \
  TGEMM_REGISTERS_96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TGEMM_REGISTERS_120 TGEMM_REGISTERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TGEMM_REGISTERS_128                                                                      \
  TGEMM_REGISTERS_96                                                                             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define TGEMM_SUMS_8(how, d, i)                                                         \
  how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), \
      how(d[i + 6]), how(d[i + 7])
#define TGEMM_SUMS_16(how, d, i) TGEMM_SUMS_8(how, d, i), TGEMM_SUMS_8(how, d, i + 8)
#define TGEMM_SUMS_32(how, d, i) TGEMM_SUMS_16(how, d, i), TGEMM_SUMS_16(how, d, i + 16)
#define TGEMM_SUMS_OF_4(how, d) how(d[0]), how(d[1]), how(d[2]), how(d[3])
#define TGEMM_SUMS_OF_8(how, d) TGEMM_SUMS_8(how, d, 0)
#define TGEMM_SUMS_OF_16(how, d) TGEMM_SUMS_16(how, d, 0)
#define TGEMM_SUMS_OF_32(how, d) TGEMM_SUMS_32(how, d, 0)
#define TGEMM_SUMS_OF_48(how, d) TGEMM_SUMS_OF_32(how, d), TGEMM_SUMS_16(how, d, 32)
#define TGEMM_SUMS_OF_64(how, d) TGEMM_SUMS_32(how, d, 0), TGEMM_SUMS_32(how, d, 32)
#define TGEMM_SUMS_OF_72(how, d) TGEMM_SUMS_OF_64(how, d), TGEMM_SUMS_8(how, d, 64)
#define TGEMM_SUMS_OF_80(how, d) TGEMM_SUMS_OF_64(how, d), TGEMM_SUMS_16(how, d, 64)
#define TGEMM_SUMS_OF_88(how, d) TGEMM_SUMS_OF_80(how, d), TGEMM_SUMS_8(how, d, 80)
#define TGEMM_SUMS_OF_96(how, d) TGEMM_SUMS_OF_64(how, d), TGEMM_SUMS_32(how, d, 64)
#define TGEMM_SUMS_OF_112(how, d) TGEMM_SUMS_OF_96(how, d), TGEMM_SUMS_16(how, d, 96)
#define TGEMM_SUMS_OF_120(how, d) TGEMM_SUMS_OF_112(how, d), TGEMM_SUMS_8(how, d, 112)
#define TGEMM_SUMS_OF_128(how, d) TGEMM_SUMS_OF_96(how, d), TGEMM_SUMS_32(how, d, 96)
// A sum that is added to, or one that is only written.
#define TGEMM_ADDED(sum) "+f"(sum)
#define TGEMM_WRITTEN(sum) "=f"(sum)

// 9.7.15.5.2 wgmma.mma_async: D (64xN, FP32) += A (64xK) * B (KxN), or, of TF32 and without
// `kAdds`, D = A * B. A thread's d[4 j + e] is row 16 warp + lane / 4 + e / 2 * 8, column 8 j +
// lane % 4 * 2 + e % 2.
template <int kN, WgmmaType kType, bool kAKMajor, bool kBKMajor>
struct Wgmma;

#define TGEMM_WGMMA_16_BIT(n, count, types, a_at, b_at, a_order_at, b_order_at)           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." types                    \
               " {" TGEMM_REGISTERS_##count "}, " a_at ", " b_at ", 1, 1, 1, " a_order_at \
                                            ", " b_order_at ";"                           \
               : TGEMM_SUMS_OF_##count(TGEMM_ADDED, d)                                    \
               : "l"(a), "l"(b), "n"(kAKMajor ? 0 : 1), "n"(kBKMajor ? 0 : 1))

#define TGEMM_WGMMA_TF32(n, count, a_at, b_at, adds, how)                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" TGEMM_REGISTERS_##count \
               "}, " a_at ", " b_at ", " adds ", 1, 1;"                                            \
               : TGEMM_SUMS_OF_##count(how, d)                                                     \
               : "l"(a), "l"(b))

#define TGEMM_WGMMA(n, count, a_at, b_at, a_order_at, b_order_at)                      \
  template <WgmmaType kType, bool kAKMajor, bool kBKMajor>                             \
  struct Wgmma<n, kType, kAKMajor, kBKMajor> {                                         \
    template <bool kAdds = true>                                                       \
    __device__ static void multiply(float (&d)[count], uint64_t a, uint64_t b) {       \
      static_assert(kAdds || kType == WgmmaType::kTf32);                               \
      if constexpr (kType == WgmmaType::kF16) {                                        \
        TGEMM_WGMMA_16_BIT(n, count, "f16.f16", a_at, b_at, a_order_at, b_order_at);   \
      } else if constexpr (kType == WgmmaType::kBf16) {                                \
        TGEMM_WGMMA_16_BIT(n, count, "bf16.bf16", a_at, b_at, a_order_at, b_order_at); \
      } else {                                                                         \
        static_assert(kAKMajor && kBKMajor, "TF32 operands have to be K-major");       \
        if constexpr (kAdds) {                                                         \
          TGEMM_WGMMA_TF32(n, count, a_at, b_at, "1", TGEMM_ADDED);                    \
        } else {                                                                       \
          TGEMM_WGMMA_TF32(n, count, a_at, b_at, "0", TGEMM_WRITTEN);                  \
        }                                                                              \
      }                                                                                \
    }                                                                                  \
  }

TGEMM_WGMMA(8, 4, "%4", "%5", "%6", "%7");
TGEMM_WGMMA(16, 8, "%8", "%9", "%10", "%11");
TGEMM_WGMMA(32, 16, "%16", "%17", "%18", "%19");
TGEMM_WGMMA(64, 32, "%32", "%33", "%34", "%35");
TGEMM_WGMMA(96, 48, "%48", "%49", "%50", "%51");
TGEMM_WGMMA(128, 64, "%64", "%65", "%66", "%67");
TGEMM_WGMMA(144, 72, "%72", "%73", "%74", "%75");
TGEMM_WGMMA(160, 80, "%80", "%81", "%82", "%83");
TGEMM_WGMMA(176, 88, "%88", "%89", "%90", "%91");
TGEMM_WGMMA(192, 96, "%96", "%97", "%98", "%99");
TGEMM_WGMMA(224, 112, "%112", "%113", "%114", "%115");
TGEMM_WGMMA(240, 120, "%120", "%121", "%122", "%123");
TGEMM_WGMMA(256, 128, "%128", "%129", "%130", "%131");

#undef TGEMM_WGMMA
#undef TGEMM_WGMMA_TF32
#undef TGEMM_WGMMA_16_BIT
#undef TGEMM_WRITTEN
#undef TGEMM_ADDED
#undef TGEMM_SUMS_OF_128
#undef TGEMM_SUMS_OF_120
#undef TGEMM_SUMS_OF_112
#undef TGEMM_SUMS_OF_96
#undef TGEMM_SUMS_OF_88
#undef TGEMM_SUMS_OF_80
#undef TGEMM_SUMS_OF_72
#undef TGEMM_SUMS_OF_64
#undef TGEMM_SUMS_OF_48
#undef TGEMM_SUMS_OF_32
#undef TGEMM_SUMS_OF_16
#undef TGEMM_SUMS_OF_8
#undef TGEMM_SUMS_OF_4
#undef TGEMM_SUMS_32
#undef TGEMM_SUMS_16
#undef TGEMM_SUMS_8
#undef TGEMM_REGISTERS_128
#undef TGEMM_REGISTERS_120
#undef TGEMM_REGISTERS_112
#undef TGEMM_REGISTERS_96
#undef TGEMM_REGISTERS_88
#undef TGEMM_REGISTERS_80
#undef TGEMM_REGISTERS_72
#undef TGEMM_REGISTERS_64
#undef TGEMM_REGISTERS_48
#undef TGEMM_REGISTERS_32
#undef TGEMM_REGISTERS_16
#undef TGEMM_REGISTERS_8
#undef TGEMM_REGISTERS_4

}  // namespace tgemm::ptx
