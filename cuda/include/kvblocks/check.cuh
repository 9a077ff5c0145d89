// Reporting of wrong values in index arrays, which a kernel skips.
//
// Owns the error report: u32 [4] of code, row, column and the value's low 32 bits, zero at the start.
// Includes device_compat.cuh only. Invariant: a kernel never follows an index that it has not compared with
// its bounds; the first thread that finds a wrong one keeps the report, whether or not somebody reads it.
#pragma once

#include "device_compat.cuh"

namespace kvb {

enum ErrorCode : u32 {
    error_none = 0,
    error_slot = 1,       // slot_mapping [row] is below -1 or beyond the storage
    error_block = 2,      // block_tables [row, column] is no block of the storage
    error_seq_len = 3,    // seq_lens [row] is negative or beyond the row's table
    error_query_len = 4,  // row has more queries than keys, or query_start_loc is not ascending
    error_copy = 5,       // copies [row] names a block beyond the storage
    error_move = 6,       // moves [row] names a slot beyond the storage
    error_move_start = 7, // move_start [row] is negative, beyond moves, or above the next
    error_indptr = 8,     // kv_indptr [row] is negative, beyond kv_indices, or above the next
};

// report: u32 [4], or nullptr where nobody asked.
KVB_DEVICE void report_error(u32* report, ErrorCode code, i32 row, i32 column, i64 value) {
    if (report != nullptr && atomic_exchange_if(report, error_none, code) == error_none) {
        report[1] = static_cast<u32>(row);
        report[2] = static_cast<u32>(column);
        report[3] = static_cast<u32>(value);
    }
}

} // namespace kvb
