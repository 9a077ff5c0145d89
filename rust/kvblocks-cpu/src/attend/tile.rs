//! The rows of a run of keys: a tile. Imports `paged`.
//!
//! Invariant: offsets come from table entries that `check_rows` has seen, so they address rows of the storage.

use std::ops::Range;

use super::Source;

/// Keys of a tile: their logits for a group of heads stay in the first-level cache.
pub(super) const TILE: usize = 32;

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
