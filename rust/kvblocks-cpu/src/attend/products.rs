//! The two products of one query with the rows of a tile in float32: q.k, and weights times values. Imports `pairs`, `rows`,
//! `tile`, `code` and `simd`.
//!
//! Lanes are elements, in the order of a row, or, where that is the quick way to f32, as they leave pairs of bf16.
//! Invariant: nothing is rounded but products and sums.

use std::ops::Range;

use super::pairs::dot_rows;
use super::rows::{keep_order, Place, Rows};
use super::tile::TILE;
use crate::code::Code;
use crate::simd::{Simd, Task, MAX_LANES};

/// Run a body for the query heads of a group, four, two or one of them at a time: `$first` stands for the first of them
/// in the group, `$heads` for how many they are.
macro_rules! for_heads {
    ($group:expr, $first:ident, $heads:ident => $body:expr) => {{
        let mut $first = 0;
        // Four heads times four keys or vectors need more registers than narrow sets have.
        while S::LANES == MAX_LANES && $group - $first >= 4 {
            const $heads: usize = 4;
            $body;
            $first += 4;
        }
        while $group - $first >= 2 {
            const $heads: usize = 2;
            $body;
            $first += 2;
        }
        if $first < $group {
            const $heads: usize = 1;
            $body;
        }
    }};
}
pub(super) use for_heads;

/// Run a body with `$dim` standing for the elements of a row; for four heads and the usual rows as a constant, so that
/// loops over a row, which are short, are unrolled.
macro_rules! with_dim {
    ($heads:ident, $value:expr, $dim:ident => $body:expr) => {
        match $value {
            128 if $heads == 4 => {
                let $dim = 128;
                $body
            }
            64 if $heads == 4 => {
                let $dim = 64;
                $body
            }
            $dim => $body,
        }
    };
}
pub(super) use with_dim;

/// Tokens whose V is taken at once where the heads of a token lie side by side.
const V_TOKENS: usize = 4;

/// q.k of some heads and the keys of a tile.
pub(super) struct Logits<'a, T> {
    /// `[num_q_heads, q_stride]`, arranged as `how` wants it.
    pub q: &'a [f32],
    pub q_stride: usize,
    pub how: How,
    pub rows: Rows<'a, T>,
    /// `[num_q_heads, TILE]`.
    pub logits: &'a mut [f32],
}

/// How queries and keys are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// In f32, in the order of a row.
    Elements,
    /// In f32, as keys leave pairs of bf16.
    PairsOfK,
    /// Both in pairs of bf16.
    Pairs,
}

const ELEMENTS: u8 = How::Elements as u8;
const PAIRS_OF_K: u8 = How::PairsOfK as u8;
const PAIRS: u8 = How::Pairs as u8;

impl<T: Code> Logits<'_, T> {
    pub(super) fn run<S: Simd>(mut self, simd: S) {
        for_heads!(self.rows.group, first, HEADS => match self.how {
            How::Pairs => simd.vectorize(LogitsOf::<T, HEADS, 4, PAIRS> { all: &mut self, first }),
            How::PairsOfK => simd.vectorize(LogitsOf::<T, HEADS, 4, PAIRS_OF_K> { all: &mut self, first }),
            How::Elements => simd.vectorize(LogitsOf::<T, HEADS, 4, ELEMENTS> { all: &mut self, first }),
        });
    }
}

/// The same for HEADS query heads of each group, KEYS keys at a time.
struct LogitsOf<'a, 'b, T, const HEADS: usize, const KEYS: usize, const HOW: u8> {
    all: &'a mut Logits<'b, T>,
    first: usize,
}

impl<T: Code, const HEADS: usize, const KEYS: usize, const HOW: u8> Task
    for LogitsOf<'_, '_, T, HEADS, KEYS, HOW>
{
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Logits { q, q_stride, rows, logits, .. } = self.all;
        let num_q_heads = rows.num_heads * rows.group;
        assert!(q.len() >= num_q_heads * *q_stride && logits.len() >= num_q_heads * TILE);
        assert!(self.first + HEADS <= rows.group);
        with_dim!(HEADS, rows.dim, dim => rows.for_each(KEYS, |head, keys| {
            for first in keys.step_by(KEYS) {
                let q_head = head * rows.group + self.first;
                // SAFETY: the heads are within the arrays. Where the last keys are no keys of the tile, nobody looks at
                // their logits.
                unsafe {
                    let q = q.as_ptr().add(q_head * *q_stride);
                    let places = rows.at::<KEYS>(head, first);
                    let products = match HOW {
                        ELEMENTS => by_element::<S, T, HEADS, KEYS>(simd, dim, q, *q_stride, places),
                        PAIRS_OF_K => by_pair::<S, T, HEADS, KEYS>(simd, dim, q, *q_stride, places),
                        _ => dot_rows::<S, T, HEADS, KEYS>(simd, dim, q, *q_stride, places),
                    };
                    store(simd, products, logits.as_mut_ptr().add(q_head * TILE + first));
                }
            }
        }));
    }
}

/// # Safety
/// Rows of `dim` elements lie at the places, queries padded to whole vectors at each of HEADS strides from `q` on.
#[inline(always)]
unsafe fn by_element<S: Simd, T: Code, const HEADS: usize, const KEYS: usize>(
    simd: S,
    dim: usize,
    q: *const f32,
    q_stride: usize,
    places: [Place<T>; KEYS],
) -> [[S::F; KEYS]; HEADS] {
    let whole = dim - dim % S::LANES;
    let mut products = [[simd.splat(0.0); KEYS]; HEADS];
    // SAFETY: the caller's.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            let mut k = [simd.splat(0.0); KEYS];
            for (k, place) in k.iter_mut().zip(&places) {
                place.ask(simd, at, S::LANES * size_of::<T>());
                *k = T::load(simd, place.row.add(at));
            }
            multiply(simd, q.add(at), q_stride, k, &mut products);
            keep_order();
        }
        if whole < dim {
            let mut k = [simd.splat(0.0); KEYS];
            for (k, place) in k.iter_mut().zip(&places) {
                *k = T::load_part(simd, place.row.add(whole), dim - whole);
            }
            multiply(simd, q.add(whole), q_stride, k, &mut products);
        }
    }
    products
}

/// # Safety
/// As `by_element`, of rows of whole blocks, with queries in the order of their pairs.
#[inline(always)]
unsafe fn by_pair<S: Simd, T: Code, const HEADS: usize, const KEYS: usize>(
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
        let block = vectors * 2 * S::LANES;
        for at in (0..dim).step_by(block) {
            let mut k = [[simd.splat_bits(0); 2]; KEYS];
            for (k, place) in k.iter_mut().zip(&places) {
                place.ask(simd, at, block * size_of::<T>());
                *k = T::load_pairs(simd, place.row.add(at));
            }
            for vector in 0..vectors {
                let mut halves = [[simd.splat(0.0); KEYS]; 2];
                for (key, k) in k.iter().enumerate() {
                    [halves[0][key], halves[1][key]] = simd.unpair(k[vector]);
                }
                for (half, k) in halves.into_iter().enumerate() {
                    multiply(simd, q.add(at + (2 * vector + half) * S::LANES), q_stride, k, &mut products);
                }
            }
            keep_order();
        }
    }
    products
}

/// # Safety
/// A vector is readable at each of HEADS strides from `q` on.
#[inline(always)]
unsafe fn multiply<S: Simd, const HEADS: usize, const KEYS: usize>(
    simd: S,
    q: *const f32,
    q_stride: usize,
    k: [S::F; KEYS],
    products: &mut [[S::F; KEYS]; HEADS],
) {
    for (head, products) in products.iter_mut().enumerate() {
        // SAFETY: the caller's.
        let q = unsafe { simd.load(q.add(head * q_stride)) };
        for (product, &k) in products.iter_mut().zip(&k) {
            *product = simd.mul_add(q, k, *product);
        }
    }
}

/// Sum the lanes of products.
///
/// # Safety
/// KEYS elements are writable at each of HEADS times TILE elements from `logits` on.
#[inline(always)]
unsafe fn store<S: Simd, const HEADS: usize, const KEYS: usize>(
    simd: S,
    products: [[S::F; KEYS]; HEADS],
    logits: *mut f32,
) {
    for start in (0..HEADS * KEYS).step_by(4) {
        let mut four = [simd.splat(0.0); 4];
        for (index, sum) in four.iter_mut().enumerate() {
            // One head and two keys are no four.
            let index = (start + index) % (HEADS * KEYS);
            *sum = products[index / KEYS][index % KEYS];
        }
        for (index, sum) in simd.sum_4(four).into_iter().enumerate().take(HEADS * KEYS) {
            let index = start + index;
            // SAFETY: the caller's.
            unsafe { *logits.add(index / KEYS * TILE + index % KEYS) = sum };
        }
    }
}

/// Add the weighted values of a tile to the sums of some heads.
pub(super) struct Sums<'a, T> {
    /// `[num_q_heads, TILE]`.
    pub weights: &'a [f32],
    pub in_pairs: bool,
    pub rows: Rows<'a, T>,
    /// `[num_q_heads, head_dim_v]`, in the order of V.
    pub sums: &'a mut [f32],
}

impl<T: Code> Sums<'_, T> {
    pub(super) fn run<S: Simd>(mut self, simd: S) {
        for_heads!(self.rows.group, first, HEADS => if self.in_pairs {
            simd.vectorize(SumsOf::<T, HEADS, true> { all: &mut self, first });
        } else {
            simd.vectorize(SumsOf::<T, HEADS, false> { all: &mut self, first });
        });
    }
}

/// The same for HEADS query heads of each group.
struct SumsOf<'a, 'b, T, const HEADS: usize, const IN_PAIRS: bool> {
    all: &'a mut Sums<'b, T>,
    first: usize,
}

impl<T: Code, const HEADS: usize, const IN_PAIRS: bool> Task for SumsOf<'_, '_, T, HEADS, IN_PAIRS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Sums { weights, rows, sums, .. } = self.all;
        let num_q_heads = rows.num_heads * rows.group;
        assert!(weights.len() >= num_q_heads * TILE && sums.len() >= num_q_heads * rows.dim);
        assert!(self.first + HEADS <= rows.group);
        with_dim!(HEADS, rows.dim, dim => rows.for_each(V_TOKENS, |head, tokens| {
            let q_head = head * rows.group + self.first;
            // SAFETY: the heads are within the arrays.
            let mut columns = unsafe {
                Columns::<T, HEADS> {
                    rows,
                    head,
                    dim,
                    weights: weights.as_ptr().add(q_head * TILE),
                    sums: sums.as_mut_ptr().add(q_head * dim),
                }
            };
            let mut at = 0;
            // SAFETY: the elements are some of the row; rows in pairs have whole blocks, of two or four vectors.
            unsafe {
                while dim - at >= 4 * S::LANES {
                    columns.add::<S, 4, IN_PAIRS>(simd, at, tokens.clone());
                    at += 4 * S::LANES;
                }
                while IN_PAIRS && at < dim {
                    columns.add::<S, 2, true>(simd, at, tokens.clone());
                    at += 2 * S::LANES;
                }
                while dim - at >= S::LANES {
                    columns.add::<S, 1, false>(simd, at, tokens.clone());
                    at += S::LANES;
                }
                if at < dim {
                    columns.add_last(simd, at, tokens);
                }
            }
        }));
    }
}

/// Values of a head, and what they are added to.
pub(super) struct Columns<'a, 'b, T, const HEADS: usize> {
    pub rows: &'a Rows<'b, T>,
    pub head: usize,
    pub dim: usize,
    /// `[HEADS, TILE]`.
    pub weights: *const f32,
    /// `[HEADS, dim]`.
    pub sums: *mut f32,
}

impl<T: Code, const HEADS: usize> Columns<'_, '_, T, HEADS> {
    /// The sums of the elements at..at + VECTORS * LANES.
    ///
    /// # Safety
    /// They are elements of the row.
    #[inline(always)]
    pub unsafe fn load<S: Simd, const VECTORS: usize>(&self, simd: S, at: usize) -> [[S::F; VECTORS]; HEADS] {
        let mut sums = [[simd.splat(0.0); VECTORS]; HEADS];
        for (index, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's.
                *sum = unsafe { simd.load(self.sums.add(index * self.dim + at + vector * S::LANES)) };
            }
        }
        sums
    }

    /// Put them back.
    ///
    /// # Safety
    /// As `load`.
    #[inline(always)]
    pub unsafe fn store<S: Simd, const VECTORS: usize>(
        &mut self,
        simd: S,
        at: usize,
        sums: [[S::F; VECTORS]; HEADS],
    ) {
        for (index, sums) in sums.iter().enumerate() {
            for (vector, &sum) in sums.iter().enumerate() {
                // SAFETY: the caller's.
                unsafe { simd.store(self.sums.add(index * self.dim + at + vector * S::LANES), sum) };
            }
        }
    }

    /// Add the elements at..at + VECTORS * LANES of some tokens, times their weights.
    ///
    /// # Safety
    /// They are elements of the row, and the tokens some of the tile. In pairs, they are one or two blocks.
    #[inline(always)]
    unsafe fn add<S: Simd, const VECTORS: usize, const IN_PAIRS: bool>(
        &mut self,
        simd: S,
        at: usize,
        tokens: Range<usize>,
    ) {
        let len = VECTORS * S::LANES;
        // SAFETY: the caller's.
        unsafe {
            let mut sums = self.load::<S, VECTORS>(simd, at);
            for token in tokens {
                let [place] = self.rows.at(self.head, token);
                let mut weights = [simd.splat(0.0); HEADS];
                for (index, weight) in weights.iter_mut().enumerate() {
                    *weight = simd.splat(*self.weights.add(index * TILE + token));
                }
                if IN_PAIRS {
                    place.ask(simd, at, len * size_of::<T>());
                    let values: [S::F; VECTORS] = load_pairs(simd, place.row.add(at));
                    for (sums, &weight) in sums.iter_mut().zip(&weights) {
                        for (sum, &value) in sums.iter_mut().zip(&values) {
                            *sum = simd.mul_add(weight, value, *sum);
                        }
                    }
                    keep_order();
                } else {
                    for vector in 0..VECTORS {
                        let at = at + vector * S::LANES;
                        place.ask(simd, at, S::LANES * size_of::<T>());
                        let value = T::load(simd, place.row.add(at));
                        for (sums, &weight) in sums.iter_mut().zip(&weights) {
                            sums[vector] = simd.mul_add(weight, value, sums[vector]);
                        }
                        keep_order();
                    }
                }
            }
            self.store(simd, at, sums);
        }
    }

    /// The same for the elements from `at` on, fewer than LANES.
    ///
    /// # Safety
    /// As `add`.
    #[inline(always)]
    unsafe fn add_last<S: Simd>(&mut self, simd: S, at: usize, tokens: Range<usize>) {
        let len = self.dim - at;
        for index in 0..HEADS {
            // SAFETY: the caller's.
            unsafe {
                let stored = self.sums.add(index * self.dim + at);
                let mut sum = f32::load_part(simd, stored, len);
                for token in tokens.clone() {
                    let weight = simd.splat(*self.weights.add(index * TILE + token));
                    let [place] = self.rows.at(self.head, token);
                    sum = simd.mul_add(weight, T::load_part(simd, place.row.add(at), len), sum);
                }
                f32::store_part(simd, stored, len, sum);
            }
        }
    }
}

/// VECTORS vectors of elements in the order of pairs.
///
/// # Safety
/// They are readable, and one or two blocks.
#[inline(always)]
unsafe fn load_pairs<S: Simd, T: Code, const VECTORS: usize>(simd: S, from: *const T) -> [S::F; VECTORS] {
    // SAFETY: the caller's.
    unsafe {
        let [first, second] = T::load_pairs(simd, from);
        let second = if VECTORS == 4 && T::vectors_of_pairs::<S>() == 1 {
            T::load_pairs(simd, from.add(2 * S::LANES))[0]
        } else {
            second
        };
        let pairs = [simd.unpair(first), simd.unpair(second)];
        let mut values = [simd.splat(0.0); VECTORS];
        for (vector, value) in values.iter_mut().enumerate() {
            *value = pairs[vector / 2 % 2][vector % 2];
        }
        values
    }
}
