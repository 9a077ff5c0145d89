// Parts of a cache as bytes: what copies of blocks and of slots move, whatever they mean.
//
// Owns Region and the function that copies runs of bytes. Includes device_compat.cuh only.
#pragma once

#include "device_compat.cuh"

namespace kvb {

// One array of a cache (K, V or scales of a layer) whose elements are runs of contiguous bytes:
// [num_blocks, num_tokens, num_heads] runs. POD of 64 bytes; the host keeps a table of them on the device.
struct Region {
    u8* base;
    i64 block_stride; // bytes, as all strides
    i64 token_stride;
    i64 head_stride;
    i64 run_bytes;
    i32 num_blocks;
    i32 num_tokens; // of a block
    i32 num_heads;  // of a token
    i32 unit_bytes; // 16, 4 or 1: what addresses, strides and runs are multiples of
    i64 padding;
};
static_assert(sizeof(Region) == 64, "the host packs the same bytes");

template <typename Unit>
KVB_DEVICE Unit load_unit(const u8* from) {
    if constexpr (sizeof(Unit) == 16) {
        return load16(from);
    } else {
        return *reinterpret_cast<const Unit*>(from);
    }
}

template <typename Unit>
KVB_DEVICE void store_unit(u8* to, const Unit& unit) {
    if constexpr (sizeof(Unit) == 16) {
        store16(to, unit);
    } else {
        *reinterpret_cast<Unit*>(to) = unit;
    }
}

} // namespace kvb
