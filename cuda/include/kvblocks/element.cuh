// What a stored element means: float32, float16, bfloat16, FP8 e4m3 and e5m2, int8 as float32 and back.
//
// Owns the element types, their run-time names and chunks of 8 elements. Includes device_compat.cuh only.
// Invariant: to_f32 is exact; from_f32 rounds to nearest even and, for the 8-bit types, saturates. The
// numbers of Dtype are those of kernels/specs.py.
#pragma once

#include "device_compat.cuh"

namespace kvb {

// Dtypes that are known at run time only.
enum Dtype : i32 {
    dtype_f32 = 0,
    dtype_f16 = 1,
    dtype_bf16 = 2,
    dtype_e4m3 = 3,
    dtype_e5m2 = 4,
    dtype_int8 = 5
};

struct F32 {
    using Storage = u32;
    static constexpr Dtype dtype = dtype_f32;
    static constexpr bool is_scaled = false;
    static constexpr u32 beyond_finite = 0x00800000u;
    static KVB_DEVICE float to_f32(Storage x) { return float_of(x); }
    static KVB_DEVICE Storage from_f32(float x) { return bits_of(x); }
};

struct F16 {
    using Storage = u16;
    static constexpr Dtype dtype = dtype_f16;
    static constexpr bool is_scaled = false;
    static constexpr u32 beyond_finite = 0x04000400u;
    static KVB_DEVICE float to_f32(Storage x) { return f16_to_f32(x); }
    static KVB_DEVICE Storage from_f32(float x) { return f32_to_f16(x); }
};

struct BF16 {
    using Storage = u16;
    static constexpr Dtype dtype = dtype_bf16;
    static constexpr bool is_scaled = false;
    static constexpr u32 beyond_finite = 0x00800080u;
    static KVB_DEVICE float to_f32(Storage x) { return float_of(static_cast<u32>(x) << 16); }
    static KVB_DEVICE Storage from_f32(float x) { return f32_to_bf16(x); }
};

// Each 8-bit type converts two elements at once to float16, which holds their values exactly.
struct E4M3 {
    using Storage = u8;
    static constexpr Dtype dtype = dtype_e4m3;
    static constexpr bool is_scaled = true;
    static constexpr u32 beyond_finite = 0x01010101u;
    static constexpr float largest = 448.0f;
    // Values from here on are clipped: half a step beyond the largest, a tie goes to it.
    static KVB_DEVICE bool is_clipped(float x) { return x > 464.0f || x < -464.0f; }
    static KVB_DEVICE half2 pair_to_f16x2(u16 pair) { return e4m3x2_to_f16x2(pair); }
    static KVB_DEVICE float to_f32(Storage x) { return f16_to_f32(static_cast<u16>(pair_to_f16x2(x))); }
    static KVB_DEVICE Storage from_f32(float x) {
        return static_cast<Storage>(f32_to_e4m3(x) | (bits_of(x) >> 24 & 0x80u)); // a NaN keeps its sign
    }
};

struct E5M2 {
    using Storage = u8;
    static constexpr Dtype dtype = dtype_e5m2;
    static constexpr bool is_scaled = true;
    static constexpr u32 beyond_finite = 0x04040404u;
    static constexpr float largest = 57344.0f;
    static KVB_DEVICE bool is_clipped(float x) { return x >= 61440.0f || x <= -61440.0f; }
    static KVB_DEVICE half2 pair_to_f16x2(u16 pair) {
        return permute_bytes(pair, 0, 0x1404); // the high bytes of float16
    }
    static KVB_DEVICE float to_f32(Storage x) {
        return f16_to_f32(static_cast<u16>(static_cast<u16>(x) << 8));
    }
    static KVB_DEVICE Storage from_f32(float x) {
        return static_cast<Storage>(f32_to_e5m2(x) | (bits_of(x) >> 24 & 0x80u)); // a NaN keeps its sign
    }
};

struct Int8 {
    using Storage = u8;
    static constexpr Dtype dtype = dtype_int8;
    static constexpr bool is_scaled = true;
    static constexpr u32 beyond_finite = 0u;
    static constexpr float largest = 127.0f;
    static KVB_DEVICE bool is_clipped(float x) { return x >= 127.5f || x <= -127.5f; }
    static KVB_DEVICE half2 pair_to_f16x2(u16 pair) {
        // 0x6400 is 1024 and its low byte counts ones: 1024 + (code + 128), less 1152.
        const half2 biased = permute_bytes(static_cast<u32>(pair) ^ 0x8080u, 0x64646464u, 0x4140);
        return sub_f16x2(biased, 0x64806480u);
    }
    static KVB_DEVICE float to_f32(Storage x) { return static_cast<float>(static_cast<i8>(x)); }
    // NaN is 0.
    static KVB_DEVICE Storage from_f32(float x) {
        const i32 code = round_to_int(x);
        return static_cast<Storage>(code > 127 ? 127 : code < -127 ? -127 : code);
    }
};

// The high bit of each element of a word that is infinite or NaN: what `beyond_finite` carries its magnitude
// to.
template <typename E>
KVB_DEVICE u32 nonfinite_of(u32 word) {
    constexpr u32 high = sizeof(typename E::Storage) == 1   ? 0x80808080u
                         : sizeof(typename E::Storage) == 2 ? 0x80008000u
                                                            : 0x80000000u;
    return E::beyond_finite == 0 ? 0 : ((word & ~high) + E::beyond_finite) & high;
}

// How the elements of one K or V array are scaled: value = code * scale.
enum ScaleMode : i32 {
    scale_none = 0,
    scale_tensor = 1,     // float32 [1]
    scale_head = 2,       // float32 [num_kv_heads]
    scale_channel = 3,    // float32 [num_kv_heads, head_dim]
    scale_token_head = 4, // float32 [num_blocks, block_size, num_kv_heads], computed as a row is written
};

constexpr float smallest_normal = 0x1p-126f;
constexpr float largest_finite = 0x1.fffffep127f;

KVB_DEVICE bool is_finite(float x) {
    return x >= -largest_finite && x <= largest_finite;
}

// The scale of a row whose largest finite magnitude is given: the next smaller one where the largest code
// would be infinite.
template <typename E>
KVB_DEVICE float row_scale(float largest) {
    const float scale = largest == 0.0f ? 1.0f : max_f32(largest / E::largest, smallest_normal);
    return is_finite(scale * E::largest) ? scale : float_of(bits_of(scale) - 1);
}

// The scale of a row, or 1 where its elements have scales of their own. slot: used by scale_token_head only.
KVB_DEVICE float scale_of(const float* scales, i32 mode, i64 slot, i32 head, i32 num_heads) {
    return mode == scale_tensor       ? scales[0]
           : mode == scale_head       ? scales[head]
           : mode == scale_token_head ? scales[slot * num_heads + head]
                                      : 1.0f;
}

template <typename E>
KVB_DEVICE float element_at(const u8* row, i32 index) {
    return E::to_f32(reinterpret_cast<const typename E::Storage*>(row)[index]);
}

// The element of a row whose dtype is known at run time; f32, f16 and bf16 only.
KVB_DEVICE float element_at(const u8* row, i32 index, i32 dtype) {
    return dtype == dtype_f32   ? element_at<F32>(row, index)
           : dtype == dtype_f16 ? element_at<F16>(row, index)
                                : element_at<BF16>(row, index);
}

KVB_DEVICE void store_element(u8* row, i64 index, float value, i32 dtype) {
    if (dtype == dtype_f32) {
        reinterpret_cast<u32*>(row)[index] = F32::from_f32(value);
    } else {
        reinterpret_cast<u16*>(row)[index] =
            dtype == dtype_f16 ? F16::from_f32(value) : BF16::from_f32(value);
    }
}

KVB_DEVICE i32 bytes_of(i32 dtype) {
    return dtype == dtype_f32 ? 4 : dtype <= dtype_bf16 ? 2 : 1;
}

// All values of 16 bytes of elements.
template <typename E>
KVB_DEVICE void unpack(const Vec16& raw, float (&values)[16 / sizeof(typename E::Storage)]) {
    KVB_UNROLL
    for (i32 i = 0; i < 4; ++i) {
        if constexpr (sizeof(typename E::Storage) == 4) {
            values[i] = E::to_f32(raw.word[i]);
        } else if constexpr (sizeof(typename E::Storage) == 2) {
            values[2 * i] = E::to_f32(static_cast<u16>(raw.word[i]));
            values[2 * i + 1] = E::to_f32(static_cast<u16>(raw.word[i] >> 16));
        } else {
            KVB_UNROLL
            for (i32 pair = 0; pair < 2; ++pair) {
                const half2 two = E::pair_to_f16x2(static_cast<u16>(raw.word[i] >> (16 * pair)));
                values[4 * i + 2 * pair] = f16_to_f32(static_cast<u16>(two));
                values[4 * i + 2 * pair + 1] = f16_to_f32(static_cast<u16>(two >> 16));
            }
        }
    }
}

} // namespace kvb
