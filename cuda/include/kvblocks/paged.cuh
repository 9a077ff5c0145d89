// Where a token lives: (block table, position) -> slot -> element offset. The only maker of cache addresses.
//
// Owns Paged and the functions on it. Includes device_compat.cuh only.
// Invariant: everything after the int32 block id is 64-bit, so a pool may exceed 2^31 elements. Nothing is
// checked here: ids and positions come from arrays that the caller has checked, or checks itself.
#pragma once

#include "device_compat.cuh"

namespace kvb {

// K or V of one layer. NHD [num_blocks, block_size, num_heads, head_dim] and HND [num_blocks, num_heads,
// block_size, head_dim] differ in their strides only; the elements of a row are contiguous.
// POD of 32 bytes: part of the kernels' parameter structs, filled by the host.
struct Paged {
    i64 block_stride; // elements between two blocks
    i64 token_stride; // elements between two tokens of a block
    i64 head_stride;  // elements between two heads of a token
    i32 block_size;   // tokens per block, >= 1
    i32 num_blocks;   // ids are 0..num_blocks
};
static_assert(sizeof(Paged) == 32, "the host packs the same bytes");

// Slot of a sequence's token: block_id * block_size + offset. Reads one entry of the table [max_blocks].
KVB_INLINE i64 slot_of(const Paged& paged, const i32* block_table, i32 position) {
    const i32 column = position / paged.block_size;
    const i32 offset = position - column * paged.block_size;
    return static_cast<i64>(block_table[column]) * paged.block_size + offset;
}

// A slot of -1 means: do not write. (Any negative one is skipped, so that a bad one cannot do harm.)
KVB_INLINE bool is_skipped(i64 slot) {
    return slot < 0;
}

// Element offset of the row of a head at a slot >= 0.
KVB_INLINE i64 row_offset(const Paged& paged, i64 slot, i32 head) {
    const i64 block = slot / paged.block_size;
    const i64 token = slot - block * paged.block_size;
    return block * paged.block_stride + token * paged.token_stride + head * paged.head_stride;
}

// Element offset of the row of a head at a sequence's position: row_offset(slot_of(..)) without its division.
KVB_INLINE i64 row_offset(const Paged& paged, const i32* block_table, i32 position, i32 head) {
    const i32 column = position / paged.block_size;
    const i32 token = position - column * paged.block_size;
    return block_table[column] * paged.block_stride + token * paged.token_stride + head * paged.head_stride;
}

} // namespace kvb
