//! Token ids hashed once, and the history that a preemption hands out. Imports `hash`, `ids`.
//!
//! Invariant: immutable and shared; `hashes` holds one entry per full block, or none when the prefix cache is off.

use std::sync::Arc;

use crate::hash::BlockHasher;
use crate::ids::{SeqHandle, SeqKey};

/// Token ids with the hashes of their full blocks.
pub(crate) struct Tokens {
    pub ids: Vec<u32>,
    pub hashes: Vec<u128>,
}

/// Makes the prompts of one manager; immutable, so that hashing needs no lock. Cheap to clone.
#[derive(Clone)]
pub struct Preparer {
    /// Whose prompts these are.
    identity: Arc<()>,
    hasher: Option<BlockHasher>,
    block_size: usize,
}

impl Preparer {
    pub(crate) fn new(hasher: Option<BlockHasher>, block_size: usize) -> Self {
        Self { identity: Arc::new(()), hasher, block_size }
    }

    /// Hash a prompt once for any number of look-ups. O(tokens).
    pub fn prepare(&self, ids: Vec<u32>) -> Prompt {
        let hashes =
            self.hasher.as_ref().map(|hasher| hasher.chain(&ids, self.block_size)).unwrap_or_default();
        self.wrap(Arc::new(Tokens { ids, hashes }), None)
    }

    /// Tokens hashed already, as a prompt.
    pub(crate) fn wrap(&self, tokens: Arc<Tokens>, resumes: Option<SeqKey>) -> Prompt {
        Prompt { tokens, identity: Arc::clone(&self.identity), resumes }
    }

    /// Whether `prompt` was made here.
    pub(crate) fn made(&self, prompt: &Prompt) -> bool {
        Arc::ptr_eq(&prompt.identity, &self.identity)
    }
}

/// A request's tokens, prepared by one manager for any number of look-ups. Cheap to clone.
#[derive(Clone)]
pub struct Prompt {
    pub(crate) tokens: Arc<Tokens>,
    identity: Arc<()>,
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
