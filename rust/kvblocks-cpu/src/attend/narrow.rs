//! Attention of one query: lanes are elements of a row. Imports `tile`, `code`, `simd` and `math`.
//!
//! A row of K or V is loaded once for up to four query heads. While a tile is computed, the next one is asked for.
//! Invariant: only visible keys are read.

use super::tile::{tile_at, Ahead, Tile, TILE};
use super::{soft_cap, Call, Partials, State, Unit};
use crate::code::{with_elements, Code};
use crate::math::exp;
use crate::simd::{Simd, Task, MAX_LANES};

/// What a thread keeps between units.
pub(super) struct Scratch {
    /// `[num_q_heads, head_dim padded to lanes]`, scaled.
    q: Vec<f32>,
    /// `[num_q_heads, TILE]`: logits, then weights.
    weights: Vec<f32>,
    tiles: [Tile; 2],
    ahead: Ahead,
}

impl Default for Scratch {
    fn default() -> Self {
        let tiles = [Tile::EMPTY, Tile::EMPTY];
        Self { q: Vec::new(), weights: Vec::new(), tiles, ahead: Ahead::nothing() }
    }
}

/// Run a unit of one query.
#[inline(always)]
pub(super) fn run<S: Simd>(
    simd: S,
    call: &Call<'_>,
    unit: &Unit,
    partials: &Partials<'_>,
    scratch: &mut Scratch,
) {
    let (group, head_dim, head_dim_v) = (call.group(), call.k.paged.head_dim, call.v.paged.head_dim);
    let q_heads = unit.heads.start * group..unit.heads.end * group;
    let q_stride = head_dim.next_multiple_of(S::LANES);
    let Scratch { q, weights, tiles: [now, next], ahead } = scratch;
    q.clear();
    q.resize(q_heads.len() * q_stride, 0.0);
    for (row, head) in q.chunks_exact_mut(q_stride).zip(q_heads.clone()) {
        call.load_query(simd, unit.queries.start, head, &mut row[..head_dim]);
    }
    weights.resize(q_heads.len() * TILE, 0.0);
    // SAFETY: no other unit has these heads of this partial result.
    let (states, sums) = unsafe { partials.of(call, unit.partial, q_heads.clone()) };

    let table = call.batch.table(unit.row);
    let locate = |tile: &mut Tile, first: usize| {
        if first < unit.keys.end {
            tile.locate(&call.k.paged, &call.v.paged, table, tile_at(first, &unit.keys));
        } else {
            tile.len = 0;
        }
    };
    locate(now, unit.keys.start);
    let mut first = unit.keys.start;
    while now.len > 0 {
        locate(next, first + now.len);
        let num_heads = unit.heads.len();
        ahead.start(&call.k, &next.k[..next.len], unit.heads.clone(), num_heads * now.len.div_ceil(4));
        // The keys go in fours; the last one again where there are fewer, and its logit is dropped below.
        let padded = now.len.next_multiple_of(4);
        let last = now.k[now.len - 1];
        now.k[now.len..padded].fill(last);
        for (index, head) in unit.heads.clone().enumerate() {
            with_elements!(Elements, call.k.data, data => simd.vectorize(Logits {
                q: &q[index * group * q_stride..][..group * q_stride],
                q_stride,
                // SAFETY: an offset of the head within the storage.
                keys: unsafe { data.as_ptr().add(head * call.k.paged.head_stride) },
                tokens: &now.k[..padded],
                head_dim,
                logits: &mut weights[index * group * TILE..][..group * TILE],
                ahead,
            }));
        }
        let distance = unit.position - first;
        simd.vectorize(Weights { call, head: q_heads.start, len: now.len, distance, weights, states, sums });
        let steps = num_heads * now.len * head_dim_v.div_ceil(4 * S::LANES);
        ahead.start(&call.v, &next.v[..next.len], unit.heads.clone(), steps);
        for (index, head) in unit.heads.clone().enumerate() {
            with_elements!(Elements, call.v.data, data => simd.vectorize(Sums {
                weights: &weights[index * group * TILE..][..group * TILE],
                // SAFETY: an offset of the head within the storage.
                values: unsafe { data.as_ptr().add(head * call.v.paged.head_stride) },
                tokens: &now.v[..now.len],
                head_dim_v,
                sums: &mut sums[index * group * head_dim_v..][..group * head_dim_v],
                ahead,
            }));
        }
        first += now.len;
        std::mem::swap(now, next);
    }
}

/// q.k of the heads that share a key head and the keys of a tile.
struct Logits<'a, T> {
    q: &'a [f32],
    q_stride: usize,
    /// Base of the rows that `tokens`, a multiple of four, are offsets to.
    keys: *const T,
    tokens: &'a [usize],
    head_dim: usize,
    /// `[group, TILE]`.
    logits: &'a mut [f32],
    ahead: &'a mut Ahead,
}

impl<T: Code> Task for Logits<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let num_heads = self.q.len() / self.q_stride;
        let mut head = 0;
        if S::LANES == MAX_LANES {
            while num_heads - head >= 4 {
                self.heads::<S, 4>(simd, head);
                head += 4;
            }
        }
        while num_heads - head >= 2 {
            self.heads::<S, 2>(simd, head);
            head += 2;
        }
        if head < num_heads {
            self.heads::<S, 1>(simd, head);
        }
    }
}

impl<T: Code> Logits<'_, T> {
    #[inline(always)]
    fn heads<S: Simd, const HEADS: usize>(&mut self, simd: S, head: usize) {
        let whole = self.head_dim - self.head_dim % S::LANES;
        let q = &self.q[head * self.q_stride..][..HEADS * self.q_stride];
        let logits = &mut self.logits[head * TILE..][..HEADS * TILE];
        for (block, tokens) in self.tokens.as_chunks::<4>().0.iter().enumerate() {
            if head == 0 {
                self.ahead.step(simd);
            }
            let mut products = [[simd.splat(0.0); 4]; HEADS];
            // SAFETY: rows of head_dim elements lie at the tokens' offsets, and q is padded to whole vectors.
            unsafe {
                let rows = [0, 1, 2, 3].map(|key| self.keys.add(tokens[key]));
                for at in (0..whole).step_by(S::LANES) {
                    let k = rows.map(|row| T::load(simd, row.add(at)));
                    Self::multiply::<S, HEADS>(simd, q.as_ptr().add(at), self.q_stride, k, &mut products);
                }
                if whole < self.head_dim {
                    let k = rows.map(|row| T::load_part(simd, row.add(whole), self.head_dim - whole));
                    Self::multiply::<S, HEADS>(simd, q.as_ptr().add(whole), self.q_stride, k, &mut products);
                }
            }
            for (head, products) in products.into_iter().enumerate() {
                logits[head * TILE + block * 4..][..4].copy_from_slice(&simd.sum_4(products));
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
}

/// Turn the q.k of a tile into weights against the new maximum, and rescale what was summed before.
struct Weights<'a, 'b> {
    call: &'a Call<'b>,
    /// The first query head.
    head: usize,
    len: usize,
    /// From the first key of the tile to the query, in tokens.
    distance: usize,
    /// `[heads, TILE]`.
    weights: &'a mut [f32],
    states: &'a mut [State],
    sums: &'a mut [f32],
}

impl Task for Weights<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let options = &self.call.options;
        let head_dim_v = self.call.v.paged.head_dim;
        let rows =
            self.weights.chunks_exact_mut(TILE).zip(self.states).zip(self.sums.chunks_exact_mut(head_dim_v));
        let padded = self.len.next_multiple_of(S::LANES);
        for (index, ((weights, state), sums)) in rows.enumerate() {
            let slope = options.alibi_slopes.map(|slopes| slopes[self.head + index]);
            // SAFETY: padded is at most TILE, and a multiple of the lanes.
            unsafe {
                if options.soft_cap.is_some() || slope.is_some() {
                    for at in (0..padded).step_by(S::LANES) {
                        let logit = simd.load(weights.as_ptr().add(at));
                        let logit = options.soft_cap.map_or(logit, |cap| soft_cap(simd, logit, cap));
                        let logit = slope.map_or(logit, |slope| tilt(simd, logit, slope, self.distance - at));
                        simd.store(weights.as_mut_ptr().add(at), logit);
                    }
                }
                // Beyond the keys, to the end of the last vector: no weight.
                weights[self.len..padded].fill(f32::NEG_INFINITY);
                let mut highest = simd.splat(f32::NEG_INFINITY);
                for at in (0..padded).step_by(S::LANES) {
                    highest = simd.max(highest, simd.load(weights.as_ptr().add(at)));
                }
                let (rescale, base) = state.rise(simd.highest(highest));
                if rescale != 1.0 {
                    sums.iter_mut().for_each(|sum| *sum *= rescale);
                }
                let base = simd.splat(base);
                let mut sum = simd.splat(0.0);
                for at in (0..padded).step_by(S::LANES) {
                    let weight = exp(simd, simd.sub(simd.load(weights.as_ptr().add(at)), base));
                    sum = simd.add(sum, weight);
                    simd.store(weights.as_mut_ptr().add(at), weight);
                }
                state.sum = state.sum * rescale + simd.sum(sum);
            }
        }
    }
}

/// Logits less what distance costs; the key of the first lane is `distance` tokens before the query.
#[inline(always)]
fn tilt<S: Simd>(simd: S, logits: S::F, slope: f32, distance: usize) -> S::F {
    let distance = simd.sub(simd.splat(distance as f32), simd.iota());
    simd.sub(logits, simd.mul(simd.splat(slope), distance))
}

/// Add the weighted values of a tile to the heads that share a value head.
struct Sums<'a, T> {
    /// `[group, TILE]`.
    weights: &'a [f32],
    /// Base of the rows that `tokens` are offsets to.
    values: *const T,
    tokens: &'a [usize],
    head_dim_v: usize,
    /// `[group, head_dim_v]`.
    sums: &'a mut [f32],
    ahead: &'a mut Ahead,
}

impl<T: Code> Task for Sums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let num_heads = self.sums.len() / self.head_dim_v;
        let mut head = 0;
        if S::LANES == MAX_LANES {
            while num_heads - head >= 4 {
                self.heads::<S, 4>(simd, head);
                head += 4;
            }
        }
        while num_heads - head >= 2 {
            self.heads::<S, 2>(simd, head);
            head += 2;
        }
        if head < num_heads {
            self.heads::<S, 1>(simd, head);
        }
    }
}

impl<T: Code> Sums<'_, T> {
    #[inline(always)]
    fn heads<S: Simd, const HEADS: usize>(&mut self, simd: S, head: usize) {
        let whole = self.head_dim_v - self.head_dim_v % S::LANES;
        let mut at = 0;
        while whole - at >= 4 * S::LANES {
            self.columns::<S, HEADS, 4>(simd, head, at);
            at += 4 * S::LANES;
        }
        while at < whole {
            self.columns::<S, HEADS, 1>(simd, head, at);
            at += S::LANES;
        }
        if at < self.head_dim_v {
            self.last_columns::<S, HEADS>(simd, head, at);
        }
    }

    /// The elements at..at + VECTORS * LANES.
    #[inline(always)]
    fn columns<S: Simd, const HEADS: usize, const VECTORS: usize>(
        &mut self,
        simd: S,
        head: usize,
        at: usize,
    ) {
        let mut sums = [[simd.splat(0.0); VECTORS]; HEADS];
        let weights = &self.weights[head * TILE..][..HEADS * TILE];
        // SAFETY: the columns lie within the rows of values and sums; a tile has at most TILE tokens.
        unsafe {
            let stored = self.sums.as_mut_ptr().add(head * self.head_dim_v + at);
            for (index, sums) in sums.iter_mut().enumerate() {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.load(stored.add(index * self.head_dim_v + vector * S::LANES));
                }
            }
            for (column, &token) in self.tokens.iter().enumerate() {
                if head == 0 {
                    self.ahead.step(simd);
                }
                let row = self.values.add(token + at);
                let mut values = [simd.splat(0.0); VECTORS];
                for (vector, value) in values.iter_mut().enumerate() {
                    *value = T::load(simd, row.add(vector * S::LANES));
                }
                for (index, sums) in sums.iter_mut().enumerate() {
                    let weight = simd.splat(*weights.get_unchecked(index * TILE + column));
                    for (sum, &value) in sums.iter_mut().zip(&values) {
                        *sum = simd.mul_add(weight, value, *sum);
                    }
                }
            }
            for (index, sums) in sums.iter().enumerate() {
                for (vector, &sum) in sums.iter().enumerate() {
                    simd.store(stored.add(index * self.head_dim_v + vector * S::LANES), sum);
                }
            }
        }
    }

    /// The elements from `at` on, fewer than LANES.
    #[inline(always)]
    fn last_columns<S: Simd, const HEADS: usize>(&mut self, simd: S, head: usize, at: usize) {
        let len = self.head_dim_v - at;
        // SAFETY: the columns lie within the rows of values and sums.
        unsafe {
            let stored = self.sums.as_mut_ptr().add(head * self.head_dim_v + at);
            for index in 0..HEADS {
                let stored = stored.add(index * self.head_dim_v);
                let mut sum = f32::load_part(simd, stored, len);
                for (column, &token) in self.tokens.iter().enumerate() {
                    let weight = simd.splat(self.weights[(head + index) * TILE + column]);
                    sum = simd.mul_add(weight, T::load_part(simd, self.values.add(token + at), len), sum);
                }
                f32::store_part(simd, stored, len, sum);
            }
        }
    }
}
