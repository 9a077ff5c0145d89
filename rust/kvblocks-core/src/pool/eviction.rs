//! What the pool hands out: blocks without content, then cached ones in order of last use. Part of `pool`.
//!
//! Invariant: a block is withdrawn from the index before it is handed out. Evictions of neighbours of one namespace are
//! counted together.

use super::Pool;
use crate::blocks::Blocks;
use crate::ids::BlockId;
use crate::prefetch::AHEAD;

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
        let mut taken = None;
        self.evict_each(1, |_, block| taken = Some(block));
        taken
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

    /// Ask for the records of the blocks that will be evicted next, if none is free: ids of neighbours in the queue mostly
    /// follow one another, in one direction or the other.
    #[inline]
    pub fn prefetch_queued(&self) {
        if let Some(front) = self.list.front().filter(|_| self.list.num_unqueued() == 0) {
            for i in 0..2 * AHEAD as u32 {
                self.blocks.prefetch(BlockId(front.0.wrapping_add(i)));
                self.blocks.prefetch(BlockId(front.0.wrapping_sub(i)));
            }
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
        self.evict_each(count, |blocks, block| {
            blocks.begin(block, namespace);
            table.push(block);
        });
    }

    /// Take `count` blocks from the front of the queue, evict what they hold, and give each to `give`. What a block further
    /// on leads to is asked for ahead of its eviction.
    #[inline(always)]
    fn evict_each(&mut self, count: usize, mut give: impl FnMut(&mut Blocks, BlockId)) {
        let mut ahead = self.list.front();
        for _ in 0..AHEAD.min(count - 1) {
            ahead = self.look_ahead(ahead);
        }
        let (mut num_evicted, mut namespace) = (0, 0);
        for _ in 0..count {
            ahead = self.look_ahead(ahead);
            let Some(block) = self.list.pop_front(&mut self.blocks) else { break };
            let owner = self.blocks[block].namespace;
            match &mut self.index {
                Some(index) if self.blocks[block].is_published() => {
                    index.withdraw(block, &mut self.blocks);
                    if owner != namespace {
                        self.count_evicted(num_evicted, namespace);
                        (num_evicted, namespace) = (0, owner);
                    }
                    num_evicted += 1;
                }
                _ => self.list.note_taken(block),
            }
            give(&mut self.blocks, block);
        }
        self.count_evicted(num_evicted, namespace);
    }

    /// Ask for the index entry of a block in the queue, whose record is read on the way; returns the block behind it.
    #[inline(always)]
    fn look_ahead(&self, ahead: Option<BlockId>) -> Option<BlockId> {
        let (block, index) = (ahead?, self.index.as_ref()?);
        index.prefetch(self.blocks[block].fragment());
        self.list.after(block, &self.blocks)
    }

    /// Count blocks of a namespace that have been evicted, neighbours together.
    fn count_evicted(&mut self, count: usize, namespace: u32) {
        if count > 0 {
            self.evictions += count as u64;
            self.num_cached -= count as u32;
            let usage = self.namespaces.usage(namespace);
            usage.cached_blocks -= count;
            usage.evicted_blocks += count as u64;
            self.namespaces.drop_refs(namespace, count);
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
