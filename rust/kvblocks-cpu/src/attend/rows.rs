//! The rows of some heads in a tile: where they are, and what is asked for ahead of them. Imports `tile`, `code`, `paged`
//! and `simd`.
//!
//! Invariant: places come from a tile, so rows lie within the storage; what is only asked for may lie anywhere.

use std::ops::Range;
use std::sync::atomic::{compiler_fence, Ordering};

use super::tile::TILE;
use crate::code::{with_elements, Code};
use crate::paged::{Cache, Paged};
use crate::simd::Simd;

pub(super) const LINE_BYTES: usize = 64;

/// Tokens ahead of which a row is asked for again: with all heads of a token side by side, some hundred lines.
const SOON: usize = 4;

/// The rows of some heads that are computed on when those of a tile are done, of any type.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Base of the rows of the first head.
    data: *const u8,
    /// Bytes between two heads of a token.
    head_stride: usize,
    /// Bytes from the base to what has the place of each token.
    tokens: [usize; TILE],
}

impl Ahead {
    pub(super) fn new(cache: &Cache<'_>, heads: &Range<usize>, tokens: &[usize; TILE]) -> Self {
        let (data, element_bytes) =
            with_elements!(Elements, cache.data, data => (data.as_ptr().cast::<u8>(), size_of_val(&data[0])));
        let head_stride = cache.paged.head_stride * element_bytes;
        let tokens = tokens.map(|token| token * element_bytes);
        Self { data: data.wrapping_add(heads.start * head_stride), head_stride, tokens }
    }

    /// Where the row of a head starts that has the place of a token.
    ///
    /// # Safety
    /// The index is below TILE.
    #[inline(always)]
    pub(super) unsafe fn at(&self, head: usize, index: usize) -> *const u8 {
        // SAFETY: the caller's.
        let token = unsafe { *self.tokens.get_unchecked(index) };
        self.data.wrapping_add(head * self.head_stride).wrapping_add(token)
    }
}

/// Keep all that is asked for and loaded before this ahead of what comes after it. Else compilers gather the requests of a
/// row, and the processor drops those that come in crowds.
#[inline(always)]
pub(super) fn keep_order() {
    compiler_fence(Ordering::SeqCst);
}

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
    /// Bytes from the base to the row that is due `SOON` tokens after each, of this tile or ahead.
    soon: [usize; TILE],
    ahead: Ahead,
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
        ahead: Ahead,
    ) -> Self {
        // Within the storage, as the head has rows.
        let data = data[heads.start * paged.head_stride..].as_ptr();
        let to_ahead = (ahead.data as usize).wrapping_sub(data as usize);
        let soon = std::array::from_fn(|index| match tokens.get(index + SOON) {
            Some(token) => token * size_of::<T>(),
            None => to_ahead.wrapping_add(ahead.tokens[index + SOON - TILE]),
        });
        Self {
            data,
            dim: paged.head_dim,
            head_stride: paged.head_stride,
            num_heads: heads.len(),
            group,
            heads_together: paged.head_stride <= paged.token_stride,
            tokens,
            len,
            soon,
            ahead,
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
        let rows = self.data.wrapping_add(head * self.head_stride);
        std::array::from_fn(|index| {
            let index = first + index;
            // SAFETY: the caller's.
            let (row, soon, ahead) = unsafe {
                (self.tokens.get_unchecked(index), self.soon.get_unchecked(index), self.ahead.at(head, index))
            };
            Place { row: rows.wrapping_add(*row), soon: rows.cast::<u8>().wrapping_add(*soon), ahead }
        })
    }
}

/// A row of a tile, the one that is due `SOON` tokens later, and what has its place in the rows that come next.
#[derive(Clone, Copy)]
pub(super) struct Place<T> {
    pub(super) row: *const T,
    soon: *const u8,
    ahead: *const u8,
}

impl<T> Place<T> {
    /// Ask for what comes in the place of some bytes of this row, from an element on, and again for what is due soon.
    ///
    /// So all that is computed on is asked for twice, each time in the order of the computation: memory is read at one
    /// pace, in runs that the processor sees. The second time is for lines that the processor forgot: it drops what it is
    /// asked for while too many lines are under way.
    #[inline(always)]
    pub(super) fn ask<S: Simd>(self, simd: S, element: usize, bytes: usize) {
        let start = element * size_of::<T>();
        if bytes < LINE_BYTES && !start.is_multiple_of(LINE_BYTES) {
            return; // in a line that has been asked for
        }
        for byte in (0..bytes).step_by(LINE_BYTES) {
            simd.prefetch_far(self.ahead.wrapping_add(start + byte));
            simd.prefetch_far(self.soon.wrapping_add(start + byte));
        }
    }
}
