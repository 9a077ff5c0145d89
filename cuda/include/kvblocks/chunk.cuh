// Chunks of 8 neighbouring elements of a row: what a lane moves at once.
//
// Owns loads of any source dtype, stores and copies of a cache's type. Includes element.cuh only.
// Invariant: nothing beyond head_dim is read or written. is_vector says that the address, the strides and
// head_dim allow accesses of 8 elements (at most 16 bytes each).
#pragma once

#include "element.cuh"

namespace kvb {

constexpr i32 chunk = 8; // elements

// Elements first..first + 8 of a source row; 0 beyond the row.
KVB_DEVICE void load_chunk(const u8* row, i32 first, i32 head_dim, i32 dtype, bool is_vector,
                           float (&values)[chunk]) {
    if (is_vector) {
        if (dtype == dtype_f32) {
            float quarter[4];
            KVB_UNROLL
            for (i32 i = 0; i < 2; ++i) {
                unpack<F32>(load_stream(row + 4 * (first + 4 * i)), quarter);
                KVB_UNROLL
                for (i32 j = 0; j < 4; ++j) {
                    values[4 * i + j] = quarter[j];
                }
            }
        } else if (dtype == dtype_f16) {
            unpack<F16>(load_stream(row + 2 * first), values);
        } else {
            unpack<BF16>(load_stream(row + 2 * first), values);
        }
        return;
    }
    KVB_UNROLL
    for (i32 i = 0; i < chunk; ++i) {
        values[i] = first + i < head_dim ? element_at(row, first + i, dtype) : 0.0f;
    }
}

// The largest finite magnitude of a row that `lanes` neighbouring lanes of a warp share; 0 where it is not
// read. Every lane of the warp takes part in the shuffles.
KVB_DEVICE float largest_of_row(const u8* row, i32 head_dim, i32 dtype, bool is_vector, bool is_read,
                                i32 lane, i32 lanes) {
    float values[chunk];
    float largest = 0.0f;
    for (i32 first = lane * chunk; is_read && first < head_dim; first += lanes * chunk) {
        load_chunk(row, first, head_dim, dtype, is_vector, values);
        KVB_UNROLL
        for (i32 i = 0; i < chunk; ++i) {
            const float magnitude = max_f32(values[i], -values[i]);
            largest = is_finite(magnitude) ? max_f32(largest, magnitude) : largest;
        }
    }
    for (i32 other = 1; other < lanes; other *= 2) {
        largest = max_f32(largest, shuffle_xor(largest, other));
    }
    return largest;
}

template <typename E>
KVB_DEVICE void store_chunk(u8* row, i32 first, i32 head_dim, bool is_vector, const float (&values)[chunk]) {
    using Storage = typename E::Storage;
    constexpr i32 bytes = chunk * static_cast<i32>(sizeof(Storage));
    if (is_vector) {
        constexpr i32 num_words = bytes / 4, per_word = 4 / static_cast<i32>(sizeof(Storage));
        u32 words[num_words];
        KVB_UNROLL
        for (i32 i = 0; i < num_words; ++i) {
            words[i] = 0;
            KVB_UNROLL
            for (i32 j = 0; j < per_word; ++j) {
                const u32 bits = E::from_f32(values[i * per_word + j]);
                words[i] |= bits << (32 / per_word * j % 32);
            }
        }
        u8* to = row + first * static_cast<i32>(sizeof(Storage));
        if constexpr (bytes >= 16) {
            KVB_UNROLL
            for (i32 i = 0; i < bytes / 16; ++i) {
                store16(to + 16 * i,
                        Vec16{{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]}});
            }
        } else {
            *reinterpret_cast<u64*>(to) = words[0] | static_cast<u64>(words[1]) << 32;
        }
        return;
    }
    KVB_UNROLL
    for (i32 i = 0; i < chunk; ++i) {
        if (first + i < head_dim) {
            reinterpret_cast<Storage*>(row)[first + i] = E::from_f32(values[i]);
        }
    }
}

// A row of the cache's own type keeps its bits, those of a NaN included.
template <typename E>
KVB_DEVICE void copy_chunk(u8* to, const u8* from, i32 first, i32 head_dim, bool is_vector) {
    using Storage = typename E::Storage;
    constexpr i32 bytes = chunk * static_cast<i32>(sizeof(Storage));
    if (is_vector) {
        KVB_UNROLL
        for (i32 i = 0; i < bytes / 16; ++i) {
            const i32 offset = first * static_cast<i32>(sizeof(Storage)) + 16 * i;
            store16(to + offset, load_stream(from + offset));
        }
        return;
    }
    for (i32 i = first; i < first + chunk && i < head_dim; ++i) {
        reinterpret_cast<Storage*>(to)[i] = reinterpret_cast<const Storage*>(from)[i];
    }
}

} // namespace kvb
