//! The order of the elements of a row in a query and in sums. Imports `code` and `simd`.
//!
//! Rows go through f32 in their own order, or, where whole blocks of a row have a quick way to pairs of bf16, in pairs.
//! Invariant: arranging rounds nothing; what is arranged in pairs are bf16 numbers.

use crate::code::Code;
use crate::simd::Simd;

/// How the elements of a row stand in a query's scratch, or in sums.
pub(super) struct Order {
    /// If rows go in pairs, the elements that are low halves, by vector and lane; the high ones come next in the row.
    pairs: Vec<usize>,
}

impl Order {
    /// The order for rows of a slice's elements.
    pub(super) fn of<S: Simd, T: Code>(_: &[T], dim: usize) -> Self {
        let vectors = T::vectors_of_pairs::<S>();
        let block = vectors * 2 * S::LANES;
        let num_pairs = if block > 0 && dim.is_multiple_of(block) { dim / 2 } else { 0 };
        let element = |pair: usize| {
            let (vector, lane) = (pair / S::LANES, pair % S::LANES);
            vector / vectors * block + T::place_of_pair(vector % vectors, lane)
        };
        Self { pairs: (0..num_pairs).map(element).collect() }
    }

    pub(super) fn in_pairs(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// Put a query where `Logits` wants it: in pairs of bf16 if that is exact, and in f32 otherwise.
    #[inline(always)]
    pub(super) fn arrange<S: Simd>(&self, row: &[f32], exact: bool, to: &mut [f32]) {
        for (vector, pairs) in self.pairs.chunks_exact(S::LANES).enumerate() {
            for (lane, &element) in pairs.iter().enumerate() {
                let pair = [row[element], row[element + 1]];
                if exact {
                    to[vector * S::LANES + lane] =
                        f32::from_bits(pair[0].to_bits() >> 16 | pair[1].to_bits());
                } else {
                    to[2 * vector * S::LANES + lane] = pair[0];
                    to[(2 * vector + 1) * S::LANES + lane] = pair[1];
                }
            }
        }
    }

    /// Put sums in pairs back into the order of the elements; `row` is scratch of the same length.
    #[inline(always)]
    pub(super) fn restore<S: Simd>(&self, sums: &mut [f32], row: &mut [f32]) {
        for (vector, pairs) in self.pairs.chunks_exact(S::LANES).enumerate() {
            for (lane, &element) in pairs.iter().enumerate() {
                row[element] = sums[2 * vector * S::LANES + lane];
                row[element + 1] = sums[(2 * vector + 1) * S::LANES + lane];
            }
        }
        sums.copy_from_slice(row);
    }
}

/// Whether values are bf16 numbers.
pub(super) fn are_bf16(values: &[f32]) -> bool {
    values.iter().fold(0, |bits, value| bits | value.to_bits()) & 0xFFFF == 0
}
