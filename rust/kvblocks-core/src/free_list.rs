//! The blocks that nobody owns: recycled ids, and cached blocks in order of last use. Imports `blocks`, `ids`,
//! `memory`.
//!
//! Invariant: a block is recycled, queued or neither, never both. Ids that were never used are a counter, not entries,
//! so a new pool touches no memory.

use crate::blocks::Blocks;
use crate::ids::BlockId;
use crate::memory::zeroed;

const NIL: u32 = u32::MAX;

/// Which blocks without content are taken first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// The one freed last: its bytes may still be in a cache. Cached blocks only when no other is left.
    #[default]
    LastFreed,
    /// Ids never used, then all blocks, cached or not, in the order in which they were freed.
    FirstFreed,
}

/// Recycled ids, never used ids, and the queue of cached blocks.
pub(crate) struct FreeList {
    reuse: Reuse,
    recycled: Vec<u32>,
    fresh: u32,
    limit: u32,
    head: u32,
    tail: u32,
    num_queued: u32,
    /// One bit a block, set while it is owned or queued as cached.
    taken: Vec<u64>,
}

impl FreeList {
    /// Ids `first..limit`, all fresh; None if the memory cannot be had.
    pub fn new(first: u32, limit: u32, reuse: Reuse) -> Option<Self> {
        let mut taken = zeroed((limit as usize).div_ceil(64))?;
        if first > 0 {
            taken[0] = (1 << first) - 1;
        }
        let mut recycled = Vec::new();
        recycled.try_reserve_exact(limit as usize).ok()?;
        Some(Self { reuse, recycled, fresh: first, limit, head: NIL, tail: NIL, num_queued: 0, taken })
    }

    /// Recycled and fresh blocks. O(1).
    #[inline]
    pub fn num_unqueued(&self) -> u32 {
        self.recycled.len() as u32 + (self.limit - self.fresh)
    }

    /// Blocks in the queue: the cached ones, and under `FirstFreed` all that were freed. O(1).
    #[inline]
    pub fn num_queued(&self) -> u32 {
        self.num_queued
    }

    /// Take a block that holds nothing worth keeping, if there is one outside the queue. O(1).
    #[inline]
    pub fn pop_unqueued(&mut self) -> Option<BlockId> {
        let block = match self.recycled.pop() {
            Some(block) => block,
            None if self.fresh < self.limit => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return None,
        };
        self.flip(block);
        Some(BlockId(block))
    }

    /// The recycled block that is taken after `count` others. O(1).
    #[inline]
    pub fn peek_recycled(&self, count: usize) -> Option<BlockId> {
        let at = self.recycled.len().checked_sub(1 + count)?;
        Some(BlockId(self.recycled[at]))
    }

    /// Give back a block without content. O(1).
    #[inline]
    pub fn push_unpublished(&mut self, block: BlockId, blocks: &mut Blocks) {
        self.flip(block.0);
        match self.reuse {
            Reuse::LastFreed => self.recycled.push(block.0),
            Reuse::FirstFreed => self.push_back(block, blocks),
        }
    }

    /// Queue `block` as the most recently used one. O(1).
    #[inline]
    pub fn push_back(&mut self, block: BlockId, blocks: &mut Blocks) {
        let record = &mut blocks[block];
        (record.prev, record.next) = (self.tail, NIL);
        match self.tail {
            NIL => self.head = block.0,
            tail => blocks[BlockId(tail)].next = block.0,
        }
        self.tail = block.0;
        self.num_queued += 1;
    }

    /// The block queued first. O(1).
    #[inline]
    pub fn front(&self) -> Option<BlockId> {
        (self.head != NIL).then_some(BlockId(self.head))
    }

    /// The block queued after `block`. O(1).
    #[inline]
    pub fn after(&self, block: BlockId, blocks: &Blocks) -> Option<BlockId> {
        Some(BlockId(blocks[block].next)).filter(|next| next.0 != NIL)
    }

    /// Take the block queued first. The caller says whether it had content. O(1).
    #[inline]
    pub fn pop_front(&mut self, blocks: &mut Blocks) -> Option<BlockId> {
        let block = self.front()?;
        self.head = blocks[block].next;
        match self.head {
            NIL => self.tail = NIL,
            head => blocks[BlockId(head)].prev = NIL,
        }
        self.num_queued -= 1;
        Some(block)
    }

    /// Take `count` neighbours, from `first` to `last`, out of the queue, wherever they stand. O(1).
    #[inline]
    pub fn unlink(&mut self, first: BlockId, last: BlockId, count: u32, blocks: &mut Blocks) {
        let (prev, next) = (blocks[first].prev, blocks[last].next);
        match prev {
            NIL => self.head = next,
            prev => blocks[BlockId(prev)].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => blocks[BlockId(next)].prev = prev,
        }
        self.num_queued -= count;
    }

    /// Note that a queued block without content was taken. O(1).
    #[inline]
    pub fn note_taken(&mut self, block: BlockId) {
        self.flip(block.0);
    }

    /// The queue, in order; for checks.
    pub fn queued<'a>(&'a self, blocks: &'a Blocks) -> impl Iterator<Item = BlockId> + 'a {
        std::iter::successors(self.front(), |&at| self.after(at, blocks))
    }

    /// Ids outside the queue, for checks.
    pub fn unqueued(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.recycled.iter().copied().chain(self.fresh..self.limit).map(BlockId)
    }

    /// Whether the bitmap counts the block as free, for checks.
    pub fn is_marked_free(&self, block: BlockId) -> bool {
        self.taken[block.index() / 64] >> (block.0 % 64) & 1 == 0
    }

    /// Lengths of the runs of consecutive free ids. O(num_blocks / 64 + runs).
    pub fn free_runs(&self, mut visit: impl FnMut(usize)) {
        let (mut run, limit) = (0, self.limit as usize);
        for (word, &bits) in self.taken.iter().enumerate() {
            let mut left = (limit - 64 * word).min(64) as u32;
            let mut bits = bits;
            while left > 0 {
                let free = bits.trailing_zeros().min(left);
                run += free as usize;
                (bits, left) = (bits.unbounded_shr(free), left - free);
                if left > 0 {
                    if run > 0 {
                        visit(std::mem::take(&mut run));
                    }
                    let taken = bits.trailing_ones().min(left);
                    (bits, left) = (bits.unbounded_shr(taken), left - taken);
                }
            }
        }
        if run > 0 {
            visit(run);
        }
    }

    #[inline]
    fn flip(&mut self, block: u32) {
        self.taken[block as usize / 64] ^= 1 << (block % 64);
    }
}
