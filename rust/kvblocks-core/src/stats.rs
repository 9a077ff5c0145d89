//! Counters of the manager, the snapshot that users see, and the series of samples. Imports `manager`, `usage`.
//!
//! Invariant: a snapshot is O(1): every counter is kept up to date by the change that moves it.

use crate::error::Result;
use crate::keys::Keys;
use crate::manager::Manager;
use crate::pool::Pool;
use crate::usage::Usage;

/// Running totals since the manager was made; peaks since they were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub steps: u64,
    /// The pool's. What it uses now is the pool's and the ledger's to say.
    pub total: Usage,
    pub completed_transfers: u64,
    pub failed_transfers: u64,
    pub cancelled_transfers: u64,
}

/// State of the pool at one moment: its usage, and what only the pool as a whole has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the documentation; the Python stub explains each
pub struct Stats {
    pub usage: Usage,
    pub capacity_blocks: usize,
    pub free_blocks: usize,
    pub num_transfers: usize,
    pub num_steps: u64,
    pub completed_transfers: u64,
    pub failed_transfers: u64,
    pub cancelled_transfers: u64,
}

/// The pool's usage reads as a part of its stats.
impl std::ops::Deref for Stats {
    type Target = Usage;

    fn deref(&self) -> &Usage {
        &self.usage
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
        Stats {
            usage: self.pool_usage().snapshot(self.size),
            capacity_blocks: self.capacity(),
            free_blocks: self.pool.num_free(),
            num_transfers: self.transfers.len(),
            num_steps: self.counters.steps,
            completed_transfers: self.counters.completed_transfers,
            failed_transfers: self.counters.failed_transfers,
            cancelled_transfers: self.counters.cancelled_transfers,
        }
    }

    fn pool_usage(&self) -> Usage {
        Usage {
            live_blocks: self.pool.num_live(),
            cached_blocks: self.pool.num_cached(),
            held_blocks: self.pool.num_held(),
            num_seqs: self.seqs.len(),
            used_slots: self.pool.used_slots(),
            evicted_blocks: self.pool.evictions,
            ..self.counters.total
        }
    }

    /// What one namespace uses, and what has been counted for it; zeros for one that is not known. O(length of the keys).
    pub fn namespace_usage(&mut self, keys: &Keys) -> Result<Usage> {
        keys.check(0)?;
        let index = self.pool.namespaces.find(&keys.namespace());
        Ok(index.map(|index| *self.pool.namespaces.usage(index)).unwrap_or_default().snapshot(self.size))
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

    /// Start the peaks afresh from the current use. O(namespaces).
    pub fn reset_peaks(&mut self) {
        let mut now = self.pool_usage();
        now.reset_peaks();
        self.counters.total.peak_live_blocks = now.peak_live_blocks;
        self.counters.total.peak_logical_blocks = now.peak_logical_blocks;
        self.pool.namespaces.reset_peaks();
    }

    /// Note the peaks of the pool, and of the namespaces whose sequences have been settled. O(1) each.
    #[inline]
    pub(crate) fn note_peaks(&mut self) {
        let total = &mut self.counters.total;
        total.peak_live_blocks = total.peak_live_blocks.max(self.pool.num_live());
        total.peak_logical_blocks = total.peak_logical_blocks.max(total.logical_blocks);
        self.pool.namespaces.note_peaks();
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
                self.counters.total.logical_blocks as u64,
            ]);
        }
    }
}

/// Count a request that took blocks since there were `before` evictions, if that evicted any.
#[inline]
pub(crate) fn note_evictions(counters: &mut Counters, pool: &mut Pool, namespace: u32, before: u64) {
    if pool.evictions > before {
        counters.total.evicting_requests += 1;
        pool.namespaces.usage(namespace).evicting_requests += 1;
    }
}
