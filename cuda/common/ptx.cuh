// PTX instructions by name: all inline assembly of the kernels. `sys` is the scope of the host and
// of other GPUs.
#pragma once

#include <cstdint>

namespace jaxkv::ptx {

// ---- Ordered accesses at system scope -----------------------------------------------------------

inline __device__ uint32_t load_acquire_sys(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
inline __device__ uint64_t load_acquire_sys(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
inline __device__ void store_release_sys(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
inline __device__ void store_release_sys(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// ---- Vectors of four 32-bit words; each word is accessed atomically, the vector is not ----------

inline __device__ uint4 load_volatile(const uint4* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
inline __device__ void store_volatile(uint4* to, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- Caches, shared memory, time ----------------------------------------------------------------

inline __device__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Asynchronous copies to shared memory, at its 32-bit address. 16 bytes bypass the L1 cache.
inline __device__ void cp_async_16(uint32_t shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
inline __device__ void cp_async_4(uint32_t shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
}
// The copies of this thread so far form a group, for which cp_async_wait_groups waits.
inline __device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
inline __device__ void cp_async_wait_groups() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}
inline __device__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Programmatic dependent launch. The next kernel of the stream may start when all thread blocks of
// this one have called or ended; it waits for the end of this one and its writes. Without the
// launch attribute, and before compute capability 9.0, the kernels run one after the other anyway.
inline __device__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
inline __device__ void wait_for_preceding_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline __device__ uint64_t globaltimer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Emits no instruction: the compiler keeps the address in a register instead of recomputing it.
template <class T>
__device__ T* opaque(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

// ---- Multicast (NVLS) addresses: the NVLink switch reduces or broadcasts the vector -------------

// Orders accesses through one address before later ones through another address of the same memory.
inline __device__ void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// Reductions accumulate in f32, in an unspecified order.
#if __CUDA_ARCH__ >= 900
#define JAXKV_MULTIMEM_LOAD_ADD(type)                                                      \
  uint4 v;                                                                                 \
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add" type " {%0, %1, %2, %3}, [%4];" \
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                \
               : "l"(from)                                                                 \
               : "memory");                                                                \
  return v
#else
#define JAXKV_MULTIMEM_LOAD_ADD(type) __trap()  // no such device has multicast
#endif

inline __device__ uint4 multimem_load_add_f32(uintptr_t from) {
  JAXKV_MULTIMEM_LOAD_ADD(".v4.f32");
}
inline __device__ uint4 multimem_load_add_bf16(uintptr_t from) {
  JAXKV_MULTIMEM_LOAD_ADD(".acc::f32.v4.bf16x2");
}
inline __device__ uint4 multimem_load_add_f16(uintptr_t from) {
  JAXKV_MULTIMEM_LOAD_ADD(".acc::f32.v4.f16x2");
}
#undef JAXKV_MULTIMEM_LOAD_ADD

inline __device__ void multimem_store(uintptr_t to, uint4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),
               "f"(__uint_as_float(v.w))
               : "memory");
#else
  __trap();
#endif
}

}  // namespace jaxkv::ptx
