//! Token ids hashed once, and the history that a preemption hands out. Imports `ids`.
//!
//! Invariant: immutable and shared; `hashes` holds one entry per full block, or none when the prefix cache is off.

use std::sync::Arc;

use crate::ids::{SeqHandle, SeqKey};

/// Token ids with the hashes of their full blocks.
pub(crate) struct Tokens {
    pub ids: Vec<u32>,
    pub hashes: Vec<u128>,
}

/// A request's tokens, prepared by one manager for any number of look-ups. Cheap to clone.
#[derive(Clone)]
pub struct Prompt {
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) manager: Arc<()>,
    pub(crate) resumes: Option<SeqKey>,
}

impl Prompt {
    /// Number of tokens.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.tokens.ids.len()
    }

    /// Token ids.
    pub fn ids(&self) -> &[u32] {
        &self.tokens.ids
    }

    /// The preempted sequence that `allocate` of this prompt continues.
    pub fn handle(&self) -> Option<SeqHandle> {
        self.resumes.map(SeqHandle::of)
    }
}
