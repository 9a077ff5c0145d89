//! The rows of a run of keys: a tile. Imports `paged`, `code` and `simd`.
//!
//! Invariant: offsets come from table entries that `check_rows` has seen, so they address rows of the storage.

use std::ops::Range;

use super::Source;
use crate::code::with_elements;
use crate::paged::Cache;
use crate::simd::Simd;

/// Keys of a tile: their logits for a group of heads stay in the first-level cache.
pub(super) const TILE: usize = 64;

/// Where the rows of up to `TILE` tokens start, for head 0, in elements.
pub(super) struct Tile {
    pub len: usize,
    pub k: [usize; TILE],
    pub v: [usize; TILE],
    /// Where the scales of the tokens are.
    pub slots: [usize; TILE],
}

impl Tile {
    pub(super) const EMPTY: Self = Self { len: 0, k: [0; TILE], v: [0; TILE], slots: [0; TILE] };

    /// Find the tokens of the tile of a sequence that begins at a position, within `keys`; it may be empty.
    ///
    /// What is beyond is the last key again. Tiles start at multiples of `TILE`.
    pub(super) fn locate(&mut self, source: &Source<'_>, first: usize, keys: &Range<usize>) {
        let (k, v) = (&source.k.paged, &source.v.paged);
        self.len = keys.end.min((first / TILE + 1) * TILE).saturating_sub(first);
        let column = first - source.first;
        let (mut column, mut offset) = (column / k.block_size, column % k.block_size);
        for index in 0..self.len {
            let block = source.table[column] as usize;
            self.k[index] = block * k.block_stride + offset * k.token_stride;
            self.v[index] = block * v.block_stride + offset * v.token_stride;
            self.slots[index] = block * k.block_size + offset;
            offset += 1;
            if offset == k.block_size {
                (column, offset) = (column + 1, 0);
            }
        }
        if let Some(last) = self.len.checked_sub(1) {
            let (k, v, slot) = (self.k[last], self.v[last], self.slots[last]);
            self.k[self.len..].fill(k);
            self.v[self.len..].fill(v);
            self.slots[self.len..].fill(slot);
        }
    }
}

/// The cache lines of a tile, asked for one by one while the tile before it is computed.
///
/// A processor has few requests to memory under way at a time, and one too many holds up all that follow. So they are
/// spread as evenly as can be.
#[derive(Default)]
pub(super) struct Ahead {
    /// Runs of memory: from the first address up to the second.
    runs: Vec<(usize, usize)>,
    /// The next run, and what is left of this one.
    run: usize,
    next: usize,
    end: usize,
    /// In 1 / 16 of a line: what a step is worth, and what is due.
    per_step: usize,
    due: usize,
}

const LINE_BYTES: usize = 64;

impl Ahead {
    /// Forget what was asked for.
    pub(super) fn clear(&mut self) {
        self.runs.clear();
        (self.run, self.next, self.end) = (0, 0, 0);
    }

    /// Add the rows of some heads of the tokens at `tokens`, as in `Tile`.
    pub(super) fn add(&mut self, cache: &Cache<'_>, tokens: &[usize], heads: Range<usize>) {
        let paged = &cache.paged;
        let (data, size) =
            with_elements!(Elements, cache.data, slice => (slice.as_ptr() as usize, size_of_val(&slice[0])));
        // One run for all heads where they lie side by side.
        let (num_runs, dim) = if paged.head_stride == paged.head_dim {
            (1, heads.len() * paged.head_dim)
        } else {
            (heads.len(), paged.head_dim)
        };
        for run in 0..num_runs {
            let head = data + (heads.start + run) * paged.head_stride * size;
            self.runs.extend(tokens.iter().map(|token| {
                let start = head + token * size;
                (start, start + dim * size)
            }));
        }
    }

    /// Spread all that was added over a number of steps.
    pub(super) fn spread(&mut self, num_steps: usize) {
        let num_lines: usize = self.runs.iter().map(|(start, end)| (end - start).div_ceil(LINE_BYTES)).sum();
        self.per_step = (16 * num_lines).div_ceil(num_steps.max(1));
        self.due = 0;
    }

    /// Ask for the lines of a step.
    #[inline(always)]
    pub(super) fn step<S: Simd>(&mut self, simd: S) {
        self.due += self.per_step;
        while self.due >= 16 {
            self.due -= 16;
            if self.next >= self.end {
                let Some(&(next, end)) = self.runs.get(self.run) else { return };
                (self.run, self.next, self.end) = (self.run + 1, next, end);
            }
            simd.prefetch(self.next as *const u8);
            self.next += LINE_BYTES;
        }
    }
}
