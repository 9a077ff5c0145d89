//! Identities: block ids, sequence and transfer handles. Imports nothing of the crate.
//!
//! Invariant: a block id is an index into the storage; a sequence's handle carries a generation, so that it is never
//! mistaken for what later reuses its index, and a transfer's handle is never a sequence's.

/// Index of a block in the storage, `0..num_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, bytemuck::TransparentWrapper)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// What a block table holds where `drop_range` took a block out; never an index.
    pub const HOLE: Self = Self(u32::MAX);

    /// The id as an index of per-block arrays.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The id as tables show it to the outside: holes as `padding`.
    #[inline]
    pub fn export(self, padding: i32) -> i32 {
        if self == Self::HOLE {
            padding
        } else {
            self.0 as i32
        }
    }
}

/// A sequence as the outside sees it: `generation << 32 | index`, in an int64; below `2**62`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, bytemuck::TransparentWrapper)]
#[repr(transparent)]
pub struct SeqHandle(pub i64);

impl SeqHandle {
    /// Where generations start again.
    pub(crate) const NUM_GENERATIONS: u32 = 1 << 30;

    pub(crate) fn new(index: u32, generation: u32) -> Self {
        Self(i64::from(generation) << 32 | i64::from(index))
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        self.0 as u32 as usize
    }

    #[inline]
    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// A transfer as the outside sees it: `2**62 + number`, where no sequence's handle lies; numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferHandle(pub i64);

impl TransferHandle {
    pub(crate) const FIRST: Self = Self(1 << 62);
}

/// Why a handle that should be a sequence's, or a transfer's, is not.
pub(crate) fn explain(handle: i64, is_transfer_wanted: bool) -> &'static str {
    match (is_transfer_wanted, handle >= TransferHandle::FIRST.0) {
        (false, true) => "it is a transfer's",
        (true, false) => "it is a sequence's, or none",
        (false, false) => "it was freed, or never given out",
        (true, true) => "it has ended, or was never begun",
    }
}
