//! The prefix cache's index: from content to a block that holds it. Imports `blocks`, `buckets`, `hash`,
//! `ids`, `prefetch`, `prompt`.
//!
//! Content is compared, never trusted to a digest. Comparing whole prefixes would cost O(prefix) a block, so each
//! distinct (parent content, tokens, extra keys) is given a [`ContentId`] when first published: two published blocks
//! have the same content id if and only if they hold the K/V of the same prefix under the same keys. A candidate found
//! by digest is a hit if its tokens, its extra keys and its *parent's content id* are equal; by induction from the root
//! of its namespace no collision can pass. So a block may be guessed as well: the hits of a prompt are found by asking
//! each block's record which one follows it, and the table only where that was wrong.
//!
//! Invariant: every published block is either the one the table names for its content (the oldest) or among the twins
//! of that content, in the order of publication; withdrawing a block removes exactly itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::blocks::{are_same, Blocks, Record};
use crate::buckets::Buckets;
use crate::hash::Digest;
use crate::ids::BlockId;
use crate::prefetch::AHEAD;
use crate::prompt::Tokens;

/// Identity of a published prefix; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ContentId(pub u64);

/// Set in the ids of the roots, one a namespace, which nothing is published under.
const ROOT: u64 = 1 << 62;
/// Set in a record's parent if the block has extra keys.
const HAS_EXTRA: u64 = 1 << 63;

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
    pub digest: &'a Digest,
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
    /// The oldest block of each content.
    buckets: Buckets,
    /// Later blocks of a content that the table already names, oldest first. Duplicates are rare: two requests that
    /// computed the same block at the same time.
    twins: HashMap<ContentId, Vec<BlockId>, BuildHasherDefault<NumberHasher>>,
    next_content: u64,
}

/// Blocks of a prompt to make room for among the hits before any is found.
const HITS_AT_ONCE: usize = 256;

/// The hits of a prompt so far.
#[derive(Clone, Copy)]
struct Chain {
    /// Content of the last one.
    parent: ContentId,
    /// What may follow it; perhaps no block at all.
    likely: BlockId,
    len: usize,
}

impl Chain {
    /// Add a block to the hits, and ask for those that may come soon.
    #[inline(always)]
    fn add(&mut self, block: BlockId, hits: &mut [BlockId], blocks: &Blocks) {
        let record = &blocks[block];
        hits[self.len] = block;
        *self = Self { parent: ContentId(record.content()), likely: BlockId(record.prev), len: self.len + 1 };
        // Ids of neighbours mostly follow one another, in one direction or the other.
        let step = record.prev.wrapping_sub(block.0);
        blocks.prefetch_hit(BlockId(block.0.wrapping_add(step.wrapping_mul(AHEAD as u32))));
    }
}

/// The bits of a digest that decide where it stands.
#[inline]
pub(crate) fn fragment(digest: &Digest) -> u64 {
    digest.low as u64
}

/// Digest and content of a published block.
pub(crate) fn link(blocks: &Blocks, block: BlockId) -> Link {
    Link { digest: blocks.digest(block), content: ContentId(blocks[block].content()) }
}

impl PrefixIndex {
    /// An index for `num_blocks` blocks, which never grows; None if the memory cannot be had.
    pub fn new(num_blocks: usize) -> Option<Self> {
        Some(Self { buckets: Buckets::new(num_blocks)?, twins: HashMap::default(), next_content: 1 })
    }

    /// The oldest block with this content. `collisions` grows by the blocks met that have the same digest and other
    /// tokens or keys. O(1) expected.
    #[inline]
    fn find(&self, wanted: Content, blocks: &Blocks, collisions: &mut u64) -> Option<BlockId> {
        self.buckets.find(fragment(wanted.digest), |block| compare(block, &wanted, blocks, collisions))
    }

    /// Ask for the place where a digest with these first bits is found, ahead of the look-up.
    #[inline]
    pub fn prefetch(&self, fragment: u64) {
        self.buckets.prefetch(fragment);
    }

    /// The longest run of published blocks that hold the leading blocks of a prompt after `parent`, at most `most`, left in
    /// `hits`, which is empty; `collisions` as in `find`. O(hits).
    #[inline(never)]
    pub fn find_chain(
        &self,
        prompt: &Tokens,
        parent: ContentId,
        most: usize,
        blocks: &Blocks,
        collisions: &mut u64,
        hits: &mut Vec<BlockId>,
    ) {
        let most = most.min(prompt.hashes.len());
        let (own, size) = blocks.tokens_and_size();
        let mut chain = Chain { parent, likely: BlockId::HOLE, len: 0 };
        while chain.len < most {
            let part = chain.len * size..(chain.len + 1) * size;
            let (digest, tokens, extra) =
                (&prompt.hashes[chain.len], &prompt.ids[part], prompt.extra(chain.len));
            let wanted = Content { digest, parent: chain.parent, tokens, extra };
            let Some(block) = self.find(wanted, blocks, collisions) else { break };
            if chain.len == hits.len() {
                // As there are hits, since a long prompt may have few.
                hits.resize(most.min(chain.len + chain.len.max(HITS_AT_ONCE)), BlockId::HOLE);
            }
            chain.add(block, hits, blocks);
            // From here on each block tells which one likely follows it.
            if size == 16 && prompt.extras.is_empty() {
                let (own, wanted) = (own.as_chunks().0, prompt.ids.as_chunks().0);
                self.follow(&mut chain, hits, blocks, |chain, record| {
                    record.parent() == chain.parent.0
                        && are_same(&own[chain.likely.index()], &wanted[chain.len])
                });
            } else {
                self.follow(&mut chain, hits, blocks, |chain, record| {
                    let extra = prompt.extra(chain.len);
                    record.parent() == chain.parent.as_parent(extra)
                        && blocks.tokens(chain.likely)
                            == &prompt.ids[chain.len * size..(chain.len + 1) * size]
                        && (extra.is_none() || blocks.extras.get(&chain.likely) == extra)
                });
            }
        }
        hits.truncate(chain.len);
    }

    /// Add blocks to `chain` as long as the one that is likely next is the oldest with the content that is wanted, as
    /// `is_wanted` says if it is published.
    #[inline(always)]
    fn follow(
        &self,
        chain: &mut Chain,
        hits: &mut [BlockId],
        blocks: &Blocks,
        is_wanted: impl Fn(&Chain, &Record) -> bool,
    ) {
        let no_twins = self.twins.is_empty();
        while chain.len < hits.len() {
            let Some(record) = blocks.get(chain.likely) else { return };
            let is_hit = record.is_published()
                && is_wanted(chain, record)
                && (no_twins || self.is_single(record.content()));
            if !is_hit {
                return;
            }
            chain.add(chain.likely, hits, blocks);
        }
    }

    /// Whether a content has a single block.
    #[inline(never)]
    fn is_single(&self, content: u64) -> bool {
        !self.twins.contains_key(&ContentId(content))
    }

    /// Publish a full block whose tokens stand beside it; returns its content. O(1) expected.
    #[inline]
    pub fn publish(
        &mut self,
        block: BlockId,
        digest: &Digest,
        parent: ContentId,
        extra: Option<&Arc<[u8]>>,
        blocks: &mut Blocks,
    ) -> ContentId {
        let older = self.buckets.find(fragment(digest), |older| {
            let wanted = Content { digest, parent, tokens: blocks.tokens(block), extra };
            compare(older, &wanted, blocks, &mut 0)
        });
        let content = match older {
            Some(older) => {
                let content = ContentId(blocks[older].content());
                self.twins.entry(content).or_default().push(block);
                content
            }
            None => {
                self.buckets.insert(fragment(digest), block);
                self.next_content += 1;
                ContentId(self.next_content - 1)
            }
        };
        blocks[block].publish(digest, content.0, parent.as_parent(extra));
        blocks.set_digest_high(block, digest);
        if let Some(extra) = extra {
            blocks.extras.insert(block, Arc::clone(extra));
        }
        content
    }

    /// Make a published block unfindable; its oldest twin, if any, takes its place. O(1) expected, and O(twins).
    #[inline]
    pub fn withdraw(&mut self, block: BlockId, blocks: &mut Blocks) {
        let record = &mut blocks[block];
        let fragment = record.fragment();
        let content = ContentId(record.content());
        record.unpublish();
        if record.parent() & HAS_EXTRA != 0 {
            blocks.extras.remove(&block);
        }
        if self.twins.is_empty() {
            self.buckets.remove(fragment, block);
        } else {
            self.withdraw_among_twins(block, fragment, content);
        }
    }

    #[inline(never)]
    fn withdraw_among_twins(&mut self, block: BlockId, fragment: u64, content: ContentId) {
        let oldest = match self.twins.get_mut(&content) {
            None => None,
            // It is the one that the table names, unless it is among the twins.
            Some(twins) => match twins.iter().position(|&twin| twin == block) {
                None => Some(twins.remove(0)),
                Some(at) => {
                    twins.remove(at);
                    self.forget_empty(content);
                    return;
                }
            },
        };
        self.buckets.remove(fragment, block);
        if let Some(oldest) = oldest {
            self.buckets.insert(fragment, oldest);
            self.forget_empty(content);
        }
    }

    fn forget_empty(&mut self, content: ContentId) {
        if self.twins.get(&content).is_some_and(Vec::is_empty) {
            self.twins.remove(&content);
        }
    }

    /// The oldest block with the content of a published one, if that is another. O(1) expected, and O(twins).
    pub fn older_twin(&self, block: BlockId, blocks: &Blocks) -> Option<BlockId> {
        let record = &blocks[block];
        if !self.twins.get(&ContentId(record.content()))?.contains(&block) {
            return None;
        }
        let parent = ContentId(record.parent() & !HAS_EXTRA);
        let (digest, extra) = (blocks.digest(block), blocks.extras.get(&block));
        self.find(Content { digest: &digest, parent, tokens: blocks.tokens(block), extra }, blocks, &mut 0)
    }

    /// Entries of the table and twins, for checks.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.buckets.iter().chain(self.twins.values().flatten().copied())
    }

    /// Content ids that the table names, for checks.
    pub fn num_entries(&self) -> usize {
        self.buckets.len()
    }
}

/// Whether a published block holds the content that is wanted; counts a collision. Apart from its callers, which rarely
/// have something to compare.
#[inline(never)]
fn compare(block: BlockId, wanted: &Content, blocks: &Blocks, collisions: &mut u64) -> bool {
    let is_hit =
        blocks[block].parent() == wanted.parent.as_parent(wanted.extra) && same_part(block, wanted, blocks);
    *collisions += u64::from(!is_hit && collides(block, wanted, blocks));
    is_hit
}

/// Whether tokens and keys of one block are equal, whatever came before it.
fn same_part(block: BlockId, wanted: &Content, blocks: &Blocks) -> bool {
    blocks.tokens(block) == wanted.tokens
        && (wanted.extra.is_none() || blocks.extras.get(&block) == wanted.extra)
}

/// Whether only the digest is the same. The same part after another number of its parent is none: that was dropped and
/// computed again.
#[cold]
fn collides(block: BlockId, wanted: &Content, blocks: &Blocks) -> bool {
    blocks.digest(block) == *wanted.digest && !same_part(block, wanted, blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Algorithm, BlockHasher};
    use crate::keys::{KeyValue, Keys, Media};
    use crate::prompt::Preparer;

    const FIRST: BlockId = BlockId(1);
    const SECOND: BlockId = BlockId(2);
    const SECOND_AFTER_ANOTHER: BlockId = BlockId(4);
    const TWIN_OF_SECOND: BlockId = BlockId(5);
    const SECOND_WITH_IMAGE: BlockId = BlockId(6);
    const NUM_BLOCKS: usize = 8;

    /// An index in which some blocks are published, and what makes prompts for it.
    struct Cache {
        preparer: Preparer,
        size: usize,
        blocks: Blocks,
        index: PrefixIndex,
    }

    impl Cache {
        /// Two blocks of one prompt; others that hold the tokens of the second after another block, twice, and with an
        /// image.
        fn new(size: usize) -> Self {
            let hasher = BlockHasher { algorithm: Algorithm::Xxh3, seed: 1 };
            let mut cache = Self {
                preparer: Preparer::new(Some(hasher), size),
                size,
                blocks: Blocks::new(NUM_BLOCKS, size, false).unwrap(),
                index: PrefixIndex::new(NUM_BLOCKS).unwrap(),
            };
            cache.publish(&cache.prompt([1, 2], None), &[FIRST, SECOND]);
            cache.publish(&cache.prompt([3, 2], None), &[BlockId(3), SECOND_AFTER_ANOTHER]);
            cache.publish(&cache.prompt([1, 2], None), &[FIRST, TWIN_OF_SECOND]);
            cache.publish(&cache.prompt([1, 2], Some("image")), &[FIRST, SECOND_WITH_IMAGE]);
            cache
        }

        /// Two blocks of one token id each, the second with an image in it.
        fn prompt(&self, ids: [u32; 2], image: Option<&str>) -> Tokens {
            let ids: Vec<_> = ids.iter().flat_map(|&id| vec![id; self.size]).collect();
            let image = image.map(|digest| Media::new(KeyValue::Text(digest.into()), self.size, 1));
            let keys = Keys { media: image.into_iter().collect(), ..Keys::default() };
            self.preparer.tokens(ids.into(), keys).unwrap()
        }

        fn publish(&mut self, prompt: &Tokens, table: &[BlockId]) {
            let mut parent = ContentId::root(0);
            for (i, &block) in table.iter().enumerate() {
                if self.blocks[block].is_published() {
                    parent = ContentId(self.blocks[block].content());
                    continue;
                }
                self.blocks.write_tokens(block, 0, &prompt.ids[i * self.size..(i + 1) * self.size]);
                let (digest, extra) = (&prompt.hashes[i], prompt.extra(i));
                parent = self.index.publish(block, digest, parent, extra, &mut self.blocks);
            }
        }

        fn hits(&self, prompt: &Tokens) -> Vec<BlockId> {
            let mut hits = Vec::new();
            self.index.find_chain(prompt, ContentId::root(0), 2, &self.blocks, &mut 0, &mut hits);
            hits
        }
    }

    #[test]
    fn a_wrong_guess_changes_nothing_that_is_found() {
        for size in [4, 16] {
            let mut cache = Cache::new(size);
            let plain = cache.prompt([1, 2], None);
            let [image, other] = ["image", "other"].map(|digest| cache.prompt([1, 2], Some(digest)));
            // All blocks there are, and none.
            for guess in (0..=NUM_BLOCKS as u32).chain([u32::MAX]) {
                cache.blocks.suggest_next(FIRST, BlockId(guess));
                assert_eq!(cache.hits(&plain), [FIRST, SECOND], "{guess}");
                assert_eq!(cache.hits(&image), [FIRST, SECOND_WITH_IMAGE], "{guess}");
                assert_eq!(cache.hits(&other), [FIRST], "{guess}");
            }
            for (withdrawn, left) in [(SECOND, Some(TWIN_OF_SECOND)), (TWIN_OF_SECOND, None)] {
                cache.index.withdraw(withdrawn, &mut cache.blocks);
                for guess in 0..=NUM_BLOCKS as u32 {
                    cache.blocks.suggest_next(FIRST, BlockId(guess));
                    let found: Vec<_> = [FIRST].into_iter().chain(left).collect();
                    assert_eq!(cache.hits(&plain), found, "{guess}");
                }
            }
        }
    }
}
