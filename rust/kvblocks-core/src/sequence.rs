//! One sequence: its cursors, its block table, its steps in flight. Imports `block_size`, `ids`, `pool`, `prefetch`, `prefix`,
//! `prompt`.
//!
//! Invariants (all in tokens): `num_computed <= num_scheduled <= num_reserved`, and the table holds exactly
//! `ceil(num_reserved / block_size)` columns; holes among them stand for blocks that `drop_range` took out. Ids of
//! computed tokens stand in their blocks, later ones (and those of holes) in the prompt. Blocks `0..num_published` have
//! been offered to the prefix cache. `epoch` changes whenever an existing column does.

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::TransparentWrapper;

use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::BlockId;
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

/// A step that was scheduled and not yet committed.
#[derive(Clone, Copy)]
pub(crate) struct InFlight {
    pub num_new: u32,
    /// `num_reserved` before the step, to which a rejection returns.
    pub reserved_before: u32,
    /// Where its only token goes; a hole for a step of several tokens, or one whose table has changed since.
    pub block: BlockId,
}

/// Steps that a sequence may have in flight: a bound, so that scheduling never allocates.
pub(crate) const MAX_IN_FLIGHT: usize = 8;

/// The steps in flight of a sequence, oldest first. Nearly always there is one, so the others move up.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Pipeline {
    len: u32,
    steps: [InFlight; MAX_IN_FLIGHT],
}

impl Pipeline {
    fn new() -> Self {
        let none = InFlight { num_new: 0, reserved_before: 0, block: BlockId::HOLE };
        Self { len: 0, steps: [none; MAX_IN_FLIGHT] }
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub fn oldest(&self) -> Option<InFlight> {
        (self.len > 0).then_some(self.steps[0])
    }

    /// The caller has checked that there is room.
    #[inline]
    pub fn push(&mut self, step: InFlight) {
        self.steps[self.len()] = step;
        self.len += 1;
    }

    #[inline]
    pub fn pop_oldest(&mut self) -> Option<InFlight> {
        let step = self.oldest()?;
        self.len -= 1;
        if self.len > 0 {
            self.steps.rotate_left(1);
        }
        Some(step)
    }

    /// Take the last `pop_oldest` back; nothing may have been scheduled since.
    pub fn push_back_oldest(&mut self) {
        if self.len > 0 {
            self.steps.rotate_right(1);
        }
        self.len += 1;
    }

    pub fn newest(&self) -> Option<InFlight> {
        self.iter().next_back()
    }

    pub fn pop_newest(&mut self) -> Option<InFlight> {
        let step = self.newest()?;
        self.len -= 1;
        Some(step)
    }

    /// The table changes: look blocks up when they are needed.
    fn forget_blocks(&mut self) {
        self.steps.iter_mut().for_each(|step| step.block = BlockId::HOLE);
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = InFlight> + '_ {
        self.steps[..self.len()].iter().copied()
    }
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

/// References to the first blocks of a sequence that ends which others, that have ended before it, left to it.
#[derive(Default)]
pub(crate) struct Owed {
    len: usize,
    times: u32,
}

/// Block ids to compare at once.
const CHUNK: usize = 16;

/// What a plain decode row reads and writes stands in the first cache line, up to the oldest step in flight.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    /// Of the place in the arena; odd while it is taken.
    pub generation: u32,
    /// Number of the batch call that saw this sequence last, to find duplicates.
    pub seen: u32,
    pub epoch: u32,
    /// Length of the block table.
    pub num_cols: u32,
    pub computed: u32,
    pub scheduled: u32,
    pub reserved: u32,
    /// Leading tokens of `prompt` that belong to this sequence; a truncation lowers it.
    pub prompted: u32,
    /// Where the next token goes; right while `room > 0`.
    pub tail: BlockId,
    /// Slots at the end of `tail`, from `num_scheduled` on, that may be written without asking the pool; 0 if that is
    /// not known.
    pub room: u32,
    pub namespace: u32,
    pub is_preempted: bool,
    /// Its namespace was dropped, or the parent of its next block: what it computes is not published.
    pub unlisted: bool,
    pub in_flight: Pipeline,
    pub blocks: Vec<BlockId>,
    pub share: Share,
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
    /// Declared maximum of blocks at one time.
    pub max_resident: Option<usize>,
    /// Blocks merged away that steps in flight still read: (block, steps to wait for).
    pub retired: Vec<(BlockId, usize)>,
}

const _: () =
    assert!(offset_of!(Sequence, in_flight) + offset_of!(Pipeline, steps) + size_of::<InFlight>() == 64);

impl Sequence {
    /// Ask for what a row that needs a block reads and writes beside the first line.
    pub fn prefetch_table(&self) {
        prefetch(std::slice::from_ref(&self.blocks), 0);
        prefetch(std::slice::from_ref(&self.num_holes), 0);
        prefetch(std::slice::from_ref(&self.max_tokens), 0);
    }

    /// Ask for what publishing its next block reads and writes.
    #[inline]
    pub fn prefetch_tip(&self) {
        prefetch(std::slice::from_ref(&self.blocks), 0);
        prefetch(std::slice::from_ref(&self.num_published), 0);
        prefetch(std::slice::from_ref(&self.prompt), 0);
    }

    pub fn new(prompt: Arc<Tokens>, namespace: u32) -> Self {
        Self {
            generation: 0,
            seen: 0,
            epoch: 0,
            num_cols: 0,
            computed: 0,
            scheduled: 0,
            reserved: 0,
            tail: BlockId::HOLE,
            room: 0,
            is_preempted: false,
            unlisted: false,
            in_flight: Pipeline::new(),
            prompted: prompt.ids.len() as u32,
            blocks: Vec::new(),
            share: Share::default(),
            namespace,
            num_holes: 0,
            changed_col: 0,
            num_published: 0,
            tip: Link { digest: prompt.root, content: ContentId::root(namespace) },
            prompt,
            max_tokens: None,
            max_resident: None,
            retired: Vec::new(),
        }
    }

    #[inline]
    pub fn is_taken(&self) -> bool {
        self.generation & 1 == 1
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
        self.reserved as usize
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
        (self.computed, self.scheduled, self.reserved) = (computed as u32, computed as u32, reserved as u32);
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

    /// Let `next` take this sequence's place, under its handle; returns the one that leaves, with its blocks and all that
    /// is counted for it.
    pub fn replace(&mut self, mut next: Self) -> Self {
        next.generation = self.generation;
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
        self.room = 0;
        self.in_flight.forget_blocks();
    }

    /// The blocks that it has a reference to: those in its table, and merged ones.
    pub fn owned_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let retired = self.retired.iter().map(|&(block, _)| block);
        self.blocks.iter().copied().chain(retired).filter(|&block| block != BlockId::HOLE)
    }

    /// Find the slot of the next token, its block being writable.
    pub fn aim(&mut self, size: BlockSize) {
        self.room = 0;
        if let Some(&block) = self.blocks.get(size.column(self.num_scheduled())) {
            self.tail = block;
            self.room = (size.get() - size.offset(self.num_scheduled())) as u32;
        }
    }

    /// Schedule one token, `room` being above 0, and so a step more; returns its slot.
    #[inline]
    pub fn advance(&mut self, size: BlockSize) -> usize {
        let step = InFlight { num_new: 1, reserved_before: self.reserved, block: self.tail };
        self.in_flight.push(step);
        let slot = (self.tail.index() + 1) * size.get() - self.room as usize;
        self.scheduled += 1;
        self.room -= 1;
        slot
    }

    /// Take the last `advance` back, and the slot that was reserved with it.
    pub fn retreat(&mut self) {
        self.in_flight.pop_newest();
        self.scheduled -= 1;
        self.reserved -= 1;
        self.room += 1;
    }

    /// Blocks that the table names, holes not counted, and what else is counted for it.
    pub fn share_now(&self, size: BlockSize) -> Share {
        let blocks = self.blocks.len() - self.num_holes;
        let columns =
            self.max_tokens.map_or(0, |tokens| size.blocks(tokens)).saturating_sub(self.blocks.len());
        let resident = self.max_resident.map_or(usize::MAX, |most| most.saturating_sub(blocks));
        let promised = if self.is_preempted { 0 } else { columns.min(resident) };
        Share { blocks: blocks as u32, promised: promised as u32, ahead: self.reserved - self.scheduled }
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

    /// Release the blocks from column `len` on, tail first, so that of two blocks released together the one that fewer
    /// prompts can share is evicted first. Returns how many nobody owns any more.
    pub fn shrink(&mut self, len: usize, pool: &mut Pool) -> usize {
        if len >= self.blocks.len() {
            return 0;
        }
        self.touch(len);
        let (num_holes, orphaned) = pool.release_many(&self.blocks[len..], 1, self.namespace);
        self.blocks.truncate(len);
        self.num_holes -= num_holes;
        orphaned
    }

    /// Release everything, merged blocks included, at the end of a sequence; returns how many blocks nobody owns any more.
    /// What was published when it was scheduled and never committed cannot be found any more.
    pub fn release_all(&mut self, pool: &mut Pool) -> usize {
        self.release_all_but(0, &mut Owed::default(), pool)
    }

    /// As `release_all`, for one of several that end together: the references to the first `common` blocks are left to
    /// the next one, added to `owed`, and this one releases what those before it have left and the next one does not
    /// share.
    pub fn release_all_but(&mut self, common: usize, owed: &mut Owed, pool: &mut Pool) -> usize {
        self.withdraw_from(pool.block_size.column(self.num_computed()), pool);
        let retired = std::mem::take(&mut self.retired);
        let merged = retired.into_iter().filter(|&(block, _)| pool.release(block)).count();
        let mut release = |columns: Range<usize>, times: u32| {
            if columns.is_empty() || times == 0 {
                return 0;
            }
            pool.release_many(&self.blocks[columns], times, self.namespace).1
        };
        // Tail first; what is released for others below `common` has an owner left.
        let own = release(common.max(owed.len)..self.blocks.len(), 1);
        let rest = if common <= owed.len {
            owed.times += 1;
            release(common..owed.len, owed.times)
        } else {
            release(0..owed.len, std::mem::replace(&mut owed.times, 1))
        };
        owed.len = common;
        merged + own + rest
    }

    /// Leading blocks that two sequences have in common and that `next` does not withdraw when it ends.
    pub fn common_blocks(&self, next: &Self, size: BlockSize) -> usize {
        let most = size.column(next.num_computed()).min(next.blocks.len()).min(self.blocks.len());
        let [ours, theirs] = [self, next].map(|seq| BlockId::peel_slice(&seq.blocks[..most]));
        let (ours, theirs) = (ours.as_chunks::<CHUNK>(), theirs.as_chunks::<CHUNK>());
        let equal = ours.0.iter().zip(theirs.0).take_while(|(ours, theirs)| ours == theirs).count();
        if equal < ours.0.len() {
            return equal * CHUNK;
        }
        let rest = ours.1.iter().zip(theirs.1).take_while(|(ours, theirs)| ours == theirs);
        equal * CHUNK + rest.count()
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
