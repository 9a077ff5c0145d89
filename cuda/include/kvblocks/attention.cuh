// What all attention kernels share: parameters, which rows and keys a block of the grid works on, logits,
// results.
//
// Owns AttendParams, Tile, the split of keys over the grid and the fate of a finished row. Includes the other
// headers. Invariant: the grid depends on shapes only; lengths, tables and query_start_loc are read on the
// device, so that a captured launch serves every step. A row's keys are cut in the same places whatever else
// is in the batch if split_size is given.
//
// A *row* is a query head of a token: rows of a sequence and a key head are numbered token * group + head of
// the group. Sequence i owns the row tiles from query_start_loc[i] * group / tile + i on, which leaves it
// enough of them, and makes the first tile of each ascending: that is how a block of the grid finds its
// sequence.
#pragma once

#include "check.cuh"
#include "element.cuh"
#include "paged.cuh"
#include "softmax.cuh"

namespace kvb {

struct AttendParams {
    const u8* q;
    const u8* k;
    const u8* v;
    u8* out;
    float* lse;                        // or nullptr
    float* partial_out;                // [num_splits, num_tokens, num_q_heads, head_dim_v], if num_splits > 1
    float* partial_lse;                // [num_splits, num_tokens, num_q_heads]
    const i32* block_tables;           // [num_seqs, max_blocks]; CSR: kv_indices
    const i32* kv_indptr;              // CSR [num_seqs + 1]; nullptr for the table form
    const i32* seq_lens;               // [num_seqs]; CSR: kv_last_block_len
    const i32* query_start_loc;        // [num_seqs + 1]
    const float* sinks;                // [num_q_heads] or nullptr
    const float* alibi_slopes;         // [num_q_heads] or nullptr
    const float* k_scales;             // by k_scale_mode
    const float* v_scales;             // by v_scale_mode
    u32* error;                        // report of check.cuh, or nullptr
    i64 q_token_stride, q_head_stride; // elements
    i64 out_token_stride, out_head_stride;
    i64 lse_token_stride, lse_head_stride;
    i64 block_table_stride;
    Paged k_paged, v_paged;
    float scale;
    float soft_cap; // 0: none
    i32 num_seqs, num_tokens, num_q_heads, num_kv_heads;
    i32 head_dim, head_dim_v;
    i32 max_blocks; // columns of block_tables
    i32 window;     // keys that a query sees; the largest int32: all
    i32 q_dtype;
    i32 num_splits; // blocks of the grid that share a row's keys
    i32 split_size; // keys of a split; 0: as many as make the splits even
    i32 k_scale_mode, v_scale_mode;
    i32 k_is_vector, v_is_vector; // rows can be read 16 bytes at a time
    i32 num_indices;              // CSR: of kv_indices
};
static_assert(sizeof(AttendParams) == 320, "the host packs the same bytes");

constexpr i32 split_granule = 64;   // keys; splits begin at multiples of it from a tile's first key
constexpr i32 smallest_split = 256; // keys, where split_size is not given

// The rows and the keys of a block of the grid: grid (row tiles, key heads, splits).
struct Tile {
    i32 seq;                        // num_seqs for the tokens that belong to no sequence
    i32 first_row, num_rows;        // of the tile, num_rows >= 1 unless the tile is empty
    i32 first_token;                // of the sequence, in the batch
    i32 first_position;             // of the sequence's first query
    i32 seq_len;                    // 0 also where the arrays are wrong
    i32 first_key, end_key;         // of the split; equal if it has none
    i32 oldest_query, newest_query; // positions of the tile's first and last row
};

KVB_DEVICE i32 min_i32(i32 a, i32 b) {
    return a < b ? a : b;
}
KVB_DEVICE i32 max_i32(i32 a, i32 b) {
    return a > b ? a : b;
}

KVB_DEVICE i64 first_tile_of(const AttendParams& params, i32 seq, i32 group, i32 rows_of_tile) {
    return static_cast<i64>(params.query_start_loc[seq]) * group / rows_of_tile + seq;
}

// The last sequence whose first tile is not beyond the block's, found by the 32 lanes together.
KVB_DEVICE i32 find_sequence(const AttendParams& params, i32 group, i32 rows_of_tile) {
    const i32 lane = thread_index() % 32;
    i32 first = 0, count = params.num_seqs + 1;
    while (count > 1) {
        const i32 step = (count + 31) / 32;
        const i32 index = lane * step;
        const bool is_reached =
            index < count && first_tile_of(params, first + index, group, rows_of_tile) <= block_x();
        const i32 reached = max_i32(count_lanes(is_reached), 1);
        first += (reached - 1) * step;
        count = min_i32(step, count - (reached - 1) * step);
    }
    return first;
}

KVB_DEVICE i32 length_of(const AttendParams& params, i32 seq) {
    if (params.kv_indptr == nullptr) {
        return params.seq_lens[seq];
    }
    const i32 num_blocks = params.kv_indptr[seq + 1] - params.kv_indptr[seq];
    return num_blocks <= 0 ? 0 : (num_blocks - 1) * params.k_paged.block_size + params.seq_lens[seq];
}

KVB_DEVICE i64 capacity_of(const AttendParams& params, i32 seq) {
    const i32 num_blocks =
        params.kv_indptr == nullptr ? params.max_blocks : params.kv_indptr[seq + 1] - params.kv_indptr[seq];
    return static_cast<i64>(num_blocks) * params.k_paged.block_size;
}

KVB_DEVICE const i32* table_of(const AttendParams& params, i32 seq) {
    return params.block_tables +
           (params.kv_indptr == nullptr ? seq * params.block_table_stride : params.kv_indptr[seq]);
}

// All threads of the block get the same tile.
KVB_DEVICE Tile find_tile(const AttendParams& params, i32 rows_of_tile) {
    const i32 group = params.num_q_heads / params.num_kv_heads;
    Tile tile{};
    tile.seq = find_sequence(params, group, rows_of_tile);
    const i64 first_tile = first_tile_of(params, tile.seq, group, rows_of_tile);
    tile.first_row = static_cast<i32>(block_x() - first_tile) * rows_of_tile;
    const i32 start = params.query_start_loc[tile.seq];
    const i32 end = tile.seq < params.num_seqs ? params.query_start_loc[tile.seq + 1] : params.num_tokens;
    // Where starts do not ascend, the block may have found a sequence whose tiles begin beyond it.
    if (start < 0 || end > params.num_tokens || start > end || block_x() < first_tile) {
        report_error(params.error, error_query_len, tile.seq, 0, start);
        return tile;
    }
    const i32 num_queries = end - start;
    tile.first_token = start;
    tile.num_rows = max_i32(0, min_i32(rows_of_tile, num_queries * group - tile.first_row));
    if (tile.seq == params.num_seqs || tile.num_rows == 0) {
        return tile;
    }
    if (params.kv_indptr != nullptr) {
        const i32 first = params.kv_indptr[tile.seq], past = params.kv_indptr[tile.seq + 1];
        const bool ascends = first >= 0 && first <= past;
        if (!ascends || past > params.num_indices) {
            report_error(params.error, error_indptr, tile.seq, 0, ascends ? past : first);
            return tile;
        }
    }
    const i32 seq_len = length_of(params, tile.seq);
    if (seq_len < 0 || seq_len > capacity_of(params, tile.seq)) {
        report_error(params.error, error_seq_len, tile.seq, 0, seq_len);
        return tile;
    }
    if (num_queries > seq_len) {
        if (seq_len > 0) {
            report_error(params.error, error_query_len, tile.seq, 0, num_queries);
        }
        return tile;
    }
    tile.seq_len = seq_len;
    tile.first_position = seq_len - num_queries;
    // The keys that some row of the tile sees.
    tile.oldest_query = tile.first_position + tile.first_row / group;
    tile.newest_query = tile.first_position + (tile.first_row + tile.num_rows - 1) / group;
    const i32 first = max_i32(0, tile.oldest_query - params.window + 1);
    const i32 num_keys = tile.newest_query + 1 - first;
    i32 split = params.split_size;
    if (split == 0) {
        split = (num_keys + params.num_splits - 1) / params.num_splits;
        split = max_i32(smallest_split, (split + split_granule - 1) / split_granule * split_granule);
        split = params.num_splits == 1 ? num_keys : split;
    }
    const i64 begin = static_cast<i64>(block_z()) * split;
    tile.first_key = first + static_cast<i32>(begin < num_keys ? begin : num_keys);
    tile.end_key = first + static_cast<i32>(begin + split < num_keys ? begin + split : num_keys);
    return tile;
}

// One row of a tile.
struct Row {
    i32 token; // of the batch
    i32 head;  // of Q
    i32 position;
    float slope;
};

KVB_DEVICE Row row_of(const AttendParams& params, const Tile& tile, i32 row_of_tile) {
    const i32 group = params.num_q_heads / params.num_kv_heads;
    const i32 index = tile.first_row + row_of_tile;
    const i32 token = index / group;
    const i32 head = block_y() * group + index - token * group;
    return Row{tile.first_token + token, head, tile.first_position + token,
               params.alibi_slopes == nullptr ? 0.0f : params.alibi_slopes[head]};
}

// The slot of a key, or -1 where its block is none of the storage.
KVB_DEVICE i64 checked_slot(const AttendParams& params, const Tile& tile, const i32* table, i32 key) {
    const i32 column = key / params.k_paged.block_size;
    const i32 block = table[column];
    if (block < 0 || block >= params.k_paged.num_blocks) {
        report_error(params.error, error_block, tile.seq, column, block);
        return -1;
    }
    return static_cast<i64>(block) * params.k_paged.block_size + (key - column * params.k_paged.block_size);
}

// The logit of a key from its scaled product, before masks.
KVB_DEVICE float logit_of(const AttendParams& params, float product, float slope, i32 position, i32 key) {
    float logit = product;
    if (params.soft_cap != 0.0f) {
        logit = params.soft_cap * tanh_f32(logit / params.soft_cap);
    }
    if (params.alibi_slopes != nullptr) {
        logit += slope * static_cast<float>(key - position);
    }
    return logit;
}

KVB_DEVICE bool is_visible(const AttendParams& params, const Row& row, i32 key) {
    return key <= row.position && row.position - key < params.window;
}

// What a row's softmax comes to once all its keys, or those of a split, are summed: out = sum * factor.
struct Finish {
    float factor;
    float lse;
};

// sum: of the weights against base_of(highest). The sink of a split row joins when its parts are combined.
KVB_DEVICE Finish finish_row(const AttendParams& params, i32 head, float highest, float sum, bool is_part) {
    float factor = 1.0f;
    if (params.sinks != nullptr && !is_part) {
        const float sink = params.sinks[head];
        const float all = max_f32(highest, sink);
        factor = weight_of(base_of(highest), base_of(all));
        factor = highest == minus_infinity ? 0.0f : factor;
        sum = sum * factor + weight_of(sink, base_of(all));
        highest = all;
    }
    return Finish{sum == 0.0f ? 0.0f : factor / sum, log_sum(base_of(highest), sum)};
}

KVB_DEVICE void store_lse(const AttendParams& params, const Row& row, float lse, bool is_part) {
    if (is_part) {
        params
            .partial_lse[(static_cast<i64>(block_z()) * params.num_tokens + row.token) * params.num_q_heads +
                         row.head] = lse;
    } else if (params.lse != nullptr) {
        params.lse[row.token * params.lse_token_stride + row.head * params.lse_head_stride] = lse;
    }
}

// An element of a row's result.
KVB_DEVICE void store_out(const AttendParams& params, const Row& row, i32 dim, float value, bool is_part) {
    if (is_part) {
        const i64 index =
            (static_cast<i64>(block_z()) * params.num_tokens + row.token) * params.num_q_heads + row.head;
        params.partial_out[index * params.head_dim_v + dim] = value;
    } else {
        store_element(params.out,
                      row.token * params.out_token_stride + row.head * params.out_head_stride + dim, value,
                      params.q_dtype);
    }
}

// The partial log-sum-exp of a row whose sequence has no keys at all, so that no sink joins it: a NaN that no
// arithmetic makes.
constexpr u32 no_keys_bits = 0x7FC0DEADu;

// 0 and -infinity for a tile without keys. Its partial out is never read.
KVB_DEVICE void store_nothing(const AttendParams& params, const Tile& tile, bool is_part) {
    const float part = tile.seq_len == 0 ? float_of(no_keys_bits) : minus_infinity;
    for (i32 r = thread_index() / 32; r < tile.num_rows; r += num_threads() / 32) {
        const Row row = row_of(params, tile, r);
        if (thread_index() % 32 == 0) {
            store_lse(params, row, is_part ? part : minus_infinity, is_part);
        }
        for (i32 dim = thread_index() % 32; !is_part && dim < params.head_dim_v; dim += 32) {
            store_out(params, row, dim, 0.0f, false);
        }
    }
}

} // namespace kvb
