// move_slots: tokens of all layers from slot to slot in one launch, so that an accepted branch stands in a
// row.
//
// Run time: everything. Grid: (sequences, regions, columns of a row). The moves of a sequence are done in
// their order, each byte by one thread, so a slot may be the source of one move and the destination of a
// later one.

#include "kvblocks/check.cuh"
#include "kvblocks/region.cuh"

namespace kvb {

struct MoveParams {
    const Region* regions; // [grid_y]
    const i64* moves;      // [num_moves, 2]: source, destination slot; a negative one skips the move
    const i32* move_start; // [num_seqs + 1]: sequence i owns the moves move_start[i]..move_start[i + 1]
    u32* error;            // report of check.cuh, or nullptr
    i32 num_moves, padding;
};
static_assert(sizeof(MoveParams) == 40, "the host packs the same bytes");

constexpr i32 move_threads = 128;

template <typename Unit>
KVB_DEVICE void move_column(const MoveParams& params, const Region& region, i64 column) {
    constexpr i32 unit = static_cast<i32>(sizeof(Unit));
    const i64 units_of_run = region.run_bytes / unit;
    const i64 head = column / units_of_run;
    if (head >= region.num_heads) {
        return;
    }
    const i64 in_token = head * region.head_stride + (column - head * units_of_run) * unit;
    const i64 num_slots = static_cast<i64>(region.num_blocks) * region.num_tokens;
    const i32 first = params.move_start[block_x()], end = params.move_start[block_x() + 1];
    if (first < 0 || end < first || end > params.num_moves) {
        report_error(params.error, error_move_start, block_x(), 0, end < first || first < 0 ? first : end);
        return;
    }
    for (i32 move = first; move < end; ++move) {
        const i64 at = 2 * static_cast<i64>(move);
        const i64 source = params.moves[at], destination = params.moves[at + 1];
        if (source >= num_slots || destination >= num_slots) {
            report_error(params.error, error_move, move, 0, source >= num_slots ? source : destination);
            continue;
        }
        if (source < 0 || destination < 0) {
            continue;
        }
        const i64 source_block = source / region.num_tokens,
                  destination_block = destination / region.num_tokens;
        const u8* from = region.base + source_block * region.block_stride +
                         (source - source_block * region.num_tokens) * region.token_stride + in_token;
        u8* to = region.base + destination_block * region.block_stride +
                 (destination - destination_block * region.num_tokens) * region.token_stride + in_token;
        store_unit<Unit>(to, load_unit<Unit>(from));
    }
}

KVB_DEVICE void move_slots(const MoveParams& params) {
    const Region& region = params.regions[block_y()];
    const i64 num_units = region.run_bytes / region.unit_bytes * region.num_heads;
    for (i64 column = static_cast<i64>(block_z()) * move_threads + thread_index(); column < num_units;
         column += static_cast<i64>(grid_z()) * move_threads) {
        if (region.unit_bytes == 16) {
            move_column<Vec16>(params, region, column);
        } else if (region.unit_bytes == 4) {
            move_column<u32>(params, region, column);
        } else {
            move_column<u8>(params, region, column);
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_move_slots, kvb::MoveParams, kvb::move_threads, 8) {
    kvb::move_slots(params);
}
