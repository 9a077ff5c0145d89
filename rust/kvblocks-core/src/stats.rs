//! Counters of the manager, the snapshot that users see, and the series of samples. Imports `manager`.
//!
//! Invariant: a snapshot is O(1): every counter is kept up to date by the change that moves it.

use std::sync::Arc;

use crate::block_size::BlockSize;
use crate::keys::Keys;
use crate::manager::Manager;
use crate::namespaces::Usage;

/// Running totals since the manager was made; peaks since they were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub steps: u64,
    pub peak_live_blocks: usize,
    pub peak_logical_blocks: usize,
    pub queried_requests: u64,
    pub hit_requests: u64,
    pub queried_blocks: u64,
    pub hit_blocks: u64,
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    pub readmit_requests: u64,
    pub readmit_hit_requests: u64,
    pub readmit_queried_tokens: u64,
    pub readmit_hit_tokens: u64,
    pub copied_blocks: u64,
    pub preemptions: u64,
    pub completed_transfers: u64,
    pub failed_transfers: u64,
    pub cancelled_transfers: u64,
}

impl Counters {
    /// Count a served look-up. Re-admissions hit their own blocks, so they are kept apart from the hit rate.
    pub fn count_query(
        &mut self,
        num_tokens: usize,
        num_cached: usize,
        size: BlockSize,
        is_readmission: bool,
    ) {
        let (tokens, hits) = (num_tokens as u64, num_cached as u64);
        if is_readmission {
            self.readmit_requests += 1;
            self.readmit_hit_requests += u64::from(num_cached > 0);
            self.readmit_queried_tokens += tokens;
            self.readmit_hit_tokens += hits;
        } else {
            self.queried_requests += 1;
            self.hit_requests += u64::from(num_cached > 0);
            self.queried_blocks += size.column(num_tokens) as u64;
            self.hit_blocks += size.blocks(num_cached) as u64;
            self.queried_tokens += tokens;
            self.hit_tokens += hits;
        }
    }
}

/// State of the pool at one moment. `_blocks`, `_slots`, `_tokens` and `_requests` are counted in those units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the documentation; the Python stub explains each
pub struct Stats {
    pub capacity_blocks: usize,
    pub free_blocks: usize,
    pub live_blocks: usize,
    pub cached_blocks: usize,
    pub held_blocks: usize,
    pub logical_blocks: usize,
    pub promised_blocks: usize,
    pub num_seqs: usize,
    pub num_transfers: usize,
    pub num_steps: u64,
    pub used_slots: u64,
    pub allocated_slots: u64,
    pub reserved_slots: usize,
    pub peak_live_blocks: usize,
    pub peak_logical_blocks: usize,
    pub queried_requests: u64,
    pub hit_requests: u64,
    pub queried_blocks: u64,
    pub hit_blocks: u64,
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    pub readmit_requests: u64,
    pub readmit_hit_requests: u64,
    pub readmit_queried_tokens: u64,
    pub readmit_hit_tokens: u64,
    pub hash_collisions: u64,
    pub evicted_blocks: u64,
    pub copied_blocks: u64,
    pub preemptions: u64,
    pub completed_transfers: u64,
    pub failed_transfers: u64,
    pub cancelled_transfers: u64,
}

impl Stats {
    /// Share of the allocated slots that hold no computed token; 0 for an idle pool.
    pub fn internal_fragmentation(&self) -> f64 {
        match self.allocated_slots {
            0 => 0.0,
            allocated => 1.0 - self.used_slots as f64 / allocated as f64,
        }
    }

    /// Logical blocks per physical block; 1 for an idle pool.
    pub fn sharing(&self) -> f64 {
        match self.live_blocks {
            0 => 1.0,
            live => self.logical_blocks as f64 / live as f64,
        }
    }
}

/// The long form: where the free blocks lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// Free blocks, cached ones not counted.
    pub free_blocks: usize,
    /// Runs of consecutive free ids.
    pub num_runs: usize,
    /// Blocks in the longest run.
    pub longest_run_blocks: usize,
    /// Runs by length: entry i counts those of `2^i` to `2^(i+1) - 1` blocks.
    pub run_histogram: Vec<u64>,
}

/// One sample: step, live, cached, free and held blocks, used slots, tables' blocks.
pub type Sample = [u64; 7];

/// The last samples of a manager.
pub(crate) struct Series {
    every: usize,
    len: usize,
    samples: Vec<Sample>,
    next: usize,
}

impl Series {
    pub fn new(every: usize, len: usize) -> Self {
        let len = if every == 0 { 0 } else { len };
        Self { every, len, samples: Vec::with_capacity(len), next: 0 }
    }

    fn push(&mut self, sample: Sample) {
        if self.samples.len() < self.len {
            self.samples.push(sample);
        } else {
            self.samples[self.next] = sample;
            self.next = (self.next + 1) % self.len;
        }
    }
}

impl Manager {
    /// Counters of the pool. O(1).
    pub fn stats(&self) -> Stats {
        let live_blocks = self.pool.num_live();
        let (counters, share) = (self.counters, self.ledger.0);
        Stats {
            capacity_blocks: self.capacity(),
            free_blocks: self.pool.num_free(),
            live_blocks,
            cached_blocks: self.pool.num_cached(),
            held_blocks: self.pool.num_held(),
            logical_blocks: share.blocks,
            promised_blocks: share.promised,
            num_seqs: self.seqs.len(),
            num_transfers: self.transfers.len(),
            num_steps: counters.steps,
            used_slots: self.pool.used_slots(),
            allocated_slots: (live_blocks * self.size.get()) as u64,
            reserved_slots: share.ahead,
            peak_live_blocks: counters.peak_live_blocks,
            peak_logical_blocks: counters.peak_logical_blocks,
            queried_requests: counters.queried_requests,
            hit_requests: counters.hit_requests,
            queried_blocks: counters.queried_blocks,
            hit_blocks: counters.hit_blocks,
            queried_tokens: counters.queried_tokens,
            hit_tokens: counters.hit_tokens,
            readmit_requests: counters.readmit_requests,
            readmit_hit_requests: counters.readmit_hit_requests,
            readmit_queried_tokens: counters.readmit_queried_tokens,
            readmit_hit_tokens: counters.readmit_hit_tokens,
            hash_collisions: self.pool.collisions,
            evicted_blocks: self.pool.evictions,
            copied_blocks: counters.copied_blocks,
            preemptions: counters.preemptions,
            completed_transfers: counters.completed_transfers,
            failed_transfers: counters.failed_transfers,
            cancelled_transfers: counters.cancelled_transfers,
        }
    }

    /// What one namespace uses; zeros for one that nothing belongs to. O(length of the keys).
    pub fn namespace_usage(&mut self, keys: &Keys) -> Usage {
        let framed: Arc<[u8]> = keys.namespace();
        self.pool.namespaces.find(&framed).map(|index| *self.pool.namespaces.usage(index)).unwrap_or_default()
    }

    /// Where the free blocks lie. Paged allocation does not care; whoever wants to shrink the pool does.
    /// O(num_blocks / 64 + runs).
    pub fn fragmentation(&self) -> Fragmentation {
        let mut long = Fragmentation::default();
        self.pool.list.free_runs(|run| {
            let class = run.ilog2() as usize;
            if long.run_histogram.len() <= class {
                long.run_histogram.resize(class + 1, 0);
            }
            long.run_histogram[class] += 1;
            long.free_blocks += run;
            long.num_runs += 1;
            long.longest_run_blocks = long.longest_run_blocks.max(run);
        });
        long
    }

    /// The samples kept, oldest first. O(samples).
    pub fn series(&self) -> impl Iterator<Item = &Sample> {
        let (newer, older) = self.series.samples.split_at(self.series.next);
        older.iter().chain(newer)
    }

    /// Start the peaks afresh from the current use. O(1).
    pub fn reset_peaks(&mut self) {
        self.counters.peak_live_blocks = 0;
        self.counters.peak_logical_blocks = 0;
        self.note_peaks();
    }

    /// Count a step, and sample it if it is due.
    #[inline]
    pub(crate) fn note_step(&mut self) {
        self.counters.steps += 1;
        if self.series.len > 0 && self.counters.steps.is_multiple_of(self.series.every as u64) {
            self.series.push([
                self.counters.steps,
                self.pool.num_live() as u64,
                self.pool.num_cached() as u64,
                self.pool.num_free() as u64,
                self.pool.num_held() as u64,
                self.pool.used_slots(),
                self.ledger.0.blocks as u64,
            ]);
        }
    }
}
