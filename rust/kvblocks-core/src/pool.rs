//! The blocks of one cache and the state of each: free, live, cached or held. Imports `block_size`,
//! `blocks`, `free_list`, `hash`, `ids`, `namespaces`, `prefetch`, `prefix`, `prompt`.
//!
//! Invariants: a block is live while a sequence owns it, held while only transfers do, cached while nobody does and it
//! is published, else free; the counters follow, so free + live + cached + held == capacity. A block leaves the pool
//! with exactly one reference.

mod content;
mod eviction;

use std::collections::HashMap;

use crate::block_size::BlockSize;
use crate::blocks::Blocks;
use crate::free_list::{FreeList, Reuse};
use crate::hash::{Algorithm, BlockHasher};
use crate::ids::BlockId;
use crate::namespaces::Namespaces;
use crate::prefix::PrefixIndex;

/// Blocks to release together.
const CHUNK: usize = 32;

pub(crate) struct Pool {
    pub block_size: BlockSize,
    first: u32,
    num_blocks: u32,
    num_live: u32,
    num_held: u32,
    num_cached: u32,
    used_slots: u64,
    pub list: FreeList,
    pub blocks: Blocks,
    pub namespaces: Namespaces,
    /// References that transfers hold, of the blocks that have any.
    pub holds: HashMap<BlockId, u32>,
    /// None when the prefix cache is off: then nothing is hashed, published or looked up.
    pub index: Option<PrefixIndex>,
    pub hasher: BlockHasher,
    pub evictions: u64,
    /// Blocks that the last look-up met with an equal digest and other content.
    pub collisions: u64,
}

impl Pool {
    /// None if the memory cannot be had.
    pub fn new(
        first: u32,
        num_blocks: u32,
        block_size: BlockSize,
        hasher: Option<BlockHasher>,
        reuse: Reuse,
    ) -> Option<Self> {
        let n = num_blocks as usize;
        let wide = hasher.is_some_and(|hasher| hasher.algorithm == Algorithm::Sha256);
        Some(Self {
            block_size,
            first,
            num_blocks,
            num_live: 0,
            num_held: 0,
            num_cached: 0,
            used_slots: 0,
            list: FreeList::new(first, num_blocks, reuse)?,
            blocks: Blocks::new(n, block_size.get(), wide)?,
            namespaces: Namespaces::new(),
            holds: HashMap::new(),
            index: if hasher.is_some() { Some(PrefixIndex::new(n)?) } else { None },
            hasher: hasher.unwrap_or(BlockHasher { algorithm: Algorithm::Xxh3, seed: 0 }),
            evictions: 0,
            collisions: 0,
        })
    }

    /// Ids that can be handed out.
    pub fn ids(&self) -> impl Iterator<Item = BlockId> {
        (self.first..self.num_blocks).map(BlockId)
    }

    /// Whether an id is one that can be handed out.
    pub fn holds_id(&self, block: BlockId) -> bool {
        (self.first..self.num_blocks).contains(&block.0)
    }

    pub fn capacity(&self) -> usize {
        (self.num_blocks - self.first) as usize
    }

    pub fn num_live(&self) -> usize {
        self.num_live as usize
    }

    pub fn num_held(&self) -> usize {
        self.num_held as usize
    }

    pub fn num_cached(&self) -> usize {
        self.num_cached as usize
    }

    pub fn num_free(&self) -> usize {
        self.num_available() - self.num_cached()
    }

    /// Blocks that `take` can hand out, evictions included. O(1).
    #[inline]
    pub fn num_available(&self) -> usize {
        (self.list.num_unqueued() + self.list.num_queued()) as usize
    }

    pub fn used_slots(&self) -> u64 {
        self.used_slots
    }

    #[inline]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.blocks.refs(block)
    }

    pub fn fill(&self, block: BlockId) -> usize {
        self.blocks[block].fill as usize
    }

    #[inline]
    pub fn is_published(&self, block: BlockId) -> bool {
        self.blocks[block].is_published()
    }

    /// Whether one owner alone may write into the block as it is.
    #[inline]
    pub fn is_private(&self, block: BlockId) -> bool {
        self.refs(block) == 1 && !self.is_published(block)
    }

    /// Add a sequence to the owners of a live, held or cached block; its content stays. O(1).
    #[inline]
    pub fn share(&mut self, block: BlockId) {
        let refs = self.blocks.refs(block);
        *self.blocks.refs_mut(block) = refs + 1;
        if refs == 0 {
            self.list.unlink(block, block, 1, &mut self.blocks);
            let namespace = self.blocks[block].namespace;
            self.count_revived(1, u64::from(self.blocks[block].fill), namespace);
        } else if self.is_held(block, refs) {
            self.leave_held(block);
            self.become_live(block);
        }
    }

    /// Add a sequence of a namespace to the owners of blocks that it hits. O(blocks).
    pub fn share_many(&mut self, hits: &[BlockId], namespace: u32) {
        let (mut num_revived, mut rest) = (0, hits);
        while let Some((&first, behind)) = rest.split_first() {
            rest = behind;
            if self.refs(first) > 0 {
                self.share(first);
                continue;
            }
            // A table is released tail first: in the queue, the block behind a cached one likely stands before it.
            let (mut last, mut count) = (first, 1);
            *self.blocks.refs_mut(first) = 1;
            while let Some((&next, behind)) =
                rest.split_first().filter(|(next, _)| next.0 == self.blocks[last].prev)
            {
                *self.blocks.refs_mut(next) = 1;
                (last, count, rest) = (next, count + 1, behind);
            }
            self.list.unlink(last, first, count, &mut self.blocks);
            num_revived += count;
        }
        // Published blocks are full.
        self.count_revived(num_revived, u64::from(num_revived) * self.block_size.get() as u64, namespace);
    }

    /// Count cached blocks of a namespace that have become live.
    fn count_revived(&mut self, num_blocks: u32, slots: u64, namespace: u32) {
        self.num_cached -= num_blocks;
        self.num_live += num_blocks;
        self.used_slots += slots;
        let usage = self.namespaces.usage(namespace);
        usage.cached_blocks -= num_blocks as usize;
        usage.live_blocks += num_blocks as usize;
        usage.used_slots += slots;
    }

    /// Remove a sequence from the owners; true if nobody owns the block any more. It is then cached if published, else
    /// free. O(1).
    #[inline]
    pub fn release(&mut self, block: BlockId) -> bool {
        let refs = self.blocks.refs_mut(block);
        *refs -= 1;
        let refs = *refs;
        if refs > 0 && !self.is_held(block, refs) {
            return false;
        }
        self.lose_last_sequence(block, refs)
    }

    /// Add `times` sequences to the owners of blocks that a sequence owns already. O(blocks), whatever the number.
    pub fn share_owned(&mut self, table: &[BlockId], times: u32) {
        let refs = self.blocks.all_refs_mut();
        for block in table.iter().filter(|&&block| block != BlockId::HOLE) {
            refs[block.index()] += times;
        }
    }

    /// Release part of the table of a sequence of a namespace, last block first, `times` times; returns (holes, blocks
    /// that nobody owns any more). O(blocks), whatever the number.
    pub fn release_many(&mut self, part: &[BlockId], times: u32, namespace: u32) -> (usize, usize) {
        let (mut num_holes, mut num_orphans, mut num_cached, mut slots) = (0, 0, 0, 0);
        for chunk in part.rchunks(CHUNK) {
            // First the reference counts, which stand close together, then what nobody owns any more.
            let (mut orphans, mut len) = ([BlockId::HOLE; CHUNK], 0);
            let refs = self.blocks.all_refs_mut();
            for &block in chunk.iter().rev() {
                if block == BlockId::HOLE {
                    num_holes += 1;
                    continue;
                }
                let refs = &mut refs[block.index()];
                *refs -= times;
                orphans[len % CHUNK] = block;
                len += usize::from(*refs == 0);
            }
            if !self.holds.is_empty() {
                for &block in chunk.iter().rev().filter(|&&block| block != BlockId::HOLE) {
                    let refs = self.refs(block);
                    if refs > 0 && self.is_held(block, refs) {
                        self.become_held(block);
                    }
                }
            }
            let orphans = &orphans[..len];
            orphans.iter().for_each(|&block| self.blocks.prefetch(block));
            for &block in orphans {
                slots += u64::from(self.blocks[block].fill);
                num_cached += usize::from(self.put_back_uncounted(block));
            }
            num_orphans += len;
        }
        self.num_cached += num_cached as u32;
        self.namespaces.usage(namespace).cached_blocks += num_cached;
        self.count_lost(num_orphans, slots, namespace);
        (num_holes, num_orphans)
    }

    /// The rest of `release`: no sequence owns the block any more, `refs` transfers do.
    #[inline]
    fn lose_last_sequence(&mut self, block: BlockId, refs: u32) -> bool {
        if refs > 0 {
            self.become_held(block);
            return false;
        }
        let (fill, namespace) = (self.blocks[block].fill, self.blocks[block].namespace);
        self.count_lost(1, u64::from(fill), namespace);
        self.put_back(block);
        true
    }

    fn become_held(&mut self, block: BlockId) {
        let (fill, namespace) = (self.blocks[block].fill, self.blocks[block].namespace);
        self.count_lost(1, u64::from(fill), namespace);
        self.num_held += 1;
        self.namespaces.usage(namespace).held_blocks += 1;
        self.namespaces.add_refs(namespace, 1);
    }

    /// Count blocks of a namespace that are live no more.
    fn count_lost(&mut self, num_blocks: usize, slots: u64, namespace: u32) {
        self.num_live -= num_blocks as u32;
        self.used_slots -= slots;
        let usage = self.namespaces.usage(namespace);
        usage.live_blocks -= num_blocks;
        usage.used_slots -= slots;
    }

    /// Add a transfer to the owners of a live block. O(1).
    pub fn hold(&mut self, block: BlockId) {
        *self.blocks.refs_mut(block) += 1;
        *self.holds.entry(block).or_default() += 1;
    }

    /// Remove a transfer from the owners; true if nobody owns the block any more. O(1).
    pub fn unhold(&mut self, block: BlockId) -> bool {
        if let Some(holds) = self.holds.get_mut(&block) {
            *holds -= 1;
            if *holds == 0 {
                self.holds.remove(&block);
            }
        }
        *self.blocks.refs_mut(block) -= 1;
        if self.blocks.refs(block) > 0 {
            return false;
        }
        self.put_back(block);
        self.leave_held(block);
        true
    }

    fn leave_held(&mut self, block: BlockId) {
        let namespace = self.blocks[block].namespace;
        self.num_held -= 1;
        self.namespaces.usage(namespace).held_blocks -= 1;
        self.namespaces.drop_ref(namespace);
    }

    /// Whether `refs` references are all transfers'.
    #[inline]
    fn is_held(&self, block: BlockId, refs: u32) -> bool {
        !self.holds.is_empty() && self.holds.get(&block) == Some(&refs)
    }

    fn become_live(&mut self, block: BlockId) {
        let (fill, namespace) = (self.blocks[block].fill, self.blocks[block].namespace);
        self.num_live += 1;
        self.used_slots += u64::from(fill);
        let usage = self.namespaces.usage(namespace);
        usage.live_blocks += 1;
        usage.used_slots += u64::from(fill);
    }

    #[inline]
    fn put_back(&mut self, block: BlockId) {
        if self.put_back_uncounted(block) {
            let namespace = self.blocks[block].namespace;
            self.namespaces.usage(namespace).cached_blocks += 1;
            self.num_cached += 1;
        }
    }

    /// Returns whether the block is cached now, which the caller counts.
    #[inline]
    fn put_back_uncounted(&mut self, block: BlockId) -> bool {
        let is_cached = self.is_published(block);
        if is_cached {
            self.list.push_back(block, &mut self.blocks);
        } else {
            self.list.push_unpublished(block, &mut self.blocks);
        }
        is_cached
    }
}
