// copy_blocks: whole blocks of all layers in one launch, from a table of regions.
//
// Run time: everything. Grid: (pairs x pieces of a block, regions). Blocks are copied as bytes, scales
// included. A thread has 4 loads in flight before its first store.

#include "kvblocks/check.cuh"
#include "kvblocks/region.cuh"

namespace kvb {

struct CopyParams {
    const Region* regions; // [grid_y]
    const i32* copies;     // [num_copies, 2]: source, destination
    u32* error;            // report of check.cuh, or nullptr
    i32 num_copies;
    i32 num_pieces; // of a block: blocks of the grid that share a pair
};
static_assert(sizeof(CopyParams) == 32, "the host packs the same bytes");

constexpr i32 copy_threads = 128;
constexpr i32 copy_depth = 4;

template <typename Unit>
KVB_DEVICE void copy_piece(const Region& region, i32 source, i32 destination, i32 piece, i32 num_pieces) {
    constexpr i32 unit = static_cast<i32>(sizeof(Unit));
    const i64 units_of_run = region.run_bytes / unit;
    const i64 num_units = units_of_run * region.num_tokens * region.num_heads;
    const i64 step = static_cast<i64>(num_pieces) * copy_threads;
    const u8* from = region.base + source * region.block_stride;
    u8* to = region.base + destination * region.block_stride;
    for (i64 first = static_cast<i64>(piece) * copy_threads + thread_index(); first < num_units;
         first += step * copy_depth) {
        Unit units[copy_depth];
        i64 offsets[copy_depth];
        KVB_UNROLL
        for (i32 i = 0; i < copy_depth; ++i) {
            const i64 index = first + i * step;
            if (index < num_units) {
                i64 offset = index * unit; // of a block that is one run
                if (region.num_tokens * region.num_heads > 1) {
                    const i64 run = index / units_of_run;
                    const i64 token = run / region.num_heads;
                    offset = token * region.token_stride +
                             (run - token * region.num_heads) * region.head_stride +
                             (index - run * units_of_run) * unit;
                }
                offsets[i] = offset;
                units[i] = load_unit<Unit>(from + offset);
            }
        }
        KVB_UNROLL
        for (i32 i = 0; i < copy_depth; ++i) {
            if (first + i * step < num_units) {
                store_unit<Unit>(to + offsets[i], units[i]);
            }
        }
    }
}

KVB_DEVICE void copy_blocks(const CopyParams& params) {
    const Region& region = params.regions[block_y()];
    const i32 pair = block_x() / params.num_pieces;
    const i32 piece = block_x() - pair * params.num_pieces;
    const i32 source = params.copies[2 * pair], destination = params.copies[2 * pair + 1];
    const bool is_inside =
        source >= 0 && source < region.num_blocks && destination >= 0 && destination < region.num_blocks;
    if (!is_inside) {
        report_error(params.error, error_copy, pair, 0, source);
        return;
    }
    if (region.unit_bytes == 16) {
        copy_piece<Vec16>(region, source, destination, piece, params.num_pieces);
    } else if (region.unit_bytes == 4) {
        copy_piece<u32>(region, source, destination, piece, params.num_pieces);
    } else {
        copy_piece<u8>(region, source, destination, piece, params.num_pieces);
    }
}

} // namespace kvb

KVB_KERNEL(kvb_copy_blocks, kvb::CopyParams, kvb::copy_threads, 8) {
    kvb::copy_blocks(params);
}
