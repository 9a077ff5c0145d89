//! How a sequence lets go of its blocks: from its table's end, or all, alone or with others. Imports `block_size`, `ids`,
//! `pool`, `sequence`.
//!
//! Invariant: tail first, so that of two blocks released together the one that fewer prompts can share is evicted first.

use std::ops::Range;

use bytemuck::TransparentWrapper;

use crate::block_size::BlockSize;
use crate::ids::BlockId;
use crate::pool::Pool;
use crate::sequence::Sequence;

/// References to the first blocks of a sequence that ends which others, that have ended before it, left to it.
#[derive(Default)]
pub(crate) struct Owed {
    len: usize,
    times: u32,
}

/// Block ids to compare at once.
const CHUNK: usize = 16;

impl Sequence {
    /// Release the blocks from column `len` on; returns how many nobody owns any more.
    pub fn shrink(&mut self, len: usize, pool: &mut Pool) -> usize {
        if len >= self.blocks.len() {
            return 0;
        }
        self.touch(len);
        let (num_holes, orphaned) = pool.release_many(&self.blocks[len..], 1, self.namespace);
        self.blocks.truncate(len);
        self.num_holes -= num_holes as u32;
        orphaned
    }

    /// Release everything, merged blocks included, at the end of a sequence; returns how many blocks nobody owns any more.
    /// What was published when it was scheduled and never committed cannot be found any more.
    pub fn release_all(&mut self, pool: &mut Pool) -> usize {
        self.release_all_but(0, &mut Owed::default(), pool)
    }

    /// As `release_all`, for one of several that end together: the references to the first `common` blocks are left to
    /// the next one, added to `owed`, and this one releases what those before it have left and the next one does not
    /// share.
    pub fn release_all_but(&mut self, common: usize, owed: &mut Owed, pool: &mut Pool) -> usize {
        self.withdraw_from(pool.block_size.column(self.num_computed()), pool);
        let retired = std::mem::take(&mut self.retired);
        let merged = retired.into_iter().filter(|&(block, _)| pool.release(block)).count();
        let mut release = |columns: Range<usize>, times: u32| {
            if columns.is_empty() || times == 0 {
                return 0;
            }
            pool.release_many(&self.blocks[columns], times, self.namespace).1
        };
        // Tail first; what is released for others below `common` has an owner left.
        let own = release(common.max(owed.len)..self.blocks.len(), 1);
        let rest = if common <= owed.len {
            owed.times += 1;
            release(common..owed.len, owed.times)
        } else {
            release(0..owed.len, std::mem::replace(&mut owed.times, 1))
        };
        owed.len = common;
        merged + own + rest
    }

    /// Leading blocks that two sequences have in common and that `next` does not withdraw when it ends.
    pub fn common_blocks(&self, next: &Self, size: BlockSize) -> usize {
        let most = size.column(next.num_computed()).min(next.blocks.len()).min(self.blocks.len());
        let [ours, theirs] = [self, next].map(|seq| BlockId::peel_slice(&seq.blocks[..most]));
        let (ours, theirs) = (ours.as_chunks::<CHUNK>(), theirs.as_chunks::<CHUNK>());
        let equal = ours.0.iter().zip(theirs.0).take_while(|(ours, theirs)| ours == theirs).count();
        if equal < ours.0.len() {
            return equal * CHUNK;
        }
        let rest = ours.1.iter().zip(theirs.1).take_while(|(ours, theirs)| ours == theirs);
        equal * CHUNK + rest.count()
    }
}
