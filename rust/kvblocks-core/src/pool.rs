//! The blocks of one cache and the state of each: free, live or cached. Imports `free_list`, `hash`, `ids`, `prefix`.
//!
//! Invariants: a block is live while `refs >= 1`, cached while `refs == 0` and published, else free; the counters
//! follow from that, so free + live + cached == capacity. A block leaves the pool with exactly one reference. `fill` of
//! a block is its written high-water mark; `used_slots` is the sum of `fill` over live blocks.

use crate::free_list::FreeList;
use crate::hash::BlockHasher;
use crate::ids::BlockId;
use crate::prefix::{ContentId, Link, PrefixIndex, TokenStore};

pub(crate) struct Pool {
    pub block_size: usize,
    first: u32,
    num_blocks: u32,
    refs: Vec<u32>,
    fill: Vec<u32>,
    num_live: u32,
    used_slots: u64,
    pub lists: FreeList,
    pub tokens: TokenStore,
    /// None when the prefix cache is off: then nothing is hashed, published or looked up.
    pub index: Option<PrefixIndex>,
    pub hasher: BlockHasher,
    pub evictions: u64,
    pub collisions: u64,
}

impl Pool {
    pub fn new(first: u32, num_blocks: u32, block_size: usize, hasher: Option<BlockHasher>) -> Self {
        let n = num_blocks as usize;
        Self {
            block_size,
            first,
            num_blocks,
            refs: vec![0; n],
            fill: vec![0; n],
            num_live: 0,
            used_slots: 0,
            lists: FreeList::new(first, num_blocks),
            tokens: TokenStore::new(n, block_size),
            index: hasher.is_some().then(|| PrefixIndex::new(n)),
            hasher: hasher.unwrap_or_else(|| BlockHasher::new(0)),
            evictions: 0,
            collisions: 0,
        }
    }

    /// Ids that can be handed out.
    pub fn ids(&self) -> impl Iterator<Item = BlockId> {
        (self.first..self.num_blocks).map(BlockId)
    }

    /// Whether an id is one that can be handed out.
    pub fn holds(&self, block: BlockId) -> bool {
        (self.first..self.num_blocks).contains(&block.0)
    }

    pub fn capacity(&self) -> u32 {
        self.num_blocks - self.first
    }

    pub fn num_live(&self) -> u32 {
        self.num_live
    }

    /// Blocks that `take` can hand out, evictions included. O(1).
    pub fn num_available(&self) -> u32 {
        self.lists.num_free() + self.lists.num_cached()
    }

    pub fn used_slots(&self) -> u64 {
        self.used_slots
    }

    pub fn refs(&self, block: BlockId) -> u32 {
        self.refs[block.index()]
    }

    pub fn fill(&self, block: BlockId) -> u32 {
        self.fill[block.index()]
    }

    pub fn is_published(&self, block: BlockId) -> bool {
        self.index.as_ref().is_some_and(|index| index.is_published(block))
    }

    /// Hand out a block with one reference and no content: a free one, else the least recently used cached one. O(1).
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.lists.pop_free().or_else(|| self.evict())?;
        self.refs[block.index()] = 1;
        self.num_live += 1;
        Some(block)
    }

    /// Add an owner to a live or cached block; its content stays. O(1).
    pub fn share(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.index()];
        *refs += 1;
        if *refs == 1 {
            self.lists.unlink_cached(block);
            self.num_live += 1;
            self.used_slots += u64::from(self.fill[block.index()]);
        }
    }

    /// Remove an owner; true if it was the last. The block is then cached if published, else free. O(1).
    pub fn release(&mut self, block: BlockId) -> bool {
        let refs = &mut self.refs[block.index()];
        *refs -= 1;
        if *refs > 0 {
            return false;
        }
        self.num_live -= 1;
        self.used_slots -= u64::from(self.fill[block.index()]);
        if self.is_published(block) {
            self.lists.push_cached(block);
        } else {
            self.fill[block.index()] = 0;
            self.lists.push_free(block);
        }
        true
    }

    /// Undo the `release` of a block that kept other owners (a plan that was refused).
    pub fn restore(&mut self, block: BlockId) {
        self.refs[block.index()] += 1;
    }

    /// Raise the written high-water mark of a live block. O(1).
    pub fn raise_fill(&mut self, block: BlockId, fill: usize) {
        let mark = &mut self.fill[block.index()];
        let raised = (fill as u32).saturating_sub(*mark);
        *mark += raised;
        self.used_slots += u64::from(raised);
    }

    /// Lower the mark of a live block to `fill`; for its sole owner only. O(1).
    pub fn lower_fill(&mut self, block: BlockId, fill: usize) {
        let mark = &mut self.fill[block.index()];
        let lowered = mark.saturating_sub(fill as u32);
        *mark -= lowered;
        self.used_slots -= u64::from(lowered);
    }

    /// Make a live block's content unfindable, before its sole owner overwrites it. O(1).
    pub fn withdraw(&mut self, block: BlockId) {
        if let Some(index) = &mut self.index {
            index.withdraw(block);
        }
    }

    /// The longest run of published blocks that hold the leading blocks of `tokens`, pushed to `hits`. No side effect
    /// but the count of collisions. O(hits).
    pub fn find_prefix(&mut self, tokens: &[u32], hashes: &[u128], max: usize, hits: &mut Vec<BlockId>) {
        let Some(index) = &self.index else { return };
        let mut parent = ContentId::ROOT;
        for (tokens, &hash) in tokens.chunks_exact(self.block_size).zip(hashes).take(max) {
            match index.find(hash, parent, tokens, &self.tokens, &mut self.collisions) {
                Some(block) => {
                    parent = index.link(block).content;
                    hits.push(block);
                }
                None => return,
            }
        }
    }

    /// Publish a full live block after `parent`; `hash` where it is known already. O(block_size).
    pub fn publish(&mut self, block: BlockId, parent: Link, hash: Option<u128>) -> Option<Link> {
        let index = self.index.as_mut()?;
        let hash = hash.unwrap_or_else(|| self.hasher.block(parent.hash, self.tokens.of(block)));
        Some(index.publish(block, hash, parent.content, &self.tokens))
    }

    /// Drop every cached block; returns how many. O(cached).
    pub fn drop_cached(&mut self) -> u32 {
        let dropped = self.lists.num_cached();
        while let Some(block) = self.evict() {
            self.evictions -= 1;
            self.lists.push_free(block);
        }
        dropped
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.lists.pop_cached()?;
        self.withdraw(block);
        self.fill[block.index()] = 0;
        self.evictions += 1;
        Some(block)
    }
}
