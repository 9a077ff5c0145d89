// What differs between a device compiler and a host compiler, and nothing else.
//
// Owns the function qualifiers, the index types and every wrapper of an intrinsic, a barrier, a shuffle, an
// atomic, an asynchronous copy or an instruction. Includes host_twins.cuh on a host and nothing on a device,
// so that NVRTC needs no header of the CUDA toolkit. Invariant: every other file compiles unchanged with
// NVRTC and with a C++17 host compiler; no __CUDA_ARCH__, no intrinsic, no asm and no qualifier appears
// outside this file. Collectives of a warp are called by all 32 lanes, in uniform control flow.
//
// The instructions are those of the PTX ISA, of sm_80 unless a comment says otherwise.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KVB_ON_DEVICE 1
// A small function that kernels call, and that host code may call too.
#define KVB_INLINE __host__ __device__ __forceinline__
// A function that runs in a kernel only.
#define KVB_DEVICE __device__ __forceinline__
// The one entry of a source file: KVB_KERNEL(name, Params, threads of a block, blocks that an SM is to hold)
// { ... }. The last one bounds the registers of a thread.
#define KVB_KERNEL(name, Params, num_threads, num_blocks)                                                    \
    extern "C" __global__ void __launch_bounds__(num_threads, num_blocks)                                    \
        name(const __grid_constant__ Params params)
#define KVB_UNROLL _Pragma("unroll")
#else
#define KVB_ON_DEVICE 0
#define KVB_INLINE inline
#define KVB_DEVICE inline
#define KVB_KERNEL(name, Params, num_threads, num_blocks)                                                    \
    static void name##_body(const Params& params);                                                           \
    extern "C" void name(const void* params) {                                                               \
        name##_body(*static_cast<const Params*>(params));                                                    \
    }                                                                                                        \
    extern "C" unsigned name##_params_size() {                                                               \
        return sizeof(Params);                                                                               \
    }                                                                                                        \
    static void name##_body(const Params& params)
#define KVB_UNROLL
#endif

namespace kvb {

using i8 = signed char;
using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
static_assert(sizeof(i32) == 4 && sizeof(i64) == 8, "index arrays are int32 and int64");

// What one 128-bit access moves.
struct alignas(16) Vec16 {
    u32 word[4];
};

// Two float16 in the two halves of a word, the first in the low one.
using half2 = u32;

} // namespace kvb

#if KVB_ON_DEVICE

namespace kvb {

// --- Where a thread is. Blocks are one-dimensional.

KVB_DEVICE i32 thread_index() {
    return static_cast<i32>(threadIdx.x);
}
KVB_DEVICE i32 num_threads() {
    return static_cast<i32>(blockDim.x);
}
KVB_DEVICE i32 block_x() {
    return static_cast<i32>(blockIdx.x);
}
KVB_DEVICE i32 block_y() {
    return static_cast<i32>(blockIdx.y);
}
KVB_DEVICE i32 block_z() {
    return static_cast<i32>(blockIdx.z);
}
KVB_DEVICE i32 grid_x() {
    return static_cast<i32>(gridDim.x);
}
KVB_DEVICE i32 grid_y() {
    return static_cast<i32>(gridDim.y);
}
KVB_DEVICE i32 grid_z() {
    return static_cast<i32>(gridDim.z);
}

// The block's dynamic shared memory, aligned to 16 bytes. Its contents are undefined at the start.
KVB_DEVICE u8* shared_memory() {
    extern __shared__ Vec16 kvb_shared_memory[];
    return reinterpret_cast<u8*>(kvb_shared_memory);
}

// --- Barriers and collectives.

KVB_DEVICE void sync_block() {
    __syncthreads();
}
KVB_DEVICE void sync_warp() {
    __syncwarp();
}
KVB_DEVICE float shuffle_xor(float value, i32 lane_mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, lane_mask);
}
KVB_DEVICE u32 shuffle_xor(u32 value, i32 lane_mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, lane_mask);
}
// How many lanes of the warp say yes.
KVB_DEVICE i32 count_lanes(bool yes) {
    return __popc(__ballot_sync(0xFFFFFFFFu, yes));
}

// --- Atomics on global or shared memory.

// The old value.
KVB_DEVICE u32 atomic_add(u32* address, u32 value) {
    return atomicAdd(address, value);
}
KVB_DEVICE void atomic_max(u32* address, u32 value) {
    atomicMax(address, value);
}
// Stores value if the word is expected; the old value.
KVB_DEVICE u32 atomic_exchange_if(u32* address, u32 expected, u32 value) {
    return atomicCAS(address, expected, value);
}

// --- Global memory. Addresses are multiples of the size that is moved.

// Read-only during the kernel, read once: kept out of L1.
KVB_DEVICE Vec16 load_stream(const void* address) {
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address));
    return v;
}
// Ordinary load and store of 16 bytes.
KVB_DEVICE Vec16 load16(const void* address) {
    Vec16 v;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address)
                 : "memory");
    return v;
}
KVB_DEVICE void store16(void* address, Vec16 value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.word[0]),
                 "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
}

// --- Asynchronous copies from global to shared memory.

// 16 bytes, of which the first `num_valid` (0 or 16) are read and the others become 0.
KVB_DEVICE void copy_async(void* shared, const void* global, i32 num_valid) {
    const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(num_valid)
                 : "memory");
}
// Ends a group of this thread's copies.
KVB_DEVICE void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `pending` of this thread's groups are under way.
template <i32 pending>
KVB_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// --- Tensor cores. Fragments are those of mma.m16n8k16 and ldmatrix in the PTX ISA.

// Four 8x8 matrices of 16-bit elements; lane i names the row i % 8 of matrix i / 8 in shared memory.
KVB_DEVICE void load_matrix_x4(u32 (&fragment)[4], const void* row) {
    const u32 from = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(from)
                 : "memory");
}
// The same, each matrix transposed.
KVB_DEVICE void load_matrix_x4_transposed(u32 (&fragment)[4], const void* row) {
    const u32 from = static_cast<u32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(from)
                 : "memory");
}
// c += a b, with a [16, 16] and b [16, 8] of float16 and c [16, 8] of float32.
KVB_DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same with bfloat16.
KVB_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Arithmetic.

KVB_DEVICE u32 bits_of(float value) {
    return __float_as_uint(value);
}
KVB_DEVICE float float_of(u32 bits) {
    return __uint_as_float(bits);
}
// 2^x to 2 units in the last place; denormal results are 0.
KVB_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
KVB_DEVICE float log_f32(float x) {
    return logf(x);
}
KVB_DEVICE float tanh_f32(float x) {
    return tanhf(x);
}
// Nearest integer, ties to even, saturated to int32; NaN is 0.
KVB_DEVICE i32 round_to_int(float x) {
    i32 y;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
KVB_DEVICE float max_f32(float a, float b) {
    return fmaxf(a, b);
}
// Byte i of the result is byte `selector >> 4 i & 7` of b:a.
KVB_DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    return __byte_perm(a, b, selector);
}

// --- Conversions. Results are rounded to nearest even; a NaN becomes the canonical one of its format.

KVB_DEVICE float f16_to_f32(u16 bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}
// Beyond the range: infinite.
KVB_DEVICE u16 f32_to_f16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
KVB_DEVICE u16 f32_to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
KVB_DEVICE half2 f32_to_f16x2(float low, float high) {
    half2 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
KVB_DEVICE u32 f32_to_bf16x2(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
KVB_DEVICE half2 mul_f16x2(half2 a, half2 b) {
    half2 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
KVB_DEVICE half2 sub_f16x2(half2 a, half2 b) {
    half2 y;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

} // namespace kvb

#else

#include "host_twins.cuh"

#endif

namespace kvb {

// --- FP8, by bit operations, for hosts and for devices without the instructions (below sm_89).

// Beyond the range: +-448. Encodings of +-infinity do not exist; NaN is 0x7F.
KVB_DEVICE u8 f32_to_e4m3_bits(float x) {
    const u32 bits = bits_of(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7F800000u) {
        return 0x7F;
    }
    u32 code;
    if (magnitude < 0x3C800000u) { // below 2^-6: a multiple of 2^-9, which adding 2^14 rounds to
        code = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
    } else {
        code = (magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20;
        code = code > (0x7Eu + 960u) ? 0x7Eu : code - 960u; // 960: the exponents' biases, 127 and 7
    }
    return static_cast<u8>(sign | code);
}

// Beyond the range: +-57344; NaN is 0x7F.
KVB_DEVICE u8 f32_to_e5m2_bits(float x) {
    const u32 bits = bits_of(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7F800000u) {
        return 0x7F;
    }
    u32 code;
    if (magnitude < 0x38800000u) { // below 2^-14: a multiple of 2^-16, which adding 2^7 rounds to
        code = bits_of(float_of(magnitude) + 128.0f) - 0x43000000u;
    } else {
        code = (magnitude + 0xFFFFFu + (magnitude >> 21 & 1u)) >> 21;
        code = code > (0x7Bu + 448u) ? 0x7Bu : code - 448u; // 448: the exponents' biases, 127 and 15
    }
    return static_cast<u8>(sign | code);
}

// The e4m3 values of two bytes as float16, exactly; a NaN of either sign is 0x7FFF.
KVB_DEVICE half2 e4m3x2_to_f16x2_bits(u16 pair) {
    const u32 spread = (static_cast<u32>(pair) & 0xFFu) << 8 | (static_cast<u32>(pair) & 0xFF00u) << 16;
    const u32 magnitude = (spread & 0x7F007F00u) >> 1; // its value times 2^-8
    half2 value = mul_f16x2(magnitude | (spread & 0x80008000u), 0x5C005C00u);
    if ((magnitude & 0xFFFFu) == 0x3F80u) {
        value = (value & 0xFFFF0000u) | 0x7FFFu;
    }
    if (magnitude >> 16 == 0x3F80u) {
        value = (value & 0xFFFFu) | 0x7FFF0000u;
    }
    return value;
}

#if KVB_ON_DEVICE && __CUDA_ARCH__ >= 890

KVB_DEVICE u8 f32_to_e4m3(float x) {
    u16 y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(x));
    return static_cast<u8>(y);
}
KVB_DEVICE u8 f32_to_e5m2(float x) {
    u16 y;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(x));
    return static_cast<u8>(y);
}
KVB_DEVICE half2 e4m3x2_to_f16x2(u16 pair) {
    half2 y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(pair));
    return y;
}

#else

KVB_DEVICE u8 f32_to_e4m3(float x) {
    return f32_to_e4m3_bits(x);
}
KVB_DEVICE u8 f32_to_e5m2(float x) {
    return f32_to_e5m2_bits(x);
}
KVB_DEVICE half2 e4m3x2_to_f16x2(u16 pair) {
    return e4m3x2_to_f16x2_bits(pair);
}

#endif

} // namespace kvb
