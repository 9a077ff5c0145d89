//! What is counted for a namespace and, under the same names, for the pool; and what a group of sequences uses. Imports
//! `block_size`, `ids`, `manager`.
//!
//! Invariant: counters of namespaces and of the pool move with each change, O(1); those of a group of sequences are
//! counted when asked for, since whether a block is shared changes with what its other owners do.

use std::collections::HashMap;

use crate::block_size::BlockSize;
use crate::error::Result;
use crate::ids::{BlockId, SeqHandle};
use crate::manager::Manager;
use crate::sequence::Share;

/// What a namespace, or the pool, uses now, has used at most, and has asked for so far. `_blocks`, `_slots`, `_tokens`
/// and `_requests` are counted in those units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are the documentation; the Python stub explains each
pub struct Usage {
    pub live_blocks: usize,
    pub cached_blocks: usize,
    pub held_blocks: usize,
    pub logical_blocks: usize,
    pub promised_blocks: usize,
    pub num_seqs: usize,
    pub used_slots: u64,
    /// Of a snapshot.
    pub allocated_slots: u64,
    pub reserved_slots: usize,
    pub peak_live_blocks: usize,
    pub peak_logical_blocks: usize,
    pub queried_requests: u64,
    pub queried_blocks: u64,
    pub queried_tokens: u64,
    pub hit_requests: u64,
    pub hit_blocks: u64,
    pub hit_tokens: u64,
    pub readmit_requests: u64,
    pub readmit_queried_blocks: u64,
    pub readmit_queried_tokens: u64,
    pub readmit_hit_requests: u64,
    pub readmit_hit_blocks: u64,
    pub readmit_hit_tokens: u64,
    pub collided_requests: u64,
    pub collided_blocks: u64,
    /// Of a snapshot.
    pub collided_tokens: u64,
    pub evicting_requests: u64,
    pub evicted_blocks: u64,
    /// Of a snapshot.
    pub evicted_tokens: u64,
    pub copied_blocks: u64,
    pub preemptions: u64,
}

/// A look-up that was served.
#[derive(Clone, Copy)]
pub(crate) struct Query {
    pub num_tokens: usize,
    pub num_cached_tokens: usize,
    /// Blocks met that have an equal digest and other content.
    pub num_collided: u64,
    pub is_readmission: bool,
}

impl Usage {
    /// Count a served look-up. Re-admissions hit their own blocks, so they are kept apart from the hit rate.
    pub(crate) fn count_query(&mut self, query: Query, size: BlockSize) {
        let (tokens, hits) = (query.num_tokens as u64, query.num_cached_tokens as u64);
        let (blocks, hit_blocks) =
            (size.column(query.num_tokens) as u64, size.blocks(query.num_cached_tokens) as u64);
        self.collided_requests += u64::from(query.num_collided > 0);
        self.collided_blocks += query.num_collided;
        if query.is_readmission {
            self.readmit_requests += 1;
            self.readmit_queried_blocks += blocks;
            self.readmit_queried_tokens += tokens;
            self.readmit_hit_requests += u64::from(hits > 0);
            self.readmit_hit_blocks += hit_blocks;
            self.readmit_hit_tokens += hits;
        } else {
            self.queried_requests += 1;
            self.queried_blocks += blocks;
            self.queried_tokens += tokens;
            self.hit_requests += u64::from(hits > 0);
            self.hit_blocks += hit_blocks;
            self.hit_tokens += hits;
        }
    }

    /// Count a sequence as `new` in place of `old`.
    #[inline]
    pub(crate) fn replace(&mut self, old: Share, new: Share) {
        self.logical_blocks = self.logical_blocks + new.blocks as usize - old.blocks as usize;
        self.promised_blocks = self.promised_blocks + new.promised as usize - old.promised as usize;
        self.reserved_slots = self.reserved_slots + new.ahead as usize - old.ahead as usize;
    }

    #[inline]
    pub(crate) fn note_peaks(&mut self) {
        self.peak_live_blocks = self.peak_live_blocks.max(self.live_blocks);
        self.peak_logical_blocks = self.peak_logical_blocks.max(self.logical_blocks);
    }

    pub(crate) fn reset_peaks(&mut self) {
        (self.peak_live_blocks, self.peak_logical_blocks) = (self.live_blocks, self.logical_blocks);
    }

    /// With what follows from the size of a block.
    pub(crate) fn snapshot(self, size: BlockSize) -> Self {
        let size = size.get() as u64;
        Self {
            allocated_slots: self.live_blocks as u64 * size,
            collided_tokens: self.collided_blocks * size,
            evicted_tokens: self.evicted_blocks * size,
            ..self
        }
    }

    /// Blocks that the next request may have: the cached ones.
    pub fn reclaimable_blocks(&self) -> usize {
        self.cached_blocks
    }

    /// Share of the allocated slots that hold no computed token; 0 if there are none.
    pub fn internal_fragmentation(&self) -> f64 {
        internal_fragmentation(self.used_slots, self.allocated_slots)
    }

    /// Logical blocks per live block; 1 if there are none.
    pub fn sharing(&self) -> f64 {
        sharing(self.logical_blocks, self.live_blocks)
    }
}

/// What a group of sequences uses now, each block counted once however many of them own it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceUsage {
    /// Blocks that they own.
    pub live_blocks: usize,
    /// Those of them that other sequences own too.
    pub shared_blocks: usize,
    /// Those that `free` of the group would give back now: neither shared nor in a transfer.
    pub reclaimable_blocks: usize,
    /// Entries of their tables, holes not counted.
    pub logical_blocks: usize,
    /// Written high-water marks of the blocks.
    pub used_slots: u64,
    /// Slots of the blocks.
    pub allocated_slots: u64,
    /// Slots reserved and not yet scheduled: chunks to come, look-ahead.
    pub reserved_slots: usize,
}

impl SequenceUsage {
    /// Blocks that no other sequence owns.
    pub fn private_blocks(&self) -> usize {
        self.live_blocks - self.shared_blocks
    }

    /// Share of the allocated slots that hold no computed token; 0 if there are none.
    pub fn internal_fragmentation(&self) -> f64 {
        internal_fragmentation(self.used_slots, self.allocated_slots)
    }

    /// Logical blocks per live block; 1 if there are none.
    pub fn sharing(&self) -> f64 {
        sharing(self.logical_blocks, self.live_blocks)
    }
}

impl Manager {
    /// What a group of sequences uses now. O(its blocks).
    pub fn sequence_usage(&mut self, handles: &[SeqHandle]) -> Result<SequenceUsage> {
        self.check_batch(handles, false)?;
        let mut usage = SequenceUsage::default();
        let mut owned: HashMap<BlockId, u32> = HashMap::new();
        for &handle in handles {
            let seq = &self.seqs[handle];
            usage.logical_blocks += seq.share.blocks as usize;
            usage.reserved_slots += seq.share.ahead as usize;
            seq.owned_blocks().for_each(|block| *owned.entry(block).or_default() += 1);
        }
        usage.live_blocks = owned.len();
        usage.allocated_slots = (owned.len() * self.size.get()) as u64;
        for (block, owned) in owned {
            let refs = self.pool.refs(block);
            let holds = self.pool.holds.get(&block).copied().unwrap_or(0);
            usage.shared_blocks += usize::from(refs - holds > owned);
            usage.reclaimable_blocks += usize::from(refs == owned);
            usage.used_slots += self.pool.fill(block) as u64;
        }
        Ok(usage)
    }
}

fn internal_fragmentation(used_slots: u64, allocated_slots: u64) -> f64 {
    match allocated_slots {
        0 => 0.0,
        allocated => 1.0 - used_slots as f64 / allocated as f64,
    }
}

fn sharing(logical_blocks: usize, live_blocks: usize) -> f64 {
    match live_blocks {
        0 => 1.0,
        live => logical_blocks as f64 / live as f64,
    }
}
