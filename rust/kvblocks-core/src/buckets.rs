//! Block ids by digest: the table of the prefix cache. Imports `ids`, `prefetch`, `words`.
//!
//! Open addressing in buckets of one cache line: up to 10 block ids, beside each a tag of 16 bits, and the number of
//! entries that found the bucket full and went on to a later one. Half of a digest's first 64 bits, its *fragment*, choose
//! the bucket, others the tag: so a look-up compares all tags of a bucket at once, nearly never looks at a block in vain,
//! and goes on only where that number is not 0. There are no tombstones and no rehash.
//!
//! Invariant: an entry stands in the first bucket after its home, that included, which had a place when it came; every
//! bucket that it passed counts it.

use crate::ids::BlockId;
use crate::prefetch::prefetch;
use crate::words::Words;

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
        // In 16 bits, as the tags are, so that all are compared at once.
        let bits =
            self.tags.iter().zip(0..).map(|(&other, place)| if other == tag { 1 << place } else { 0u16 });
        u32::from(bits.fold(0, |places, bit| places | bit))
    }

    /// Enter a block, if there is an empty place.
    #[inline]
    fn insert(&mut self, tag: u16, block: BlockId) -> bool {
        let empty = self.places(EMPTY).trailing_zeros() as usize;
        if empty < PLACES {
            (self.tags[empty], self.blocks[empty]) = (tag, block.0);
        }
        empty < PLACES
    }

    /// Empty the place of a block, if it is here.
    #[inline]
    fn remove(&mut self, tag: u16, block: BlockId) -> bool {
        let place = bits(self.places(tag)).find(|&place| self.blocks[place] == block.0);
        if let Some(place) = place {
            self.tags[place] = EMPTY;
        }
        place.is_some()
    }
}

/// The table.
pub(crate) struct Buckets {
    /// `WORDS` to a bucket.
    words: Words,
    num_buckets: usize,
    num_entries: usize,
}

/// What stands for a digest in its bucket.
#[inline]
fn tag(fragment: u64) -> u16 {
    ((fragment >> 32) as u16).max(EMPTY + 1)
}

/// Set bits, from the lowest on.
fn bits(mut set: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= set.wrapping_sub(1);
        lowest
    })
}

impl Buckets {
    /// A table for `num_blocks` entries, which never grows; None if the memory cannot be had.
    pub fn new(num_blocks: usize) -> Option<Self> {
        // 57 % full at 11.2 bytes a block: few buckets overflow.
        let num_buckets = (num_blocks * 7).div_ceil(40) + 1;
        Some(Self { words: Words::new(WORDS * num_buckets)?, num_buckets, num_entries: 0 })
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.num_entries
    }

    /// Ask for the place where a fragment is found, ahead of the look-up.
    #[inline]
    pub fn prefetch(&self, fragment: u64) {
        prefetch(&self.words, WORDS * self.home(fragment));
    }

    /// The first entry, among those that may have the fragment, that is the one sought. O(1) expected.
    #[inline]
    pub fn find(&self, fragment: u64, is_sought: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        let bucket = self.bucket(self.home(fragment));
        // What is published has mostly not been before.
        match bucket.places(tag(fragment)) == 0 && bucket.went_on == 0 {
            true => None,
            false => self.search(fragment, is_sought),
        }
    }

    #[inline(never)]
    fn search(&self, fragment: u64, mut is_sought: impl FnMut(BlockId) -> bool) -> Option<BlockId> {
        for at in self.from(self.home(fragment)) {
            let bucket = self.bucket(at);
            let mut found = bits(bucket.places(tag(fragment))).map(|place| BlockId(bucket.blocks[place]));
            if let Some(block) = found.find(|&block| is_sought(block)) {
                return Some(block);
            }
            if bucket.went_on == 0 {
                break;
            }
        }
        None
    }

    /// Enter a block in the first bucket that has a place. O(1) expected.
    #[inline]
    pub fn insert(&mut self, fragment: u64, block: BlockId) {
        self.num_entries += 1;
        let home = self.home(fragment);
        if !self.bucket_mut(home).insert(tag(fragment), block) {
            self.insert_later(home, tag(fragment), block);
        }
    }

    #[cold]
    fn insert_later(&mut self, home: usize, tag: u16, block: BlockId) {
        for at in self.from(home) {
            if self.bucket_mut(at).insert(tag, block) {
                return;
            }
            self.bucket_mut(at).went_on += 1;
        }
    }

    /// Empty the place of a block that the table names. O(1) expected.
    #[inline]
    pub fn remove(&mut self, fragment: u64, block: BlockId) {
        self.num_entries -= 1;
        let home = self.home(fragment);
        if !self.bucket_mut(home).remove(tag(fragment), block) {
            self.remove_later(home, tag(fragment), block);
        }
    }

    #[cold]
    fn remove_later(&mut self, home: usize, tag: u16, block: BlockId) {
        for at in self.from(home) {
            if self.bucket_mut(at).remove(tag, block) {
                return;
            }
            self.bucket_mut(at).went_on -= 1;
        }
    }

    /// All entries, for checks.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let buckets = (0..self.num_buckets).map(|at| self.bucket(at));
        let entries = buckets.flat_map(|bucket| bucket.tags.iter().zip(bucket.blocks));
        entries.filter(|&(&tag, _)| tag != EMPTY).map(|(_, block)| BlockId(block))
    }

    /// The first bucket of a fragment: 32 bits of it, scaled to their number.
    #[inline]
    fn home(&self, fragment: u64) -> usize {
        (((fragment & 0xffff_ffff) * self.num_buckets as u64) >> 32) as usize
    }

    /// All buckets, round the end of the table, from a home on.
    fn from(&self, home: usize) -> impl Iterator<Item = usize> {
        (home..self.num_buckets).chain(0..home)
    }

    #[inline]
    fn bucket(&self, at: usize) -> &Bucket {
        bytemuck::cast_ref(&self.words.as_chunks::<WORDS>().0[at])
    }

    #[inline]
    fn bucket_mut(&mut self, at: usize) -> &mut Bucket {
        bytemuck::cast_mut(&mut self.words.as_chunks_mut::<WORDS>().0[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buckets overflow, round the end of the table too, where nearly all fragments choose the last ones.
    #[test]
    fn full_buckets_lose_nothing() {
        const NUM_BLOCKS: u32 = 64;
        let mut buckets = Buckets::new(NUM_BLOCKS as usize).unwrap();
        let fragment = |block: u32| {
            let chooses = [u32::MAX, u32::MAX - 1, 0][block as usize % 3];
            u64::from(chooses) | u64::from(block % 5) << 32
        };
        let mut entered = [false; NUM_BLOCKS as usize];
        let mut most_went_on = 0;
        for step in 0..4000u32 {
            // Mostly full, then mostly empty, and so on.
            let block = step.wrapping_mul(2_654_435_761) >> 26;
            let enter = step / 500 % 2 == 0 || step % 5 == 0;
            if enter && !entered[block as usize] {
                buckets.insert(fragment(block), BlockId(block));
            } else if !enter && entered[block as usize] {
                buckets.remove(fragment(block), BlockId(block));
            }
            entered[block as usize] = enter;
            for block in 0..NUM_BLOCKS {
                let found = buckets.find(fragment(block), |found| found.0 == block);
                assert_eq!(found, entered[block as usize].then_some(BlockId(block)));
            }
            let went_on: u32 = (0..buckets.num_buckets).map(|at| buckets.bucket(at).went_on).sum();
            let num_entered = entered.iter().filter(|&&entered| entered).count();
            assert_eq!((buckets.len(), buckets.iter().count()), (num_entered, num_entered));
            assert!(buckets.len() > 0 || went_on == 0);
            most_went_on = most_went_on.max(went_on);
        }
        assert!(most_went_on > 20);
    }

    #[test]
    fn the_places_with_a_tag_are_those_alone() {
        let mut bucket = Bucket { tags: [7; PLACES], went_on: 0x0007_0007, blocks: [0x0007_0007; PLACES] };
        assert_eq!(bucket.places(7), (1 << PLACES) - 1);
        (bucket.tags[0], bucket.tags[9]) = (0x8007, EMPTY);
        assert_eq!((bucket.places(0x8007), bucket.places(EMPTY), bucket.places(7)), (1, 1 << 9, 0x1fe));
    }
}
