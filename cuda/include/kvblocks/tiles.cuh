// What the tensor-core kernels share: Q and tiles of keys on their way to shared memory.
//
// Owns KeyTable, the loads of Q and of rows of K and V, and what becomes of elements of V that are not
// finite. Includes attention.cuh and fragments.cuh. Invariant: a key that does not exist, or whose block does
// not, has offset -1: its row is zeros, and the kernels mask it.
#pragma once

#include "attention.cuh"
#include "fragments.cuh"

namespace kvb {

constexpr i32 num_stages = 2;
constexpr i32 num_tables = 3; // of keys: of the tile in work, of the one under way, of the one after

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

// Whether some row of the tile sees one of the keys first_key.. that another row does not.
KVB_DEVICE bool is_partly_seen(const AttendParams& params, const Tile& tile, i32 first_key, i32 num_keys) {
    const i32 last_key = min_i32(first_key + num_keys, tile.end_key) - 1;
    return last_key > tile.oldest_query || tile.newest_query - first_key >= params.window;
}

// A weight of 0 times an infinity is no 0: what a row must not see, it could not be kept from in a product of
// the tile. So where rows see different keys, and V is not finite, the kernels add those elements to the rows
// that see them one by one, and clear them before the product.

// Whether this thread's share of a tile's rows of V has an element that is not finite.
template <typename E, i32 block_threads, i32 num_keys, i32 chunks, i32 stride>
KVB_DEVICE bool has_nonfinite(const u8* rows) {
    u32 found = 0;
    for (i32 index = thread_index(); index < num_keys * chunks; index += block_threads) {
        const i32 key = index / chunks, piece = index - key * chunks;
        const Vec16 raw = *reinterpret_cast<const Vec16*>(rows + key * stride + piece * 16);
        KVB_UNROLL
        for (i32 i = 0; i < 4; ++i) {
            found |= nonfinite_of<E>(raw.word[i]);
        }
    }
    return found != 0;
}

template <typename E, i32 block_threads, i32 num_keys, i32 chunks, i32 stride>
KVB_DEVICE void clear_nonfinite(u8* rows) {
    for (i32 index = thread_index(); index < num_keys * chunks; index += block_threads) {
        const i32 key = index / chunks, piece = index - key * chunks;
        auto* words = reinterpret_cast<u32*>(rows + key * stride + piece * 16);
        KVB_UNROLL
        for (i32 i = 0; i < 4; ++i) {
            // The high bit of an element, spread over it.
            const u32 high = nonfinite_of<E>(words[i]);
            words[i] &= ~(sizeof(typename E::Storage) == 1 ? (high >> 7) * 0xFFu : (high >> 15) * 0xFFFFu);
        }
    }
}

// Adds them to the lane's results: of its two rows, the keys first.. and the dims that it has in `num_tiles`
// result tiles; v: the first of those dims of the tile's first key.
template <typename E, i32 num_tiles, i32 stride, i32 num_keys>
KVB_DEVICE void add_nonfinite(const AttendParams& params, float (&results)[num_tiles][4],
                              const Row (&rows)[2], const KeyTable<num_keys>& keys, i32 first_key, i32 first,
                              i32 count, const u8* v) {
    const i32 lane = thread_index() % 32;
    for (i32 index = first; index < first + count; ++index) {
        if (keys.k_offset[index] < 0) {
            continue;
        }
        const bool is_seen[2] = {is_visible(params, rows[0], first_key + index),
                                 is_visible(params, rows[1], first_key + index)};
        KVB_UNROLL
        for (i32 t = 0; t < num_tiles; ++t) {
            KVB_UNROLL
            for (i32 c = 0; c < 2; ++c) {
                const float value = element_at<E>(v + index * stride, result_dim<E>(t, lane % 4 * 2 + c));
                if (!is_finite(value)) {
                    results[t][c] += is_seen[0] ? value : 0.0f;
                    results[t][2 + c] += is_seen[1] ? value : 0.0f;
                }
            }
        }
    }
}

} // namespace kvb
