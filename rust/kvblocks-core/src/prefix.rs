//! The prefix cache's index: from content to a block that holds it. Imports `blocks`, `hash`, `ids`,
//! `prefetch`, `prompt`, `words`.
//!
//! Content is compared, never trusted to a digest. Comparing whole prefixes would cost O(prefix) a block, so each
//! distinct (parent content, tokens, extra keys) is given a [`ContentId`] when first published: two published blocks
//! have the same content id if and only if they hold the K/V of the same prefix under the same keys. A candidate found
//! by digest is a hit if its tokens, its extra keys and its *parent's content id* are equal; by induction from the root
//! of its namespace no collision can pass.
//!
//! The table is open addressing in buckets of one cache line: up to 10 block ids, beside each a tag of 16 bits, and the
//! number of entries that found the bucket full and went on to a later one. Half of the digest's first 64 bits choose the
//! bucket, others the tag: so a look-up compares all tags of a bucket at once, nearly never looks at a block in vain,
//! and goes on only where that number is not 0. There are no tombstones and no rehash.
//!
//! Invariant: every published block is either the one the table names for its content (the oldest) or among the twins
//! of that content, in the order of publication; withdrawing a block removes exactly itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::blocks::Blocks;
use crate::hash::Digest;
use crate::ids::BlockId;
use crate::prefetch::{prefetch, AHEAD};
use crate::prompt::Tokens;
use crate::words::Words;

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
    /// `WORDS` to a bucket.
    words: Words,
    num_buckets: usize,
    num_entries: usize,
    /// Later blocks of a content that the table already names, oldest first. Duplicates are rare: two requests that
    /// computed the same block at the same time.
    twins: HashMap<ContentId, Vec<BlockId>, BuildHasherDefault<NumberHasher>>,
    next_content: u64,
}

/// The bits of a digest that decide where it stands.
#[inline]
pub(crate) fn fragment(digest: &Digest) -> u64 {
    digest.low as u64
}

/// Entries of a bucket.
const PLACES: usize = 10;
/// Its length in the table.
const WORDS: usize = size_of::<Bucket>() / size_of::<u32>();
/// The tag of an empty place.
const EMPTY: u16 = 0;

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
struct Bucket {
    tags: [u16; PLACES],
    /// Entries that found it full.
    went_on: u32,
    blocks: [u32; PLACES],
}

impl Bucket {
    /// The places with a tag, one bit each.
    #[inline]
    fn places(&self, tag: u16) -> u32 {
        let bits = self.tags.iter().zip(0..).map(|(&other, place)| u32::from(other == tag) << place);
        bits.fold(0, |places, bit| places | bit)
    }

    /// The place of a block, given its tag.
    #[inline]
    fn place_of(&self, tag: u16, block: BlockId) -> Option<usize> {
        let mut places = self.places(tag);
        while places != 0 {
            let place = places.trailing_zeros() as usize;
            if self.blocks[place] == block.0 {
                return Some(place);
            }
            places &= places - 1;
        }
        None
    }
}

/// What stands for a digest in its bucket.
#[inline]
fn tag(fragment: u64) -> u16 {
    ((fragment >> 32) as u16).max(EMPTY + 1)
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
        // 57 % full at 11.2 bytes a block: few buckets overflow.
        let num_buckets = (num_blocks * 7).div_ceil(40) + 1;
        let words = Words::new(WORDS * num_buckets)?;
        Some(Self { words, num_buckets, num_entries: 0, twins: HashMap::default(), next_content: 1 })
    }

    /// The oldest block with this content. `collisions` grows by the blocks met that have the same digest and other
    /// tokens or keys. O(1) expected.
    #[inline]
    pub fn find(&self, wanted: Content, blocks: &Blocks, collisions: &mut u64) -> Option<BlockId> {
        let fragment = fragment(wanted.digest);
        let mut at = self.home(fragment);
        for _ in 0..self.num_buckets {
            let bucket = self.bucket(at);
            let mut found = bucket.places(tag(fragment));
            while found != 0 {
                let block = BlockId(bucket.blocks[found.trailing_zeros() as usize]);
                if holds(block, &wanted, blocks) {
                    return Some(block);
                }
                *collisions += u64::from(collides(block, &wanted, blocks));
                found &= found - 1;
            }
            if bucket.went_on == 0 {
                break;
            }
            at = self.after(at);
        }
        None
    }

    /// Ask for the place where a digest with these first bits is found, ahead of the look-up.
    #[inline]
    pub fn prefetch(&self, fragment: u64) {
        prefetch(&self.words, WORDS * self.home(fragment));
    }

    /// The block that a look-up would compare first, asked for ahead of it; a hole if there is none.
    #[inline]
    fn prefetch_candidate(&self, digest: &Digest, blocks: &Blocks) -> BlockId {
        let bucket = self.bucket(self.home(fragment(digest)));
        let place = bucket.places(tag(fragment(digest))).trailing_zeros() as usize;
        let Some(&block) = bucket.blocks.get(place) else { return BlockId::HOLE };
        blocks.prefetch(BlockId(block));
        blocks.prefetch_tokens(BlockId(block));
        BlockId(block)
    }

    /// The longest run of published blocks that hold the leading blocks of a prompt after `parent`, at most `most`, pushed
    /// to `hits`; `collisions` as in `find`. O(hits).
    pub fn find_chain(
        &self,
        prompt: &Tokens,
        mut parent: ContentId,
        most: usize,
        blocks: &Blocks,
        collisions: &mut u64,
        hits: &mut Vec<BlockId>,
    ) {
        // What is likely found, a few blocks ahead; its bucket is asked for twice as far ahead.
        let mut candidates = [BlockId::HOLE; AHEAD];
        for (to, digest) in candidates.iter_mut().zip(&prompt.hashes) {
            *to = self.prefetch_candidate(digest, blocks);
        }
        let parts = prompt.ids.chunks_exact(blocks.block_size());
        for (i, (tokens, digest)) in parts.zip(&prompt.hashes).enumerate().take(most) {
            let wanted = Content { digest, parent, tokens, extra: prompt.extra(i) };
            let likely = candidates[i % AHEAD];
            let found = match likely != BlockId::HOLE && holds(likely, &wanted, blocks) {
                true => Some(likely),
                false => self.find(wanted, blocks, collisions),
            };
            let Some(block) = found else { return };
            parent = ContentId(blocks[block].content());
            hits.push(block);
            if let Some(far) = prompt.hashes.get(i + 2 * AHEAD) {
                self.prefetch(fragment(far));
            }
            if let Some(ahead) = prompt.hashes.get(i + AHEAD) {
                candidates[i % AHEAD] = self.prefetch_candidate(ahead, blocks);
            }
        }
    }

    /// Publish a full block whose tokens stand beside it; returns its content. O(1) expected.
    pub fn publish(
        &mut self,
        block: BlockId,
        digest: &Digest,
        parent: ContentId,
        extra: Option<&Arc<[u8]>>,
        blocks: &mut Blocks,
    ) -> ContentId {
        let wanted = Content { digest, parent, tokens: blocks.tokens(block), extra };
        let content = match self.find(wanted, blocks, &mut 0) {
            Some(older) => {
                let content = ContentId(blocks[older].content());
                self.twins.entry(content).or_default().push(block);
                content
            }
            None => {
                self.insert(fragment(digest), block);
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
    pub fn withdraw(&mut self, block: BlockId, blocks: &mut Blocks) {
        let record = &mut blocks[block];
        let fragment = record.fragment();
        let content = ContentId(record.content());
        record.set_content(UNPUBLISHED);
        if record.parent() & HAS_EXTRA != 0 {
            blocks.extras.remove(&block);
        }
        if self.twins.is_empty() {
            self.remove(fragment, block);
            return;
        }
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
        self.remove(fragment, block);
        if let Some(oldest) = oldest {
            self.insert(fragment, oldest);
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
        let buckets = (0..self.num_buckets).map(|at| self.bucket(at));
        let entries = buckets.flat_map(|bucket| bucket.tags.iter().zip(bucket.blocks));
        let named = entries.filter(|&(&tag, _)| tag != EMPTY).map(|(_, block)| BlockId(block));
        named.chain(self.twins.values().flatten().copied())
    }

    /// Content ids that the table names, for checks.
    pub fn num_entries(&self) -> usize {
        self.num_entries
    }

    /// The first bucket of a fragment: 32 bits of it, scaled to their number.
    #[inline]
    fn home(&self, fragment: u64) -> usize {
        (((fragment & 0xffff_ffff) * self.num_buckets as u64) >> 32) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.num_buckets {
            0
        } else {
            at + 1
        }
    }

    #[inline]
    fn bucket(&self, at: usize) -> &Bucket {
        bytemuck::cast_ref(&self.words.as_chunks::<WORDS>().0[at])
    }

    #[inline]
    fn bucket_mut(&mut self, at: usize) -> &mut Bucket {
        bytemuck::cast_mut(&mut self.words.as_chunks_mut::<WORDS>().0[at])
    }

    /// Enter a block in the first bucket that has a place.
    #[inline]
    fn insert(&mut self, fragment: u64, block: BlockId) {
        self.num_entries += 1;
        let mut at = self.home(fragment);
        for _ in 0..self.num_buckets {
            let bucket = self.bucket_mut(at);
            let empty = bucket.places(EMPTY).trailing_zeros() as usize;
            if empty < PLACES {
                (bucket.tags[empty], bucket.blocks[empty]) = (tag(fragment), block.0);
                return;
            }
            bucket.went_on += 1;
            at = self.after(at);
        }
    }

    /// Empty the place of a block that the table names.
    #[inline]
    fn remove(&mut self, fragment: u64, block: BlockId) {
        self.num_entries -= 1;
        let mut at = self.home(fragment);
        for _ in 0..self.num_buckets {
            let bucket = self.bucket_mut(at);
            if let Some(place) = bucket.place_of(tag(fragment), block) {
                bucket.tags[place] = EMPTY;
                return;
            }
            bucket.went_on -= 1;
            at = self.after(at);
        }
    }
}

/// Whether a published block holds the content that is wanted.
#[inline]
fn holds(block: BlockId, wanted: &Content, blocks: &Blocks) -> bool {
    blocks[block].parent() == wanted.parent.as_parent(wanted.extra) && same_part(block, wanted, blocks)
}

/// Whether tokens and keys of one block are equal, whatever came before it.
#[inline]
fn same_part(block: BlockId, wanted: &Content, blocks: &Blocks) -> bool {
    blocks.holds_tokens(block, wanted.tokens)
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

    /// Buckets overflow, round the end of the table too, where nearly all digests choose the last ones.
    #[test]
    fn full_buckets_lose_nothing() {
        const NUM_BLOCKS: u32 = 64;
        let mut blocks = Blocks::new(NUM_BLOCKS as usize, 1, false).unwrap();
        let mut index = PrefixIndex::new(NUM_BLOCKS as usize).unwrap();
        let parent = ContentId::root(0);
        let digest = |block: u32| {
            let chooses = [u32::MAX, u32::MAX - 1, 0][block as usize % 3];
            Digest {
                low: u128::from(chooses) | u128::from(block % 5) << 32 | u128::from(block) << 64,
                high: 0,
            }
        };
        let mut published = [false; NUM_BLOCKS as usize];
        let mut most_went_on = 0;
        for step in 0..4000u32 {
            // Mostly full, then mostly empty, and so on.
            let block = step.wrapping_mul(2_654_435_761) >> 26;
            let publish = step / 500 % 2 == 0 || step % 5 == 0;
            if publish && !published[block as usize] {
                blocks.write_tokens(BlockId(block), 0, &[block]);
                index.publish(BlockId(block), &digest(block), parent, None, &mut blocks);
                assert!(index.twins.is_empty());
            } else if !publish && published[block as usize] {
                index.withdraw(BlockId(block), &mut blocks);
            }
            published[block as usize] = publish;
            for block in 0..NUM_BLOCKS {
                let (digest, tokens) = (digest(block), [block]);
                let wanted = Content { digest: &digest, parent, tokens: &tokens, extra: None };
                let found = published[block as usize].then_some(BlockId(block));
                assert_eq!(index.find(wanted, &blocks, &mut 0), found);
            }
            let went_on: u32 = (0..index.num_buckets).map(|at| index.bucket(at).went_on).sum();
            assert_eq!(index.num_entries(), published.iter().filter(|&&published| published).count());
            assert!(index.num_entries() > 0 || went_on == 0);
            most_went_on = most_went_on.max(went_on);
        }
        assert!(most_went_on > 20);
    }
}
