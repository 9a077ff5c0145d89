//! Identities: block ids and sequence handles. Imports nothing of the crate.
//!
//! Invariant: a block id is an index into the storage; a handle carries a generation, so that it is never mistaken
//! for the sequence that later reuses its index.

use slotmap::{Key, KeyData};

slotmap::new_key_type! {
    /// Key of a sequence in the manager's slot map.
    pub(crate) struct SeqKey;
}

/// Index of a block in the storage, `0..num_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as an index of per-block arrays.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A sequence as the outside sees it: `generation << 32 | index`, in an int64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqHandle(pub i64);

impl SeqHandle {
    pub(crate) fn of(key: SeqKey) -> Self {
        Self(key.data().as_ffi() as i64)
    }

    pub(crate) fn key(self) -> SeqKey {
        KeyData::from_ffi(self.0 as u64).into()
    }
}
