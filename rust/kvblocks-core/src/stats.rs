//! Counters of the manager, and the snapshot that users see. Imports `manager`.
//!
//! Invariant: a snapshot is O(1): every counter is kept up to date by the change that moves it.

use crate::manager::Manager;

/// Running totals since the manager was made; peaks since they were reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub peak_live_blocks: usize,
    pub peak_logical_blocks: usize,
    pub queried_requests: u64,
    pub hit_requests: u64,
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    pub readmit_queried_tokens: u64,
    pub readmit_hit_tokens: u64,
    pub copied_blocks: u64,
    pub preemptions: u64,
}

impl Counters {
    /// Count a served look-up. Re-admissions hit their own blocks, so they are kept apart from the hit rate.
    pub fn count_query(&mut self, num_tokens: usize, num_cached: usize, is_readmission: bool) {
        let (tokens, hits) = (num_tokens as u64, num_cached as u64);
        if is_readmission {
            self.readmit_queried_tokens += tokens;
            self.readmit_hit_tokens += hits;
        } else {
            self.queried_requests += 1;
            self.hit_requests += u64::from(num_cached > 0);
            self.queried_tokens += tokens;
            self.hit_tokens += hits;
        }
    }
}

/// State of the pool at one moment. `_blocks`, `_slots` and `_tokens` are counted in those units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the documentation; the Python stub explains each
pub struct Stats {
    pub capacity_blocks: usize,
    pub free_blocks: usize,
    pub live_blocks: usize,
    pub cached_blocks: usize,
    pub held_blocks: usize,
    pub logical_blocks: usize,
    pub num_seqs: usize,
    pub used_slots: u64,
    pub allocated_slots: u64,
    pub peak_live_blocks: usize,
    pub peak_logical_blocks: usize,
    pub queried_requests: u64,
    pub hit_requests: u64,
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    pub readmit_queried_tokens: u64,
    pub readmit_hit_tokens: u64,
    pub hash_collisions: u64,
    pub evicted_blocks: u64,
    pub copied_blocks: u64,
    pub preemptions: u64,
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

impl Manager {
    /// Counters of the pool. O(1).
    pub fn stats(&self) -> Stats {
        let live_blocks = self.pool.num_live() as usize;
        let counters = self.counters;
        Stats {
            capacity_blocks: self.capacity(),
            free_blocks: self.pool.lists.num_free() as usize,
            live_blocks,
            cached_blocks: self.pool.lists.num_cached() as usize,
            held_blocks: 0,
            logical_blocks: self.num_logical,
            num_seqs: self.seqs.len(),
            used_slots: self.pool.used_slots(),
            allocated_slots: (live_blocks * self.pool.block_size) as u64,
            peak_live_blocks: counters.peak_live_blocks,
            peak_logical_blocks: counters.peak_logical_blocks,
            queried_requests: counters.queried_requests,
            hit_requests: counters.hit_requests,
            queried_tokens: counters.queried_tokens,
            hit_tokens: counters.hit_tokens,
            readmit_queried_tokens: counters.readmit_queried_tokens,
            readmit_hit_tokens: counters.readmit_hit_tokens,
            hash_collisions: self.pool.collisions,
            evicted_blocks: self.pool.evictions,
            copied_blocks: counters.copied_blocks,
            preemptions: counters.preemptions,
        }
    }

    /// Start the peaks afresh from the current use. O(1).
    pub fn reset_peaks(&mut self) {
        self.counters.peak_live_blocks = 0;
        self.counters.peak_logical_blocks = 0;
        self.note_peaks();
    }
}
