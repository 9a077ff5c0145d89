//! The rows of some heads in a tile: where they are, and what is asked for ahead of them. Imports `tile`, `code`, `paged`
//! and `simd`.
//!
//! Invariant: places come from a tile, so rows lie within the storage; what is only asked for may lie anywhere.

use std::ops::Range;

use super::tile::TILE;
use crate::code::Code;
use crate::paged::Paged;
use crate::simd::Simd;

pub(super) const LINE_BYTES: usize = 64;

/// Tokens ahead of which a row is asked for again: with all heads of a token side by side, some hundred lines.
const SOON: usize = 4;

/// The rows of some heads of K or V in a tile.
pub(super) struct Rows<'a, T> {
    /// Base of the rows of the first head, which tokens are offsets to.
    data: *const T,
    /// Elements of a row.
    pub(super) dim: usize,
    /// Elements between two heads of a token.
    head_stride: usize,
    pub(super) num_heads: usize,
    /// Query heads that share a head.
    pub(super) group: usize,
    /// Whether the heads of a token lie side by side.
    heads_together: bool,
    /// As in `Tile`; `len` of them count.
    tokens: &'a [usize; TILE],
    len: usize,
    /// Those of the next tile, or of this one again.
    next: &'a [usize; TILE],
}

impl<'a, T: Code> Rows<'a, T> {
    /// The rows of some heads.
    pub(super) fn new(
        data: &[T],
        paged: &Paged,
        heads: Range<usize>,
        group: usize,
        tokens: &'a [usize; TILE],
        len: usize,
        next: &'a [usize; TILE],
    ) -> Self {
        Self {
            // Within the storage, as the head has rows.
            data: data[heads.start * paged.head_stride..].as_ptr(),
            dim: paged.head_dim,
            head_stride: paged.head_stride,
            num_heads: heads.len(),
            group,
            heads_together: paged.head_stride <= paged.token_stride,
            tokens,
            len,
            next,
        }
    }

    /// Call for each head with some tokens, in the order in which their rows lie in memory, for the processor to read
    /// ahead of them: where the heads of a token lie side by side, `together` tokens for all heads; else all of a head.
    #[inline(always)]
    pub(super) fn for_each(&self, together: usize, mut call: impl FnMut(usize, Range<usize>)) {
        let together = if self.heads_together { together } else { TILE };
        for first in (0..self.len).step_by(together) {
            for head in 0..self.num_heads {
                call(head, first..self.len.min(first + together));
            }
        }
    }

    /// Where rows of a head start: those of some tokens, and what stands in their places in the next tile.
    ///
    /// # Safety
    /// The head is one of these, and the tokens are some of the tile.
    #[inline(always)]
    pub(super) unsafe fn at<const TOKENS: usize>(&self, head: usize, first: usize) -> [Place<T>; TOKENS] {
        let head = self.data.wrapping_add(head * self.head_stride);
        std::array::from_fn(|index| {
            let index = first + index;
            // SAFETY: the caller's; the remainder is below TILE.
            let (row, soon, next) = unsafe {
                let soon = self.tokens.get_unchecked((index + SOON) % TILE);
                (self.tokens.get_unchecked(index), soon, self.next.get_unchecked(index))
            };
            Place {
                row: head.wrapping_add(*row),
                soon: head.wrapping_add(*soon),
                next: head.wrapping_add(*next),
            }
        })
    }
}

/// A row of a tile, the one `SOON` tokens later, and the one in its place in the next tile.
#[derive(Clone, Copy)]
pub(super) struct Place<T> {
    pub(super) row: *const T,
    soon: *const T,
    next: *const T,
}

impl<T> Place<T> {
    /// Ask for some bytes of the next row from an element on, again for as many of the one that is due soon, and for as
    /// many of this one `distance` elements further, which are in a farther cache by now.
    ///
    /// So what is computed on is asked for three times, each time in the order of the computation: memory is read at one
    /// pace, in runs that the processor sees, and what is used over and over stays in the first-level cache. The second
    /// time is for lines that the processor forgot: it drops what it is asked for while too many lines are under way.
    #[inline(always)]
    pub(super) fn ask<S: Simd>(self, simd: S, element: usize, bytes: usize, distance: usize) {
        if bytes < LINE_BYTES && !(element * size_of::<T>()).is_multiple_of(LINE_BYTES) {
            return; // in a line that has been asked for
        }
        for byte in (0..bytes).step_by(LINE_BYTES) {
            simd.prefetch_far(self.next.wrapping_add(element).cast::<u8>().wrapping_add(byte));
            simd.prefetch_far(self.soon.wrapping_add(element).cast::<u8>().wrapping_add(byte));
            simd.prefetch_near(self.row.wrapping_add(element + distance).cast::<u8>().wrapping_add(byte));
        }
    }
}
