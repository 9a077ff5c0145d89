// What differs between a device compiler and a host compiler, and nothing else.
//
// Owns the function qualifiers. Includes nothing, so that NVRTC needs no header of the CUDA toolkit.
// Invariant: every other file compiles unchanged with NVRTC and with a C++17 host compiler; no __CUDA_ARCH__,
// no intrinsic and no qualifier appears outside this file.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
// A small function that kernels call, and that host code may call too.
#define KVB_INLINE __host__ __device__ __forceinline__
#else
#define KVB_INLINE inline
#endif
