// combine_splits: the result of a row from those of its splits, always in the same order.
//
// Run time: everything. A warp takes a row (token, query head); the sink joins here.

#include "kvblocks/attention.cuh"

namespace kvb {

constexpr i32 combine_threads = 128;

KVB_DEVICE void combine_splits(const AttendParams& params) {
    const i32 lane = thread_index() % 32;
    const i64 index = static_cast<i64>(block_x()) * (combine_threads / 32) + thread_index() / 32;
    const i64 num_rows = static_cast<i64>(params.num_tokens) * params.num_q_heads;
    if (index >= num_rows) {
        return;
    }
    const i32 token = static_cast<i32>(index / params.num_q_heads);
    const Row row{token, static_cast<i32>(index - static_cast<i64>(token) * params.num_q_heads), 0, 0.0f};
    const bool has_keys = bits_of(params.partial_lse[index]) != no_keys_bits;
    float highest = minus_infinity;
    for (i32 split = 0; has_keys && split < params.num_splits; ++split) {
        highest = max_f32(highest, params.partial_lse[split * num_rows + index]);
    }
    float sum = 0.0f;
    for (i32 split = 0; has_keys && split < params.num_splits; ++split) {
        sum += weight_of(params.partial_lse[split * num_rows + index], base_of(highest));
    }
    const Finish finish =
        has_keys ? finish_row(params, row.head, highest, sum, false) : Finish{0.0f, minus_infinity};
    if (lane == 0) {
        store_lse(params, row, finish.lse, false);
    }
    for (i32 dim = lane; dim < params.head_dim_v; dim += 32) {
        float value = 0.0f;
        for (i32 split = 0; finish.factor != 0.0f && split < params.num_splits; ++split) {
            const float part = params.partial_lse[split * num_rows + index];
            if (part != minus_infinity) { // a split without keys has no result
                value += weight_of(part, base_of(highest)) *
                         params.partial_out[(split * num_rows + index) * params.head_dim_v + dim];
            }
        }
        store_out(params, row, dim, value * finish.factor, false);
    }
}

} // namespace kvb

KVB_KERNEL(kvb_combine_splits, kvb::AttendParams, kvb::combine_threads, 8) {
    kvb::combine_splits(params);
}
