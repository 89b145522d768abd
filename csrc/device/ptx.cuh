// One function per PTX instruction, named after it. Sections refer to the PTX ISA, version 9.0.
#pragma once

#include <cstdint>

namespace tgemm::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 9.7.9.25.3.1 cp.async: 16 bytes to shared memory past L1, if `wanted`. Both addresses 16-byte
// aligned. sm_80.
__device__ inline void cp_async_16_if(bool wanted, uint32_t shared, const void* global) {
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %0, 0; @p cp.async.cg.shared.global [%1], [%2], 16;}" ::"r"(
          static_cast<int>(wanted)),
      "r"(shared), "l"(global)
      : "memory");
}

// The same, but only the first `bytes` (0 to 16) are read and the rest are zero.
__device__ inline void cp_async_16_zfill(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// 9.7.9.25.3.2 cp.async.commit_group. sm_80.
__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// 9.7.9.25.3.3 cp.async.wait_group: at most kPending of this thread's latest groups still in
// flight. sm_80.
template <int kPending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 9.7.15.5.15 ldmatrix: four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8
// of matrix i / 8. sm_75.
__device__ inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

// The same, each matrix transposed on the way.
__device__ inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

// 9.7.3.12 max.NaN: the larger one, or a NaN if there is one. sm_80.
__device__ inline float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// 9.7.15.5.16 stmatrix: the counterpart of ldmatrix_x4. sm_90.
__device__ inline void stmatrix_x4(uint32_t shared, const uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

// 9.7.13.15.13 mbarrier.arrive at the barrier of CTA `rank` of the cluster that has the address of
// this one. Orders nothing but what the CTA itself sees (scope .cta, unlike libcu++'s, which waits
// for all of the GPU): enough where nothing was written for the other side to read. sm_90.
__device__ inline void mbarrier_arrive_remote(uint64_t* barrier, int rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// 9.7.9.12 st.async: four floats into the shared memory of another CTA of the cluster, 16-byte
// aligned; its barrier counts the 16 bytes. Addresses as mapa gives them. sm_90.
__device__ inline void st_async(uint32_t remote, const float* four, uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote),
      "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]), "r"(remote_barrier)
      : "memory");
}

// 9.7.9.24 mapa: where CTA `rank` of the cluster has what is at `shared` in this one. sm_90.
__device__ inline uint32_t mapa(uint32_t shared, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

// 9.7.13.1 barrier: waits for `threads` threads of the CTA at barrier `id` (1 to 15; 0 is
// __syncthreads).
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, without waiting.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 9.7.13.15 elect.sync: true in one of the warp's threads, and the compiler knows that it is one.
// sm_90.
__device__ inline bool elect_sync() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

// What the warp's first thread has, in all of its threads. So that the compiler knows that it is
// the same: what wgmma and TMA take lies in uniform registers.
__device__ inline uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

// 9.7.9.15 prefetch.tensormap: a tensor map among the kernel's parameters. sm_90.
__device__ inline void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// 9.7.13.13 griddepcontrol.wait: all of what the kernels before this one on the stream wrote is
// visible from here on. Where this kernel's launch let it start early: sm_90; nothing before.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 9.7.13.13 griddepcontrol.launch_dependents: the next kernel may start, up to its own wait. sm_90;
// nothing before.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 9.7.19.5 setmaxnreg: registers per thread of this warpgroup. sm_90a.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ inline uint32_t ld_shared_u32(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ inline void st_shared_v4(uint32_t shared, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

// 9.7.14.5.14 mma: D (16x8, FP32) += A (16x16) * B (16x8). sm_80.
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with half of K: A (16x8), B (8x8). sm_80.
__device__ inline void mma_m16n8k8_f16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ inline void mma_m16n8k8_bf16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// The same as m16n8k16 with A (16x8) and B (8x8) in TF32: FP32 bit patterns, of which the hardware
// reads the upper 19 bits, so round first with cvt_rna_tf32. sm_80.
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 9.7.14.5.17 movmatrix: transposes an 8x8 matrix of 16-bit elements that lies in a warp as mma has
// it, lane i with elements 2 * (i % 4) and the next of row i / 4. sm_75.
__device__ inline uint32_t movmatrix_trans(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// 9.7.14.5.1 mma: four products D (8x8, FP32) += A (8x4) * B (4x8), one per quad pair. A thread
// holds four k of one row (column) of a K-major operand, else four rows (columns) at one k.
// HMMA.884 on sm_70 and sm_75; later cards emulate it with FP32 multiply-adds.
template <bool kAKMajor, bool kBKMajor>
__device__ inline void mma_m8n8k4_f16(float (&d)[8], const uint32_t (&a)[2],
                                      const uint32_t (&b)[2]) {
#define TGEMM_MMA_M8N8K4(a_layout, b_layout)                                                \
  asm("mma.sync.aligned.m8n8k4." a_layout "." b_layout                                      \
      ".f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "           \
      "{%0, %1, %2, %3, %4, %5, %6, %7};"                                                   \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), \
        "+f"(d[7])                                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]))
  if constexpr (kAKMajor && kBKMajor) TGEMM_MMA_M8N8K4("row", "col");
  if constexpr (kAKMajor && !kBKMajor) TGEMM_MMA_M8N8K4("row", "row");
  if constexpr (!kAKMajor && kBKMajor) TGEMM_MMA_M8N8K4("col", "col");
  if constexpr (!kAKMajor && !kBKMajor) TGEMM_MMA_M8N8K4("col", "row");
#undef TGEMM_MMA_M8N8K4
}

// 9.7.9.22 cvt.rna: FP32 to TF32, to nearest, ties away from zero. sm_80.
__device__ inline uint32_t cvt_rna_tf32(uint32_t fp32_bits) {
  uint32_t tf32;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(tf32) : "f"(__uint_as_float(fp32_bits)));
  return tf32;
}

}  // namespace tgemm::ptx
