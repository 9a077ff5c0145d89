// upload_step: the index arrays of a step from one staged copy into the fixed arrays that captured kernels
// read.
//
// Run time: everything. Grid: blocks, each of which takes every grid-th run. Runs and their words are written
// by the host that also sizes the arrays, so nothing is compared here.

#include "kvblocks/device_compat.cuh"

namespace kvb {

struct UploadRun {
    i32 source;      // first word, counted from the first staged one
    i32 destination; // first word of the arena
    i32 num_words;
    i32 padding;
};
static_assert(sizeof(UploadRun) == 16, "the host packs the same bytes");

struct UploadParams {
    const UploadRun* runs; // [num_runs]
    const u32* words;      // staged
    u32* arena;            // all fixed arrays, one after the other
    i32 num_runs;
    i32 padding;
};
static_assert(sizeof(UploadParams) == 32, "the host packs the same bytes");

constexpr i32 upload_threads = 128;

KVB_DEVICE void upload_step(const UploadParams& params) {
    for (i32 index = block_x(); index < params.num_runs; index += grid_x()) {
        const UploadRun& run = params.runs[index];
        const u32* from = params.words + run.source;
        u32* to = params.arena + run.destination;
        for (i32 word = thread_index(); word < run.num_words; word += upload_threads) {
            to[word] = from[word];
        }
    }
}

} // namespace kvb

KVB_KERNEL(kvb_upload_step, kvb::UploadParams, kvb::upload_threads, 8) {
    kvb::upload_step(params);
}
