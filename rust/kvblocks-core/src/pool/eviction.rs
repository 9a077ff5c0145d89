//! What the pool hands out: blocks without content, then cached ones in order of last use. Part of `pool`.
//!
//! Invariant: a block is withdrawn from the index before it is handed out. Evictions of neighbours of one namespace are
//! counted together.

use super::Pool;
use crate::ids::BlockId;
use crate::prefetch::AHEAD;
use crate::prefix;

/// A run of evictions of blocks of one namespace, counted together.
#[derive(Default)]
struct Evictions {
    namespace: u32,
    count: usize,
    /// A block further on in the queue, to look at ahead of its eviction.
    ahead: Option<BlockId>,
}

impl Pool {
    /// Hand out a block with one reference and no content: a free one, else the least recently used cached one. O(1).
    #[inline]
    pub fn take(&mut self, namespace: u32) -> Option<BlockId> {
        let block = self.take_uncounted(namespace)?;
        self.count_taken(1, namespace);
        Some(block)
    }

    /// `take` of a block that the caller counts, with others, by `count_taken`. O(1).
    #[inline]
    pub fn take_uncounted(&mut self, namespace: u32) -> Option<BlockId> {
        let block = match self.list.pop_unqueued() {
            Some(block) => block,
            None => self.evict()?,
        };
        self.blocks.begin(block, namespace);
        Some(block)
    }

    #[inline(never)]
    fn evict(&mut self) -> Option<BlockId> {
        let mut evictions = Evictions::default();
        let block = self.pop_queued(&mut evictions);
        self.count_evictions(&evictions);
        block
    }

    /// Count blocks that have been taken for a namespace.
    #[inline]
    pub fn count_taken(&mut self, num_blocks: usize, namespace: u32) {
        self.num_live += num_blocks as u32;
        self.namespaces.usage(namespace).live_blocks += num_blocks;
    }

    /// Ask for what is known of the block that will be taken after `count` others, if it is one without content.
    #[inline]
    pub fn prefetch_free(&self, count: usize) {
        if let Some(block) = self.list.peek_recycled(count) {
            self.blocks.prefetch_refs(block);
            self.blocks.prefetch(block);
        }
    }

    /// `take`, `count` times, onto the end of a table that has room; the caller has seen that so many are available.
    #[inline]
    pub fn take_many(&mut self, count: usize, namespace: u32, table: &mut Vec<BlockId>) {
        let num_taken = count.min(self.list.num_unqueued() as usize);
        for _ in 0..num_taken {
            if let Some(block) = self.list.pop_unqueued() {
                self.blocks.begin(block, namespace);
                table.push(block);
            }
        }
        if count > num_taken {
            self.evict_many(count - num_taken, namespace, table);
        }
        self.count_taken(count, namespace);
    }

    #[inline(never)]
    fn evict_many(&mut self, count: usize, namespace: u32, table: &mut Vec<BlockId>) {
        let mut evictions = Evictions { ahead: self.list.front(), ..Evictions::default() };
        for _ in 0..AHEAD.min(count) {
            self.look_ahead(&mut evictions);
        }
        for _ in 0..count {
            if let Some(block) = self.pop_queued(&mut evictions) {
                self.blocks.begin(block, namespace);
                table.push(block);
            }
        }
        self.count_evictions(&evictions);
    }

    /// Take the front of the queue, evicting its content.
    #[inline]
    fn pop_queued(&mut self, evictions: &mut Evictions) -> Option<BlockId> {
        self.look_ahead(evictions);
        let block = self.list.pop_front(&mut self.blocks)?;
        match &mut self.index {
            Some(index) if prefix::is_published(&self.blocks, block) => {
                let namespace = self.blocks[block].namespace;
                index.withdraw(block, &mut self.blocks);
                if namespace != evictions.namespace {
                    self.count_evictions(evictions);
                    (evictions.namespace, evictions.count) = (namespace, 0);
                }
                evictions.count += 1;
            }
            _ => self.list.note_taken(block),
        }
        Some(block)
    }

    /// Ask for the index entry of a block further on in the queue, whose record is read on the way.
    #[inline]
    fn look_ahead(&self, evictions: &mut Evictions) {
        if let (Some(block), Some(index)) = (evictions.ahead, &self.index) {
            index.prefetch(self.blocks[block].fragment());
            evictions.ahead = self.list.after(block, &self.blocks);
        }
    }

    fn count_evictions(&mut self, evictions: &Evictions) {
        if evictions.count > 0 {
            self.evictions += evictions.count as u64;
            self.num_cached -= evictions.count as u32;
            let usage = self.namespaces.usage(evictions.namespace);
            usage.cached_blocks -= evictions.count;
            usage.evicted_blocks += evictions.count as u64;
            self.namespaces.drop_refs(evictions.namespace, evictions.count);
        }
    }

    /// Drop the cached blocks that `which` chooses by namespace; returns how many. O(cached blocks).
    pub fn drop_cached(&mut self, mut which: impl FnMut(u32) -> bool) -> usize {
        let chosen: Vec<_> = self
            .list
            .queued(&self.blocks)
            .filter(|&block| self.is_published(block) && which(self.blocks[block].namespace))
            .collect();
        for &block in &chosen {
            self.withdraw(block);
        }
        chosen.len()
    }
}
