// mla_decode: attention over latents, where V is the first 512 elements of K's 576 and one row serves all
// heads.
//
// Compile time: KVB_KV, F16, BF16 or E4M3. Run time: the rest; params.v is not read, as it is params.k.
// A tile has 32 rows (heads times tokens), in two groups of 16; four warps share a group. For Q K^T each of
// the four takes 16 of the tile's 64 keys; their weights meet in shared memory; for P V each takes 128 of the
// 512 result dims and all keys. So a latent is read once, from one copy in shared memory, for both products.

#include "kvblocks/tiles.cuh"

namespace kvb {

constexpr i32 mla_threads = 256;
constexpr i32 mla_rows = 32;
constexpr i32 mla_keys = 64;
constexpr i32 latent_dim = 576;
constexpr i32 latent_dim_v = 512;
constexpr i32 warps_of_group = 4;
constexpr i32 result_tiles = latent_dim_v / warps_of_group / 8;

// Where things lie in shared memory. Rows are an odd number of 16-byte chunks apart, see paged_attention_mma.
template <i32 bytes> // of an element
struct MlaPlan {
    static constexpr i32 row_chunks = latent_dim * bytes / 16;
    static constexpr i32 v_chunks = latent_dim_v * bytes / 16;
    static constexpr i32 row_stride = (row_chunks | 1) * 16;
    static constexpr i32 weight_stride = (mla_keys * 2 / 16 | 1) * 16;
    static constexpr i32 tables = 0; // KeyTable [num_tables]
    static constexpr i32 q_factors = tables + num_tables * static_cast<i32>(sizeof(KeyTable<mla_keys>));
    static constexpr i32 maxima = q_factors + mla_rows * 4;               // float [warps_of_group, mla_rows]
    static constexpr i32 totals = maxima + warps_of_group * mla_rows * 4; // the same
    static constexpr i32 weights = totals + warps_of_group * mla_rows * 4;
    static constexpr i32 unsound = weights + mla_rows * weight_stride; // u32 [4], see paged_attention_mma
    static constexpr i32 q = unsound + 16;
    static constexpr i32 q_stride = (latent_dim / 8 | 1) * 16;
    static constexpr i32 stages = q + mla_rows * q_stride;
    static constexpr i32 stage_bytes = mla_keys * row_stride;
};

template <typename E>
KVB_DEVICE void attend_latents(const AttendParams& params) {
    using P = MlaPlan<static_cast<i32>(sizeof(typename E::Storage))>;
    const Tile tile = find_tile(params, mla_rows);
    const bool is_part = params.num_splits > 1;
    if (tile.first_key == tile.end_key) {
        store_nothing(params, tile, is_part);
        return;
    }
    u8* shared = shared_memory();
    auto* tables = reinterpret_cast<KeyTable<mla_keys>*>(shared + P::tables);
    auto* q_factors = reinterpret_cast<float*>(shared + P::q_factors);
    auto* maxima = reinterpret_cast<float*>(shared + P::maxima);
    auto* totals = reinterpret_cast<float*>(shared + P::totals);
    auto* unsound = reinterpret_cast<u32*>(shared + P::unsound);
    const i32 lane = thread_index() % 32, warp = thread_index() / 32, matrix = lane / 8;
    const i32 first_row = warp / warps_of_group * 16, quarter = warp % warps_of_group;

    load_q<E, latent_dim, mla_rows, P::q_stride>(params, tile, shared + P::q, q_factors);
    locate_keys<E>(params, tile, tile.first_key, tables[0]);
    locate_keys<E>(params, tile, tile.first_key + mla_keys, tables[1]);
    if (thread_index() == 0) {
        *unsound = 0;
    }
    sync_block();
    load_rows<mla_threads, mla_keys, P::row_chunks, P::row_stride>(params.k, tables[0].k_offset,
                                                                   shared + P::stages);
    copy_async_commit();

    // The lane's two rows of the group's 16; `total` is of the warp's own keys.
    Row rows[2];
    float factors[2], highest[2] = {minus_infinity, minus_infinity}, total[2] = {0.0f, 0.0f};
    KVB_UNROLL
    for (i32 half = 0; half < 2; ++half) {
        const i32 r = first_row + half * 8 + lane / 4;
        rows[half] = row_of(params, tile, min_i32(r, tile.num_rows - 1));
        factors[half] = params.scale * q_factors[r];
        if constexpr (E::is_scaled) {
            if (params.k_scale_mode != scale_token_head) {
                factors[half] *=
                    scale_of(params.k_scales, params.k_scale_mode, 0, block_y(), params.num_kv_heads);
            }
        }
    }
    float v_scale = 1.0f;
    const bool v_own = E::is_scaled && params.v_scale_mode == scale_token_head;
    if constexpr (E::is_scaled) {
        if (!v_own) {
            v_scale = scale_of(params.v_scales, params.v_scale_mode, 0, block_y(), params.num_kv_heads);
        }
    }
    float v_largest = 1.0f; // what the weights of `results` are scaled by, beside weight_scale
    float results[result_tiles][4];
    KVB_UNROLL
    for (i32 t = 0; t < result_tiles; ++t) {
        results[t][0] = results[t][1] = results[t][2] = results[t][3] = 0.0f;
    }

    i32 stage = 0, table = 0;
    for (i32 first_key = tile.first_key; first_key < tile.end_key; first_key += mla_keys) {
        const i32 next_table = table == 2 ? 0 : table + 1;
        if (first_key + mla_keys < tile.end_key) {
            load_rows<mla_threads, mla_keys, P::row_chunks, P::row_stride>(
                params.k, tables[next_table].k_offset, shared + P::stages + (stage ^ 1) * P::stage_bytes);
        }
        copy_async_commit();
        locate_keys<E>(params, tile, first_key + 2 * mla_keys, tables[next_table == 2 ? 0 : next_table + 1]);
        copy_async_wait<1>();
        sync_block();

        u8* latents = shared + P::stages + stage * P::stage_bytes;
        const u8* keys_here = latents + quarter * 16 * P::row_stride;
        if constexpr (E::beyond_finite != 0) {
            if (is_partly_seen(params, tile, first_key, mla_keys)) {
                if (has_nonfinite<E, mla_threads, mla_keys, P::v_chunks, P::row_stride>(latents)) {
                    *unsound = 1;
                }
                sync_block();
            }
        }
        float products[2][4];
        multiply_keys<E, latent_dim / 16, P::row_stride>(products, keys_here, [&](u32(&q)[4], i32 step) {
            load_matrix_x4(q, shared + P::q + (first_row + matrix % 2 * 8 + lane % 8) * P::q_stride +
                                  step * 32 + matrix / 2 * 16);
        });
        const KeyTable<mla_keys>& keys = tables[table];
        float v_ratio = 1.0f;
        if constexpr (E::is_scaled) {
            if (v_own) { // the largest scale of the tile's keys, which all warps find for themselves
                float v_now = max_f32(keys.v_scale[lane], keys.v_scale[lane + 32]);
                KVB_UNROLL
                for (i32 other = 1; other < 32; other *= 2) {
                    v_now = max_f32(v_now, shuffle_xor(v_now, other));
                }
                // No key at all leaves it as it is; nor may it fall so far that the results overflow.
                v_now = max_f32(v_now == 0.0f ? v_largest : v_now, v_largest * 0x1p-60f);
                v_ratio = v_largest / v_now;
                v_largest = v_now;
            }
        }
        float mine[2] = {minus_infinity, minus_infinity};
        KVB_UNROLL
        for (i32 t = 0; t < 2; ++t) {
            KVB_UNROLL
            for (i32 c = 0; c < 2; ++c) {
                const i32 index = quarter * 16 + t * 8 + lane % 4 * 2 + c;
                KVB_UNROLL
                for (i32 half = 0; half < 2; ++half) {
                    float& product = products[t][2 * half + c];
                    const i32 key = first_key + index;
                    float factor = factors[half];
                    if constexpr (E::is_scaled) {
                        factor *= keys.k_scale[index];
                    }
                    product = logit_of(params, product * factor, rows[half].slope, rows[half].position, key);
                    const bool is_seen = keys.k_offset[index] >= 0 && is_visible(params, rows[half], key);
                    product = is_seen ? product : minus_infinity;
                    mine[half] = max_f32(mine[half], product);
                }
            }
        }
        KVB_UNROLL
        for (i32 half = 0; half < 2; ++half) {
            KVB_UNROLL
            for (i32 other = 1; other < 4; other *= 2) {
                mine[half] = max_f32(mine[half], shuffle_xor(mine[half], other));
            }
            if (lane % 4 == 0) {
                maxima[quarter * mla_rows + first_row + half * 8 + lane / 4] = mine[half];
            }
        }
        sync_block(); // the maxima of the group's four warps are there
        KVB_UNROLL
        for (i32 half = 0; half < 2; ++half) {
            const i32 r = first_row + half * 8 + lane / 4;
            float highest_now = highest[half];
            KVB_UNROLL
            for (i32 w = 0; w < warps_of_group; ++w) {
                highest_now = max_f32(highest_now, maxima[w * mla_rows + r]);
            }
            const float shrink = weight_of(highest[half], base_of(highest_now));
            highest[half] = highest_now;
            total[half] *= shrink;
            KVB_UNROLL
            for (i32 t = 0; t < result_tiles; ++t) {
                results[t][2 * half] *= shrink * v_ratio;
                results[t][2 * half + 1] *= shrink * v_ratio;
            }
            KVB_UNROLL
            for (i32 t = 0; t < 2; ++t) {
                float weights[2];
                KVB_UNROLL
                for (i32 c = 0; c < 2; ++c) {
                    weights[c] = weight_of(products[t][2 * half + c], base_of(highest_now));
                    total[half] += weights[c];
                    weights[c] *= Product<E>::is_bf16 ? 1.0f : weight_scale;
                    if constexpr (E::is_scaled) {
                        if (v_own) {
                            weights[c] *= keys.v_scale[quarter * 16 + t * 8 + lane % 4 * 2 + c] / v_largest;
                        }
                    }
                }
                const i32 column = quarter * 16 + t * 8 + lane % 4 * 2;
                *reinterpret_cast<u32*>(shared + P::weights + r * P::weight_stride + column * 2) =
                    pack_pair<E>(weights[0], weights[1]);
            }
        }
        sync_block(); // the weights of all keys are there
        const i32 quarter_bytes = quarter * result_tiles * 8 * static_cast<i32>(sizeof(typename E::Storage));
        if constexpr (E::beyond_finite != 0) {
            if (*unsound != 0) {
                add_nonfinite<E, result_tiles, P::row_stride>(params, results, rows, keys, first_key, 0,
                                                              mla_keys, latents + quarter_bytes);
                sync_block();
                clear_nonfinite<E, mla_threads, mla_keys, P::v_chunks, P::row_stride>(latents);
                sync_block();
            }
        }
        KVB_UNROLL
        for (i32 group = 0; group < mla_keys / 16; ++group) {
            u32 weights[4];
            load_matrix_x4(weights, shared + P::weights +
                                        (first_row + matrix % 2 * 8 + lane % 8) * P::weight_stride +
                                        group * 32 + matrix / 2 * 16);
            multiply_values<E, P::row_stride>(results, weights,
                                              latents + group * 16 * P::row_stride + quarter_bytes);
        }
        sync_block(); // nobody reads this stage, its keys, its weights or the flag any more
        if (thread_index() == 0) {
            *unsound = 0;
        }
        stage ^= 1;
        table = next_table;
    }
    copy_async_wait<0>();

    KVB_UNROLL
    for (i32 half = 0; half < 2; ++half) {
        KVB_UNROLL
        for (i32 other = 1; other < 4; other *= 2) {
            total[half] += shuffle_xor(total[half], other);
        }
        if (lane % 4 == 0) {
            totals[quarter * mla_rows + first_row + half * 8 + lane / 4] = total[half];
        }
    }
    sync_block();
    KVB_UNROLL
    for (i32 half = 0; half < 2; ++half) {
        const i32 r = first_row + half * 8 + lane / 4;
        if (r >= tile.num_rows) {
            continue;
        }
        float sum = 0.0f;
        KVB_UNROLL
        for (i32 w = 0; w < warps_of_group; ++w) {
            sum += totals[w * mla_rows + r];
        }
        const Finish finish = finish_row(params, rows[half].head, highest[half], sum, is_part);
        if (quarter == 0 && lane % 4 == 0) {
            store_lse(params, rows[half], finish.lse, is_part);
        }
        const float factor =
            finish.factor * v_scale * v_largest * (Product<E>::is_bf16 ? 1.0f : 1.0f / weight_scale);
        KVB_UNROLL
        for (i32 t = 0; t < result_tiles; ++t) {
            KVB_UNROLL
            for (i32 c = 0; c < 2; ++c) {
                const i32 dim = quarter * result_tiles * 8 + result_dim<E>(t, lane % 4 * 2 + c);
                store_out(params, rows[half], dim,
                          finish.factor == 0.0f ? 0.0f : results[t][2 * half + c] * factor, is_part);
            }
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_mla_decode, kvb::AttendParams, kvb::mla_threads, 1) {
    kvb::attend_latents<kvb::KVB_KV>(params);
}
