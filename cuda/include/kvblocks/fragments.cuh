// Products on tensor cores: what a lane holds of rows, keys and results.
//
// Owns the products of rows with keys and of weights with values, for elements of 16 and of 8 bits. Includes
// element.cuh only. Invariant: fragments are those of mma.m16n8k16 (PTX ISA). An 8-bit element has half the
// width that ldmatrix moves, which permutes dims: for Q K^T the same permutation is applied to Q; for P V the
// two dims of a pair go to two result tiles.
#pragma once

#include "element.cuh"

namespace kvb {

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

// The dim of column `column` of 8 of result tile `tile`.
template <typename E>
KVB_DEVICE i32 result_dim(i32 tile, i32 column) {
    if constexpr (sizeof(typename E::Storage) == 1) {
        return tile / 2 * 16 + column * 2 + tile % 2;
    }
    return tile * 8 + column;
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

// Two elements for a product, from the low bits of a word.
template <typename E>
KVB_DEVICE half2 to_factor(u32 pair) {
    if constexpr (sizeof(typename E::Storage) == 1) {
        return E::pair_to_f16x2(static_cast<u16>(pair));
    }
    return pair;
}

// products[2 g], products[2 g + 1]: the warp's rows times keys 16 g..16 g + 8 and 16 g + 8..16 g + 16 from
// `k` on, `stride` bytes apart. get_q(fragment, step): the rows' dims 16 step..16 step + 16.
template <typename E, i32 num_steps, i32 stride, i32 num_products, typename GetQ>
KVB_DEVICE void multiply_keys(float (&products)[num_products][4], const u8* k, const GetQ& get_q) {
    const i32 lane = thread_index() % 32, matrix = lane / 8;
    KVB_UNROLL
    for (i32 t = 0; t < num_products; ++t) {
        products[t][0] = products[t][1] = products[t][2] = products[t][3] = 0.0f;
    }
    if constexpr (sizeof(typename E::Storage) == 1) {
        KVB_UNROLL
        for (i32 step = 0; step < num_steps; step += 2) {
            const bool has_second = step + 1 < num_steps;
            u32 q[2][4];
            KVB_UNROLL
            for (i32 half = 0; half < 2; ++half) {
                if (half == 0 || has_second) {
                    get_q(q[half], step + half);
                }
            }
            KVB_UNROLL
            for (i32 g = 0; g < num_products / 2; ++g) {
                // Matrices: keys 0..8 and 8..16 of 16 dims, then the same of the next 16 dims.
                const i32 key = g * 16 + matrix % 2 * 8 + lane % 8;
                const i32 piece = step + (has_second ? matrix / 2 : 0);
                u32 fragment[4];
                load_matrix_x4(fragment, k + key * stride + piece * 16);
                KVB_UNROLL
                for (i32 m = 0; m < 4; ++m) {
                    if (m < 2 || has_second) {
                        multiply_fragments<E>(products[2 * g + m % 2], q[m / 2], to_factor<E>(fragment[m]),
                                              to_factor<E>(fragment[m] >> 16));
                    }
                }
            }
        }
    } else {
        KVB_UNROLL
        for (i32 step = 0; step < num_steps; ++step) {
            u32 q[4];
            get_q(q, step);
            KVB_UNROLL
            for (i32 g = 0; g < num_products / 2; ++g) {
                // Matrices: dims 0..8 and 8..16 of keys 0..8, then of keys 8..16.
                const i32 key = g * 16 + matrix / 2 * 8 + lane % 8;
                u32 fragment[4];
                load_matrix_x4(fragment, k + key * stride + step * 32 + matrix % 2 * 16);
                multiply_fragments<E>(products[2 * g], q, fragment[0], fragment[1]);
                multiply_fragments<E>(products[2 * g + 1], q, fragment[2], fragment[3]);
            }
        }
    }
}

// results += weights V for 16 keys. v: the first of the results' dims of the first key, rows `stride` bytes
// apart.
template <typename E, i32 stride, i32 num_tiles>
KVB_DEVICE void multiply_values(float (&results)[num_tiles][4], const u32 (&weights)[4], const u8* v) {
    const i32 lane = thread_index() % 32, matrix = lane / 8;
    const u8* row = v + (matrix % 2 * 8 + lane % 8) * stride;
    if constexpr (sizeof(typename E::Storage) == 1) {
        constexpr i32 num_pieces = num_tiles / 2;
        KVB_UNROLL
        for (i32 piece = 0; piece < num_pieces; piece += 2) {
            const bool has_second = piece + 1 < num_pieces;
            // Matrices: keys 0..8 and 8..16 of 16 dims, then the same of the next 16 dims.
            u32 fragment[4];
            load_matrix_x4_transposed(fragment, row + (piece + (has_second ? matrix / 2 : 0)) * 16);
            KVB_UNROLL
            for (i32 second = 0; second < 2; ++second) {
                if (second == 0 || has_second) {
                    // A word holds two dims of a key, then of the next key: pair the keys of a dim.
                    const u32 low = permute_bytes(fragment[2 * second], 0, 0x3120);
                    const u32 high = permute_bytes(fragment[2 * second + 1], 0, 0x3120);
                    const i32 t = 2 * (piece + second);
                    multiply_fragments<E>(results[t], weights, to_factor<E>(low), to_factor<E>(high));
                    multiply_fragments<E>(results[t + 1], weights, to_factor<E>(low >> 16),
                                          to_factor<E>(high >> 16));
                }
            }
        }
    } else {
        KVB_UNROLL
        for (i32 t = 0; t < num_tiles; t += 2) {
            // Matrices: keys 0..8 and 8..16 of 8 dims, then the same of the next 8 dims.
            u32 fragment[4];
            load_matrix_x4_transposed(fragment, row + t * 16 + matrix / 2 * 16);
            multiply_fragments<E>(results[t], weights, fragment[0], fragment[1]);
            multiply_fragments<E>(results[t + 1], weights, fragment[2], fragment[3]);
        }
    }
}

} // namespace kvb
