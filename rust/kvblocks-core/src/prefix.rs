//! The prefix cache's index: from content to a block that holds it. Imports `hash`, `ids`.
//!
//! Content is compared, never trusted to a hash. Comparing whole prefixes would cost O(prefix) a block, so each distinct
//! (parent content, tokens) is given a [`ContentId`] when first published: two published blocks have the same content
//! id if and only if they hold the K/V of the same token prefix. A candidate found by hash is a hit if its tokens and
//! its *parent's content id* are equal; by induction from the root no collision can pass.
//!
//! Invariant: every published block is either the one the table names for its content (the oldest) or among the twins
//! of that content, in the order of publication; withdrawing a block removes exactly itself.

use std::collections::HashMap;

use hashbrown::HashTable;

use crate::ids::BlockId;

/// Identity of a published token prefix; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ContentId(u64);

impl ContentId {
    /// The empty prefix: parent of every first block.
    pub const ROOT: Self = Self(0);
}

/// What stands in the `content` array for a block that is not published (only `parent` may be the root).
const UNPUBLISHED: u64 = 0;

/// The chain value of a block: what its successor needs as parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub hash: u128,
    pub content: ContentId,
}

impl Link {
    /// Before the first block.
    pub const ROOT: Self = Self { hash: 0, content: ContentId::ROOT };
}

/// Token ids of every block, beside the block: `block_size` entries each.
pub(crate) struct TokenStore {
    ids: Vec<u32>,
    block_size: usize,
}

impl TokenStore {
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self { ids: vec![0; num_blocks * block_size], block_size }
    }

    pub fn of(&self, block: BlockId) -> &[u32] {
        let start = block.index() * self.block_size;
        &self.ids[start..start + self.block_size]
    }

    pub fn write(&mut self, block: BlockId, offset: usize, tokens: &[u32]) {
        let start = block.index() * self.block_size + offset;
        self.ids[start..start + tokens.len()].copy_from_slice(tokens);
    }

    pub fn copy(&mut self, src: BlockId, dst: BlockId, len: usize) {
        let (src, dst) = (src.index() * self.block_size, dst.index() * self.block_size);
        self.ids.copy_within(src..src + len, dst);
    }
}

/// Finds published blocks by content.
pub(crate) struct PrefixIndex {
    table: HashTable<BlockId>,
    /// Later blocks of a content that the table already names, oldest first. Duplicates are rare: two requests that
    /// computed the same block at the same time.
    twins: HashMap<ContentId, Vec<BlockId>>,
    hash: Vec<u128>,
    content: Vec<u64>,
    parent: Vec<u64>,
    next_content: u64,
}

impl PrefixIndex {
    /// An index for `num_blocks` blocks. It never grows: the table holds at most one entry a block.
    pub fn new(num_blocks: usize) -> Self {
        Self {
            table: HashTable::with_capacity(num_blocks),
            twins: HashMap::new(),
            hash: vec![0; num_blocks],
            content: vec![0; num_blocks],
            parent: vec![0; num_blocks],
            next_content: 1,
        }
    }

    pub fn is_published(&self, block: BlockId) -> bool {
        self.content[block.index()] != UNPUBLISHED
    }

    /// Hash and content of a published block.
    pub fn link(&self, block: BlockId) -> Link {
        Link { hash: self.hash[block.index()], content: ContentId(self.content[block.index()]) }
    }

    /// The oldest block that holds `tokens` after `parent`, found by their `hash`. `collisions` grows by the blocks met
    /// that have this hash and other content. O(1) expected.
    pub fn find(
        &self,
        hash: u128,
        parent: ContentId,
        tokens: &[u32],
        store: &TokenStore,
        collisions: &mut u64,
    ) -> Option<BlockId> {
        self.table
            .find(hash as u64, |&block| {
                let at = block.index();
                if self.hash[at] != hash {
                    return false;
                }
                let same = self.parent[at] == parent.0 && store.of(block) == tokens;
                *collisions += u64::from(!same);
                same
            })
            .copied()
    }

    /// Publish a full block whose tokens stand in `store`; returns its chain value. O(1) expected.
    pub fn publish(&mut self, block: BlockId, hash: u128, parent: ContentId, store: &TokenStore) -> Link {
        let content = match self.find(hash, parent, store.of(block), store, &mut 0) {
            Some(first) => {
                let content = ContentId(self.content[first.index()]);
                self.twins.entry(content).or_default().push(block);
                content
            }
            None => {
                self.insert(block, hash);
                self.next_content += 1;
                ContentId(self.next_content - 1)
            }
        };
        let at = block.index();
        (self.hash[at], self.content[at], self.parent[at]) = (hash, content.0, parent.0);
        Link { hash, content }
    }

    /// Make a published block unfindable; its oldest twin, if any, takes its place. O(1) expected, and O(twins).
    pub fn withdraw(&mut self, block: BlockId) {
        let Link { hash, content } = self.link(block);
        self.content[block.index()] = UNPUBLISHED;
        let twins = self.twins.get_mut(&content);
        let named = self.table.find_entry(hash as u64, |&other| other == block);
        match (named, twins) {
            (Ok(entry), None) => {
                entry.remove();
            }
            (Ok(mut entry), Some(twins)) => *entry.get_mut() = twins.remove(0),
            (Err(_), Some(twins)) => twins.retain(|&other| other != block),
            (Err(_), None) => debug_assert!(false, "published block {block:?} is not indexed"),
        }
        if self.twins.get(&content).is_some_and(Vec::is_empty) {
            self.twins.remove(&content);
        }
    }

    /// Entries of the table and twins, for checks.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.table.iter().chain(self.twins.values().flatten()).copied()
    }

    /// Content id of the parent of a published block, for checks.
    pub fn parent(&self, block: BlockId) -> ContentId {
        ContentId(self.parent[block.index()])
    }

    fn insert(&mut self, block: BlockId, hash: u128) {
        let hashes = &self.hash;
        self.table.insert_unique(hash as u64, block, |other| hashes[other.index()] as u64);
    }
}
