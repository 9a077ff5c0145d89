// quantize: rows of any dtype as codes of an 8-bit type, with a report of what was clipped.
//
// Compile time: KVB_KV, the type of the codes. Run time: the rest. A static scale is computed in two
// launches: the first measures, the second derives it from what was measured, so that nothing goes through
// the host. A row (token, head) belongs to 2^lanes_log2 neighbouring lanes of a warp, 8 elements a lane and
// step.

#include "kvblocks/chunk.cuh"

namespace kvb {

struct QuantizeParams {
    const u8* source; // rows [num_tokens, num_heads, head_dim]
    u8* codes;        // [num_tokens, num_heads, head_dim], contiguous
    float* scales;    // by scale_mode; scale_token_head is [num_tokens, num_heads]
    u32* measured;    // float32 bits: the largest finite magnitude of all that share a static scale
    u32* num_clipped; // [num_heads], added to: elements beyond the largest code, infinities among them
    u32* largest;     // [num_heads], float32 bits, raised to the largest finite magnitude
    i64 token_stride; // of the source, in elements
    i64 head_stride;  //
    i32 num_tokens;
    i32 num_heads;
    i32 head_dim;
    i32 dtype; // of the source: f32, f16 or bf16
    i32 scale_mode;
    i32 lanes_log2;
    i32 is_vector;
    i32 phase;
};
static_assert(sizeof(QuantizeParams) == 96, "the host packs the same bytes");

enum QuantizePhase : i32 {
    phase_measure = 0, // raises `measured`, and nothing else
    phase_derive = 1,  // writes scales, of `measured` or of each row, and codes
    phase_given = 2,   // reads scales and writes codes
};

constexpr i32 quantize_threads = 256;

// Which of the static scales an element shares.
KVB_DEVICE i64 scale_index(const QuantizeParams& params, i32 head, i32 dim) {
    return params.scale_mode == scale_tensor ? 0
           : params.scale_mode == scale_head ? head
                                             : static_cast<i64>(head) * params.head_dim + dim;
}

// The static scale of an element; the first token's thread that meets it writes it down.
template <typename E>
KVB_DEVICE float static_scale(const QuantizeParams& params, i64 token, i32 head, i32 dim) {
    const i64 index = scale_index(params, head, dim);
    if (params.phase == phase_given) {
        return params.scales[index];
    }
    const float scale = row_scale<E>(float_of(params.measured[index]));
    if (token == 0) {
        params.scales[index] = scale;
    }
    return scale;
}

template <typename E>
KVB_DEVICE void quantize(const QuantizeParams& params) {
    const i32 lanes = 1 << params.lanes_log2;
    const i32 lane = thread_index() & (lanes - 1);
    const i32 rows_of_block = quantize_threads >> params.lanes_log2;
    const i64 num_rows = static_cast<i64>(params.num_tokens) * params.num_heads;
    for (i64 base = static_cast<i64>(block_x()) * rows_of_block; base < num_rows;
         base += static_cast<i64>(grid_x()) * rows_of_block) {
        const i64 row = base + (thread_index() >> params.lanes_log2);
        const bool is_row = row < num_rows;
        const i64 token = (is_row ? row : 0) / params.num_heads;
        const i32 head = static_cast<i32>((is_row ? row : 0) - token * params.num_heads);
        const u8* from = params.source +
                         (token * params.token_stride + head * params.head_stride) * bytes_of(params.dtype);
        u8* to = params.codes + (token * params.num_heads + head) * params.head_dim;

        float values[chunk];
        const float largest =
            largest_of_row(from, params.head_dim, params.dtype, params.is_vector, is_row, lane, lanes);
        float scale = 1.0f;
        u32 num_clipped = 0;
        const bool is_own = params.scale_mode == scale_token_head;
        if (is_row && is_own) {
            scale = params.phase == phase_given ? params.scales[row] : row_scale<E>(largest);
            if (params.phase == phase_derive && lane == 0) {
                params.scales[row] = scale;
            }
        }
        for (i32 first = lane * chunk; is_row && first < params.head_dim; first += lanes * chunk) {
            load_chunk(from, first, params.head_dim, params.dtype, params.is_vector, values);
            KVB_UNROLL
            for (i32 i = 0; i < chunk; ++i) {
                if (first + i >= params.head_dim) {
                    continue;
                }
                if (params.phase == phase_measure) {
                    const float magnitude = max_f32(values[i], -values[i]);
                    if (params.scale_mode == scale_channel && is_finite(magnitude)) {
                        atomic_max(params.measured + scale_index(params, head, first + i),
                                   bits_of(magnitude));
                    }
                    continue;
                }
                values[i] = values[i] / (is_own ? scale : static_scale<E>(params, token, head, first + i));
                num_clipped += E::is_clipped(values[i]) ? 1u : 0u;
            }
            if (params.phase != phase_measure) {
                store_chunk<E>(to, first, params.head_dim, params.is_vector, values);
            }
        }
        for (i32 other = 1; other < lanes; other *= 2) {
            num_clipped += shuffle_xor(num_clipped, other);
        }
        if (is_row && lane == 0) {
            // Magnitudes order as their bits do.
            if (params.phase == phase_measure && params.scale_mode != scale_channel) {
                atomic_max(params.measured + scale_index(params, head, 0), bits_of(largest));
            }
            atomic_max(params.largest + head, bits_of(largest));
            if (num_clipped > 0) {
                atomic_add(params.num_clipped + head, num_clipped);
            }
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_quantize, kvb::QuantizeParams, kvb::quantize_threads, 4) {
    kvb::quantize<kvb::KVB_KV>(params);
}
