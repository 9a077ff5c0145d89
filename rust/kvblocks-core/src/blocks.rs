//! What is known of each block: one record a block and its token ids beside it. Imports `block_size`, `hash`, `ids`, `memory`,
//! `prefetch`, `words`.
//!
//! Invariant: all memory is asked for once, as zero pages, and touched only where blocks are used. A record takes 48
//! bytes: together with 4 of the reference count, 64 of tokens and 11 of the index, a cached block of 16 tokens costs
//! 127. Reference counts stand apart, so that a fork touches 4 bytes a block.

use std::collections::HashMap;
use std::mem::offset_of;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use bytemuck::Zeroable;

use crate::block_size::BlockSize;
use crate::hash::Digest;
use crate::ids::BlockId;
use crate::memory::zeroed;
use crate::prefetch::{prefetch, prefetch_part};
use crate::words::Words;

/// Slots to look ahead where single tokens are written.
const SLOTS_AHEAD: usize = 16;

/// Facts of one block, without padding.
#[derive(Clone, Copy, Zeroable)]
#[repr(C)]
pub(crate) struct Record {
    /// The first 16 bytes of the digest, little-endian.
    digest: [u64; 2],
    content: u64,
    parent: u64,
    /// Neighbours in the queue, while it is in there. A table is released tail first, so `prev` likely is the block that
    /// follows in a prompt. It stays when a block leaves the queue, and is set when the next one is published: a hint,
    /// and perhaps no block at all.
    pub prev: u32,
    pub next: u32,
    /// Its written high-water mark.
    pub fill: u32,
    /// Index of the namespace of whoever took it.
    pub namespace: u32,
}

const _: () = assert!(size_of::<Record>() == 48);

/// The content of a block that is not published.
const UNPUBLISHED: u64 = 0;

impl Record {
    /// The number of its content, see `prefix`; above 0 if it is published.
    #[inline]
    pub fn content(&self) -> u64 {
        self.content
    }

    #[inline]
    pub fn is_published(&self) -> bool {
        self.content != UNPUBLISHED
    }

    /// The number of the content before it, and whether it has extra keys: see `prefix`.
    #[inline]
    pub fn parent(&self) -> u64 {
        self.parent
    }

    /// Note what a block is published as.
    #[inline]
    pub fn publish(&mut self, digest: &Digest, content: u64, parent: u64) {
        self.digest = [digest.low as u64, (digest.low >> 64) as u64];
        (self.content, self.parent) = (content, parent);
    }

    #[inline]
    pub fn unpublish(&mut self) {
        self.content = UNPUBLISHED;
    }

    /// The first 64 bits of the digest.
    #[inline]
    pub fn fragment(&self) -> u64 {
        self.digest[0]
    }
}

/// The records and tokens of all blocks.
pub(crate) struct Blocks {
    records: Vec<Record>,
    /// Sequences and transfers that own each block.
    refs: Words,
    tokens: Words,
    /// Second halves of digests; empty for an algorithm of 16 bytes.
    digest_high: Vec<u128>,
    /// Framed media keys of the published blocks that have some.
    pub extras: HashMap<BlockId, Arc<[u8]>>,
    block_size: usize,
}

impl Blocks {
    /// None if the memory cannot be had.
    pub fn new(num_blocks: usize, block_size: usize, wide_digests: bool) -> Option<Self> {
        let num_tokens = num_blocks.checked_mul(block_size)?;
        Some(Self {
            records: zeroed(num_blocks)?,
            refs: Words::new(num_blocks)?,
            tokens: Words::new(num_tokens)?,
            digest_high: zeroed(if wide_digests { num_blocks } else { 0 })?,
            extras: HashMap::new(),
            block_size,
        })
    }

    /// The tokens of all blocks, one after the other, and how many a block holds.
    #[inline]
    pub fn tokens_and_size(&self) -> (&[u32], usize) {
        (&self.tokens, self.block_size)
    }

    /// The record of a block, if there is such a block.
    #[inline]
    pub fn get(&self, block: BlockId) -> Option<&Record> {
        self.records.get(block.index())
    }

    /// Ask for what is read of a block, if there is one, to see whether it is a hit.
    #[inline]
    pub fn prefetch_hit(&self, block: BlockId) {
        prefetch(&self.records, block.index());
        prefetch(&self.tokens, block.index() * self.block_size);
    }

    #[inline]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.refs[block.index()]
    }

    #[inline]
    pub fn refs_mut(&mut self, block: BlockId) -> &mut u32 {
        &mut self.refs[block.index()]
    }

    /// The reference counts of all blocks.
    #[inline]
    pub fn all_refs_mut(&mut self) -> &mut [u32] {
        &mut self.refs
    }

    /// Give a block that nobody owns its first owner.
    #[inline]
    pub fn begin(&mut self, block: BlockId, namespace: u32) {
        self.refs[block.index()] = 1;
        let record = &mut self.records[block.index()];
        (record.fill, record.namespace) = (0, namespace);
    }

    /// Ask for what is known of a block, ahead of its use.
    #[inline]
    pub fn prefetch(&self, block: BlockId) {
        prefetch(&self.records, block.index());
    }

    /// Ask for the reference count of a block, ahead of its use.
    #[inline]
    pub fn prefetch_refs(&self, block: BlockId) {
        prefetch(&self.refs, block.index());
    }

    pub fn digest(&self, block: BlockId) -> Digest {
        let [first, second] = self[block].digest;
        let low = u128::from(second) << 64 | u128::from(first);
        Digest { low, high: self.digest_high.get(block.index()).copied().unwrap_or(0) }
    }

    /// Note that `next` follows a block that has owners, or a hole, in a prompt.
    #[inline]
    pub fn suggest_next(&mut self, block: BlockId, next: BlockId) {
        if let Some(record) = self.records.get_mut(block.index()) {
            record.prev = next.0;
        }
    }

    /// Note the second half of a digest, where the algorithm has one.
    #[inline]
    pub fn set_digest_high(&mut self, block: BlockId, digest: &Digest) {
        if let Some(high) = self.digest_high.get_mut(block.index()) {
            *high = digest.high;
        }
    }

    #[inline]
    pub fn tokens(&self, block: BlockId) -> &[u32] {
        let start = block.index() * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    #[inline]
    pub fn write_tokens(&mut self, block: BlockId, offset: usize, tokens: &[u32]) {
        let start = block.index() * self.block_size + offset;
        let to = &mut self.tokens[start..start + tokens.len()];
        // A full block of the usual size goes through registers.
        match (<&[u32; 16]>::try_from(tokens), <&mut [u32; 16]>::try_from(&mut *to)) {
            (Ok(from), Ok(to)) => *to = *from,
            _ => to.copy_from_slice(tokens),
        }
    }

    /// See `Pool::store_each`; `count` is told by how much marks were raised in all for neighbours of one namespace.
    #[inline]
    pub fn write_each(
        &mut self,
        slots: &[(BlockId, u32)],
        ids: &[u32],
        size: BlockSize,
        filled: &mut [u32],
        mut count: impl FnMut(u32, u32),
    ) -> usize {
        let (tokens, records) = (&mut self.tokens[..], &mut self.records[..]);
        let place = |block: BlockId, position: u32| {
            let offset = size.offset(position as usize);
            (block.index() * size.get() + offset, offset)
        };
        let (mut written, mut namespace, mut num_filled) = (0, 0, 0);
        for (at, (&(block, position), &id)) in slots.iter().zip(ids).enumerate() {
            if let Some(&(ahead, position)) = slots.get(at + SLOTS_AHEAD) {
                prefetch(tokens, place(ahead, position).0);
                prefetch_part(records, ahead.index(), offset_of!(Record, fill));
            }
            let (slot, offset) = place(block, position);
            tokens[slot] = id;
            let record = &mut records[block.index()];
            let raised = (offset as u32 + 1).saturating_sub(record.fill);
            record.fill += raised;
            if record.namespace != namespace {
                count(std::mem::take(&mut written), namespace);
                namespace = record.namespace;
            }
            written += raised;
            // One row in `size` fills its block, and no branch predictor knows which.
            filled[num_filled] = at as u32;
            num_filled += usize::from(offset + 1 == size.get());
        }
        count(written, namespace);
        num_filled
    }

    pub fn copy_tokens(&mut self, src: BlockId, dst: BlockId, len: usize) {
        let (src, dst) = (src.index() * self.block_size, dst.index() * self.block_size);
        self.tokens.copy_within(src..src + len, dst);
    }
}

/// Whether the tokens of two blocks of the usual size are equal; `==` would call the C library.
#[inline(always)]
pub(crate) fn are_same(a: &[u32; 16], b: &[u32; 16]) -> bool {
    a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

impl Index<BlockId> for Blocks {
    type Output = Record;

    #[inline]
    fn index(&self, block: BlockId) -> &Record {
        &self.records[block.index()]
    }
}

impl IndexMut<BlockId> for Blocks {
    #[inline]
    fn index_mut(&mut self, block: BlockId) -> &mut Record {
        &mut self.records[block.index()]
    }
}
