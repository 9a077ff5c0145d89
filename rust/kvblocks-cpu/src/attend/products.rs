//! The two products of one query with the rows of a tile: q.k, and weights times values. Imports `tile`, `code`, `simd`.
//!
//! Rows go through f32 (lanes are elements), or, where whole blocks of a row have a quick way to pairs of bf16, in pairs.
//! Invariant: no value of K, V or a query is rounded; where the processor multiplies pairs, queries go in pairs too if
//! they are bf16 numbers.

use std::ops::Range;

use super::tile::{Ahead, TILE};
use crate::code::Code;
use crate::paged::Paged;
use crate::simd::{Simd, Task, MAX_LANES};

/// How the elements of a row stand in a query's scratch, or in sums.
pub(super) struct Order {
    /// Elements of a block, if rows go in pairs; else 0.
    block: usize,
    place_of_pair: fn(usize, usize) -> usize,
}

impl Order {
    /// The order for rows of a slice's elements.
    pub(super) fn of<S: Simd, T: Code>(_: &[T], dim: usize) -> Self {
        let block = T::vectors_of_pairs::<S>() * 2 * S::LANES;
        let whole = block > 0 && dim.is_multiple_of(block);
        Self { block: if whole { block } else { 0 }, place_of_pair: T::place_of_pair }
    }

    pub(super) fn in_pairs(&self) -> bool {
        self.block > 0
    }

    /// The elements whose halves share a lane, by vector and lane: the low ones; the high ones come next.
    fn pairs<S: Simd>(&self, dim: usize) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let vectors = self.block / (2 * S::LANES);
        (0..dim / (2 * S::LANES)).flat_map(move |vector| {
            let start = vector / vectors * self.block;
            (0..S::LANES)
                .map(move |lane| (vector, lane, start + (self.place_of_pair)(vector % vectors, lane)))
        })
    }

    /// Put a query where `Logits` wants it: in pairs of bf16 if that is exact, and in f32 otherwise.
    pub(super) fn arrange<S: Simd>(&self, row: &[f32], exact: bool, to: &mut [f32]) {
        if !self.in_pairs() {
            to[..row.len()].copy_from_slice(row);
            return;
        }
        for (vector, lane, element) in self.pairs::<S>(row.len()) {
            let pair = [row[element], row[element + 1]];
            if exact {
                to[vector * S::LANES + lane] = f32::from_bits(pair[0].to_bits() >> 16 | pair[1].to_bits());
            } else {
                to[2 * vector * S::LANES + lane] = pair[0];
                to[(2 * vector + 1) * S::LANES + lane] = pair[1];
            }
        }
    }

    /// Put sums in pairs back into the order of the elements; `row` is scratch of the same length.
    pub(super) fn restore<S: Simd>(&self, sums: &mut [f32], row: &mut [f32]) {
        for (vector, lane, element) in self.pairs::<S>(sums.len()) {
            row[element] = sums[2 * vector * S::LANES + lane];
            row[element + 1] = sums[(2 * vector + 1) * S::LANES + lane];
        }
        sums.copy_from_slice(row);
    }
}

/// Whether values are bf16 numbers.
pub(super) fn are_bf16(values: &[f32]) -> bool {
    values.iter().fold(0, |bits, value| bits | value.to_bits()) & 0xFFFF == 0
}

/// Call `$self.$method::<S, HEADS, ..>(simd, head, tokens)` for some tokens and all query heads, four, two or one of them
/// at a time.
///
/// The tokens come in the order in which their rows lie in memory, for the processor to read ahead of them: where the
/// heads of a token lie side by side, a few tokens for all heads; else all tokens of a head.
macro_rules! for_heads {
    ($self:ident, $simd:ident, $tokens:expr, $method:ident $(, $more:literal)*) => {{
        let tokens = $self.len;
        let together = if $self.rows.heads_together { $tokens } else { tokens };
        for first in (0..tokens).step_by(together) {
            let some = first..tokens.min(first + together);
            for kv_head in 0..$self.rows.num_heads {
                let last = (kv_head + 1) * $self.rows.group;
                let mut head = kv_head * $self.rows.group;
                // Four heads times four keys or vectors need more registers than narrow sets have.
                while S::LANES == MAX_LANES && last - head >= 4 {
                    $self.$method::<S, 4 $(, $more)*>($simd, kv_head, head, some.clone());
                    head += 4;
                }
                while last - head >= 2 {
                    $self.$method::<S, 2 $(, $more)*>($simd, kv_head, head, some.clone());
                    head += 2;
                }
                if head < last {
                    $self.$method::<S, 1 $(, $more)*>($simd, kv_head, head, some.clone());
                }
            }
        }
    }};
}

/// About how often `Logits`, `Sums` and the weights between them ask for what comes next.
pub(super) fn num_steps<S: Simd>(
    orders: [&Order; 2],
    dims: [usize; 2],
    len: usize,
    num_heads: usize,
    group: usize,
) -> usize {
    let k_step = if orders[0].in_pairs() { orders[0].block } else { S::LANES };
    let keys = len.div_ceil(4) * dims[0].div_ceil(k_step);
    let values = len * dims[1].div_ceil(4 * S::LANES);
    num_heads * (passes::<S>(group) * (keys + values) + group * 2 * len.div_ceil(S::LANES))
}

/// How often all query heads of a group are gone through, in fours, twos and ones.
fn passes<S: Simd>(group: usize) -> usize {
    let (fours, rest) = if S::LANES == MAX_LANES { (group / 4, group % 4) } else { (0, group) };
    fours + rest / 2 + rest % 2
}

/// The rows of some heads of K or V.
pub(super) struct Rows<T> {
    /// Base of the rows of the first head, which tokens are offsets to.
    pub data: *const T,
    /// Elements of a row.
    pub dim: usize,
    /// Elements between two heads of a token.
    pub head_stride: usize,
    pub num_heads: usize,
    /// Query heads that share a head.
    pub group: usize,
    /// Whether the heads of a token lie side by side.
    pub heads_together: bool,
}

impl<T: Code> Rows<T> {
    /// The rows of some heads.
    pub(super) fn new(data: &[T], paged: &Paged, heads: Range<usize>, group: usize) -> Self {
        Self {
            // Within the storage, as the head has rows.
            data: data[heads.start * paged.head_stride..].as_ptr(),
            dim: paged.head_dim,
            head_stride: paged.head_stride,
            num_heads: heads.len(),
            group,
            heads_together: paged.head_stride <= paged.token_stride,
        }
    }

    /// # Safety
    /// The head is one of these and the token one of the tile.
    #[inline(always)]
    unsafe fn at(&self, head: usize, token: usize) -> *const T {
        // SAFETY: the caller's.
        unsafe { self.data.add(head * self.head_stride + token) }
    }
}

/// Tokens whose K is taken at once where the heads of a token lie side by side, and whose V is.
const K_TOKENS: usize = 4;
const V_TOKENS: usize = 8;

/// q.k of some heads and the keys of a tile.
pub(super) struct Logits<'a, T> {
    /// `[num_q_heads, q_stride]`, arranged by the order of K.
    pub q: &'a [f32],
    pub q_stride: usize,
    pub in_pairs: bool,
    /// Whether the queries are in pairs as well.
    pub exact: bool,
    pub rows: Rows<T>,
    /// As in `Tile`; `len` of them count.
    pub tokens: &'a [usize; TILE],
    pub len: usize,
    /// `[num_q_heads, TILE]`.
    pub logits: &'a mut [f32],
    pub ahead: &'a mut Ahead,
}

impl<T: Code> Task for Logits<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        match (self.in_pairs, self.exact) {
            (false, _) => for_heads!(self, simd, K_TOKENS, by_element),
            (true, false) => for_heads!(self, simd, K_TOKENS, by_pair, false),
            (true, true) => for_heads!(self, simd, K_TOKENS, by_pair, true),
        }
    }
}

impl<T: Code> Logits<'_, T> {
    /// # Safety
    /// The head is one of the rows', and `first` at most TILE - 4.
    #[inline(always)]
    unsafe fn four_rows(&self, kv_head: usize, first: usize) -> [*const T; 4] {
        // SAFETY: the caller's.
        unsafe { [0, 1, 2, 3].map(|key| self.rows.at(kv_head, *self.tokens.get_unchecked(first + key))) }
    }

    #[inline(always)]
    fn by_element<S: Simd, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        some: Range<usize>,
    ) {
        let dim = self.rows.dim;
        let whole = dim - dim % S::LANES;
        let q = &self.q[head * self.q_stride..][..HEADS * self.q_stride];
        // In fours; where the last ones are no keys of the tile, nobody looks at their logits.
        for first in some.step_by(4) {
            let mut products = [[simd.splat(0.0); 4]; HEADS];
            // SAFETY: rows of head_dim elements lie at the tokens' offsets, and q is padded to whole vectors.
            unsafe {
                let rows = self.four_rows(kv_head, first);
                for at in (0..whole).step_by(S::LANES) {
                    self.ahead.step(simd);
                    let k = [
                        T::load(simd, rows[0].add(at)),
                        T::load(simd, rows[1].add(at)),
                        T::load(simd, rows[2].add(at)),
                        T::load(simd, rows[3].add(at)),
                    ];
                    multiply::<S, HEADS>(simd, q.as_ptr().add(at), self.q_stride, k, &mut products);
                }
                if whole < dim {
                    let rest = dim - whole;
                    let k = [
                        T::load_part(simd, rows[0].add(whole), rest),
                        T::load_part(simd, rows[1].add(whole), rest),
                        T::load_part(simd, rows[2].add(whole), rest),
                        T::load_part(simd, rows[3].add(whole), rest),
                    ];
                    multiply::<S, HEADS>(simd, q.as_ptr().add(whole), self.q_stride, k, &mut products);
                }
            }
            for (index, products) in products.into_iter().enumerate() {
                self.logits[(head + index) * TILE + first..][..4].copy_from_slice(&simd.sum_4(products));
            }
        }
    }

    #[inline(always)]
    fn by_pair<S: Simd, const HEADS: usize, const EXACT: bool>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        some: Range<usize>,
    ) {
        let dim = self.rows.dim;
        let vectors = T::vectors_of_pairs::<S>();
        let block_len = vectors * 2 * S::LANES;
        let q = &self.q[head * self.q_stride..][..HEADS * self.q_stride];
        // In fours; where the last ones are no keys of the tile, nobody looks at their logits.
        for first in some.step_by(4) {
            let mut products = [[simd.splat(0.0); 4]; HEADS];
            // SAFETY: rows of head_dim elements, whole blocks, lie at the tokens' offsets; q has as many elements.
            unsafe {
                let rows = self.four_rows(kv_head, first);
                for at in (0..dim).step_by(block_len) {
                    self.ahead.step(simd);
                    let k = [
                        T::load_pairs(simd, rows[0].add(at)),
                        T::load_pairs(simd, rows[1].add(at)),
                        T::load_pairs(simd, rows[2].add(at)),
                        T::load_pairs(simd, rows[3].add(at)),
                    ];
                    for vector in 0..vectors {
                        let pairs = at / 2 + vector * S::LANES;
                        let k = [k[0][vector], k[1][vector], k[2][vector], k[3][vector]];
                        if EXACT {
                            for (head, products) in products.iter_mut().enumerate() {
                                let q = simd.load_bits(q.as_ptr().add(head * self.q_stride + pairs).cast());
                                for key in 0..4 {
                                    products[key] = simd.dot_pairs(q, k[key], products[key]);
                                }
                            }
                        } else {
                            let [k0, k1] = [simd.unpair(k[0]), simd.unpair(k[1])];
                            let [k2, k3] = [simd.unpair(k[2]), simd.unpair(k[3])];
                            for half in 0..2 {
                                let q = q.as_ptr().add(2 * pairs + half * S::LANES);
                                let k = [k0[half], k1[half], k2[half], k3[half]];
                                multiply::<S, HEADS>(simd, q, self.q_stride, k, &mut products);
                            }
                        }
                    }
                }
            }
            for (index, products) in products.into_iter().enumerate() {
                self.logits[(head + index) * TILE + first..][..4].copy_from_slice(&simd.sum_4(products));
            }
        }
    }
}

/// # Safety
/// A vector is readable at each of HEADS strides from `q` on.
#[inline(always)]
unsafe fn multiply<S: Simd, const HEADS: usize>(
    simd: S,
    q: *const f32,
    q_stride: usize,
    k: [S::F; 4],
    products: &mut [[S::F; 4]; HEADS],
) {
    for (head, products) in products.iter_mut().enumerate() {
        // SAFETY: the caller's.
        let q = unsafe { simd.load(q.add(head * q_stride)) };
        for key in 0..4 {
            products[key] = simd.mul_add(q, k[key], products[key]);
        }
    }
}

/// Add the weighted values of a tile to the sums of some heads.
pub(super) struct Sums<'a, T> {
    /// `[num_q_heads, TILE]`.
    pub weights: &'a [f32],
    pub in_pairs: bool,
    pub rows: Rows<T>,
    /// As in `Tile`; `len` of them count.
    pub tokens: &'a [usize; TILE],
    pub len: usize,
    /// `[num_q_heads, head_dim_v]`, in the order of V.
    pub sums: &'a mut [f32],
    pub ahead: &'a mut Ahead,
}

impl<T: Code> Task for Sums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        if self.in_pairs {
            for_heads!(self, simd, V_TOKENS, by_pair);
        } else {
            for_heads!(self, simd, V_TOKENS, by_element);
        }
    }
}

impl<T: Code> Sums<'_, T> {
    #[inline(always)]
    fn by_element<S: Simd, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        some: Range<usize>,
    ) {
        let whole = self.rows.dim - self.rows.dim % S::LANES;
        let mut at = 0;
        while whole - at >= 4 * S::LANES {
            self.columns::<S, HEADS, 4>(simd, (kv_head, head), at, some.clone());
            at += 4 * S::LANES;
        }
        while at < whole {
            self.columns::<S, HEADS, 1>(simd, (kv_head, head), at, some.clone());
            at += S::LANES;
        }
        if at < self.rows.dim {
            self.last_columns::<S, HEADS>(simd, (kv_head, head), at, some);
        }
    }

    /// The elements at..at + VECTORS * LANES.
    #[inline(always)]
    fn columns<S: Simd, const HEADS: usize, const VECTORS: usize>(
        &mut self,
        simd: S,
        (kv_head, head): (usize, usize),
        at: usize,
        some: Range<usize>,
    ) {
        let mut sums = [[simd.splat(0.0); VECTORS]; HEADS];
        // SAFETY: the columns lie within the rows of values and sums; a tile has at most TILE tokens.
        unsafe {
            self.load_sums(simd, head, at, &mut sums);
            for column in some {
                let row = self.rows.at(kv_head, *self.tokens.get_unchecked(column)).add(at);
                self.ahead.step(simd);
                let mut values = [simd.splat(0.0); VECTORS];
                for (vector, value) in values.iter_mut().enumerate() {
                    *value = T::load(simd, row.add(vector * S::LANES));
                }
                self.add(simd, head, column, &values, &mut sums);
            }
            self.store_sums(simd, head, at, &sums);
        }
    }

    #[inline(always)]
    fn by_pair<S: Simd, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        some: Range<usize>,
    ) {
        let block_len = T::vectors_of_pairs::<S>() * 2 * S::LANES;
        let mut at = 0;
        while self.rows.dim - at >= 4 * S::LANES {
            self.pairs::<S, HEADS, 4>(simd, (kv_head, head), at, some.clone());
            at += 4 * S::LANES;
        }
        while at < self.rows.dim {
            debug_assert_eq!(block_len, 2 * S::LANES);
            self.pairs::<S, HEADS, 2>(simd, (kv_head, head), at, some.clone());
            at += block_len;
        }
    }

    /// The elements at..at + VECTORS * LANES: one or two blocks.
    #[inline(always)]
    fn pairs<S: Simd, const HEADS: usize, const VECTORS: usize>(
        &mut self,
        simd: S,
        (kv_head, head): (usize, usize),
        at: usize,
        some: Range<usize>,
    ) {
        let mut sums = [[simd.splat(0.0); VECTORS]; HEADS];
        let one_by_one = T::vectors_of_pairs::<S>() == 1;
        // SAFETY: the columns lie within the rows of values and sums; a tile has at most TILE tokens.
        unsafe {
            self.load_sums(simd, head, at, &mut sums);
            for column in some {
                let row = self.rows.at(kv_head, *self.tokens.get_unchecked(column)).add(at);
                self.ahead.step(simd);
                let first = T::load_pairs(simd, row);
                let mut values = [simd.splat(0.0); VECTORS];
                [values[0], values[1]] = simd.unpair(first[0]);
                if VECTORS == 4 {
                    let second =
                        if one_by_one { T::load_pairs(simd, row.add(2 * S::LANES))[0] } else { first[1] };
                    [values[2], values[3]] = simd.unpair(second);
                }
                self.add(simd, head, column, &values, &mut sums);
            }
            self.store_sums(simd, head, at, &sums);
        }
    }

    /// Add the values of a token, times its weight for each head.
    ///
    /// # Safety
    /// The column is one of the tile, and the heads are those of the group.
    #[inline(always)]
    unsafe fn add<S: Simd, const HEADS: usize, const VECTORS: usize>(
        &self,
        simd: S,
        head: usize,
        column: usize,
        values: &[S::F; VECTORS],
        sums: &mut [[S::F; VECTORS]; HEADS],
    ) {
        for (index, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's.
            let weight = simd.splat(unsafe { *self.weights.get_unchecked((head + index) * TILE + column) });
            for (sum, &value) in sums.iter_mut().zip(values) {
                *sum = simd.mul_add(weight, value, *sum);
            }
        }
    }

    /// # Safety
    /// The columns lie within the rows of sums.
    #[inline(always)]
    unsafe fn load_sums<S: Simd, const HEADS: usize, const VECTORS: usize>(
        &self,
        simd: S,
        head: usize,
        at: usize,
        sums: &mut [[S::F; VECTORS]; HEADS],
    ) {
        for (index, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                let at = (head + index) * self.rows.dim + at + vector * S::LANES;
                // SAFETY: the caller's.
                *sum = unsafe { simd.load(self.sums.as_ptr().add(at)) };
            }
        }
    }

    /// # Safety
    /// The columns lie within the rows of sums.
    #[inline(always)]
    unsafe fn store_sums<S: Simd, const HEADS: usize, const VECTORS: usize>(
        &mut self,
        simd: S,
        head: usize,
        at: usize,
        sums: &[[S::F; VECTORS]; HEADS],
    ) {
        for (index, sums) in sums.iter().enumerate() {
            for (vector, &sum) in sums.iter().enumerate() {
                let at = (head + index) * self.rows.dim + at + vector * S::LANES;
                // SAFETY: the caller's.
                unsafe { simd.store(self.sums.as_mut_ptr().add(at), sum) };
            }
        }
    }

    /// The elements from `at` on, fewer than LANES.
    #[inline(always)]
    fn last_columns<S: Simd, const HEADS: usize>(
        &mut self,
        simd: S,
        (kv_head, head): (usize, usize),
        at: usize,
        some: Range<usize>,
    ) {
        let len = self.rows.dim - at;
        // SAFETY: the columns lie within the rows of values and sums.
        unsafe {
            let stored = self.sums.as_mut_ptr().add(head * self.rows.dim + at);
            for index in 0..HEADS {
                let stored = stored.add(index * self.rows.dim);
                let mut sum = f32::load_part(simd, stored, len);
                for column in some.clone() {
                    let weight = simd.splat(self.weights[(head + index) * TILE + column]);
                    let row = self.rows.at(kv_head, self.tokens[column]).add(at);
                    sum = simd.mul_add(weight, T::load_part(simd, row, len), sum);
                }
                f32::store_part(simd, stored, len, sum);
            }
        }
    }
}
