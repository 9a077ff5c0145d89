//! The rows of a run of keys: a tile. Imports `paged`, `code` and `simd`.
//!
//! Invariant: offsets come from table entries that `check_rows` has seen, so they address rows of the storage.

use std::ops::Range;

use crate::code::with_elements;
use crate::paged::{Cache, Paged};
use crate::simd::Simd;

/// Keys of a tile: their logits for a group of heads stay in the first-level cache.
pub(super) const TILE: usize = 64;

/// Where the rows of up to `TILE` tokens start, for head 0, in elements.
pub(super) struct Tile {
    pub len: usize,
    pub k: [usize; TILE],
    pub v: [usize; TILE],
}

impl Tile {
    pub(super) const EMPTY: Self = Self { len: 0, k: [0; TILE], v: [0; TILE] };

    /// Find the tokens at some positions of a sequence.
    pub(super) fn locate(&mut self, k: &Paged, v: &Paged, table: &[i32], positions: Range<usize>) {
        self.len = positions.len();
        let (mut column, mut offset) = (positions.start / k.block_size, positions.start % k.block_size);
        for index in 0..self.len {
            let block = table[column] as usize;
            self.k[index] = block * k.block_stride + offset * k.token_stride;
            self.v[index] = block * v.block_stride + offset * v.token_stride;
            offset += 1;
            if offset == k.block_size {
                (column, offset) = (column + 1, 0);
            }
        }
    }
}

/// The tile that contains a position, cut to some keys; tiles start at multiples of `TILE`.
pub(super) fn tile_at(position: usize, keys: &Range<usize>) -> Range<usize> {
    position..keys.end.min((position / TILE + 1) * TILE)
}

/// The cache lines of K or V of a tile, asked for little by little while the tile before it is computed.
pub(super) struct Ahead {
    data: *const u8,
    /// Bytes from `data` to runs of memory, all of one length.
    runs: Vec<usize>,
    run_bytes: usize,
    next: (usize, usize),
    lines_per_step: usize,
}

const LINE_BYTES: usize = 64;

impl Ahead {
    pub(super) fn nothing() -> Self {
        Self { data: std::ptr::null(), runs: Vec::new(), run_bytes: 0, next: (0, 0), lines_per_step: 0 }
    }

    /// Ask for the rows of some heads of the tokens at `tokens` (as in `Tile`) in about `num_steps` steps.
    pub(super) fn start(
        &mut self,
        cache: &Cache<'_>,
        tokens: &[usize],
        heads: Range<usize>,
        num_steps: usize,
    ) {
        let paged = &cache.paged;
        let (data, size) =
            with_elements!(Elements, cache.data, slice => (slice.as_ptr().cast(), size_of_val(&slice[0])));
        let first = heads.start * paged.head_stride;
        self.data = data;
        self.runs.clear();
        if paged.head_stride == paged.head_dim {
            self.run_bytes = heads.len() * paged.head_dim * size;
            self.runs.extend(tokens.iter().map(|token| (token + first) * size));
        } else {
            self.run_bytes = paged.head_dim * size;
            for head in heads {
                self.runs.extend(tokens.iter().map(|token| (token + head * paged.head_stride) * size));
            }
        }
        self.next = (0, 0);
        let num_lines = self.runs.len() * self.run_bytes.div_ceil(LINE_BYTES);
        self.lines_per_step = num_lines.div_ceil(num_steps.max(1));
    }

    /// The next few lines.
    #[inline(always)]
    pub(super) fn step<S: Simd>(&mut self, simd: S) {
        for _ in 0..self.lines_per_step {
            let (run, byte) = self.next;
            let Some(&start) = self.runs.get(run) else { return };
            simd.prefetch(self.data.wrapping_add(start + byte));
            let byte = byte + LINE_BYTES;
            self.next = if byte < self.run_bytes { (run, byte) } else { (run + 1, 0) };
        }
    }
}
