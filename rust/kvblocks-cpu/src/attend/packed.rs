//! The two products of one query with rows of packed codes, as pairs of bf16. Imports `grouped`, `tile` and `simd`.
//!
//! A chunk of a row is four groups, each in a fourth of a vector. A code n becomes 16 + n, a bf16 of fixed exponent, by
//! shifts that leave the units of the products alone; what that adds is taken off again with the zeros, once for a row.
//! Invariant: K is not rounded, nor is a query. A weight of V is rounded together with the scale of each group; what the
//! middle of a group's codes is worth is added with the weights as they are, so that only the distance from it is off.

use std::ops::Range;

use super::grouped::{self, Product, Rows, GROUP};
use super::order::Order;
use super::tile::TILE;
use crate::paged::Cache;
use crate::scaling::Scaling;
use crate::simd::{Simd, Task, MAX_LANES};

/// Elements of a chunk.
pub(super) const CHUNK: usize = 4 * GROUP;

/// What 16 + n is more than n.
const OFFSET: f32 = 16.0;

/// The middle of the codes, a bf16, and -(16 + it) as bf16 in both halves.
const fn middle(bits: usize) -> (f32, u32) {
    match bits {
        4 => (8.0, 0xC1C0_C1C0),
        _ => (1.5, 0xC18C_C18C),
    }
}

/// The bits of a code if rows go in pairs: whole chunks, with groups of their elements.
pub(super) fn bits_of<S: Simd>(cache: &Cache<'_>) -> Option<usize> {
    match cache.scaling {
        Scaling::Group(groups) if S::BF16 && groups.size == GROUP && cache.dim().is_multiple_of(CHUNK) => {
            Some(groups.bits)
        }
        _ => None,
    }
}

/// The element of a chunk that a code is: that of a byte of a fourth, in its lower or upper half. See `Simd::load_nibbles`.
fn element(bits: usize, fourth: usize, byte: usize, half: usize) -> usize {
    let code = match bits {
        4 => 2 * byte,
        _ => byte % 8 * 4 + byte / 8 * 2,
    };
    fourth * GROUP + code + half
}

/// The order of queries: pairs are of neighbouring bytes, lower halves first. The sums of each chunk follow it.
pub(super) fn order_of_k(bits: usize, dim: usize) -> Order {
    let place = |at: usize| {
        let (vector, lane) = (at % CHUNK / MAX_LANES, at % MAX_LANES);
        let byte = vector / 2 % 2 * 8 + lane % 4 * 2 + vector % 2;
        at / CHUNK * CHUNK + element(bits, lane / 4, byte, vector / 4)
    };
    Order::of_chunks((0..dim).map(place).collect(), CHUNK)
}

/// The order of sums: lower halves first.
pub(super) fn order_of_v(bits: usize, dim: usize) -> Order {
    let place = |at: usize| {
        let (vector, lane) = (at % CHUNK / MAX_LANES, at % MAX_LANES);
        at / CHUNK * CHUNK + element(bits, lane / 4, vector % 4 * 4 + lane % 4, vector / 4)
    };
    Order::of_chunks((0..dim).map(place).collect(), CHUNK)
}

/// The codes of half of the bytes as the low bytes of 16 + n; the high bytes are all `HIGH_BYTES`.
#[inline(always)]
fn low_bytes<S: Simd, const BITS: usize>(simd: S, nibbles: S::I, half: usize) -> S::I {
    let (mask, shifted) = match (BITS, half) {
        (4, 0) => (0x7878_7878, simd.shift_left::<3>(nibbles)),
        (4, _) => (0x7878_7878, simd.shift_right::<1>(nibbles)),
        (_, 0) => (0x1818_1818, simd.shift_left::<3>(nibbles)),
        (_, _) => (0x1818_1818, simd.shift_left::<1>(nibbles)),
    };
    simd.or(simd.and(shifted, simd.splat_bits(mask)), simd.splat_bits(0x8080_8080))
}

const HIGH_BYTES: u32 = 0x4141_4141;

/// q.k of some heads and the keys of a tile.
pub(super) struct Logits<'a> {
    pub rows: Rows<'a>,
    /// `[num_q_heads, q_stride]`, in pairs in the order of K; after each chunk the sums of its lanes.
    pub q: &'a [f32],
    pub q_stride: usize,
    /// `[num_q_heads, TILE]`.
    pub logits: &'a mut [f32],
}

impl Task for Logits<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let num_q_heads = self.rows.num_heads * self.rows.group;
        assert!(self.q.len() >= num_q_heads * self.q_stride && self.logits.len() >= num_q_heads * TILE);
        assert!(self.q_stride >= self.rows.dim / CHUNK * (CHUNK / 2 + S::LANES));
        grouped::run(simd, &mut self);
    }
}

impl Product for Logits<'_> {
    fn rows(&self) -> &Rows<'_> {
        &self.rows
    }

    fn tokens(_: bool) -> usize {
        4
    }

    #[inline(always)]
    fn pass<S: Simd, const BITS: usize, const OF_TOKENS: bool, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        keys: Range<usize>,
    ) {
        self.rows.ask(simd, kv_head, keys.clone());
        for first in keys.step_by(4) {
            for chunk in 0..self.rows.dim / CHUNK {
                // SAFETY: the keys are below TILE, as ranges of them start at multiples of four; the rows have the chunk.
                let products = unsafe { self.four::<S, BITS, HEADS>(simd, kv_head, head, first, chunk) };
                for (index, products) in products.into_iter().enumerate() {
                    // Where the last ones are no keys of the tile, nobody looks at their logits.
                    let to = &mut self.logits[(head + index) * TILE + first..][..4];
                    let sums = simd.sum_4(products);
                    if chunk == 0 {
                        to.copy_from_slice(&sums);
                    } else {
                        to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
                    }
                }
            }
        }
    }
}

impl Logits<'_> {
    /// The products of some heads of the query with a chunk of four keys.
    ///
    /// # Safety
    /// The heads are some of the query, the keys are below TILE, and the rows have the chunk.
    #[inline(always)]
    unsafe fn four<S: Simd, const BITS: usize, const HEADS: usize>(
        &self,
        simd: S,
        kv_head: usize,
        head: usize,
        first: usize,
        chunk: usize,
    ) -> [[S::F; 4]; HEADS] {
        let mut products = [[simd.splat(0.0); 4]; HEADS];
        let high = simd.splat_bits(HIGH_BYTES);
        // SAFETY: the caller's; `run` has compared the sizes with the lengths.
        unsafe {
            let q = self.q.as_ptr().add(head * self.q_stride + chunk * (CHUNK / 2 + S::LANES));
            let mut rows = [std::ptr::null(); 4];
            for (key, row) in rows.iter_mut().enumerate() {
                *row = self.rows.at(kv_head, first + key).add(chunk * CHUNK * BITS / 8);
            }
            // One vector of four keys at a time, for all to stay in registers.
            for half in 0..2 {
                let mut low = [simd.splat_bits(0); 4];
                for (low, &row) in low.iter_mut().zip(&rows) {
                    *low = low_bytes::<S, BITS>(simd, simd.load_nibbles::<BITS>(row), half);
                }
                for vector in 0..2 {
                    let mut k = [simd.splat_bits(0); 4];
                    for (k, &low) in k.iter_mut().zip(&low) {
                        *k = simd.interleave::<8>(low, high)[vector];
                    }
                    for (index, products) in products.iter_mut().enumerate() {
                        let at = index * self.q_stride + (2 * half + vector) * S::LANES;
                        let q = simd.load_bits(q.add(at).cast());
                        for (product, &k) in products.iter_mut().zip(&k) {
                            *product = simd.dot_pairs(q, k, *product);
                        }
                    }
                }
            }
            let mut scales = [[simd.splat(0.0); 2]; 4];
            for (key, [scale, zero]) in scales.iter_mut().enumerate() {
                let at = self.rows.scales_of(kv_head, first + key) + 4 * chunk;
                *scale = simd.spread(self.rows.scales.scale.as_ptr().add(at));
                *zero = simd.spread(self.rows.scales.zero.as_ptr().add(at));
                *zero = simd.mul_add(*scale, simd.splat(-OFFSET), *zero);
            }
            for (index, products) in products.iter_mut().enumerate() {
                let sums = simd.load(q.add(index * self.q_stride + CHUNK / 2));
                for (product, &[scale, zero]) in products.iter_mut().zip(&scales) {
                    *product = simd.mul_add(scale, *product, simd.mul(zero, sums));
                }
            }
        }
        products
    }
}

/// Add the weighted values of a tile to the sums of some heads.
pub(super) struct Sums<'a> {
    pub rows: Rows<'a>,
    /// `[num_q_heads, TILE]`, 0 beyond the tile's keys.
    pub weights: &'a [f32],
    /// `[num_q_heads, head_dim_v]`, in the order of V.
    pub sums: &'a mut [f32],
    /// Of each head of a pass.
    pub pairs: &'a mut [Pairs; 4],
}

/// Weights of two keys, times the scales of their groups, in pairs of bf16: by pair of keys and group.
#[repr(align(64))]
pub(super) struct Pairs([u32; 2 * TILE]);

impl Pairs {
    pub(super) const NONE: Self = Self([0; 2 * TILE]);
}

impl Task for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let num_q_heads = self.rows.num_heads * self.rows.group;
        assert!(self.weights.len() >= num_q_heads * TILE && self.sums.len() >= num_q_heads * self.rows.dim);
        grouped::run(simd, &mut self);
    }
}

impl Product for Sums<'_> {
    fn rows(&self) -> &Rows<'_> {
        &self.rows
    }

    fn tokens(_: bool) -> usize {
        TILE // its sums stay in registers
    }

    #[inline(always)]
    fn pass<S: Simd, const BITS: usize, const OF_TOKENS: bool, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        keys: Range<usize>,
    ) {
        self.rows.ask(simd, kv_head, keys.clone());
        for chunk in 0..self.rows.dim / CHUNK {
            // SAFETY: the heads are within the arrays, the keys are some of the tile, and the rows have the chunk.
            unsafe { self.add::<S, BITS, HEADS>(simd, kv_head, head, keys.len(), chunk) };
        }
    }
}

impl Sums<'_> {
    /// Add a chunk of the first `len` keys.
    ///
    /// # Safety
    /// The heads are within the arrays, `len` is at most TILE, and the rows have the chunk.
    #[inline(always)]
    unsafe fn add<S: Simd, const BITS: usize, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        len: usize,
        chunk: usize,
    ) {
        let dim = self.rows.dim;
        let high = simd.splat_bits(HIGH_BYTES);
        // SAFETY: the caller's; `run` has compared the sizes with the lengths.
        unsafe {
            let middles = self.weigh::<S, BITS, HEADS>(simd, kv_head, head, len, chunk);
            for half in 0..2 {
                let at = self.sums.as_mut_ptr().add(head * dim + chunk * CHUNK + half * CHUNK / 2);
                let mut sums = [[simd.splat(0.0); 4]; HEADS];
                for (index, sums) in sums.iter_mut().enumerate() {
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        *sum = simd.add(simd.load(at.add(index * dim + vector * S::LANES)), middles[index]);
                    }
                }
                for key in (0..len).step_by(2) {
                    // Beyond the last key is the last one again, and has no weight.
                    let [a, b] = [self.rows.at(kv_head, key), self.rows.at(kv_head, key + 1)];
                    let offset = chunk * CHUNK * BITS / 8;
                    if half == 1 {
                        // The next head, of the same keys.
                        simd.prefetch_near(a.wrapping_add(offset + self.rows.head_stride));
                        simd.prefetch_near(b.wrapping_add(offset + self.rows.head_stride));
                    }
                    let [a, b] =
                        [simd.load_nibbles::<BITS>(a.add(offset)), simd.load_nibbles::<BITS>(b.add(offset))];
                    let [first, second] = simd.interleave::<8>(
                        low_bytes::<S, BITS>(simd, a, half),
                        low_bytes::<S, BITS>(simd, b, half),
                    );
                    let [first, second] =
                        [simd.interleave::<8>(first, high), simd.interleave::<8>(second, high)];
                    let values = [first[0], first[1], second[0], second[1]];
                    for (sums, pairs) in sums.iter_mut().zip(&*self.pairs) {
                        let weights = simd.bits(simd.spread(pairs.0.as_ptr().add(2 * key).cast()));
                        for (sum, &values) in sums.iter_mut().zip(&values) {
                            *sum = simd.dot_pairs(weights, values, *sum);
                        }
                    }
                }
                for (index, sums) in sums.iter().enumerate() {
                    for (vector, &sum) in sums.iter().enumerate() {
                        simd.store(at.add(index * dim + vector * S::LANES), sum);
                    }
                }
            }
        }
    }

    /// Fill the pairs of some heads; returns what is to be added to every sum of a group besides: the middles of the codes
    /// times the weights.
    ///
    /// # Safety
    /// As `add`.
    #[inline(always)]
    unsafe fn weigh<S: Simd, const BITS: usize, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        len: usize,
        chunk: usize,
    ) -> [S::F; HEADS] {
        let (middle_code, minus_middle) = const { middle(BITS) };
        let mut middles = [simd.splat(0.0); HEADS];
        // SAFETY: the caller's; `Load` has filled the scales of keys up to a multiple of eight.
        unsafe {
            for first in (0..len).step_by(8) {
                let mut scales = [simd.splat(0.0); 2];
                let mut zeros = [simd.splat(0.0); 2];
                for (index, (scale, zero)) in scales.iter_mut().zip(&mut zeros).enumerate() {
                    let mut from = [(std::ptr::null(), std::ptr::null()); 4];
                    for (key, from) in from.iter_mut().enumerate() {
                        let at = self.rows.scales_of(kv_head, first + 4 * index + key) + 4 * chunk;
                        let scales = self.rows.scales;
                        *from = (scales.scale.as_ptr().add(at), scales.zero.as_ptr().add(at));
                    }
                    *scale = simd.load_fourths([from[0].0, from[1].0, from[2].0, from[3].0]);
                    *zero = simd.load_fourths([from[0].1, from[1].1, from[2].1, from[3].1]);
                    *zero = simd.mul_add(*scale, simd.splat(middle_code), *zero);
                }
                for (index, (pairs, middle)) in self.pairs.iter_mut().zip(&mut middles).enumerate() {
                    let weights = self.weights.as_ptr().add((head + index) * TILE + first);
                    let [a, b] = [simd.spread(weights), simd.spread(weights.add(4))];
                    *middle = simd.mul_add(a, zeros[0], *middle);
                    *middle = simd.mul_add(b, zeros[1], *middle);
                    let rounded = simd.pair_fourths(simd.mul(a, scales[0]), simd.mul(b, scales[1]));
                    *middle = simd.dot_pairs(rounded, simd.splat_bits(minus_middle), *middle);
                    simd.store(pairs.0.as_mut_ptr().add(2 * first).cast(), simd.as_float(rounded));
                }
            }
            for middle in &mut middles {
                *middle = simd.sum_fourths(*middle);
            }
        }
        middles
    }
}
