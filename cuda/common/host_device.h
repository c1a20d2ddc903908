// Macros for sources that are compiled for CUDA devices and for the CPU backend.
#pragma once

#ifdef __CUDACC__
#define JAXKV_HOST_DEVICE __host__ __device__
#define JAXKV_DEVICE __device__ __forceinline__
#define JAXKV_NOINLINE __device__ __noinline__
#define JAXKV_UNROLL() _Pragma("unroll")
#define JAXKV_NO_UNROLL() _Pragma("unroll 1")
#else
#define JAXKV_HOST_DEVICE
#define JAXKV_DEVICE inline
#define JAXKV_NOINLINE inline
#define JAXKV_UNROLL()
#define JAXKV_NO_UNROLL()
#endif
