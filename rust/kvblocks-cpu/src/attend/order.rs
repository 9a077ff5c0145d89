//! The order of the elements of a row in a query and in sums. Imports `code` and `simd`.
//!
//! Rows go through f32 in their own order, or, where whole blocks of a row have a quick way to pairs of bf16, in pairs.
//! Invariant: arranging rounds nothing; what is arranged in pairs are bf16 numbers. Elements are below their number.

use crate::code::Code;
use crate::simd::Simd;

/// How the elements of a row stand in a query's scratch, or in sums.
pub(super) struct Order {
    /// The element at each place, unless it is the place itself. In pairs of elements, a vector of low halves and one of
    /// the elements after them take turns.
    elements: Vec<usize>,
    /// Whether each four of them are neighbours.
    in_fours: bool,
    /// Elements of a query in pairs that sums of lanes come after, and what these are multiplied with.
    chunk: usize,
    lane_sums: f32,
    /// What values in pairs are more than they should be.
    offset: f32,
}

impl Order {
    /// The order of a row.
    pub(super) const PLAIN: Self =
        Self { elements: Vec::new(), in_fours: false, chunk: 0, lane_sums: 0.0, offset: 0.0 };

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
        let (lane_sums, offset) = (-T::PAIR_OFFSET, T::PAIR_OFFSET);
        Self { lane_sums, offset, ..Self::of_chunks((0..dim).map(element).collect(), dim) }
    }

    /// The order of given elements, of a query with the sums of the lanes of each chunk, or of sums.
    ///
    /// They are the numbers below their number, each once.
    pub(super) fn of_chunks(elements: Vec<usize>, chunk: usize) -> Self {
        assert!(elements.iter().all(|&element| element < elements.len()));
        let in_fours =
            elements.chunks(4).all(|four| four.iter().enumerate().all(|(at, e)| *e == four[0] + at));
        let in_fours = in_fours && elements.len().is_multiple_of(4);
        Self { elements, in_fours, chunk, lane_sums: 1.0, offset: 0.0 }
    }

    pub(super) fn is_plain(&self) -> bool {
        self.elements.is_empty()
    }

    /// Whether `restore` takes the total of the weights off.
    pub(super) fn needs_total(&self) -> bool {
        self.offset != 0.0
    }

    /// Put a query of f32 in order.
    #[inline(always)]
    pub(super) fn arrange(&self, row: &[f32], to: &mut [f32]) {
        to.iter_mut().zip(&self.elements).for_each(|(to, &element)| *to = row[element]);
    }

    /// Put a query of bf16 numbers in order, in pairs. After each chunk of it, a vector has the sums of its lanes times a
    /// factor: what takes off what pairs of K are more than their values.
    #[inline(always)]
    pub(super) fn arrange_pairs<S: Simd>(&self, row: &[f32], to: &mut [f32]) {
        assert!(row.len() >= self.elements.len());
        let chunks = to.chunks_exact_mut(self.chunk / 2 + S::LANES);
        for (to, elements) in chunks.zip(self.elements.chunks_exact(self.chunk)) {
            let (pairs, sums) = to.split_at_mut(self.chunk / 2);
            for (pairs, elements) in pairs.chunks_exact_mut(S::LANES).zip(elements.chunks_exact(2 * S::LANES))
            {
                let (low, high) = elements.split_at(S::LANES);
                for (lane, pair) in pairs.iter_mut().enumerate() {
                    // SAFETY: elements are below their number.
                    let [low, high] =
                        unsafe { [*row.get_unchecked(low[lane]), *row.get_unchecked(high[lane])] };
                    *pair = f32::from_bits(low.to_bits() >> 16 | high.to_bits());
                    if self.lane_sums != 0.0 {
                        sums[lane] += self.lane_sums * (low + high);
                    }
                }
            }
        }
    }

    /// Put sums back into the order of the elements; `total` is that of the weights, `row` scratch of the same length.
    #[inline(always)]
    pub(super) fn restore(&self, sums: &mut [f32], total: f32, row: &mut [f32]) {
        if self.is_plain() {
            return;
        }
        row.copy_from_slice(sums);
        if self.in_fours {
            for (four, elements) in row.chunks_exact(4).zip(self.elements.chunks_exact(4)) {
                sums[elements[0]..][..4].copy_from_slice(four);
            }
        } else {
            row.iter().zip(&self.elements).for_each(|(&value, &element)| sums[element] = value);
        }
        if self.needs_total() {
            sums.iter_mut().for_each(|sum| *sum -= self.offset * total);
        }
    }
}

/// Whether values are bf16 numbers.
pub(super) fn are_bf16(values: &[f32]) -> bool {
    values.iter().fold(0, |bits, value| bits | value.to_bits()) & 0xFFFF == 0
}
