//! Namespaces: who may share with whom, and how much each uses. Imports `keys`.
//!
//! Invariant: a namespace is known while a sequence or a published block belongs to it, so the table is bounded by the
//! pool. Index 0 is the default one, always known.

use std::collections::HashMap;
use std::sync::Arc;

/// What a namespace, or the whole pool, uses now and has asked for so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Blocks that its sequences own.
    pub live_blocks: usize,
    /// Its cached blocks that no sequence owns.
    pub cached_blocks: usize,
    /// Slots of its live blocks that hold a computed token.
    pub used_slots: u64,
    /// Its sequences.
    pub num_seqs: usize,
    /// Tokens looked up by its admissions, re-admissions apart.
    pub queried_tokens: u64,
    /// Those found.
    pub hit_tokens: u64,
}

struct Entry {
    keys: Arc<[u8]>,
    /// Sequences and published blocks.
    refs: usize,
    usage: Usage,
}

/// The known namespaces.
pub(crate) struct Namespaces {
    by_keys: HashMap<Arc<[u8]>, u32>,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
}

impl Namespaces {
    pub fn new() -> Self {
        let default = Entry { keys: Arc::new([]), refs: 1, usage: Usage::default() };
        Self { by_keys: HashMap::new(), entries: vec![default], vacant: Vec::new() }
    }

    /// Index of a known namespace. O(length of the keys).
    pub fn find(&self, keys: &[u8]) -> Option<u32> {
        if keys.is_empty() {
            return Some(0);
        }
        self.by_keys.get(keys).copied()
    }

    /// Index of a namespace for one more sequence, made known if need be.
    pub fn enter(&mut self, keys: &Arc<[u8]>) -> u32 {
        let index = self.find(keys).unwrap_or_else(|| {
            let entry = Entry { keys: Arc::clone(keys), refs: 0, usage: Usage::default() };
            let index = match self.vacant.pop() {
                Some(index) => {
                    self.entries[index as usize] = entry;
                    index
                }
                None => {
                    self.entries.push(entry);
                    self.entries.len() as u32 - 1
                }
            };
            self.by_keys.insert(Arc::clone(keys), index);
            index
        });
        self.join(index);
        index
    }

    /// One more sequence of a known namespace.
    pub fn join(&mut self, index: u32) {
        self.usage(index).num_seqs += 1;
        self.add_refs(index, 1);
    }

    /// A sequence of the namespace ends.
    pub fn leave(&mut self, index: u32) {
        self.usage(index).num_seqs -= 1;
        self.drop_ref(index);
    }

    #[inline]
    pub fn add_refs(&mut self, index: u32, count: usize) {
        self.entries[index as usize].refs += count;
    }

    #[inline]
    pub fn drop_ref(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        entry.refs -= 1;
        if entry.refs == 0 {
            let keys = std::mem::replace(&mut entry.keys, Arc::new([]));
            self.by_keys.remove(&keys);
            self.vacant.push(index);
        }
    }

    #[inline]
    pub fn usage(&mut self, index: u32) -> &mut Usage {
        &mut self.entries[index as usize].usage
    }

    /// Keys, references and usage of each known namespace.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Arc<[u8]>, usize, &Usage)> {
        let entries = self.entries.iter().enumerate().filter(|(_, entry)| entry.refs > 0);
        entries.map(|(index, entry)| (index as u32, &entry.keys, entry.refs, &entry.usage))
    }
}
