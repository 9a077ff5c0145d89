//! One sequence: its cursors, its block table, its steps in flight. Imports `block_size`, `ids`, `pipeline`, `pool`,
//! `prefetch`, `prefix`, `prompt`.
//!
//! Invariants (all in tokens): `num_computed <= num_scheduled <= num_reserved`, and the table holds exactly
//! `ceil(num_reserved / block_size)` columns; holes among them stand for blocks that `drop_range` took out. Ids of
//! computed tokens stand in their blocks, later ones (and those of holes) in the prompt. Blocks `0..num_published` have
//! been offered to the prefix cache. `epoch` changes whenever an existing column does.

use std::mem::offset_of;
use std::sync::Arc;

use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqHandle};
use crate::pipeline::{InFlight, Pipeline};
use crate::pool::Pool;
use crate::prefetch::prefetch;
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

/// What pool and namespace have counted for a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Blocks in its table.
    pub blocks: u32,
    /// Blocks that it may still ask for, up to its declared maximum.
    pub promised: u32,
    /// Slots reserved beyond what is scheduled.
    pub ahead: u32,
}

/// By cache lines of 64 bytes: what a plain decode row reads and writes, up to the oldest step in flight; later steps; what
/// a row that opens a block needs; what one that fills a block needs beside that; the rest. Five lines, so that neighbours'
/// first ones fall into all sets of a cache.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    /// Its own, while its place in the arena is taken; see `Sequences`.
    pub handle: SeqHandle,
    pub epoch: u32,
    /// Length of the block table.
    pub num_cols: u32,
    /// Slot of position 0, were all of the sequence in a row with `tail`, where the next token goes; both right while
    /// there is room.
    pub slot_base: i64,
    pub tail: BlockId,
    /// End of the positions that lie in `tail` and may be written without asking the pool; below `scheduled`, or 0, if that
    /// is not known, or the next token belongs to the prompt.
    pub room_end: u32,
    /// Number of the batch call that saw this sequence last, to find duplicates.
    pub seen: u32,
    pub computed: u32,
    pub scheduled: u32,
    /// Slots reserved beyond what is scheduled.
    pub ahead: u32,
    pub in_flight: Pipeline,
    pub namespace: u32,
    pub blocks: Vec<BlockId>,
    pub share: Share,
    /// Leading tokens of `prompt` that belong to this sequence; a truncation lowers it.
    pub prompted: u32,
    /// Chain value of block `num_published - 1`.
    pub tip: Link,
    pub num_published: usize,
    /// Holes among `blocks`.
    pub num_holes: u32,
    pub is_preempted: bool,
    /// Its namespace was dropped, or the parent of its next block: what it computes is not published.
    pub unlisted: bool,
    /// Whether `prompt` may have extra keys; none is ever replaced by one with more.
    pub has_extras: bool,
    pub prompt: Arc<Tokens>,
    /// First column that the last change of `epoch` touched.
    pub changed_col: usize,
    /// Declared maximum of tokens.
    pub max_tokens: Option<usize>,
    /// Declared maximum of blocks at one time.
    pub max_resident: Option<u32>,
    /// Blocks merged away that steps in flight still read: (block, steps to wait for).
    pub retired: Vec<(BlockId, usize)>,
}

const _: () = assert!(offset_of!(Sequence, in_flight) + Pipeline::HEAD == 64);
const _: () = assert!(offset_of!(Sequence, namespace) >= 128 && offset_of!(Sequence, tip) == 192);
const _: () = assert!(offset_of!(Sequence, prompt) == 256 && size_of::<Sequence>() == 320);

impl Sequence {
    /// Ask for what a row that needs a block reads and writes beside the first line.
    #[inline]
    pub fn prefetch_table(&self) {
        prefetch(std::slice::from_ref(&self.blocks), 0);
    }

    /// Ask for what publishing its next block reads and writes.
    #[inline]
    pub fn prefetch_tip(&self) {
        prefetch(std::slice::from_ref(&self.blocks), 0);
        prefetch(std::slice::from_ref(&self.tip), 0);
    }

    pub fn new(prompt: Arc<Tokens>, namespace: u32) -> Self {
        Self {
            handle: SeqHandle::default(),
            epoch: 0,
            num_cols: 0,
            slot_base: 0,
            tail: BlockId::HOLE,
            room_end: 0,
            seen: 0,
            computed: 0,
            scheduled: 0,
            ahead: 0,
            in_flight: Pipeline::new(),
            namespace,
            blocks: Vec::new(),
            share: Share::default(),
            prompted: prompt.ids.len() as u32,
            tip: Link { digest: prompt.root, content: ContentId::root(namespace) },
            num_published: 0,
            num_holes: 0,
            is_preempted: false,
            unlisted: false,
            has_extras: prompt.has_extras(),
            prompt,
            changed_col: 0,
            max_tokens: None,
            max_resident: None,
            retired: Vec::new(),
        }
    }

    #[inline]
    pub fn num_computed(&self) -> usize {
        self.computed as usize
    }

    #[inline]
    pub fn num_scheduled(&self) -> usize {
        self.scheduled as usize
    }

    #[inline]
    pub fn num_reserved(&self) -> usize {
        self.scheduled as usize + self.ahead as usize
    }

    #[inline]
    pub fn prompt_len(&self) -> usize {
        self.prompted as usize
    }

    #[inline]
    pub fn num_known(&self) -> usize {
        self.computed.max(self.prompted) as usize
    }

    /// Begin with tokens that are computed already, and room for others.
    pub fn start_at(&mut self, computed: usize, reserved: usize) {
        self.computed = computed as u32;
        self.move_to(computed, reserved);
    }

    /// Set both cursors beyond what is computed.
    #[inline]
    pub fn move_to(&mut self, scheduled: usize, reserved: usize) {
        (self.scheduled, self.ahead) = (scheduled as u32, (reserved - scheduled) as u32);
    }

    pub fn cursors(&self) -> Cursors {
        Cursors {
            num_tokens: self.num_known(),
            num_computed: self.num_computed(),
            num_scheduled: self.num_scheduled(),
            num_reserved: self.num_reserved(),
            num_blocks: self.blocks.len(),
            is_preempted: self.is_preempted,
        }
    }

    /// The block that the next scheduled token shares with earlier ones; None if it opens a block.
    pub fn partial_tail(&self, size: BlockSize) -> Option<BlockId> {
        match size.offset(self.num_scheduled()) {
            0 => None,
            _ => self.blocks.get(size.column(self.num_scheduled())).copied(),
        }
    }

    /// Extra keys of a block; the prompt is looked at only if it may have some.
    #[inline]
    pub fn extra(&self, column: usize) -> Option<&Arc<[u8]>> {
        match self.has_extras {
            true => self.prompt.extra(column),
            false => None,
        }
    }

    /// Let `next` take this sequence's place, under its handle; returns the one that leaves, with its blocks and all that
    /// is counted for it.
    pub fn replace(&mut self, mut next: Self) -> Self {
        next.handle = self.handle;
        next.seen = self.seen;
        // Rows that show the old table are out of date.
        next.epoch = self.epoch.wrapping_add(1);
        next.max_tokens = next.max_tokens.or(self.max_tokens);
        next.max_resident = next.max_resident.or(self.max_resident);
        std::mem::replace(self, next)
    }

    /// A column changed: rows that show it are out of date from there on.
    pub fn touch(&mut self, column: usize) {
        self.epoch = self.epoch.wrapping_add(1);
        self.changed_col = column;
        self.lose_room();
        self.in_flight.forget_blocks();
    }

    /// As `touch`, for a column before the block that the next token goes into.
    pub fn touch_below_tail(&mut self, column: usize) {
        let room_end = self.room_end;
        self.touch(column);
        self.room_end = room_end;
    }

    /// The blocks that it has a reference to: those in its table, and merged ones.
    pub fn owned_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let retired = self.retired.iter().map(|&(block, _)| block);
        self.blocks.iter().copied().chain(retired).filter(|&block| block != BlockId::HOLE)
    }

    /// Slots from `num_scheduled` on that may be written without asking the pool.
    #[inline]
    pub fn room(&self) -> u32 {
        self.room_end.saturating_sub(self.scheduled)
    }

    /// Whether so many slots and one may be written.
    #[inline]
    pub fn has_room_beyond(&self, lookahead: u32) -> bool {
        self.scheduled + lookahead < self.room_end
    }

    /// Ask the pool before the next token is written.
    #[inline]
    pub fn lose_room(&mut self) {
        self.room_end = 0;
    }

    /// Find the slot of the next token, its block being writable.
    pub fn aim(&mut self, size: BlockSize) {
        let column = size.column(self.num_scheduled());
        match self.blocks.get(column) {
            _ if self.scheduled < self.prompted => self.lose_room(),
            Some(&block) => {
                self.room_end = ((column + 1) * size.get()) as u32;
                self.aim_at(block, size);
            }
            None => self.room_end = self.scheduled,
        }
    }

    #[inline]
    fn aim_at(&mut self, block: BlockId, size: BlockSize) {
        self.tail = block;
        self.slot_base = ((block.index() + 1) * size.get()) as i64 - i64::from(self.room_end);
    }

    /// Whether a row of one token needs a block and nothing else, `lookahead` being reserved already: the table is full,
    /// and the token goes into a block that may be written, or into the new one.
    #[inline]
    pub fn opens_block(&self, lookahead: u32, size: BlockSize) -> bool {
        let (column_end, is_known) = (self.num_cols as usize * size.get(), self.room_end >= self.scheduled);
        self.num_reserved() == column_end && column_end > 0 && is_known && (lookahead == 0 || self.room() > 0)
    }

    /// Begin a block that is not known yet: `open` says which.
    #[inline]
    pub fn aim_at_next(&mut self, size: BlockSize) {
        (self.tail, self.room_end) = (BlockId::HOLE, self.scheduled + size.get() as u32);
    }

    /// Whether the table has too few blocks for what is reserved: between `advance` and `open`.
    #[inline]
    pub fn is_short(&self, size: BlockSize) -> bool {
        self.num_reserved() > self.num_cols as usize * size.get()
    }

    /// Add a block to the end of the table; it is where the last token goes if that began one. Returns that token's slot
    /// then.
    #[inline]
    pub fn open(&mut self, block: BlockId, size: BlockSize) -> Option<i64> {
        self.blocks.push(block);
        self.num_cols += 1;
        if self.tail != BlockId::HOLE {
            return None;
        }
        self.aim_at(block, size);
        self.in_flight.place_newest(block);
        Some((block.index() * size.get()) as i64)
    }

    /// Schedule one token, there being room, and so a step more, and reserve a slot in place of its own. Returns its slot;
    /// None if there are too many steps in flight.
    #[inline]
    pub fn advance(&mut self) -> Option<i64> {
        let step = InFlight { num_new: 1, ahead_before: self.ahead, block: self.tail };
        if !self.in_flight.push(step) {
            return None;
        }
        let slot = self.slot_base + i64::from(self.scheduled);
        self.scheduled += 1;
        Some(slot)
    }

    /// Take the last `advance` back.
    pub fn retreat(&mut self) {
        self.in_flight.pop_newest();
        self.scheduled -= 1;
        if self.tail == BlockId::HOLE {
            // A block was begun that is not known: there was no room before.
            self.lose_room();
        }
    }

    /// Blocks that the table names, holes not counted, and what else is counted for it.
    pub fn share_now(&self, size: BlockSize) -> Share {
        let blocks = self.blocks.len() - self.num_holes as usize;
        let columns =
            self.max_tokens.map_or(0, |tokens| size.blocks(tokens)).saturating_sub(self.blocks.len());
        let resident = self.max_resident.map_or(usize::MAX, |most| (most as usize).saturating_sub(blocks));
        let promised = if self.is_preempted { 0 } else { columns.min(resident) };
        Share { blocks: blocks as u32, promised: promised as u32, ahead: self.ahead }
    }

    /// Ids of the known tokens: computed ones beside their blocks, the rest in the prompt. O(tokens).
    pub fn history(&self, pool: &Pool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(self.num_known());
        for (column, &block) in self.blocks.iter().enumerate() {
            let computed = pool.block_size.within(self.num_computed(), column);
            if block == BlockId::HOLE {
                ids.extend_from_slice(&self.prompt.ids[ids.len()..ids.len() + computed]);
            } else {
                ids.extend_from_slice(&pool.blocks.tokens(block)[..computed]);
            }
        }
        ids.extend_from_slice(self.prompt.ids.get(ids.len()..self.prompt_len()).unwrap_or_default());
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
