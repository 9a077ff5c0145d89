//! The steps of one sequence that were scheduled and not yet committed. Imports `ids`.
//!
//! Invariant: `block` of a step is where its only token goes, or a hole; it is never another block.

use crate::ids::BlockId;

/// A step that was scheduled and not yet committed.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct InFlight {
    pub num_new: u32,
    /// Slots that were reserved beyond `num_scheduled` before the step, to which a rejection returns.
    pub ahead_before: u32,
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
    /// Bytes up to the end of the oldest step.
    pub const HEAD: usize = size_of::<u32>() + size_of::<InFlight>();

    pub fn new() -> Self {
        let none = InFlight { num_new: 0, ahead_before: 0, block: BlockId::HOLE };
        Self { len: 0, steps: [none; MAX_IN_FLIGHT] }
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    #[inline]
    pub fn is_full(&self) -> bool {
        self.len() >= MAX_IN_FLIGHT
    }

    #[inline]
    pub fn oldest(&self) -> Option<InFlight> {
        (self.len > 0).then_some(self.steps[0])
    }

    /// Add a step; false if there is no room for it.
    #[inline]
    pub fn push(&mut self, step: InFlight) -> bool {
        let place = self.steps.get_mut(self.len as usize);
        self.len += u32::from(place.is_some());
        place.map(|place| *place = step).is_some()
    }

    #[inline]
    pub fn pop_oldest(&mut self) -> Option<InFlight> {
        let step = self.oldest()?;
        self.len -= 1;
        if self.len > 0 {
            self.move_up();
        }
        Some(step)
    }

    /// Take the oldest step, if it is known where its only token goes; returns the block.
    #[inline]
    pub fn pop_placed(&mut self) -> Option<BlockId> {
        let block = self.oldest()?.block;
        if block != BlockId::HOLE {
            self.pop_oldest();
        }
        (block != BlockId::HOLE).then_some(block)
    }

    /// Not cold where several steps are in flight, but out of the way, and of the registers, of those with one.
    #[cold]
    #[inline(never)]
    fn move_up(&mut self) {
        self.steps.rotate_left(1);
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

    /// Say where the only token of the newest step goes.
    #[inline]
    pub fn place_newest(&mut self, block: BlockId) {
        let newest = self.len().wrapping_sub(1);
        if let Some(step) = self.steps.get_mut(newest) {
            step.block = block;
        }
    }

    /// The table changes: look blocks up when they are needed.
    pub fn forget_blocks(&mut self) {
        self.steps.iter_mut().for_each(|step| step.block = BlockId::HOLE);
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = InFlight> + '_ {
        self.steps[..self.len()].iter().copied()
    }
}
