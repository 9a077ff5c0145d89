//! The two products of one query with rows as pairs of bf16, which the processor multiplies and adds up in one
//! instruction: q.k by pairs of elements, weights times values by pairs of keys. Imports `products`, `rows`, `tile`,
//! `code` and `simd`.
//!
//! Invariant: no value of K, V or a query is rounded. Weights come rounded: `narrow` says when.

use std::ops::Range;

use super::products::{for_heads, with_dim, Columns};
use super::rows::{keep_order, Place, Rows, LINE_BYTES};
use super::tile::TILE;
use crate::code::Code;
use crate::simd::{Simd, Task, MAX_LANES};

/// Products of queries, `q_stride` apart, with the rows of some keys: all in pairs, as `Order` arranges them.
///
/// # Safety
/// Rows of `dim` elements, in whole blocks of `Code::load_pairs`, lie at the places, and queries at the strides.
#[inline(always)]
pub(super) unsafe fn dot_rows<S: Simd, T: Code, const HEADS: usize, const KEYS: usize>(
    simd: S,
    dim: usize,
    q: *const f32,
    q_stride: usize,
    places: [Place<T>; KEYS],
) -> [[S::F; KEYS]; HEADS] {
    let vectors = T::vectors_of_pairs::<S>();
    let mut products = [[simd.splat(0.0); KEYS]; HEADS];
    // SAFETY: the caller's.
    unsafe {
        if T::PAIR_OFFSET != 0.0 {
            for (head, products) in products.iter_mut().enumerate() {
                *products = [simd.load(q.add(head * q_stride + dim / 2)); KEYS];
            }
        }
        for at in (0..dim).step_by(vectors * 2 * S::LANES) {
            let mut k = [[simd.splat_bits(0); 2]; KEYS];
            for (k, place) in k.iter_mut().zip(&places) {
                place.ask(simd, at, LINE_BYTES);
                *k = T::load_pairs(simd, place.row.add(at));
            }
            for vector in 0..vectors {
                for (head, products) in products.iter_mut().enumerate() {
                    let q = simd.load_bits(q.add(head * q_stride + at / 2 + vector * S::LANES).cast());
                    for (product, k) in products.iter_mut().zip(&k) {
                        *product = simd.dot_pairs(q, k[vector], *product);
                    }
                }
            }
            keep_order();
        }
    }
    products
}

/// Tokens of bytes whose V is taken at once where the heads of a token lie side by side, of longer elements fewer; even.
const TOKENS: usize = 16;

/// Add the weighted values of a tile to the sums of some heads, two keys at a time.
pub(super) struct PairSums<'a, T> {
    /// `[num_q_heads, TILE]`: of each head, the first TILE / 2 are the weights as pairs of bf16; 0 beyond the tile's keys.
    pub weights: &'a [f32],
    pub rows: Rows<'a, T>,
    /// `[num_q_heads, head_dim_v]`, in the order of `Order::of_row_pairs`.
    pub sums: &'a mut [f32],
}

impl<T: Code> PairSums<'_, T> {
    pub(super) fn run<S: Simd>(mut self, simd: S) {
        for_heads!(self.rows.group, first, HEADS => {
            simd.vectorize(PairSumsOf::<T, HEADS> { all: &mut self, first });
        });
    }
}

/// The same for HEADS query heads of each group.
struct PairSumsOf<'a, 'b, T, const HEADS: usize> {
    all: &'a mut PairSums<'b, T>,
    first: usize,
}

impl<T: Code, const HEADS: usize> Task for PairSumsOf<'_, '_, T, HEADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PairSums { weights, rows, sums } = self.all;
        let num_q_heads = rows.num_heads * rows.group;
        assert!(weights.len() >= num_q_heads * TILE && sums.len() >= num_q_heads * rows.dim);
        assert!(self.first + HEADS <= rows.group);
        with_dim!(HEADS, rows.dim, dim => rows.for_each(TOKENS / size_of::<T>(), |head, tokens| {
            let q_head = head * rows.group + self.first;
            // SAFETY: the heads are within the arrays; the elements are whole blocks of the row, of two or four vectors.
            unsafe {
                let mut columns = Columns::<T, HEADS> {
                    rows,
                    head,
                    dim,
                    weights: weights.as_ptr().add(q_head * TILE),
                    sums: sums.as_mut_ptr().add(q_head * dim),
                };
                let mut at = 0;
                while dim - at >= 4 * S::LANES {
                    columns.add_pairs::<S, 4>(simd, at, tokens.clone());
                    at += 4 * S::LANES;
                }
                if at < dim {
                    columns.add_pairs::<S, 2>(simd, at, tokens);
                }
            }
        }));
    }
}

impl<T: Code, const HEADS: usize> Columns<'_, '_, T, HEADS> {
    /// Add VECTORS vectors of elements from `at` on of some tokens, the first of them even.
    ///
    /// # Safety
    /// They are one or two blocks of the row, and the tokens some of the tile.
    #[inline(always)]
    unsafe fn add_pairs<S: Simd, const VECTORS: usize>(&mut self, simd: S, at: usize, tokens: Range<usize>) {
        let bytes = VECTORS * S::LANES * size_of::<T>();
        // SAFETY: the caller's.
        unsafe {
            let mut sums = self.load::<S, VECTORS>(simd, at);
            let whole = tokens.end - tokens.len() % 2;
            for token in (tokens.start..whole).step_by(2) {
                let [a, b] = self.rows.at::<2>(self.head, token);
                a.ask(simd, at, bytes);
                b.ask(simd, at, bytes);
                let values = pair_rows::<S, T, VECTORS>(simd, a.row.add(at), Some(b.row.add(at)));
                self.multiply(simd, token, values, &mut sums);
                keep_order();
            }
            if whole < tokens.end {
                // The other one would be no key, and may be infinite: its weight of 0 would not hide it.
                let [a] = self.rows.at::<1>(self.head, whole);
                let values = pair_rows::<S, T, VECTORS>(simd, a.row.add(at), None);
                self.multiply(simd, whole, values, &mut sums);
            }
            self.store(simd, at, sums);
        }
    }

    /// # Safety
    /// The token is one of the tile, and even.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const VECTORS: usize>(
        &self,
        simd: S,
        token: usize,
        values: [S::I; VECTORS],
        sums: &mut [[S::F; VECTORS]; HEADS],
    ) {
        for (index, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's.
            let weights = unsafe { *self.weights.add(index * TILE + token / 2) };
            let weights = simd.splat_bits(weights.to_bits());
            for (sum, &values) in sums.iter_mut().zip(&values) {
                *sum = simd.dot_pairs(weights, values, *sum);
            }
        }
    }
}

/// Elements of two rows in pairs; where there is no second row, it is 0.
///
/// # Safety
/// VECTORS vectors of elements are readable, and one or two blocks.
#[inline(always)]
unsafe fn pair_rows<S: Simd, T: Code, const VECTORS: usize>(
    simd: S,
    a: *const T,
    b: Option<*const T>,
) -> [S::I; VECTORS] {
    let vectors = 2 * T::vectors_of_pairs::<S>();
    let mut pairs = [simd.splat_bits(0); VECTORS];
    // SAFETY: the caller's; a vector of rows has `vectors` vectors of elements.
    unsafe {
        for first in (0..VECTORS).step_by(vectors) {
            let at = first * S::LANES;
            let of_a = simd.load_bits(a.add(at).cast());
            let of_b = match b {
                Some(b) => simd.load_bits(b.add(at).cast()),
                None => simd.splat_bits(0),
            };
            let both = T::pair_rows(simd, of_a, of_b);
            for (to, &from) in pairs[first..].iter_mut().zip(&both[..vectors]) {
                *to = from;
            }
        }
    }
    pairs
}

const _: () = assert!(TOKENS.is_multiple_of(2) && TILE.is_multiple_of(2) && MAX_LANES.is_multiple_of(2));
