//! Cutting a call into units. Imports the arguments of `attend`.
//!
//! Invariant: every visible pair of a query head and a key is in exactly one unit, and which keys share a unit does not
//! depend on the number of threads.

use std::ops::Range;

use super::tile::TILE;
use super::Call;
use crate::simd::MAX_LANES;
use crate::Execution;

/// Keys of a unit with few queries: a multiple of the tile, large against the cost of merging two units.
const SPLIT: usize = 1024;
/// Units that a row with many queries is cut into where its keys allow it, so that a short chunk over a long context
/// has work for many threads.
const WIDE_UNITS: usize = 64;
/// Bytes of K and V that a tile of a unit with few queries may have: it and the next are in a second-level cache.
const TILE_BYTES: usize = 256 << 10;

/// Some queries and heads of a row over a run of keys.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    pub row: usize,
    /// Tokens of the step.
    pub queries: Range<usize>,
    /// Position of the first query in its sequence.
    pub position: usize,
    /// Heads of K and V.
    pub heads: Range<usize>,
    /// Positions; some may be visible to some of the queries only.
    pub keys: Range<usize>,
    /// Where the softmax of the first query goes; that of the next is `partial_step` further.
    pub partial: usize,
    pub partial_step: usize,
    /// Whether lanes are queries.
    pub wide: bool,
    /// Whether the keys are in the tail.
    pub in_tail: bool,
}

/// The units of a call.
#[derive(Debug)]
pub(super) struct Plan {
    pub units: Vec<Unit>,
    /// Per token, its running softmaxes, in the order of their keys.
    pub partials: Vec<Range<usize>>,
    pub num_partials: usize,
}

impl Plan {
    pub(super) fn new(call: &Call<'_>, execution: Execution) -> Self {
        let num_tokens = call.num_tokens();
        let mut plan = Self { units: Vec::new(), partials: vec![0..0; num_tokens], num_partials: 0 };
        // How many heads share a unit of few queries changes no result, so it may depend on the number of threads.
        let together = heads_together(call, execution);
        for (row, &seq_len) in call.batch.seq_lens.iter().enumerate() {
            let queries = call.batch.queries(row);
            if seq_len == 0 || queries.is_empty() {
                continue;
            }
            let first_position = seq_len as usize - queries.len();
            if queries.len() * call.group() >= execution.isa.lanes() {
                plan.add_wide(call, row, queries, first_position, execution);
            } else {
                for (index, token) in queries.enumerate() {
                    plan.add_narrow(call, row, token, first_position + index, together);
                }
            }
        }
        plan
    }

    fn add_narrow(&mut self, call: &Call<'_>, row: usize, token: usize, position: usize, together: usize) {
        let keys = call.options.keys(position);
        let num_heads = call.k.paged.num_heads;
        let first = self.num_partials;
        let num_stored = call.num_stored(row);
        let mut start = keys.start;
        while start < keys.end {
            let in_tail = start >= num_stored;
            let end = if in_tail { keys.end } else { keys.end.min(num_stored) };
            let end = end.min((start / SPLIT + 1) * SPLIT);
            for head in (0..num_heads).step_by(together) {
                self.units.push(Unit {
                    row,
                    queries: token..token + 1,
                    position,
                    heads: head..num_heads.min(head + together),
                    keys: start..end,
                    partial: self.num_partials,
                    partial_step: 1,
                    wide: false,
                    in_tail,
                });
            }
            self.num_partials += 1;
            start = end;
        }
        self.partials[token] = first..self.num_partials;
    }

    fn add_wide(
        &mut self,
        call: &Call<'_>,
        row: usize,
        queries: Range<usize>,
        first_position: usize,
        execution: Execution,
    ) {
        let num_heads = call.k.paged.num_heads;
        let together = (execution.isa.wide_rows() / call.group()).max(1);
        let first_key = call.options.keys(first_position).start;
        let num_keys = first_position + queries.len() - first_key;
        let num_units = queries.len().div_ceil(together) * num_heads;
        let num_splits = (WIDE_UNITS / num_units).clamp(1, num_keys.div_ceil(SPLIT));
        let split = num_keys.div_ceil(num_splits).next_multiple_of(TILE);
        // Runs of keys: some of the cache, then what is in the tail.
        let num_stored = call.num_stored(row).max(first_key);
        let last_key = first_key + num_keys;
        let mut splits: Vec<(Range<usize>, bool)> = (first_key..num_stored.min(last_key))
            .step_by(split)
            .map(|start| (start..num_stored.min(last_key).min(start + split), false))
            .collect();
        if num_stored < last_key {
            splits.push((num_stored..last_key, true));
        }
        let num_splits = splits.len();
        for index in (0..queries.len()).step_by(together) {
            let some = index..queries.len().min(index + together);
            let position = first_position + index;
            let visible = call.options.keys(position).start..first_position + some.end;
            let partial = self.num_partials + index * num_splits;
            for head in 0..num_heads {
                for (number, (run, in_tail)) in splits.iter().enumerate() {
                    let keys = run.start.max(visible.start)..run.end.min(visible.end);
                    if keys.is_empty() {
                        continue;
                    }
                    self.units.push(Unit {
                        row,
                        queries: queries.start + some.start..queries.start + some.end,
                        position,
                        heads: head..head + 1,
                        keys,
                        partial: partial + number,
                        partial_step: num_splits,
                        wide: true,
                        in_tail: *in_tail,
                    });
                }
            }
        }
        for (index, token) in queries.clone().enumerate() {
            let first = self.num_partials + index * num_splits;
            self.partials[token] = first..first + num_splits;
        }
        self.num_partials += queries.len() * num_splits;
    }
}

/// Heads of K that a unit of few queries takes at once: many, so that memory is read in long runs, but few enough for
/// a tile to stay in a cache and for all threads to have work.
fn heads_together(call: &Call<'_>, execution: Execution) -> usize {
    let num_heads = call.k.paged.num_heads;
    let row_bytes = call.k.row_bytes() + call.v.row_bytes();
    let cached = (TILE_BYTES / TILE / row_bytes.max(1)).clamp(1, num_heads);
    let splits: usize = call.batch.seq_lens.iter().map(|&len| (len.max(0) as usize).div_ceil(SPLIT)).sum();
    let wanted = if execution.num_threads == 1 { 1 } else { 4 * execution.num_threads };
    let pieces = wanted.div_ceil(splits.max(1)).min(num_heads);
    cached.min(num_heads.div_ceil(pieces))
}

const _: () = assert!(SPLIT.is_multiple_of(TILE) && TILE.is_multiple_of(MAX_LANES));
