// paged_attention_mma: attention on tensor cores, the query heads of a group (times query tokens) as rows.
//
// Compile time: KVB_KV, the element type of the cache, of 16 or 8 bits; KVB_HEAD_DIM and KVB_HEAD_DIM_V,
// multiples of 16; KVB_ROW_WARPS, 1: a tile has 16 rows and its warps share the keys (decode), 4: it has 64
// rows, 16 a warp, and each warp sees all keys (chunked prefill). Keys come in tiles of 64 (or 32) through
// two stages of shared memory, by asynchronous copies of 16 bytes; the addresses of a tile's rows are worked
// out once, one tile ahead. 8-bit elements become float16 in registers. Products are summed in float32;
// k_scale multiplies logits, never Q. A weight enters the second product as float16 times 2^12 and v_scale
// over the largest v_scale of the warp's keys, as float16 would lose small weights; the sum of weights is not
// rounded.

#include "kvblocks/tiles.cuh"

namespace kvb {

constexpr i32 mma_threads = 128;
constexpr i32 mma_warps = mma_threads / 32;
// Sizes, and where things lie in shared memory.
template <typename E, i32 head_dim, i32 head_dim_v, i32 row_warps>
struct Plan {
    static constexpr i32 bytes = static_cast<i32>(sizeof(typename E::Storage));
    static constexpr i32 rows = 16 * row_warps;
    // Wide rows leave a warp registers for the products of 32 keys only.
    static constexpr i32 keys_of_tile = row_warps == 4 && head_dim_v > 128 ? 32 : 64;
    static constexpr i32 keys_of_warp = row_warps == 1 ? keys_of_tile / mma_warps : keys_of_tile;
    static constexpr i32 key_groups = keys_of_warp / 16; // of a warp in a tile
    static constexpr i32 k_chunks = head_dim * bytes / 16, v_chunks = head_dim_v * bytes / 16;
    // Rows lie an odd number of 16-byte chunks apart: then the 8 rows of a matrix are in different banks.
    static constexpr i32 k_stride = (k_chunks | 1) * 16, v_stride = (v_chunks | 1) * 16;
    static constexpr i32 q_stride = (head_dim / 8 | 1) * 16;
    static constexpr bool holds_q = head_dim <= 128; // in registers

    static constexpr i32 tables = 0; // KeyTable [num_tables]
    static constexpr i32 q_factors =
        tables + num_tables * static_cast<i32>(sizeof(KeyTable<keys_of_tile>)); // float [64], as the next two
    static constexpr i32 highests = q_factors + 64 * 4;
    static constexpr i32 totals = highests + 64 * 4;
    static constexpr i32 unsound = totals + 64 * 4; // u32 [4]: whether V of the tile is not finite
    static constexpr i32 q = unsound + 16;
    static constexpr i32 stages = q + rows * q_stride;
    static constexpr i32 stage_bytes = keys_of_tile * (k_stride + v_stride);
    static constexpr i32 sums = stages; // float [64, sums_stride], once the stages are done with
    // Rows so far apart that the lanes of a warp that store at once are in different banks: 4 rows of 8
    // floats, or 2 rows of 16.
    static constexpr i32 sums_stride = head_dim_v + (bytes == 1 ? (head_dim_v + 16) % 32 : 8);
    static constexpr i32 sums_bytes = 64 * sums_stride * 4;
    static constexpr i32 total_bytes =
        stages + (num_stages * stage_bytes > sums_bytes ? num_stages * stage_bytes : sums_bytes);
};

// A lane's results of two neighbouring tiles for one row, which stand side by side in memory.
struct alignas(8) Pair {
    float value[2];
};
struct alignas(16) Quad {
    float value[4];
};

template <typename E, i32 head_dim, i32 head_dim_v, i32 row_warps>
struct MmaAttention {
    using P = Plan<E, head_dim, head_dim_v, row_warps>;
    static constexpr i32 keys_of_tile = P::keys_of_tile;
    static constexpr i32 num_steps = head_dim / 16;
    static constexpr i32 num_result_tiles = head_dim_v / 8;

    const AttendParams& params;
    const Tile& tile;
    u8* shared;

    template <typename T>
    KVB_DEVICE T* at(i32 offset) const {
        return reinterpret_cast<T*>(shared + offset);
    }

    KVB_DEVICE u8* stage_k(i32 stage) const { return shared + P::stages + stage * P::stage_bytes; }
    KVB_DEVICE u8* stage_v(i32 stage) const { return stage_k(stage) + keys_of_tile * P::k_stride; }

    KVB_DEVICE KeyTable<keys_of_tile>& table_at(i32 index) const {
        return at<KeyTable<keys_of_tile>>(P::tables)[index];
    }

    KVB_DEVICE void load(i32 table, i32 stage) const {
        const KeyTable<keys_of_tile>& keys = table_at(table);
        load_rows<mma_threads, keys_of_tile, P::k_chunks, P::k_stride>(params.k, keys.k_offset,
                                                                       stage_k(stage));
        load_rows<mma_threads, keys_of_tile, P::v_chunks, P::v_stride>(params.v, keys.v_offset,
                                                                       stage_v(stage));
    }

    KVB_DEVICE void load_q_step(u32 (&fragment)[4], i32 warp_row, i32 step) const {
        const i32 lane = thread_index() % 32;
        const i32 row = warp_row + (lane / 8 % 2) * 8 + lane % 8;
        load_matrix_x4(fragment, shared + P::q + row * P::q_stride + step * 32 + lane / 16 * 16);
    }

    KVB_DEVICE void run() const {
        const i32 lane = thread_index() % 32, warp = thread_index() / 32;
        const i32 warp_row = row_warps == 1 ? 0 : warp * 16;
        const i32 warp_key = row_warps == 1 ? warp * P::keys_of_warp : 0;
        const bool is_part = params.num_splits > 1;
        const i32 kv_head = block_y();

        load_q<E, head_dim, P::rows, P::q_stride>(params, tile, shared + P::q, at<float>(P::q_factors));
        locate_keys<E>(params, tile, tile.first_key, table_at(0));
        locate_keys<E>(params, tile, tile.first_key + keys_of_tile, table_at(1));
        if (thread_index() == 0) {
            *at<u32>(P::unsound) = 0;
        }
        sync_block();
        load(0, 0);
        copy_async_commit();

        u32 q_held[P::holds_q ? num_steps : 1][4];
        if constexpr (P::holds_q) {
            KVB_UNROLL
            for (i32 step = 0; step < num_steps; ++step) {
                load_q_step(q_held[step], warp_row, step);
            }
        }
        // The lane's two rows of the warp's 16.
        Row rows[2];
        float factors[2], highest[2] = {minus_infinity, minus_infinity}, total[2] = {0.0f, 0.0f};
        KVB_UNROLL
        for (i32 half = 0; half < 2; ++half) {
            const i32 r = warp_row + half * 8 + lane / 4;
            rows[half] = row_of(params, tile, min_i32(r, tile.num_rows - 1));
            factors[half] = params.scale * at<float>(P::q_factors)[r];
            if constexpr (E::is_scaled) {
                if (params.k_scale_mode != scale_token_head) {
                    factors[half] *=
                        scale_of(params.k_scales, params.k_scale_mode, 0, kv_head, params.num_kv_heads);
                }
            }
        }
        float results[num_result_tiles][4];
        KVB_UNROLL
        for (i32 t = 0; t < num_result_tiles; ++t) {
            results[t][0] = results[t][1] = results[t][2] = results[t][3] = 0.0f;
        }
        const bool v_own = E::is_scaled && params.v_scale_mode == scale_token_head;
        float v_largest = 1.0f; // what the weights of `results` are scaled by, beside weight_scale

        i32 stage = 0, table = 0;
        for (i32 first_key = tile.first_key; first_key < tile.end_key; first_key += keys_of_tile) {
            // The next tile's copies start before this one is waited for; its addresses are there since a
            // tile ago.
            const i32 next_table = table == 2 ? 0 : table + 1;
            if (first_key + keys_of_tile < tile.end_key) {
                load(next_table, stage ^ 1);
            }
            copy_async_commit();
            locate_keys<E>(params, tile, first_key + 2 * keys_of_tile,
                           table_at(next_table == 2 ? 0 : next_table + 1));
            copy_async_wait<1>();
            sync_block();

            const KeyTable<keys_of_tile>& keys = table_at(table);
            if constexpr (E::beyond_finite != 0) {
                if (is_partly_seen(params, tile, first_key, keys_of_tile)) {
                    if (has_nonfinite<E, mma_threads, keys_of_tile, P::v_chunks, P::v_stride>(
                            stage_v(stage))) {
                        *at<u32>(P::unsound) = 1;
                    }
                    sync_block();
                }
            }
            float products[2 * P::key_groups][4];
            multiply_keys<E, num_steps, P::k_stride>(products, stage_k(stage) + warp_key * P::k_stride,
                                                     [&](u32(&q)[4], i32 step) {
                                                         if constexpr (P::holds_q) {
                                                             KVB_UNROLL
                                                             for (i32 i = 0; i < 4; ++i) {
                                                                 q[i] = q_held[step][i];
                                                             }
                                                         } else {
                                                             load_q_step(q, warp_row, step);
                                                         }
                                                     });

            float v_now = 1.0f;
            float highest_now[2] = {highest[0], highest[1]};
            if constexpr (E::is_scaled) {
                if (v_own) {
                    v_now = 0.0f;
                }
            }
            KVB_UNROLL
            for (i32 t = 0; t < 2 * P::key_groups; ++t) {
                KVB_UNROLL
                for (i32 c = 0; c < 2; ++c) {
                    const i32 index = warp_key + t * 8 + lane % 4 * 2 + c;
                    const i32 key = first_key + index;
                    const bool is_key = keys.k_offset[index] >= 0;
                    float k_scale = 1.0f;
                    if constexpr (E::is_scaled) {
                        k_scale = keys.k_scale[index];
                        if (v_own) {
                            v_now = max_f32(v_now, keys.v_scale[index]);
                        }
                    }
                    KVB_UNROLL
                    for (i32 half = 0; half < 2; ++half) {
                        float& product = products[t][2 * half + c];
                        product = logit_of(params, product * (factors[half] * k_scale), rows[half].slope,
                                           rows[half].position, key);
                        product = is_key && is_visible(params, rows[half], key) ? product : minus_infinity;
                        highest_now[half] = max_f32(highest_now[half], product);
                    }
                }
            }
            KVB_UNROLL
            for (i32 other = 1; other < 4; other *= 2) { // the four lanes that share a row
                highest_now[0] = max_f32(highest_now[0], shuffle_xor(highest_now[0], other));
                highest_now[1] = max_f32(highest_now[1], shuffle_xor(highest_now[1], other));
                if constexpr (E::is_scaled) {
                    v_now = max_f32(v_now, shuffle_xor(v_now, other));
                }
            }
            // No key at all leaves the scale as it is; nor may it fall so far that the results overflow.
            v_now = max_f32(v_now == 0.0f ? v_largest : v_now, v_largest * 0x1p-60f);
            const float v_ratio = v_largest / v_now;
            v_largest = v_now;
            float shrink[2];
            KVB_UNROLL
            for (i32 half = 0; half < 2; ++half) {
                shrink[half] = weight_of(highest[half], base_of(highest_now[half]));
                highest[half] = highest_now[half];
                total[half] *= shrink[half];
                shrink[half] *= v_ratio;
            }
            KVB_UNROLL
            for (i32 t = 0; t < num_result_tiles; ++t) {
                results[t][0] *= shrink[0];
                results[t][1] *= shrink[0];
                results[t][2] *= shrink[1];
                results[t][3] *= shrink[1];
            }
            KVB_UNROLL
            for (i32 t = 0; t < 2 * P::key_groups; ++t) {
                KVB_UNROLL
                for (i32 c = 0; c < 2; ++c) {
                    float v_scale = Product<E>::is_bf16 ? 1.0f : weight_scale;
                    if constexpr (E::is_scaled) {
                        if (v_own) {
                            const i32 index = warp_key + t * 8 + lane % 4 * 2 + c;
                            v_scale *= keys.v_scale[index] / v_now;
                        }
                    }
                    KVB_UNROLL
                    for (i32 half = 0; half < 2; ++half) {
                        float& weight = products[t][2 * half + c];
                        weight = weight_of(weight, base_of(highest[half]));
                        total[half] += weight;
                        weight *= v_scale;
                    }
                }
            }
            if constexpr (E::beyond_finite != 0) {
                if (*at<u32>(P::unsound) != 0) {
                    add_nonfinite<E, num_result_tiles, P::v_stride>(
                        params, results, rows, keys, first_key, warp_key, P::keys_of_warp, stage_v(stage));
                    sync_block();
                    clear_nonfinite<E, mma_threads, keys_of_tile, P::v_chunks, P::v_stride>(stage_v(stage));
                    sync_block();
                }
            }
            KVB_UNROLL
            for (i32 g = 0; g < P::key_groups; ++g) {
                const float (&left)[4] = products[2 * g];
                const float (&right)[4] = products[2 * g + 1];
                const u32 weights[4] = {pack_pair<E>(left[0], left[1]), pack_pair<E>(left[2], left[3]),
                                        pack_pair<E>(right[0], right[1]), pack_pair<E>(right[2], right[3])};
                multiply_values<E, P::v_stride>(results, weights,
                                                stage_v(stage) + (warp_key + g * 16) * P::v_stride);
            }
            sync_block(); // nobody reads this stage, its addresses or the flag any more
            if (thread_index() == 0) {
                *at<u32>(P::unsound) = 0;
            }
            stage ^= 1;
            table = next_table;
        }
        copy_async_wait<0>();

        const float unscale = (Product<E>::is_bf16 ? 1.0f : 1.0f / weight_scale) * v_largest;
        float* sums = at<float>(P::sums); // [64 rows: 16 a warp, sums_stride]
        KVB_UNROLL
        for (i32 half = 0; half < 2; ++half) {
            KVB_UNROLL
            for (i32 other = 1; other < 4; other *= 2) {
                total[half] += shuffle_xor(total[half], other);
            }
            const i32 r = warp * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0) {
                at<float>(P::highests)[r] = highest[half];
                at<float>(P::totals)[r] = total[half];
            }
            KVB_UNROLL
            for (i32 t = 0; t < num_result_tiles; t += 2) {
                const float (&one)[4] = results[t];
                const float (&two)[4] = results[t + 1];
                float* to = sums + r * P::sums_stride + result_dim<E>(t, lane % 4 * 2);
                if constexpr (P::bytes == 1) { // of dims in turn
                    *reinterpret_cast<Quad*>(to) =
                        Quad{{one[2 * half] * unscale, two[2 * half] * unscale, one[2 * half + 1] * unscale,
                              two[2 * half + 1] * unscale}};
                } else {
                    *reinterpret_cast<Pair*>(to) =
                        Pair{{one[2 * half] * unscale, one[2 * half + 1] * unscale}};
                    *reinterpret_cast<Pair*>(to + 8) =
                        Pair{{two[2 * half] * unscale, two[2 * half + 1] * unscale}};
                }
            }
        }
        sync_block();
        store(sums, is_part, kv_head);
    }

    // The parts of a row that the warps hold (one, if each has rows of its own) become its result.
    KVB_DEVICE void store(const float* sums, bool is_part, i32 kv_head) const {
        constexpr i32 num_parts = row_warps == 1 ? mma_warps : 1;
        float v_scale = 1.0f;
        if constexpr (E::is_scaled) {
            if (params.v_scale_mode != scale_token_head) {
                v_scale = scale_of(params.v_scales, params.v_scale_mode, 0, kv_head, params.num_kv_heads);
            }
        }
        for (i32 index = thread_index(); index < tile.num_rows * head_dim_v; index += mma_threads) {
            const i32 r = index / head_dim_v, dim = index - r * head_dim_v;
            const Row row = row_of(params, tile, r);
            float highest = minus_infinity, total = 0.0f, value = 0.0f;
            KVB_UNROLL
            for (i32 part = 0; part < num_parts; ++part) {
                highest = max_f32(highest, at<float>(P::highests)[part * 16 + r]);
            }
            KVB_UNROLL
            for (i32 part = 0; part < num_parts; ++part) {
                const float weight = weight_of(at<float>(P::highests)[part * 16 + r], base_of(highest));
                total += weight * at<float>(P::totals)[part * 16 + r];
                value += weight * sums[(part * 16 + r) * P::sums_stride + dim];
            }
            const Finish finish = finish_row(params, row.head, highest, total, is_part);
            if (dim == 0) {
                store_lse(params, row, finish.lse, is_part);
            }
            store_out(params, row, dim, finish.factor == 0.0f ? 0.0f : value * finish.factor * v_scale,
                      is_part);
        }
    }
};

template <typename E, i32 head_dim, i32 head_dim_v, i32 row_warps>
KVB_DEVICE void attend_mma(const AttendParams& params) {
    const Tile tile = find_tile(params, 16 * row_warps);
    if (tile.first_key == tile.end_key) {
        store_nothing(params, tile, params.num_splits > 1);
        return;
    }
    MmaAttention<E, head_dim, head_dim_v, row_warps>{params, tile, shared_memory()}.run();
}

} // namespace kvb

KVB_KERNEL(kvb_paged_attention_mma, kvb::AttendParams, kvb::mma_threads,
           KVB_HEAD_DIM <= 128 && KVB_ROW_WARPS == 1 ? 3 : 2) {
    kvb::attend_mma<kvb::KVB_KV, KVB_HEAD_DIM, KVB_HEAD_DIM_V, KVB_ROW_WARPS>(params);
}
