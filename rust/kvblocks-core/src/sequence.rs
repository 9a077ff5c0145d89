//! One sequence: its cursors, its block table, its steps in flight. Imports `block_size`, `ids`, `pool`, `prefix`,
//! `prompt`.
//!
//! Invariants (all in tokens): `num_computed <= num_scheduled <= num_reserved`, and the table holds exactly
//! `ceil(num_reserved / block_size)` columns; holes among them stand for blocks that `drop_range` took out. Ids of
//! computed tokens stand in their blocks, later ones (and those of holes) in the prompt. Blocks `0..num_published` have
//! been offered to the prefix cache. `epoch` changes whenever an existing column does.

use std::sync::Arc;

use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::BlockId;
use crate::pool::Pool;
use crate::prefix::{self, ContentId, Link};
use crate::prompt::Tokens;

/// Lengths of a sequence, in tokens but `num_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursors {
    /// Tokens whose ids are known.
    pub num_tokens: usize,
    /// Tokens whose K/V has been computed and committed.
    pub num_computed: usize,
    /// Tokens handed to a step so far.
    pub num_scheduled: usize,
    /// Tokens that the block table has slots for by agreement.
    pub num_reserved: usize,
    /// Length of the block table.
    pub num_blocks: usize,
    /// It holds no blocks and waits to be resumed.
    pub is_preempted: bool,
}

/// A step that was scheduled and not yet committed.
#[derive(Clone, Copy, Default)]
pub(crate) struct InFlight {
    pub num_new: u32,
    /// `num_reserved` before the step, to which a rejection returns.
    pub reserved_before: u32,
}

/// Steps that a sequence may have in flight: a bound, so that scheduling never allocates.
pub(crate) const MAX_IN_FLIGHT: usize = 8;

/// The steps in flight of a sequence, oldest first.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Pipeline {
    head: u8,
    len: u8,
    steps: [InFlight; MAX_IN_FLIGHT],
}

impl Pipeline {
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub fn oldest(&self) -> Option<InFlight> {
        (self.len > 0).then(|| self.steps[self.head as usize])
    }

    /// The caller has checked that there is room.
    #[inline]
    pub fn push(&mut self, step: InFlight) {
        self.steps[(self.head as usize + self.len()) % MAX_IN_FLIGHT] = step;
        self.len += 1;
    }

    #[inline]
    pub fn pop_oldest(&mut self) -> Option<InFlight> {
        let step = self.oldest()?;
        self.len -= 1;
        // An engine that commits each step before the next stays in the first place, and its cache line.
        self.head = if self.len == 0 { 0 } else { (self.head + 1) % MAX_IN_FLIGHT as u8 };
        Some(step)
    }

    pub fn newest(&self) -> Option<InFlight> {
        let last = self.len().checked_sub(1)?;
        Some(self.steps[(self.head as usize + last) % MAX_IN_FLIGHT])
    }

    pub fn pop_newest(&mut self) -> Option<InFlight> {
        let step = self.newest()?;
        self.len -= 1;
        Some(step)
    }

    pub fn iter(&self) -> impl Iterator<Item = InFlight> + '_ {
        (0..self.len()).map(|i| self.steps[(self.head as usize + i) % MAX_IN_FLIGHT])
    }
}

/// What pool and namespace have counted for a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Blocks in its table.
    pub blocks: usize,
    /// Blocks that it may still ask for, up to its declared maximum.
    pub promised: usize,
    /// Slots reserved beyond what is scheduled.
    pub ahead: usize,
}

/// What a decode step reads and writes stands in the first two cache lines.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    /// Of the place in the arena; odd while it is taken.
    pub generation: u32,
    /// Number of the batch call that saw this sequence last, to find duplicates.
    pub seen: u32,
    pub epoch: u32,
    /// Length of the block table.
    pub num_cols: u32,
    pub num_computed: usize,
    pub num_scheduled: usize,
    pub num_reserved: usize,
    /// Slot of `num_scheduled`; right while `room > 0`.
    pub next_slot: usize,
    /// Slots from `num_scheduled` on that may be written without asking the pool; 0 if that is not known.
    pub room: u32,
    /// Slots left in the block of `next_slot`; right while `room > 0`.
    pub left_in_block: u32,
    pub is_preempted: bool,
    /// Its namespace was dropped, or the parent of its next block: what it computes is not published.
    pub unlisted: bool,
    pub in_flight: Pipeline,
    /// Leading tokens of `prompt` that belong to this sequence; a truncation lowers it.
    pub prompt_len: usize,
    pub blocks: Vec<BlockId>,
    pub share: Share,
    pub namespace: u32,
    /// Holes among `blocks`.
    pub num_holes: usize,
    /// First column that the last change of `epoch` touched.
    pub changed_col: usize,
    pub num_published: usize,
    /// Chain value of block `num_published - 1`.
    pub tip: Link,
    pub prompt: Arc<Tokens>,
    /// Declared maximum of tokens.
    pub max_tokens: Option<usize>,
    /// Blocks merged away that steps in flight still read: (block, steps to wait for).
    pub retired: Vec<(BlockId, usize)>,
}

impl Sequence {
    pub fn new(prompt: Arc<Tokens>, namespace: u32) -> Self {
        Self {
            generation: 0,
            seen: 0,
            epoch: 0,
            num_cols: 0,
            num_computed: 0,
            num_scheduled: 0,
            num_reserved: 0,
            next_slot: 0,
            room: 0,
            left_in_block: 0,
            is_preempted: false,
            unlisted: false,
            in_flight: Pipeline::default(),
            prompt_len: prompt.ids.len(),
            blocks: Vec::new(),
            share: Share::default(),
            namespace,
            num_holes: 0,
            changed_col: 0,
            num_published: 0,
            tip: Link { digest: prompt.root, content: ContentId::root(namespace) },
            prompt,
            max_tokens: None,
            retired: Vec::new(),
        }
    }

    #[inline]
    pub fn is_taken(&self) -> bool {
        self.generation & 1 == 1
    }

    #[inline]
    pub fn num_known(&self) -> usize {
        self.num_computed.max(self.prompt_len)
    }

    pub fn cursors(&self) -> Cursors {
        Cursors {
            num_tokens: self.num_known(),
            num_computed: self.num_computed,
            num_scheduled: self.num_scheduled,
            num_reserved: self.num_reserved,
            num_blocks: self.blocks.len(),
            is_preempted: self.is_preempted,
        }
    }

    /// The block that the next scheduled token shares with earlier ones; None if it opens a block.
    pub fn partial_tail(&self, size: BlockSize) -> Option<BlockId> {
        match size.offset(self.num_scheduled) {
            0 => None,
            _ => self.blocks.get(size.column(self.num_scheduled)).copied(),
        }
    }

    /// Let `next` take this sequence's place, under its handle; returns the one that leaves, with its blocks and all that
    /// is counted for it.
    pub fn replace(&mut self, mut next: Self) -> Self {
        next.generation = self.generation;
        next.seen = self.seen;
        // Rows that show the old table are out of date.
        next.epoch = self.epoch.wrapping_add(1);
        next.max_tokens = next.max_tokens.or(self.max_tokens);
        std::mem::replace(self, next)
    }

    /// A column changed: rows that show it are out of date from there on.
    pub fn touch(&mut self, column: usize) {
        self.epoch = self.epoch.wrapping_add(1);
        self.changed_col = column;
        self.room = 0;
    }

    /// The blocks that it has a reference to: those in its table, and merged ones.
    pub fn owned_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let retired = self.retired.iter().map(|&(block, _)| block);
        self.blocks.iter().copied().chain(retired).filter(|&block| block != BlockId::HOLE)
    }

    /// Find the slot of the next token, its block being writable.
    pub fn aim(&mut self, size: BlockSize) {
        let room = self.blocks.len() * size.get() - self.num_scheduled;
        self.room = room.min(u32::MAX as usize) as u32;
        if room > 0 {
            let offset = size.offset(self.num_scheduled);
            self.next_slot = self.blocks[size.column(self.num_scheduled)].index() * size.get() + offset;
            self.left_in_block = (size.get() - offset) as u32;
        }
    }

    /// Blocks that the table names, holes not counted, and what else is counted for it.
    pub fn share_now(&self, size: BlockSize) -> Share {
        let limit = self.max_tokens.map_or(0, |tokens| size.blocks(tokens));
        let promised = if self.is_preempted { 0 } else { limit.saturating_sub(self.blocks.len()) };
        Share {
            blocks: self.blocks.len() - self.num_holes,
            promised,
            ahead: self.num_reserved - self.num_scheduled,
        }
    }

    /// Ids of the known tokens: computed ones beside their blocks, the rest in the prompt. O(tokens).
    pub fn history(&self, pool: &Pool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(self.num_known());
        for (column, &block) in self.blocks.iter().enumerate() {
            let computed = pool.block_size.within(self.num_computed, column);
            if block == BlockId::HOLE {
                ids.extend_from_slice(&self.prompt.ids[ids.len()..ids.len() + computed]);
            } else {
                ids.extend_from_slice(&pool.blocks.tokens(block)[..computed]);
            }
        }
        ids.extend_from_slice(self.prompt.ids.get(ids.len()..self.prompt_len).unwrap_or_default());
        ids
    }

    /// Make the published blocks from column `full` on unfindable, but those that others have hit already.
    pub fn withdraw_from(&self, full: usize, pool: &mut Pool) {
        for &block in self.blocks.get(full..self.num_published).unwrap_or_default() {
            if pool.refs(block) == 1 && pool.is_published(block) {
                pool.withdraw(block);
            }
        }
    }

    /// Count no more than the first `full` blocks as published.
    pub fn retract(&mut self, full: usize, pool: &Pool) {
        if self.num_published <= full {
            return;
        }
        self.num_published = full;
        match full.checked_sub(1).map(|last| self.blocks[last]) {
            // What stood there is gone, and with it the parent of what comes: publish no more.
            Some(BlockId::HOLE) => self.unlisted = true,
            Some(block) => self.tip = prefix::link(&pool.blocks, block),
            None => self.tip = self.root(),
        }
    }

    /// Chain value before the first block.
    pub fn root(&self) -> Link {
        Link { digest: self.prompt.root, content: ContentId::root(self.namespace) }
    }

    /// Release the blocks from column `len` on, tail first, so that of two blocks released together the one that fewer
    /// prompts can share is evicted first. Returns how many nobody owns any more.
    pub fn shrink(&mut self, len: usize, pool: &mut Pool) -> usize {
        if len >= self.blocks.len() {
            return 0;
        }
        self.touch(len);
        let (num_holes, orphaned) = pool.release_tail(&self.blocks[len..]);
        self.blocks.truncate(len);
        self.num_holes -= num_holes;
        orphaned
    }

    /// Release everything, merged blocks included; returns how many blocks nobody owns any more. What was published when
    /// it was scheduled and never committed cannot be found any more.
    pub fn release_all(&mut self, pool: &mut Pool) -> usize {
        self.withdraw_from(pool.block_size.column(self.num_computed), pool);
        let retired = std::mem::take(&mut self.retired);
        let merged = retired.into_iter().filter(|&(block, _)| pool.release(block)).count();
        merged + self.shrink(0, pool)
    }

    /// Refuse a length that ends inside a hole: its next token would have no block to go to.
    pub fn check_cut(&self, row: usize, length: usize, size: BlockSize) -> Result<()> {
        let inside = size.offset(length) > 0 && self.blocks.get(size.column(length)) == Some(&BlockId::HOLE);
        match inside {
            false => Ok(()),
            true => Err(Error::Row {
                argument: "lengths",
                row,
                got: length as i64,
                expected: "a length that does not end inside a dropped block".into(),
            }),
        }
    }
}
