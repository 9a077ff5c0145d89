//! The two products of one query with rows of packed codes: q.k, and weights times values. Imports `rows`, `tile`, `code`,
//! `groups`, `paged`, `scaling` and `simd`.
//!
//! Codes become their values in registers, a chunk of two vectors at a time and once for up to four query heads; where
//! neighbouring elements share a scale, a look-up in a table of its few values does it.
//! Invariant: only rows of the tile are read, and of scales those of its tokens.

use std::ops::Range;

use half::f16;

use super::rows::{Ahead, LINE_BYTES};
use super::tile::{Tile, TILE};
use crate::code::{convert, Code, Elements};
use crate::groups::{load_codes_part, Groups};
use crate::paged::Cache;
use crate::scaling::Scaling;
use crate::simd::{Simd, Task, MAX_LANES};

/// Scales and zeros of a tile as f32.
pub(super) struct Scales {
    /// By `place`, head and group, or by `place`, head and element where groups are of tokens.
    pub(super) scale: Vec<f32>,
    pub(super) zero: Vec<f32>,
    /// Where those of a key begin.
    place: [usize; TILE],
    /// From a head to the next.
    head_stride: usize,
}

impl Scales {
    pub(super) const EMPTY: Self =
        Self { scale: Vec::new(), zero: Vec::new(), place: [0; TILE], head_stride: 0 };
}

/// Put the scales of some heads of a tile into `scales`, and ask for those of the next one.
pub(super) struct Load<'a> {
    pub cache: &'a Cache<'a>,
    pub tile: &'a Tile,
    pub next: &'a Tile,
    pub heads: Range<usize>,
    pub scales: &'a mut Scales,
}

impl Task for Load<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (dim, num_heads) = (self.cache.dim(), self.cache.paged.num_heads);
        let Scales { scale, zero, place, head_stride } = self.scales;
        // What fills up the last of eights has a place too.
        let slots = &self.tile.slots[..self.tile.len.next_multiple_of(8)];
        let next = &self.next.slots[..self.next.len];
        match self.cache.scaling {
            Scaling::Group(groups) => {
                let num_groups = dim.div_ceil(groups.size);
                *head_stride = num_groups;
                let len = self.heads.len() * num_groups;
                let first = |slot: usize| (slot * num_heads + self.heads.start) * num_groups;
                for (to, from) in [(scale, groups.scale), (zero, groups.zero)] {
                    to.resize(TILE * len, 0.0);
                    next.iter().for_each(|&slot| ask(simd, &from[first(slot)..][..len]));
                    for (to, &slot) in to.chunks_exact_mut(len).zip(slots) {
                        let from = &from[first(slot)..][..len];
                        // SAFETY: both are slices of len elements.
                        unsafe { convert(simd, from.as_ptr(), to.as_mut_ptr(), len) };
                    }
                }
                place.iter_mut().enumerate().for_each(|(token, place)| *place = token * len);
            }
            Scaling::TokenGroup(groups) => {
                *head_stride = dim.next_multiple_of(2 * S::LANES);
                let len = self.heads.len() * *head_stride;
                let (mut num_groups, mut last) = (0, usize::MAX);
                for &slot in next.iter().filter(|&slot| slot.is_multiple_of(groups.size)) {
                    let first = (slot / groups.size * num_heads + self.heads.start) * dim;
                    ask(simd, &groups.scale[first..][..self.heads.len() * dim]);
                    ask(simd, &groups.zero[first..][..self.heads.len() * dim]);
                }
                for (&slot, place) in slots.iter().zip(&mut *place) {
                    let group = slot / groups.size;
                    if group != last {
                        (last, num_groups) = (group, num_groups + 1);
                        for (to, from) in [(&mut *scale, groups.scale), (&mut *zero, groups.zero)] {
                            // Elements beyond a row are worth nothing.
                            to.resize((num_groups * len).max(to.len()), 0.0);
                            let to = &mut to[(num_groups - 1) * len..][..len];
                            for (to, head) in to.chunks_exact_mut(*head_stride).zip(self.heads.clone()) {
                                let from = &from[(group * num_heads + head) * dim..][..dim];
                                to[dim..].fill(0.0);
                                // SAFETY: both have dim elements.
                                unsafe { convert(simd, from.as_ptr(), to.as_mut_ptr(), dim) };
                            }
                        }
                    }
                    *place = (num_groups - 1) * len;
                }
            }
            _ => {}
        }
    }
}

/// Ask for the cache lines of scales.
#[inline(always)]
fn ask<S: Simd>(simd: S, scales: &[f16]) {
    for line in scales.chunks(LINE_BYTES / size_of::<f16>()) {
        simd.prefetch_far(line.as_ptr().cast());
    }
}

/// Elements that share a scale in all formats with groups of elements.
pub(super) const GROUP: usize = 32;

/// The packed rows of some heads of a tile.
pub(super) struct Rows<'a> {
    /// From the rows of the first head on, which tokens are offsets to.
    data: &'a [u8],
    pub(super) head_stride: usize,
    pub(super) num_heads: usize,
    /// Whether the heads of a token lie side by side.
    heads_together: bool,
    /// Query heads that share a head.
    pub(super) group: usize,
    /// Elements of a row.
    pub(super) dim: usize,
    bits: usize,
    /// Elements that share a scale, or all of a row.
    size: usize,
    of_tokens: bool,
    pub(super) scales: &'a Scales,
    /// As in `Tile`; `len` of them count.
    tokens: &'a [usize; TILE],
    len: usize,
    ahead: Ahead,
}

impl<'a> Rows<'a> {
    /// The rows of some heads; None where the cache has no groups.
    pub(super) fn new(
        cache: &Cache<'a>,
        scales: &'a Scales,
        heads: Range<usize>,
        group: usize,
        tokens: &'a [usize; TILE],
        len: usize,
        ahead: Ahead,
    ) -> Option<Self> {
        let dim = cache.dim();
        let (Groups { bits, .. }, size, of_tokens) = match cache.scaling {
            Scaling::Group(groups) => (groups, groups.size, false),
            Scaling::TokenGroup(groups) => (groups, dim, true),
            _ => return None,
        };
        let Elements::Packed(data) = cache.data else { return None };
        let paged = &cache.paged;
        Some(Self {
            data: &data[heads.start * paged.head_stride..],
            head_stride: paged.head_stride,
            num_heads: heads.len(),
            heads_together: paged.head_stride <= paged.token_stride,
            group,
            dim,
            bits,
            size,
            of_tokens,
            scales,
            tokens,
            len,
            ahead,
        })
    }

    /// Where the row of a key begins.
    ///
    /// # Safety
    /// The head is one of these, and the key below TILE.
    #[inline(always)]
    pub(super) unsafe fn at(&self, head: usize, key: usize) -> *const u8 {
        // SAFETY: the caller's.
        let token = unsafe { *self.tokens.get_unchecked(key) };
        self.data.as_ptr().wrapping_add(head * self.head_stride + token)
    }

    /// Ask for what is in the places of some keys of a head in the rows that come next.
    #[inline(always)]
    pub(super) fn ask<S: Simd>(&self, simd: S, head: usize, keys: Range<usize>) {
        for key in keys {
            // SAFETY: keys are below TILE.
            let row = unsafe { self.ahead.at(head, key) };
            for line in (0..self.dim * self.bits / 8).step_by(LINE_BYTES) {
                simd.prefetch_far(row.wrapping_add(line));
            }
        }
    }

    /// A chunk of a row: its codes, or, where neighbours share scales, its values.
    ///
    /// # Safety
    /// The row is that of the head and the key, which is one of the tile, and has the chunk.
    #[inline(always)]
    unsafe fn values<S: Simd, const BITS: usize, const CODES: bool>(
        &self,
        simd: S,
        row: *const u8,
        (head, key): (usize, usize),
        chunk: Chunk,
    ) -> [S::F; 2] {
        // SAFETY: the caller's; `Load` has filled the scales of all heads and keys.
        unsafe {
            let [low, high] = load_codes::<S, BITS>(simd, row.add(chunk.start * BITS / 8), chunk.len);
            let table = if CODES {
                simd.table::<BITS>(1.0, 0.0)
            } else {
                let at = self.scales_of(head, key) + chunk.group;
                simd.table::<BITS>(*self.scales.scale.as_ptr().add(at), *self.scales.zero.as_ptr().add(at))
            };
            [simd.look_up::<BITS>(table, low), simd.look_up::<BITS>(table, high)]
        }
    }

    /// Where the scales of a head and a key begin.
    ///
    /// # Safety
    /// The key is below TILE.
    #[inline(always)]
    pub(super) unsafe fn scales_of(&self, head: usize, key: usize) -> usize {
        // SAFETY: the caller's.
        unsafe { self.scales.place.get_unchecked(key) + head * self.scales.head_stride }
    }
}

/// Two vectors of a row, or what is left of it.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    len: usize,
    /// The group that it is in.
    group: usize,
}

/// Call `$step` with every chunk of a row; whole ones have a constant length.
macro_rules! for_chunks {
    ($rows:expr, $chunk:ident => $step:expr) => {
        let (dim, size) = ($rows.dim, $rows.size);
        // A group has whole chunks, up to the end of the row.
        let (mut start, mut group, mut left) = (0, 0, size);
        while dim - start >= 2 * S::LANES {
            let $chunk = Chunk { start, len: 2 * S::LANES, group };
            $step;
            start += 2 * S::LANES;
            left -= 2 * S::LANES;
            if left == 0 {
                (group, left) = (group + 1, size);
            }
        }
        if start < dim {
            let $chunk = Chunk { start, len: dim - start, group };
            $step;
        }
    };
}

/// `len` codes, at most two vectors of them, and 0 in the other lanes.
///
/// # Safety
/// `len` codes are readable.
#[inline(always)]
unsafe fn load_codes<S: Simd, const BITS: usize>(simd: S, from: *const u8, len: usize) -> [S::I; 2] {
    // SAFETY: the caller's.
    unsafe {
        let high = from.wrapping_add(S::LANES * BITS / 8);
        if len == 2 * S::LANES {
            [simd.load_codes::<BITS>(from), simd.load_codes::<BITS>(high)]
        } else if len >= S::LANES {
            [simd.load_codes::<BITS>(from), load_codes_part::<S, BITS>(simd, high, len - S::LANES)]
        } else {
            [load_codes_part::<S, BITS>(simd, from, len), simd.splat_bits(0)]
        }
    }
}

/// A product that goes over the rows, some heads of the query at a time.
pub(super) trait Product {
    fn rows(&self) -> &Rows<'_>;

    /// Query heads at a time, at most.
    fn most_heads<S: Simd>() -> usize {
        4
    }

    /// Tokens at a time where the heads of a token lie side by side.
    fn tokens(of_tokens: bool) -> usize;

    /// The query heads from `head` on, which share `kv_head`, and some keys.
    fn pass<S: Simd, const BITS: usize, const OF_TOKENS: bool, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        keys: Range<usize>,
    );
}

/// Run a product over the rows.
#[inline(always)]
pub(super) fn run<S: Simd, P: Product>(simd: S, product: &mut P) {
    match (product.rows().bits, product.rows().of_tokens) {
        (4, false) => all_heads::<S, P, 4, false>(simd, product),
        (4, true) => all_heads::<S, P, 4, true>(simd, product),
        (_, false) => all_heads::<S, P, 2, false>(simd, product),
        (_, true) => all_heads::<S, P, 2, true>(simd, product),
    }
}

/// Go over the rows in the order in which they lie in memory.
#[inline(always)]
fn all_heads<S: Simd, P: Product, const BITS: usize, const OF_TOKENS: bool>(simd: S, product: &mut P) {
    let Rows { len, num_heads, group, heads_together, .. } = *product.rows();
    let together = if heads_together { P::tokens(OF_TOKENS) } else { len };
    for first in (0..len).step_by(together) {
        let keys = first..len.min(first + together);
        for kv_head in 0..num_heads {
            let (mut head, last) = (kv_head * group, (kv_head + 1) * group);
            while P::most_heads::<S>() >= 4 && last - head >= 4 {
                product.pass::<S, BITS, OF_TOKENS, 4>(simd, kv_head, head, keys.clone());
                head += 4;
            }
            while last - head >= 2 {
                product.pass::<S, BITS, OF_TOKENS, 2>(simd, kv_head, head, keys.clone());
                head += 2;
            }
            if head < last {
                product.pass::<S, BITS, OF_TOKENS, 1>(simd, kv_head, head, keys.clone());
            }
        }
    }
}

/// q.k of some heads and the keys of a tile.
pub(super) struct Logits<'a> {
    pub rows: Rows<'a>,
    /// `[num_q_heads, q_stride]`, each 0 from its end up to whole chunks.
    pub q: &'a [f32],
    pub q_stride: usize,
    /// `[4, q_stride]`: scratch.
    pub folded: &'a mut [f32],
    /// `[num_q_heads, TILE]`.
    pub logits: &'a mut [f32],
}

impl Task for Logits<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        assert!(self.q_stride >= self.rows.dim.next_multiple_of(2 * S::LANES));
        assert!(self.folded.len() >= 4 * self.q_stride);
        run(simd, &mut self);
    }
}

impl Product for Logits<'_> {
    fn rows(&self) -> &Rows<'_> {
        &self.rows
    }

    fn most_heads<S: Simd>() -> usize {
        // Four heads times four keys need more registers than narrow sets have.
        if S::LANES == MAX_LANES {
            4
        } else {
            2
        }
    }

    fn tokens(of_tokens: bool) -> usize {
        if of_tokens {
            TILE // the query has to be folded for all of a group
        } else {
            4
        }
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
        if OF_TOKENS {
            self.by_groups::<S, BITS, HEADS>(simd, kv_head, head, keys);
            return;
        }
        let q = &self.q[head * self.q_stride..][..HEADS * self.q_stride];
        for first in keys.step_by(4) {
            // SAFETY: the keys are below TILE, as ranges of them start at multiples of four; q has whole chunks.
            let products = unsafe { self.four::<S, BITS, false, HEADS>(simd, kv_head, first, q.as_ptr()) };
            for (index, products) in products.into_iter().enumerate() {
                // Where the last ones are no keys of the tile, nobody looks at their logits.
                self.logits[(head + index) * TILE + first..][..4].copy_from_slice(&simd.sum_4(products));
            }
        }
    }
}

impl Logits<'_> {
    /// Keys whose elements share scales, group by group: q.(code * scale + zero) = (q * scale).code + q.zero.
    #[inline(always)]
    fn by_groups<S: Simd, const BITS: usize, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        keys: Range<usize>,
    ) {
        let mut end = keys.start;
        while end < keys.end {
            let (first, place) = (end, self.rows.scales.place[end]);
            while end < keys.end && self.rows.scales.place[end] == place {
                end += 1;
            }
            let mut constant = [0.0; HEADS];
            for (index, constant) in constant.iter_mut().enumerate() {
                *constant =
                    self.fold(simd, head + index, place + kv_head * self.rows.scales.head_stride, index);
            }
            for first in (first..end).step_by(4) {
                // SAFETY: keys beyond the tile become its last one; the folded query has whole chunks.
                let products =
                    unsafe { self.four::<S, BITS, true, HEADS>(simd, kv_head, first, self.folded.as_ptr()) };
                for (index, (products, constant)) in products.into_iter().zip(constant).enumerate() {
                    let to = &mut self.logits[(head + index) * TILE..][..TILE][first..end.min(first + 4)];
                    for (to, sum) in to.iter_mut().zip(simd.sum_4(products)) {
                        *to = sum + constant;
                    }
                }
            }
        }
    }

    /// Fold the scales that start at a place into a head of the query; its product with the zeros.
    #[inline(always)]
    fn fold<S: Simd>(&mut self, simd: S, head: usize, place: usize, index: usize) -> f32 {
        let stride = self.rows.scales.head_stride;
        let q = &self.q[head * self.q_stride..][..stride];
        let [scale, zero] =
            [&self.rows.scales.scale, &self.rows.scales.zero].map(|all| &all[place..][..stride]);
        let to = &mut self.folded[index * self.q_stride..][..stride];
        let mut constant = simd.splat(0.0);
        for at in (0..stride).step_by(S::LANES) {
            // SAFETY: all have `stride` elements, whole vectors.
            unsafe {
                let q = simd.load(q.as_ptr().add(at));
                constant = simd.mul_add(q, simd.load(zero.as_ptr().add(at)), constant);
                simd.store(to.as_mut_ptr().add(at), simd.mul(q, simd.load(scale.as_ptr().add(at))));
            }
        }
        simd.sum(constant)
    }

    /// The products of queries, `q_stride` apart, with the values of four keys, or with their codes.
    ///
    /// # Safety
    /// The queries have whole chunks. Keys beyond the tile become its last one.
    #[inline(always)]
    unsafe fn four<S: Simd, const BITS: usize, const CODES: bool, const HEADS: usize>(
        &self,
        simd: S,
        head: usize,
        first: usize,
        q: *const f32,
    ) -> [[S::F; 4]; HEADS] {
        let mut products = [[simd.splat(0.0); 4]; HEADS];
        let keys = [first, first + 1, first + 2, first + 3].map(|key| key.min(TILE - 1));
        // SAFETY: the rows of keys of a tile have all chunks, and so have the queries.
        unsafe {
            let rows = keys.map(|key| self.rows.at(head, key));
            for_chunks!(self.rows, chunk => {
                let [a, b, c, d] = [
                    self.rows.values::<S, BITS, CODES>(simd, rows[0], (head, keys[0]), chunk),
                    self.rows.values::<S, BITS, CODES>(simd, rows[1], (head, keys[1]), chunk),
                    self.rows.values::<S, BITS, CODES>(simd, rows[2], (head, keys[2]), chunk),
                    self.rows.values::<S, BITS, CODES>(simd, rows[3], (head, keys[3]), chunk),
                ];
                let halves = [[a[0], b[0], c[0], d[0]], [a[1], b[1], c[1], d[1]]];
                for (half, k) in halves.into_iter().enumerate() {
                    let q = q.add(chunk.start + half * S::LANES);
                    for (index, products) in products.iter_mut().enumerate() {
                        let q = simd.load(q.add(index * self.q_stride));
                        for key in 0..4 {
                            products[key] = simd.mul_add(q, k[key], products[key]);
                        }
                    }
                }
            });
        }
        products
    }
}

/// Add the weighted values of a tile to the sums of some heads.
pub(super) struct Sums<'a> {
    pub rows: Rows<'a>,
    /// `[num_q_heads, TILE]`.
    pub weights: &'a [f32],
    /// `[num_q_heads, head_dim_v]`.
    pub sums: &'a mut [f32],
}

impl Task for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        run(simd, &mut self);
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
        for_chunks!(self.rows, chunk => {
            // SAFETY: the rows of the tile and those of the sums have all chunks.
            unsafe { self.add::<S, BITS, OF_TOKENS, HEADS>(simd, kv_head, head, keys.clone(), chunk) };
        });
    }
}

impl Sums<'_> {
    /// # Safety
    /// The keys are some of the tile, and rows and sums have the chunk.
    #[inline(always)]
    unsafe fn add<S: Simd, const BITS: usize, const OF_TOKENS: bool, const HEADS: usize>(
        &mut self,
        simd: S,
        kv_head: usize,
        head: usize,
        keys: Range<usize>,
        chunk: Chunk,
    ) {
        let dim = self.rows.dim;
        let weights = &self.weights[head * TILE..][..HEADS * TILE];
        let all = &mut self.sums[head * dim..][..HEADS * dim];
        // SAFETY: the caller's; a tile has TILE keys.
        unsafe {
            let all = all.as_mut_ptr().add(chunk.start);
            let mut sums = [[simd.splat(0.0); 2]; HEADS];
            for (index, sums) in sums.iter_mut().enumerate() {
                *sums = load_floats(simd, all.add(index * dim), chunk.len);
            }
            for key in keys {
                let row = self.rows.at(kv_head, key);
                let mut values = self.rows.values::<S, BITS, OF_TOKENS>(simd, row, (kv_head, key), chunk);
                if OF_TOKENS {
                    let at = self.rows.scales_of(kv_head, key) + chunk.start;
                    let scale = self.rows.scales.scale.as_ptr().add(at);
                    let zero = self.rows.scales.zero.as_ptr().add(at);
                    for (half, value) in values.iter_mut().enumerate() {
                        let at = half * S::LANES;
                        *value = simd.mul_add(*value, simd.load(scale.add(at)), simd.load(zero.add(at)));
                    }
                }
                for (index, sums) in sums.iter_mut().enumerate() {
                    let weight = simd.splat(*weights.get_unchecked(index * TILE + key));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = simd.mul_add(weight, value, *sum);
                    }
                }
            }
            for (index, sums) in sums.into_iter().enumerate() {
                store_floats(simd, all.add(index * dim), chunk.len, sums);
            }
        }
    }
}

/// `len` floats, at most two vectors of them, and 0 in the other lanes.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn load_floats<S: Simd>(simd: S, from: *const f32, len: usize) -> [S::F; 2] {
    // SAFETY: the caller's.
    unsafe {
        let high = from.wrapping_add(S::LANES);
        if len == 2 * S::LANES {
            [simd.load(from), simd.load(high)]
        } else if len >= S::LANES {
            [simd.load(from), f32::load_part(simd, high, len - S::LANES)]
        } else {
            [f32::load_part(simd, from, len), simd.splat(0.0)]
        }
    }
}

/// The first `len` of two vectors.
///
/// # Safety
/// They are writable.
#[inline(always)]
unsafe fn store_floats<S: Simd>(simd: S, to: *mut f32, len: usize, [low, high]: [S::F; 2]) {
    // SAFETY: the caller's.
    unsafe {
        let rest = to.wrapping_add(S::LANES);
        if len == 2 * S::LANES {
            simd.store(to, low);
            simd.store(rest, high);
        } else if len >= S::LANES {
            simd.store(to, low);
            f32::store_part(simd, rest, len - S::LANES, high);
        } else {
            f32::store_part(simd, to, len, low);
        }
    }
}
