// write_kv: K and V rows of new tokens into the slots of one layer's cache, converted and scaled.
//
// Compile time: KVB_KV, the element type of the cache. Run time: the rest; layouts are strides.
// A row (token, head) of K or V belongs to 2^lanes_log2 neighbouring lanes of a warp, 8 elements a lane and
// step.

#include "kvblocks/check.cuh"
#include "kvblocks/chunk.cuh"
#include "kvblocks/paged.cuh"

namespace kvb {

// The source, target and scales of K or of V.
struct WritePart {
    const u8* source; // rows [num_tokens, num_heads, head_dim]
    u8* cache;        // elements of the cache's type
    float* scales;    // by scale_mode; those of scale_token_head are computed here
    i64 token_stride; // of the source, in elements, as all strides
    i64 head_stride;  //
    Paged paged;      // of the cache
    i32 head_dim;     // elements of a row
    i32 dtype;        // of the source: f32, f16 or bf16
    i32 scale_mode;   //
    i32 is_vector;    // 8 elements of the source and of the cache can be moved at once
};
static_assert(sizeof(WritePart) == 88, "the host packs the same bytes");

struct WriteParams {
    WritePart part[2]; // K, V
    const i64* slot_mapping;
    u32* error; // report of check.cuh, or nullptr
    i32 num_slots;
    i32 num_heads;
    i32 lanes_log2; // lanes of a row, 0..5
    i32 padding;
};
static_assert(sizeof(WriteParams) == 208, "the host packs the same bytes");

constexpr i32 write_threads = 256;
template <typename E>
KVB_DEVICE void write_kv(const WriteParams& params) {
    const i32 lanes = 1 << params.lanes_log2;
    const i32 lane = thread_index() & (lanes - 1);
    const i32 rows_of_block = write_threads >> params.lanes_log2;
    const i64 num_rows = static_cast<i64>(params.num_slots) * 2 * params.num_heads;
    for (i64 base = static_cast<i64>(block_x()) * rows_of_block; base < num_rows;
         base += static_cast<i64>(grid_x()) * rows_of_block) {
        const i64 row = base + (thread_index() >> params.lanes_log2);
        const i32 token = static_cast<i32>((row < num_rows ? row : num_rows - 1) / (2 * params.num_heads));
        const i32 in_token = static_cast<i32>(row - static_cast<i64>(token) * 2 * params.num_heads);
        const bool is_v = in_token >= params.num_heads;
        const WritePart& part = params.part[is_v ? 1 : 0];
        const i32 head = in_token - (is_v ? params.num_heads : 0);
        const i64 slot = params.slot_mapping[token];
        const bool is_outside = slot >= static_cast<i64>(part.paged.num_blocks) * part.paged.block_size;
        if (row < num_rows && (is_outside || slot < -1)) {
            report_error(params.error, error_slot, token, 0, slot);
        }
        const bool is_written = row < num_rows && !is_skipped(slot) && !is_outside;

        const i64 from_element = token * part.token_stride + head * part.head_stride;
        const u8* from = part.source + from_element * bytes_of(part.dtype);
        u8* to = part.cache;
        if (is_written) {
            to += row_offset(part.paged, slot, head) * static_cast<i64>(sizeof(typename E::Storage));
        }
        float values[chunk];
        float scale = 1.0f;
        if constexpr (E::is_scaled) {
            // K and V of a call may be scaled in different ways.
            const bool is_own = part.scale_mode == scale_token_head;
            const float largest = largest_of_row(from, part.head_dim, part.dtype, part.is_vector,
                                                 is_written && is_own, lane, lanes);
            if (is_own) {
                scale = row_scale<E>(largest);
                if (is_written && lane == 0) {
                    part.scales[slot * params.num_heads + head] = scale;
                }
            } else if (is_written) {
                scale = scale_of(part.scales, part.scale_mode, slot, head, params.num_heads);
            }
        }
        for (i32 first = lane * chunk; is_written && first < part.head_dim; first += lanes * chunk) {
            if constexpr (!E::is_scaled) {
                if (part.dtype == E::dtype) {
                    copy_chunk<E>(to, from, first, part.head_dim, part.is_vector);
                    continue;
                }
            }
            load_chunk(from, first, part.head_dim, part.dtype, part.is_vector, values);
            if constexpr (E::is_scaled) {
                KVB_UNROLL
                for (i32 i = 0; i < chunk; ++i) {
                    const bool is_channel = part.scale_mode == scale_channel && first + i < part.head_dim;
                    values[i] =
                        values[i] / (is_channel ? part.scales[head * part.head_dim + first + i] : scale);
                }
            }
            store_chunk<E>(to, first, part.head_dim, part.is_vector, values);
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_write_kv, kvb::WriteParams, kvb::write_threads, 4) {
    kvb::write_kv<kvb::KVB_KV>(params);
}
