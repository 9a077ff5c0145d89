// dequantize: codes of an 8-bit type as rows of any dtype.
//
// Compile time: KVB_KV, the type of the codes. Run time: the rest. A thread takes 8 elements of a row.

#include "kvblocks/element.cuh"

namespace kvb {

struct DequantizeParams {
    const u8* codes;     // [num_tokens, num_heads, head_dim], contiguous
    const float* scales; // by scale_mode; scale_token_head is [num_tokens, num_heads]
    u8* rows;            // [num_tokens, num_heads, head_dim], contiguous
    i64 num_rows;        // num_tokens * num_heads
    i32 num_heads;
    i32 head_dim;
    i32 dtype; // of the rows: f32, f16 or bf16
    i32 scale_mode;
};
static_assert(sizeof(DequantizeParams) == 48, "the host packs the same bytes");

constexpr i32 dequantize_threads = 256;
constexpr i32 dequantize_chunk = 8;

template <typename E>
KVB_DEVICE void dequantize(const DequantizeParams& params) {
    const i64 chunks_of_row = (params.head_dim + dequantize_chunk - 1) / dequantize_chunk;
    const i64 num_chunks = params.num_rows * chunks_of_row;
    for (i64 index = static_cast<i64>(block_x()) * dequantize_threads + thread_index(); index < num_chunks;
         index += static_cast<i64>(grid_x()) * dequantize_threads) {
        const i64 row = index / chunks_of_row;
        const i32 head = static_cast<i32>(row % params.num_heads);
        const i32 first = static_cast<i32>(index - row * chunks_of_row) * dequantize_chunk;
        const float scale =
            scale_of(params.scales, params.scale_mode, row / params.num_heads, head, params.num_heads);
        for (i32 i = first; i < first + dequantize_chunk && i < params.head_dim; ++i) {
            const float factor =
                params.scale_mode == scale_channel ? params.scales[head * params.head_dim + i] : scale;
            const float code = element_at<E>(params.codes + row * params.head_dim, i);
            store_element(params.rows, row * params.head_dim + i, code * factor, params.dtype);
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_dequantize, kvb::DequantizeParams, kvb::dequantize_threads, 4) {
    kvb::dequantize<kvb::KVB_KV>(params);
}
