//! The order of the elements of a row in a query and in sums. Imports `code` and `simd`.
//!
//! Rows go through f32 in their own order, or, where whole blocks of a row have a quick way to pairs of bf16, in pairs.
//! Invariant: arranging rounds nothing; what is arranged in pairs are bf16 numbers.

use crate::code::Code;
use crate::simd::Simd;

/// How the elements of a row stand in a query's scratch, or in sums.
pub(super) struct Order {
    /// The element at each place, unless it is the place itself. In pairs of elements, a vector of low halves and one of
    /// the elements after them take turns.
    elements: Vec<usize>,
    /// What pairs are more than the values.
    offset: f32,
}

impl Order {
    /// The order of a row.
    pub(super) const PLAIN: Self = Self { elements: Vec::new(), offset: 0.0 };

    /// The order for rows of a type whose elements go in pairs with their neighbours; plain where they cannot.
    pub(super) fn of_pairs<S: Simd, T: Code>(dim: usize) -> Self {
        Self::new::<S, T>(dim, |vector, lane| T::place_of_pair(vector / 2, lane) + vector % 2)
    }

    /// The order for rows of a type whose elements go in pairs with those of another row; plain where they cannot.
    pub(super) fn of_row_pairs<S: Simd, T: Code>(dim: usize) -> Self {
        Self::new::<S, T>(dim, T::place_of_row_pair)
    }

    fn new<S: Simd, T: Code>(dim: usize, place: fn(usize, usize) -> usize) -> Self {
        let block = T::vectors_of_pairs::<S>() * 2 * S::LANES;
        if block == 0 || !dim.is_multiple_of(block) {
            return Self::PLAIN;
        }
        let element = |at: usize| at / block * block + place(at % block / S::LANES, at % S::LANES);
        Self { elements: (0..dim).map(element).collect(), offset: T::PAIR_OFFSET }
    }

    pub(super) fn is_plain(&self) -> bool {
        self.elements.is_empty()
    }

    /// Put a query of f32 in order.
    #[inline(always)]
    pub(super) fn arrange(&self, row: &[f32], to: &mut [f32]) {
        to.iter_mut().zip(&self.elements).for_each(|(to, &element)| *to = row[element]);
    }

    /// Put a query of bf16 numbers in order, in pairs with their neighbours; then a vector to begin sums of products with,
    /// which takes off what pairs of K are more than its values.
    #[inline(always)]
    pub(super) fn arrange_pairs<S: Simd>(&self, row: &[f32], to: &mut [f32]) {
        let (pairs, start) = to.split_at_mut(self.elements.len() / 2);
        let lows = self.elements.chunks_exact(S::LANES).step_by(2).flatten();
        for (at, (to, &element)) in pairs.iter_mut().zip(lows).enumerate() {
            let [low, high] = [row[element], row[element + 1]];
            *to = f32::from_bits(low.to_bits() >> 16 | high.to_bits());
            start[at % S::LANES] -= self.offset * (low + high);
        }
    }

    /// Put sums back into the order of the elements; `total` is that of the weights, `row` scratch of the same length.
    #[inline(always)]
    pub(super) fn restore(&self, sums: &mut [f32], total: f32, row: &mut [f32]) {
        if self.is_plain() {
            return;
        }
        sums.iter().zip(&self.elements).for_each(|(&sum, &element)| row[element] = sum);
        sums.copy_from_slice(row);
        if self.offset != 0.0 {
            sums.iter_mut().for_each(|sum| *sum -= self.offset * total);
        }
    }
}

/// Whether values are bf16 numbers.
pub(super) fn are_bf16(values: &[f32]) -> bool {
    values.iter().fold(0, |bits, value| bits | value.to_bits()) & 0xFFFF == 0
}
