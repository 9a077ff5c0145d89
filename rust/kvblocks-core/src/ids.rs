//! Identities: block ids, sequence and transfer handles. Imports nothing of the crate.
//!
//! Invariant: a block id is an index into the storage; a handle carries a generation, so that it is never mistaken
//! for what later reuses its index.

use slotmap::{Key, KeyData};

slotmap::new_key_type! {
    /// Key of a transfer in the manager's slot map.
    pub(crate) struct TransferKey;
}

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

/// A sequence as the outside sees it: `generation << 32 | index`, in an int64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, bytemuck::TransparentWrapper)]
#[repr(transparent)]
pub struct SeqHandle(pub i64);

impl SeqHandle {
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

/// A transfer as the outside sees it, made like a sequence's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferHandle(pub i64);

impl TransferHandle {
    pub(crate) fn of(key: TransferKey) -> Self {
        Self(key.data().as_ffi() as i64)
    }

    /// None for a number that no key has: the slot map would mend it into one.
    pub(crate) fn key(self) -> Option<TransferKey> {
        let key = TransferKey::from(KeyData::from_ffi(self.0 as u64));
        (Self::of(key) == self).then_some(key)
    }
}
