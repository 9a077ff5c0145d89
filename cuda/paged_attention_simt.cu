// paged_attention_simt: attention without tensor cores, for groups of 1 or 2 query heads, for float32, and
// for whatever the tensor-core kernel does not take: any head dims up to 576, rows at any address.
//
// Compile time: KVB_KV, the element type of the cache; KVB_VECTORS, 16-byte vectors of a row that a lane
// holds. A key belongs to 2^lanes_log2 neighbouring lanes, which hold the same parts of Q, K, V and the
// result; so a warp works on several keys at once, and a lane has the loads of `depth` keys in flight. Each
// group of lanes has a softmax of its own; groups are merged by shuffles and warps through shared memory,
// always in the same order.

#include "kvblocks/attention.cuh"

namespace kvb {

struct SimtParams {
    AttendParams attend;
    i32 lanes_log2; // lanes of a key: 2^lanes_log2 * KVB_VECTORS vectors hold a row of K and a row of V
    i32 padding;
};
static_assert(sizeof(SimtParams) == 328, "the host packs the same bytes");

constexpr i32 simt_threads = 128;
constexpr i32 simt_warps = simt_threads / 32;
constexpr i32 simt_rows = 2; // rows of a tile

// 16 bytes of a row from element `first` on; 0 beyond the row.
template <typename E>
KVB_DEVICE Vec16 load_vector(const u8* row, i32 first, i32 head_dim, bool is_vector) {
    using Storage = typename E::Storage;
    constexpr i32 bytes = static_cast<i32>(sizeof(Storage)), per_word = 4 / bytes;
    Vec16 vector{};
    if (first >= head_dim) {
        return vector;
    }
    if (is_vector) {
        return load_stream(row + first * bytes);
    }
    KVB_UNROLL
    for (i32 i = 0; i < 16 / bytes; ++i) {
        if (first + i < head_dim) {
            const u32 bits = reinterpret_cast<const Storage*>(row)[first + i];
            vector.word[i / per_word] |= bits << (i % per_word * bytes * 8);
        }
    }
    return vector;
}

template <typename E, i32 num_vectors>
KVB_DEVICE void attend_simt(const SimtParams& simt) {
    constexpr i32 bytes = static_cast<i32>(sizeof(typename E::Storage));
    constexpr i32 width = 16 / bytes; // elements of a vector
    constexpr i32 held = num_vectors * width;
    constexpr i32 depth = num_vectors == 1 ? 4 : num_vectors == 2 ? 2 : 1;
    const AttendParams& params = simt.attend;
    const Tile tile = find_tile(params, simt_rows);
    const bool is_part = params.num_splits > 1;
    if (tile.first_key == tile.end_key) {
        store_nothing(params, tile, is_part);
        return;
    }

    const i32 lanes = 1 << simt.lanes_log2, groups = 32 >> simt.lanes_log2;
    const i32 lane = thread_index() & (lanes - 1);
    const i32 group = thread_index() % 32 >> simt.lanes_log2, warp = thread_index() / 32;
    const i32 kv_head = block_y();
    const i32* table = table_of(params, tile.seq);
    const i64 token_heads = params.num_kv_heads;

    Row rows[simt_rows];
    float q[simt_rows][held], sum[simt_rows][held], highest[simt_rows], total[simt_rows];
    KVB_UNROLL
    for (i32 r = 0; r < simt_rows; ++r) {
        rows[r] = row_of(params, tile, min_i32(r, tile.num_rows - 1)); // a row twice, rather than half a tile
        const u8* from =
            params.q + (rows[r].token * params.q_token_stride + rows[r].head * params.q_head_stride) *
                           bytes_of(params.q_dtype);
        KVB_UNROLL
        for (i32 i = 0; i < held; ++i) {
            const i32 dim = (i / width * lanes + lane) * width + i % width;
            q[r][i] = dim < params.head_dim ? element_at(from, dim, params.q_dtype) : 0.0f;
            if constexpr (E::is_scaled) {
                if (params.k_scale_mode == scale_channel && dim < params.head_dim) {
                    q[r][i] *= params.k_scales[kv_head * params.head_dim + dim];
                }
            }
            sum[r][i] = 0.0f;
        }
        highest[r] = minus_infinity;
        total[r] = 0.0f;
    }

    const i32 keys_of_step = simt_warps * groups;
    for (i32 base = tile.first_key; base < tile.end_key; base += keys_of_step * depth) {
        i32 keys[depth];
        i64 slots[depth];
        Vec16 k[depth][num_vectors], v[depth][num_vectors];
        KVB_UNROLL
        for (i32 d = 0; d < depth; ++d) {
            keys[d] = base + d * keys_of_step + warp * groups + group;
            slots[d] = keys[d] < tile.end_key ? checked_slot(params, tile, table, keys[d]) : -1;
            KVB_UNROLL
            for (i32 n = 0; n < num_vectors; ++n) {
                k[d][n] = Vec16{};
                v[d][n] = Vec16{};
                const i32 first = (n * lanes + lane) * width;
                if (slots[d] >= 0) {
                    k[d][n] = load_vector<E>(params.k + row_offset(params.k_paged, slots[d], kv_head) * bytes,
                                             first, params.head_dim, params.k_is_vector);
                    v[d][n] = load_vector<E>(params.v + row_offset(params.v_paged, slots[d], kv_head) * bytes,
                                             first, params.head_dim_v, params.v_is_vector);
                }
            }
        }
        float logits[simt_rows][depth];
        KVB_UNROLL
        for (i32 d = 0; d < depth; ++d) {
            KVB_UNROLL
            for (i32 r = 0; r < simt_rows; ++r) {
                logits[r][d] = 0.0f;
            }
            KVB_UNROLL
            for (i32 n = 0; n < num_vectors; ++n) {
                float values[width];
                unpack<E>(k[d][n], values);
                KVB_UNROLL
                for (i32 i = 0; i < width; ++i) {
                    KVB_UNROLL
                    for (i32 r = 0; r < simt_rows; ++r) {
                        logits[r][d] += q[r][n * width + i] * values[i];
                    }
                }
            }
            for (i32 other = 1; other < lanes; other *= 2) {
                KVB_UNROLL
                for (i32 r = 0; r < simt_rows; ++r) {
                    logits[r][d] += shuffle_xor(logits[r][d], other);
                }
            }
        }
        KVB_UNROLL
        for (i32 r = 0; r < simt_rows; ++r) {
            float highest_now = highest[r];
            KVB_UNROLL
            for (i32 d = 0; d < depth; ++d) {
                float factor = params.scale;
                if constexpr (E::is_scaled) {
                    if (slots[d] >= 0) {
                        factor *= scale_of(params.k_scales, params.k_scale_mode, slots[d], kv_head,
                                           static_cast<i32>(token_heads));
                    }
                }
                const float logit =
                    logit_of(params, logits[r][d] * factor, rows[r].slope, rows[r].position, keys[d]);
                logits[r][d] = slots[d] >= 0 && is_visible(params, rows[r], keys[d]) ? logit : minus_infinity;
                highest_now = max_f32(highest_now, logits[r][d]);
            }
            const float shrink = weight_of(highest[r], base_of(highest_now));
            highest[r] = highest_now;
            total[r] *= shrink;
            KVB_UNROLL
            for (i32 i = 0; i < held; ++i) {
                sum[r][i] *= shrink;
            }
        }
        KVB_UNROLL
        for (i32 d = 0; d < depth; ++d) {
            float v_scale = 1.0f;
            if constexpr (E::is_scaled) {
                if (params.v_scale_mode == scale_token_head && slots[d] >= 0) {
                    v_scale = params.v_scales[slots[d] * token_heads + kv_head];
                }
            }
            float weights[simt_rows];
            KVB_UNROLL
            for (i32 r = 0; r < simt_rows; ++r) {
                weights[r] = weight_of(logits[r][d], base_of(highest[r]));
                total[r] += weights[r];
                weights[r] *= v_scale;
            }
            KVB_UNROLL
            for (i32 n = 0; n < num_vectors; ++n) {
                float values[width];
                unpack<E>(v[d][n], values);
                KVB_UNROLL
                for (i32 r = 0; r < simt_rows; ++r) {
                    // 0 times infinity: the values of a key that a row does not see may be anything.
                    if (slots[d] >= 0 && is_visible(params, rows[r], keys[d])) {
                        KVB_UNROLL
                        for (i32 i = 0; i < width; ++i) {
                            sum[r][n * width + i] += weights[r] * values[i];
                        }
                    }
                }
            }
        }
    }

    // The groups of a warp, then the warps.
    for (i32 other = lanes; other < 32; other *= 2) {
        KVB_UNROLL
        for (i32 r = 0; r < simt_rows; ++r) {
            const float their_highest = shuffle_xor(highest[r], other);
            const float their_total = shuffle_xor(total[r], other);
            const float both = max_f32(highest[r], their_highest);
            const float mine = weight_of(highest[r], base_of(both));
            const float theirs = weight_of(their_highest, base_of(both));
            highest[r] = both;
            total[r] = total[r] * mine + their_total * theirs;
            KVB_UNROLL
            for (i32 i = 0; i < held; ++i) {
                const float their_sum = shuffle_xor(sum[r][i], other);
                sum[r][i] = sum[r][i] * mine + their_sum * theirs;
            }
        }
    }
    const i32 stride = held << simt.lanes_log2;
    float* sums = reinterpret_cast<float*>(shared_memory()); // [warps, rows, stride], then highest and total
    float* highests = sums + simt_warps * simt_rows * stride;
    float* totals = highests + simt_warps * simt_rows;
    KVB_UNROLL
    for (i32 r = 0; r < simt_rows; ++r) {
        if (group == 0) {
            KVB_UNROLL
            for (i32 i = 0; i < held; ++i) {
                sums[(warp * simt_rows + r) * stride + (i / width * lanes + lane) * width + i % width] =
                    sum[r][i];
            }
        }
        if (thread_index() % 32 == 0) {
            highests[warp * simt_rows + r] = highest[r];
            totals[warp * simt_rows + r] = total[r];
        }
    }
    sync_block();
    for (i32 r = 0; r < tile.num_rows; ++r) {
        const Row row = row_of(params, tile, r);
        float all = minus_infinity, weight_sum = 0.0f, weights[simt_warps];
        KVB_UNROLL
        for (i32 w = 0; w < simt_warps; ++w) {
            all = max_f32(all, highests[w * simt_rows + r]);
        }
        KVB_UNROLL
        for (i32 w = 0; w < simt_warps; ++w) {
            weights[w] = weight_of(highests[w * simt_rows + r], base_of(all));
            weight_sum += weights[w] * totals[w * simt_rows + r];
        }
        const Finish finish = finish_row(params, row.head, all, weight_sum, is_part);
        float v_scale = 1.0f;
        if constexpr (E::is_scaled) {
            if (params.v_scale_mode != scale_token_head) {
                v_scale = scale_of(params.v_scales, params.v_scale_mode, 0, kv_head, params.num_kv_heads);
            }
        }
        if (thread_index() == 0) {
            store_lse(params, row, finish.lse, is_part);
        }
        for (i32 dim = thread_index(); dim < params.head_dim_v; dim += simt_threads) {
            float value = 0.0f;
            KVB_UNROLL
            for (i32 w = 0; w < simt_warps; ++w) {
                value += weights[w] * sums[(w * simt_rows + r) * stride + dim];
            }
            store_out(params, row, dim, finish.factor == 0.0f ? 0.0f : value * finish.factor * v_scale,
                      is_part);
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_paged_attention_simt, kvb::SimtParams, kvb::simt_threads, KVB_VECTORS == 1 ? 3 : 2) {
    kvb::attend_simt<kvb::KVB_KV, KVB_VECTORS>(params);
}
