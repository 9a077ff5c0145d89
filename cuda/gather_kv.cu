// gather_kv: the first tokens of a sequence as contiguous K and V rows, each element at its value.
//
// Compile time: KVB_KV, the element type of the cache. Run time: the rest, the dtype of the rows included.
// A thread takes 8 elements of a row (token, head) of K or V; neighbouring threads take neighbouring
// elements.

#include "kvblocks/check.cuh"
#include "kvblocks/element.cuh"
#include "kvblocks/paged.cuh"

namespace kvb {

struct GatherPart {
    const u8* cache;
    const float* scales; // by scale_mode
    u8* rows;            // [num_tokens, num_heads, head_dim], contiguous
    Paged paged;
    i32 head_dim;
    i32 scale_mode;
};
static_assert(sizeof(GatherPart) == 64, "the host packs the same bytes");

struct GatherParams {
    GatherPart part[2]; // K, V
    const i32* block_table;
    u32* error; // report of check.cuh, or nullptr
    i32 num_tokens;
    i32 num_heads;
    i32 dtype; // of the rows: f32, f16 or bf16
    i32 padding;
};
static_assert(sizeof(GatherParams) == 160, "the host packs the same bytes");

constexpr i32 gather_threads = 128;
constexpr i32 gather_chunk = 8;

// Grid: (blocks over the chunks of a token, tokens modulo the grid, K or V). A wrong block gives zeros.
template <typename E>
KVB_DEVICE void gather_kv(const GatherParams& params) {
    using Storage = typename E::Storage;
    const GatherPart& part = params.part[block_z()];
    const i32 chunks_of_row = (part.head_dim + gather_chunk - 1) / gather_chunk;
    const i32 index = block_x() * gather_threads + thread_index();
    const i32 head = index / chunks_of_row;
    const i32 first = (index - head * chunks_of_row) * gather_chunk;
    if (head >= params.num_heads) {
        return;
    }
    for (i32 token = block_y(); token < params.num_tokens; token += grid_y()) {
        const i32 block = params.block_table[token / part.paged.block_size];
        const bool is_block = block >= 0 && block < part.paged.num_blocks;
        if (!is_block) {
            report_error(params.error, error_block, 0, token / part.paged.block_size, block);
        }
        const i64 slot = is_block ? slot_of(part.paged, params.block_table, token) : 0;
        const u8* from = part.cache + row_offset(part.paged, slot, head) * static_cast<i64>(sizeof(Storage));
        const float scale =
            is_block ? scale_of(part.scales, part.scale_mode, slot, head, params.num_heads) : 0.0f;
        const i64 to = (static_cast<i64>(token) * params.num_heads + head) * part.head_dim;
        for (i32 i = first; i < first + gather_chunk && i < part.head_dim; ++i) {
            float value = is_block ? element_at<E>(from, i) : 0.0f;
            if constexpr (E::is_scaled) {
                value *= part.scale_mode == scale_channel ? part.scales[head * part.head_dim + i] : scale;
            }
            store_element(part.rows, to + i, value, params.dtype);
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_gather_kv, kvb::GatherParams, kvb::gather_threads, 8) {
    kvb::gather_kv<kvb::KVB_KV>(params);
}
