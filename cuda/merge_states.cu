// merge_states: attention over the union of two disjoint sets of keys, from the two outputs.
//
// Run time: everything. A warp takes a row (token, query head).

#include "kvblocks/element.cuh"
#include "kvblocks/softmax.cuh"

namespace kvb {

// out and lse of one set of keys; strides in elements, rows contiguous.
struct AttentionState {
    const u8* out;
    const float* lse;
    i64 out_token_stride, out_head_stride;
    i64 lse_token_stride, lse_head_stride;
};
static_assert(sizeof(AttentionState) == 48, "the host packs the same bytes");

struct MergeParams {
    AttentionState state[2];
    u8* out;    // [num_tokens, num_q_heads, head_dim_v]
    float* lse; // [num_tokens, num_q_heads]
    i64 out_token_stride, out_head_stride;
    i64 lse_token_stride, lse_head_stride;
    i64 num_rows;
    i32 num_q_heads;
    i32 head_dim_v;
    i32 dtype; // of all three outs
    i32 padding;
};
static_assert(sizeof(MergeParams) == 168, "the host packs the same bytes");

constexpr i32 merge_threads = 128;

KVB_DEVICE void merge_states(const MergeParams& params) {
    const i32 lane = thread_index() % 32;
    const i64 first = static_cast<i64>(block_x()) * (merge_threads / 32) + thread_index() / 32;
    for (i64 row = first; row < params.num_rows; row += static_cast<i64>(grid_x()) * (merge_threads / 32)) {
        const i64 token = row / params.num_q_heads, head = row - token * params.num_q_heads;
        float lse[2], highest = minus_infinity;
        for (i32 i = 0; i < 2; ++i) {
            const AttentionState& state = params.state[i];
            lse[i] = state.lse[token * state.lse_token_stride + head * state.lse_head_stride];
            highest = max_f32(highest, lse[i]);
        }
        const float base = base_of(highest);
        float weight[2], total = 0.0f;
        for (i32 i = 0; i < 2; ++i) {
            weight[i] = weight_of(lse[i], base);
            total += weight[i];
        }
        if (lane == 0) {
            params.lse[token * params.lse_token_stride + head * params.lse_head_stride] =
                log_sum(base, total);
        }
        const i64 to = token * params.out_token_stride + head * params.out_head_stride;
        for (i32 i = lane; i < params.head_dim_v; i += 32) {
            float sum = 0.0f;
            for (i32 part = 0; part < 2; ++part) {
                const AttentionState& state = params.state[part];
                if (lse[part] != minus_infinity) { // whatever its out holds
                    const i64 from = token * state.out_token_stride + head * state.out_head_stride;
                    sum += weight[part] / total *
                           element_at(state.out + from * bytes_of(params.dtype), i, params.dtype);
                }
            }
            store_element(params.out, to + i, sum, params.dtype);
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_merge_states, kvb::MergeParams, kvb::merge_threads, 8) {
    kvb::merge_states(params);
}
