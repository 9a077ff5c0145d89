//! The prefix cache's index: from content to a block that holds it. Imports `blocks`, `hash`, `ids`.
//!
//! Content is compared, never trusted to a digest. Comparing whole prefixes would cost O(prefix) a block, so each
//! distinct (parent content, tokens, extra keys) is given a [`ContentId`] when first published: two published blocks
//! have the same content id if and only if they hold the K/V of the same prefix under the same keys. A candidate found
//! by digest is a hit if its tokens, its extra keys and its *parent's content id* are equal; by induction from the root
//! of its namespace no collision can pass.
//!
//! The table is open addressing with linear probing, entries in order of their homes (Robin Hood): a probe for what is not
//! there ends where it would stand, and a removal shifts back what follows until an entry is at home; there are no
//! tombstones and no rehash. An entry holds 32 bits of the digest, which fix its home, so neither touches another
//! block's record without need.
//!
//! Invariant: every published block is either the one the table names for its content (the oldest) or among the twins
//! of that content, in the order of publication; withdrawing a block removes exactly itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::blocks::Blocks;
use crate::hash::Digest;
use crate::ids::BlockId;
use crate::prefetch::prefetch;

/// Identity of a published prefix; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ContentId(pub u64);

/// Set in the ids of the roots, one a namespace, which nothing is published under.
const ROOT: u64 = 1 << 62;
/// Set in a record's parent if the block has extra keys.
const HAS_EXTRA: u64 = 1 << 63;
/// The content of a block that is not published.
const UNPUBLISHED: u64 = 0;

impl ContentId {
    /// The empty prefix of the namespace with this index: parent of its first blocks.
    pub fn root(namespace: u32) -> Self {
        Self(ROOT | u64::from(namespace))
    }

    fn as_parent(self, extra: Option<&Arc<[u8]>>) -> u64 {
        self.0 | if extra.is_some() { HAS_EXTRA } else { 0 }
    }
}

/// The chain value of a block: what its successor needs as parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub digest: Digest,
    pub content: ContentId,
}

/// Content to look up, or to publish.
#[derive(Clone, Copy)]
pub(crate) struct Content<'a> {
    pub digest: Digest,
    pub parent: ContentId,
    pub tokens: &'a [u32],
    pub extra: Option<&'a Arc<[u8]>>,
}

/// Spreads numbers that we count up ourselves, so that nobody can choose them: every eviction asks for twins.
#[derive(Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 << 8 | u64::from(byte)));
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        // The golden ratio, as in Fibonacci hashing: consecutive numbers fall far apart.
        self.0 = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Finds published blocks by content.
pub(crate) struct PrefixIndex {
    /// `digest bits << 32 | block id + 1`; 0 is empty.
    table: Vec<u64>,
    num_entries: usize,
    /// Later blocks of a content that the table already names, oldest first. Duplicates are rare: two requests that
    /// computed the same block at the same time.
    twins: HashMap<ContentId, Vec<BlockId>, BuildHasherDefault<NumberHasher>>,
    next_content: u64,
}

#[inline]
pub(crate) fn fragment(digest: Digest) -> u32 {
    digest.low as u32
}

#[inline]
fn entry(fragment: u32, block: BlockId) -> u64 {
    u64::from(fragment) << 32 | u64::from(block.0 + 1)
}

#[inline]
fn block_of(entry: u64) -> BlockId {
    BlockId(entry as u32 - 1)
}

pub(crate) fn is_published(blocks: &Blocks, block: BlockId) -> bool {
    blocks[block].content() != UNPUBLISHED
}

/// Digest and content of a published block.
pub(crate) fn link(blocks: &Blocks, block: BlockId) -> Link {
    Link { digest: blocks.digest(block), content: ContentId(blocks[block].content()) }
}

impl PrefixIndex {
    /// An index for `num_blocks` blocks, which never grows; None if the memory cannot be had.
    pub fn new(num_blocks: usize) -> Option<Self> {
        // At most 5/7 full: short probes at 11.2 bytes a block.
        let table = bytemuck::try_zeroed_vec((num_blocks * 7).div_ceil(5) + 1).ok()?;
        Some(Self { table, num_entries: 0, twins: HashMap::default(), next_content: 1 })
    }

    /// The oldest block with this content. `collisions` grows by the blocks met that have the same digest and other
    /// tokens or keys. O(1) expected.
    #[inline]
    pub fn find(&self, wanted: Content, blocks: &Blocks, collisions: &mut u64) -> Option<BlockId> {
        self.probe(wanted, blocks, collisions).ok()
    }

    /// The oldest block with this content, or the place where it would be entered.
    #[inline]
    fn probe(
        &self,
        wanted: Content,
        blocks: &Blocks,
        collisions: &mut u64,
    ) -> std::result::Result<BlockId, usize> {
        let fragment = fragment(wanted.digest);
        let parent = wanted.parent.as_parent(wanted.extra);
        let mut at = self.home(fragment);
        let mut distance = 0;
        loop {
            let entry = self.table[at];
            if (entry >> 32) as u32 == fragment && entry != 0 {
                let block = block_of(entry);
                let same = blocks.holds_tokens(block, wanted.tokens)
                    && (wanted.extra.is_none() || blocks.extras.get(&block) == wanted.extra);
                if same && blocks[block].parent() == parent {
                    return Ok(block);
                }
                // The same tokens after another number of their parent: it was dropped and computed again.
                *collisions += u64::from(!same && blocks.digest(block) == wanted.digest);
            } else if entry == 0 || self.distance(entry, at) < distance {
                return Err(at);
            }
            at = self.after(at);
            distance += 1;
        }
    }

    /// Ask for the place where a digest with these first bits is found, ahead of the look-up.
    #[inline]
    pub fn prefetch(&self, fragment: u32) {
        prefetch(&self.table, self.home(fragment));
    }

    /// Ask for what a look-up will compare, ahead of it: the block that stands where the digest is at home.
    #[inline]
    pub fn prefetch_block(&self, digest: Digest, blocks: &Blocks) {
        let entry = self.table[self.home(fragment(digest))];
        if entry != 0 {
            blocks.prefetch(block_of(entry));
            blocks.prefetch_tokens(block_of(entry));
        }
    }

    /// Publish a full block whose tokens stand beside it; returns its chain value, and the older block with the same
    /// content if there is one. O(1) expected.
    pub fn publish(
        &mut self,
        block: BlockId,
        digest: Digest,
        parent: ContentId,
        extra: Option<&Arc<[u8]>>,
        blocks: &mut Blocks,
    ) -> (Link, Option<BlockId>) {
        let wanted = Content { digest, parent, tokens: blocks.tokens(block), extra };
        let place = self.probe(wanted, blocks, &mut 0);
        let content = match place {
            Ok(older) => {
                let content = ContentId(blocks[older].content());
                self.twins.entry(content).or_default().push(block);
                content
            }
            Err(at) => {
                self.insert(at, entry(fragment(digest), block));
                self.next_content += 1;
                ContentId(self.next_content - 1)
            }
        };
        blocks[block].publish(digest, content.0, parent.as_parent(extra));
        blocks.set_digest_high(block, digest);
        if let Some(extra) = extra {
            blocks.extras.insert(block, Arc::clone(extra));
        }
        (Link { digest, content }, place.ok())
    }

    /// Make a published block unfindable; its oldest twin, if any, takes its place. O(1) expected, and O(twins).
    pub fn withdraw(&mut self, block: BlockId, blocks: &mut Blocks) {
        let record = &mut blocks[block];
        let fragment = record.fragment();
        let content = ContentId(record.content());
        record.set_content(UNPUBLISHED);
        if record.parent() & HAS_EXTRA != 0 {
            blocks.extras.remove(&block);
        }
        if self.twins.is_empty() {
            if let Some(at) = self.position(fragment, block) {
                self.remove(at);
            }
            return;
        }
        let named = self.position(fragment, block);
        match (named, self.twins.get_mut(&content)) {
            (Some(at), None) => self.remove(at),
            (Some(at), Some(twins)) => self.table[at] = entry(fragment, twins.remove(0)),
            (None, Some(twins)) => twins.retain(|&twin| twin != block),
            (None, None) => debug_assert!(false, "published block {block:?} is not indexed"),
        }
        if self.twins.get(&content).is_some_and(Vec::is_empty) {
            self.twins.remove(&content);
        }
    }

    /// Entries of the table and twins, for checks.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let named = self.table.iter().filter(|&&entry| entry != 0).map(|&entry| block_of(entry));
        named.chain(self.twins.values().flatten().copied())
    }

    /// Content ids that the table names, for checks.
    pub fn num_entries(&self) -> usize {
        self.num_entries
    }

    /// Where the probe for a fragment starts: the fragment scaled to the table.
    #[inline]
    fn home(&self, fragment: u32) -> usize {
        ((u64::from(fragment) * self.table.len() as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.table.len() {
            0
        } else {
            at + 1
        }
    }

    /// How far from its home an entry stands.
    #[inline]
    fn distance(&self, entry: u64, at: usize) -> usize {
        let home = self.home((entry >> 32) as u32);
        if at >= home {
            at - home
        } else {
            at + self.table.len() - home
        }
    }

    fn position(&self, fragment: u32, block: BlockId) -> Option<usize> {
        let wanted = entry(fragment, block);
        let mut at = self.home(fragment);
        while self.table[at] != 0 {
            if self.table[at] == wanted {
                return Some(at);
            }
            at = self.after(at);
        }
        None
    }

    /// Enter at the place that a probe ended at; what stands from there to the next empty place moves on by one.
    #[inline]
    fn insert(&mut self, at: usize, entry: u64) {
        self.num_entries += 1;
        let mut empty = at;
        while self.table[empty] != 0 {
            empty = self.after(empty);
        }
        while empty != at {
            let before = if empty == 0 { self.table.len() } else { empty } - 1;
            self.table[empty] = self.table[before];
            empty = before;
        }
        self.table[at] = entry;
    }

    /// Empty a place and move the entries behind it up, until one is at home.
    #[inline]
    fn remove(&mut self, mut hole: usize) {
        self.num_entries -= 1;
        loop {
            let next = self.after(hole);
            let entry = self.table[next];
            if entry == 0 || self.distance(entry, next) == 0 {
                self.table[hole] = 0;
                return;
            }
            self.table[hole] = entry;
            hole = next;
        }
    }
}
