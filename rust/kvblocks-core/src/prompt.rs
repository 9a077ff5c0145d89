//! Token ids hashed once, and the history that a preemption hands out. Imports `error`, `hash`, `ids`, `keys`.
//!
//! Invariant: immutable and shared; `hashes` holds one digest per full block, or none when the prefix cache is off.

use std::borrow::Cow;
use std::sync::Arc;

use crate::error::Result;
use crate::hash::{reserve, BlockHasher, Digest};
use crate::ids::SeqHandle;
use crate::keys::Keys;

/// Token ids with the digests of their full blocks and their extra keys.
pub(crate) struct Tokens {
    pub ids: Vec<u32>,
    pub hashes: Vec<Digest>,
    pub keys: Keys,
    /// Framed keys of the namespace, and their digest: the parent of block 0.
    pub namespace: Arc<[u8]>,
    pub root: Digest,
    /// Framed media keys of the blocks that have some, in order.
    pub extras: Vec<(usize, Arc<[u8]>)>,
}

impl Tokens {
    /// Whether any block has media keys.
    pub fn has_extras(&self) -> bool {
        !self.extras.is_empty()
    }

    /// Framed media keys of a block; empty for nearly all.
    #[inline]
    pub fn extra(&self, block: usize) -> Option<&Arc<[u8]>> {
        if !self.has_extras() {
            return None;
        }
        let at = self.extras.binary_search_by_key(&block, |extra| extra.0).ok()?;
        Some(&self.extras[at].1)
    }
}

/// Makes the prompts of one manager; immutable, so that hashing needs no lock. Cheap to clone.
#[derive(Clone)]
pub struct Preparer {
    /// Whose prompts these are.
    identity: Arc<()>,
    hasher: Option<BlockHasher>,
    block_size: usize,
    /// The default namespace's parts, made once.
    no_keys: Arc<[u8]>,
    root: Digest,
}

impl Preparer {
    pub(crate) fn new(hasher: Option<BlockHasher>, block_size: usize) -> Self {
        let no_keys: Arc<[u8]> = Arc::new([]);
        let root = hasher.map(|hasher| hasher.root(&no_keys)).unwrap_or_default();
        Self { identity: Arc::new(()), hasher, block_size, no_keys, root }
    }

    /// Hash a prompt once for any number of look-ups; borrowed ids are copied. Errors: empty keys, media outside the
    /// prompt, no memory for the digests. O(tokens).
    pub fn prepare<'a>(&self, ids: impl Into<Cow<'a, [u32]>>, keys: Keys) -> Result<Prompt> {
        let ids = ids.into();
        keys.check(ids.len())?;
        Ok(self.wrap(Arc::new(self.tokens(ids, keys)?), None))
    }

    /// Hash token ids.
    pub(crate) fn tokens(&self, ids: Cow<[u32]>, keys: Keys) -> Result<Tokens> {
        let hashes = if self.hasher.is_some() { reserve(ids.len(), self.block_size)? } else { Vec::new() };
        let extras = if keys.media.is_empty() { Vec::new() } else { keys.extras(self.block_size) };
        Ok(self.hash(ids, keys, extras, hashes))
    }

    /// A prompt and what was computed after it, under the same keys; `known`: digests of its leading blocks.
    pub(crate) fn extended(&self, prompt: &Tokens, ids: Vec<u32>, known: Vec<Digest>) -> Tokens {
        self.hash(Cow::Owned(ids), prompt.keys.clone(), prompt.extras.clone(), known)
    }

    /// The first `len` tokens of a prompt. A media item that is cut short has a key of its own in the block of the cut; the
    /// blocks before it keep the key under which they were computed.
    pub(crate) fn cut(&self, prompt: &Tokens, len: usize) -> Tokens {
        let full = len / self.block_size;
        let keys = prompt.keys.cut(len);
        let before = prompt.extras.iter().filter(|extra| extra.0 < full).cloned();
        let behind = keys.extras(self.block_size).into_iter().filter(|extra| extra.0 >= full);
        let extras = before.chain(behind).collect();
        let known = &prompt.hashes[..prompt.hashes.len().min(full)];
        self.hash(Cow::Borrowed(&prompt.ids[..len]), keys, extras, known.to_vec())
    }

    /// Hash what `hashes`, the digests of leading blocks that are known, does not cover.
    fn hash(
        &self,
        ids: Cow<[u32]>,
        keys: Keys,
        extras: Vec<(usize, Arc<[u8]>)>,
        mut hashes: Vec<Digest>,
    ) -> Tokens {
        let plain = keys.adapter.is_none() && keys.salt.is_none();
        let namespace = if plain { Arc::clone(&self.no_keys) } else { keys.namespace() };
        let mut root = self.root;
        let ids = match &self.hasher {
            None => ids.into_owned(),
            Some(hasher) => {
                if !plain {
                    root = hasher.root(&namespace);
                }
                hashes.reserve_exact((ids.len() / self.block_size).saturating_sub(hashes.len()));
                hasher.extend(&mut hashes, root, ids, &extras, self.block_size)
            }
        };
        Tokens { ids, hashes, keys, namespace, root, extras }
    }

    /// Tokens hashed already, as a prompt.
    pub(crate) fn wrap(&self, tokens: Arc<Tokens>, resumes: Option<SeqHandle>) -> Prompt {
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
    pub(crate) resumes: Option<SeqHandle>,
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

    /// Digests of the full blocks; empty when the prefix cache is off.
    pub fn hashes(&self) -> &[Digest] {
        &self.tokens.hashes
    }

    /// The preempted sequence that `allocate` of this prompt continues.
    pub fn handle(&self) -> Option<SeqHandle> {
        self.resumes
    }
}
