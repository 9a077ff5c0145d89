// What the tensor-core kernels share: Q and tiles of keys on their way to shared memory.
//
// Owns KeyTable, and the loads of Q and of rows of K and V. Includes attention.cuh only.
// Invariant: a key that does not exist, or whose block does not, has offset -1: its row is zeros, and the
// kernels mask it.
#pragma once

#include "attention.cuh"

namespace kvb {

constexpr i32 num_stages = 2;
constexpr i32 num_tables = 3; // of keys: of the tile in work, of the one under way, of the one after
// Weights enter a product as float16 times this, which would lose small ones otherwise.
constexpr float weight_scale = 4096.0f;

template <typename E>
struct Product {
    static constexpr bool is_bf16 = false;
};
template <>
struct Product<BF16> {
    static constexpr bool is_bf16 = true;
};

// The dim of an element of Q that stands at position k of 16 in shared memory.
template <typename E>
KVB_DEVICE i32 permuted_dim(i32 k) {
    if constexpr (sizeof(typename E::Storage) == 1) {
        return k < 8 ? k / 2 * 4 + k % 2 : (k - 8) / 2 * 4 + 2 + k % 2;
    }
    return k;
}

// Where the keys of a tile lie, and their scales.
template <i32 num_keys>
struct KeyTable {
    i64 k_offset[num_keys]; // bytes from the first element; -1: no such key
    i64 v_offset[num_keys];
    float k_scale[num_keys]; // 1 where the scale is no row's own
    float v_scale[num_keys]; // 0 for no such key
};

template <typename E, i32 num_keys>
KVB_DEVICE void locate_keys(const AttendParams& params, const Tile& tile, i32 first_key,
                            KeyTable<num_keys>& to) {
    const i32 index = thread_index();
    if (index >= num_keys) {
        return;
    }
    const i32 key = first_key + index, head = block_y();
    const i64 slot = key < tile.end_key ? checked_slot(params, tile, table_of(params, tile.seq), key)
                                        : static_cast<i64>(-1);
    constexpr i32 bytes = static_cast<i32>(sizeof(typename E::Storage));
    to.k_offset[index] = slot < 0 ? -1 : row_offset(params.k_paged, slot, head) * bytes;
    to.v_offset[index] = slot < 0 ? -1 : row_offset(params.v_paged, slot, head) * bytes;
    if constexpr (E::is_scaled) {
        const i64 row = slot * params.num_kv_heads + head;
        const bool k_own = slot >= 0 && params.k_scale_mode == scale_token_head;
        const bool v_own = slot >= 0 && params.v_scale_mode == scale_token_head;
        to.k_scale[index] = k_own ? params.k_scales[row] : 1.0f;
        to.v_scale[index] = v_own ? params.v_scales[row] : 0.0f;
    }
}

// Starts the copies of a tile's rows: `chunks` of 16 bytes each, `stride` bytes apart in shared memory.
template <i32 block_threads, i32 num_keys, i32 chunks, i32 stride>
KVB_DEVICE void load_rows(const u8* from, const i64* row_offsets, u8* to) {
    KVB_UNROLL
    for (i32 i = 0; i < (num_keys * chunks + block_threads - 1) / block_threads; ++i) {
        const i32 index = i * block_threads + thread_index();
        const i32 key = index / chunks, piece = index - key * chunks;
        if (num_keys * chunks % block_threads == 0 || key < num_keys) {
            const i64 offset = row_offsets[key];
            copy_async(to + key * stride + piece * 16, offset < 0 ? from : from + offset + piece * 16,
                       offset < 0 ? 0 : 16);
        }
    }
}

// The rows of Q as float16 or bfloat16, permuted, `stride` bytes apart. A bfloat16 row may exceed float16, so
// it is brought to [1, 2) by a power of 2, its factor.
template <typename E, i32 head_dim, i32 num_rows, i32 stride>
KVB_DEVICE void load_q(const AttendParams& params, const Tile& tile, u8* to, float* factors) {
    const i32 lane = thread_index() % 32;
    for (i32 r = thread_index() / 32; r < num_rows; r += num_threads() / 32) {
        const bool is_row = r < tile.num_rows;
        const Row row = row_of(params, tile, is_row ? r : 0);
        const u8* from = params.q + (row.token * params.q_token_stride + row.head * params.q_head_stride) *
                                        bytes_of(params.q_dtype);
        float factor = 1.0f;
        if (!Product<E>::is_bf16 && params.q_dtype == dtype_bf16) {
            float largest = 0.0f;
            for (i32 dim = lane; dim < head_dim; dim += 32) {
                const float x = element_at<BF16>(from, dim);
                largest = max_f32(largest, max_f32(x, -x));
            }
            for (i32 other = 1; other < 32; other *= 2) {
                largest = max_f32(largest, shuffle_xor(largest, other));
            }
            const u32 exponent = bits_of(largest) & 0x7F800000u;
            factor = exponent == 0 || exponent >= 0x7E000000u ? 1.0f : float_of(exponent);
        }
        for (i32 k = lane; k < head_dim; k += 32) {
            const i32 dim = k / 16 * 16 + permuted_dim<E>(k % 16);
            const float value = is_row ? element_at(from, dim, params.q_dtype) / factor : 0.0f;
            reinterpret_cast<u16*>(to + r * stride)[k] =
                Product<E>::is_bf16 ? BF16::from_f32(value) : F16::from_f32(value);
        }
        if (lane == 0) {
            factors[r] = factor;
        }
    }
}

// c += a b in the type of E's products, and two values packed for it.
template <typename E>
KVB_DEVICE void multiply_fragments(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (Product<E>::is_bf16) {
        mma_bf16(c, a, b0, b1);
    } else {
        mma_f16(c, a, b0, b1);
    }
}

template <typename E>
KVB_DEVICE u32 pack_pair(float low, float high) {
    if constexpr (Product<E>::is_bf16) {
        return f32_to_bf16x2(low, high);
    } else {
        return f32_to_f16x2(low, high);
    }
}

} // namespace kvb
