//! Attention of many queries: lanes are queries, so a softmax needs no sums across lanes. Imports `tile`, `paged`, `simd`
//! and `math`.
//!
//! A tile of K or V is converted to f32 once; then both products are small matrix products of the same form, [j, k] *
//! [k, lanes]. Invariant: a key that a lane may not see has the weight 0 there, and if a value of it is no finite
//! number, is left out of the sum, as 0 * inf would be NaN.

use std::ops::Range;

use super::lines::Lines;
use super::tile::{Tile, TILE};
use super::{soft_cap, Call, Partials, State, Unit};
use crate::math::exp;
use crate::paged::Cache;
use crate::simd::{Simd, Task};

/// What a thread keeps between units; R are the lanes of the queries, padded to whole vectors.
pub(super) struct Scratch {
    /// `[head_dim]`: one query.
    row: Vec<f32>,
    /// `[head_dim, R]`, scaled.
    q: Lines,
    /// `[TILE, head_dim or head_dim_v]`: K or V.
    rows: Lines,
    /// `[TILE, R]`: logits, then weights.
    weights: Lines,
    /// `[head_dim_v, R]`: weighted values.
    sums: Lines,
    lanes: Lanes,
    tile: Tile,
}

/// What each lane is and has; `[R]` each.
#[derive(Default)]
struct Lanes {
    /// The keys that it sees, relative to the tile: first..=last, cut to 0..=TILE.
    first: Vec<f32>,
    last: Vec<f32>,
    /// From the tile's first key to the query, in tokens.
    distance: Vec<f32>,
    slope: Vec<f32>,
    highest: Vec<f32>,
    sum: Vec<f32>,
    /// Factor of what was summed before this tile.
    rescale: Vec<f32>,
}

impl Default for Scratch {
    fn default() -> Self {
        let [q, rows, weights, sums] = std::array::from_fn(|_| Lines::default());
        Self { row: Vec::new(), q, rows, weights, sums, lanes: Lanes::default(), tile: Tile::EMPTY }
    }
}

/// Run a unit of one key head and some queries.
#[inline(always)]
pub(super) fn run<S: Simd>(
    simd: S,
    call: &Call<'_>,
    unit: &Unit,
    partials: &Partials<'_>,
    scratch: &mut Scratch,
) {
    let num_rows = unit.queries.len() * call.group();
    let most = S::VECTORS * S::LANES;
    for first in (0..num_rows).step_by(most) {
        let rows = first..num_rows.min(first + most);
        Rows { call, unit, rows, scratch: &mut *scratch }.run(simd, partials);
    }
}

/// Row r is head `r % group` of query `r / group` of the unit.
struct Rows<'a, 'b> {
    call: &'a Call<'b>,
    unit: &'a Unit,
    rows: Range<usize>,
    scratch: &'a mut Scratch,
}

impl Rows<'_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S, partials: &Partials<'_>) {
        let Self { call, unit, rows, scratch } = self;
        let (head_dim, head_dim_v) = (call.head_dim(), call.head_dim_v());
        let width = rows.len().next_multiple_of(S::LANES);
        let Scratch { row, q, rows: tile_rows, weights, sums, lanes, tile } = scratch;
        let head = unit.heads.start;
        let query_of = |r: usize| (r / call.group(), head * call.group() + r % call.group());

        row.resize(head_dim, 0.0);
        let q = q.filled(head_dim * width, 0.0);
        for (lane, r) in rows.clone().enumerate() {
            let (query, q_head) = query_of(r);
            call.load_query(simd, unit.queries.start + query, q_head, row);
            for (element, &value) in row.iter().enumerate() {
                q[element * width + lane] = value * call.options.scale;
            }
        }
        let tile_rows = tile_rows.filled(TILE * head_dim.max(head_dim_v), 0.0);
        let weights = weights.filled(TILE * width, 0.0);
        let sums = sums.filled(head_dim_v * width, 0.0);
        lanes.start(call, width, rows.clone().map(|r| query_of(r).1));

        // Positions of the queries: of the first and of the last row.
        let [low, high] = [rows.start, rows.end - 1].map(|r| unit.position + query_of(r).0);
        let keys = unit.keys.start.max(call.options.keys(low).start)..unit.keys.end.min(high + 1);
        let seen_by_all = call.options.keys(high).start..low + 1;
        let source = call.source(unit);
        let mut start = keys.start;
        while start < keys.end {
            tile.locate(&source, start, &keys);
            let len = tile.len;
            let masked = start < seen_by_all.start || start + len > seen_by_all.end;
            lanes.move_to(call, start, rows.clone().map(|r| unit.position + query_of(r).0));

            simd.vectorize(Widen {
                cache: source.k,
                tokens: &tile.k[..len],
                slots: &tile.slots,
                head,
                rows: tile_rows,
            });
            simd.vectorize(Product {
                a: tile_rows,
                a_strides: (head_dim, 1),
                num_j: len,
                num_k: head_dim,
                b: q,
                width,
                c: weights,
                rescale: None,
            });
            simd.vectorize(Softmax { call, len, width, masked, weights, lanes });
            simd.vectorize(Widen {
                cache: source.v,
                tokens: &tile.v[..len],
                slots: &tile.slots,
                head,
                rows: tile_rows,
            });
            if !masked || are_finite(&tile_rows[..len * head_dim_v]) {
                simd.vectorize(Product {
                    a: tile_rows,
                    a_strides: (1, head_dim_v),
                    num_j: head_dim_v,
                    num_k: len,
                    b: weights,
                    width,
                    c: sums,
                    rescale: Some(&lanes.rescale),
                });
            } else {
                simd.vectorize(MaskedProduct { values: tile_rows, len, width, weights, lanes, sums });
            }
            start += len;
        }

        for (lane, r) in rows.enumerate() {
            let (query, q_head) = query_of(r);
            // SAFETY: no other unit has this head of this partial result.
            let (states, out) =
                unsafe { partials.of(call, unit.partial + query * unit.partial_step, q_head..q_head + 1) };
            let (highest, sum) = (lanes.highest[lane], lanes.sum[lane]);
            states[0] = State { base: highest, sum, divisor: sum };
            for (element, value) in out.iter_mut().enumerate() {
                *value = sums[element * width + lane];
            }
        }
    }
}

impl Lanes {
    fn start(&mut self, call: &Call<'_>, width: usize, q_heads: impl Iterator<Item = usize>) {
        let Self { first, last, distance, slope, highest, sum, rescale } = self;
        for (lanes, value) in [
            (first, 0.0),
            (last, TILE as f32),
            (distance, 0.0),
            (&mut *slope, 0.0),
            (highest, f32::NEG_INFINITY),
            (sum, 0.0),
            (rescale, 1.0),
        ] {
            lanes.clear();
            lanes.resize(width, value);
        }
        if let Some(slopes) = call.options.alibi_slopes {
            slope.iter_mut().zip(q_heads).for_each(|(slope, head)| *slope = slopes[head]);
        }
    }

    /// Make positions relative to a tile that starts at `start`.
    fn move_to(&mut self, call: &Call<'_>, start: usize, positions: impl Iterator<Item = usize>) {
        for (lane, position) in positions.enumerate() {
            let keys = call.options.keys(position);
            self.first[lane] = keys.start.saturating_sub(start).min(TILE) as f32;
            // A query before the tile sees none of it.
            self.last[lane] = if position < start { -1.0 } else { (position - start).min(TILE) as f32 };
            self.distance[lane] = (position as i64 - start as i64) as f32;
        }
    }
}

/// Whether no value is infinite or NaN.
fn are_finite(values: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7F80_0000;
    // Without a branch, so that the loop is vectorised.
    values.iter().fold(0, |bad, value| bad | u32::from(value.to_bits() & EXPONENT == EXPONENT)) == 0
}

/// The values of the rows of one head.
struct Widen<'a> {
    cache: &'a Cache<'a>,
    /// Where the rows of head 0 start, and where their scales are; as in `Tile`.
    tokens: &'a [usize],
    slots: &'a [usize],
    head: usize,
    /// `[tokens, dim]` or more.
    rows: &'a mut [f32],
}

impl Task for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let offset = self.head * self.cache.paged.head_stride;
        let rows = self.rows.chunks_exact_mut(self.cache.dim());
        for ((row, &token), &slot) in rows.zip(self.tokens).zip(self.slots) {
            self.cache.decode(simd, token + offset, slot, self.head, row);
        }
    }
}

/// `c[j, lanes] = sum over k of a[j, k] * b[k, lanes]`, added to the rescaled `c` where a factor is given.
struct Product<'a> {
    a: &'a [f32],
    /// Elements between two j, and between two k.
    a_strides: (usize, usize),
    num_j: usize,
    num_k: usize,
    b: &'a [f32],
    width: usize,
    c: &'a mut [f32],
    /// `[lanes]`.
    rescale: Option<&'a [f32]>,
}

impl Task for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        assert!(self.a.len() > (self.num_j - 1) * self.a_strides.0 + (self.num_k - 1) * self.a_strides.1);
        assert!(self.b.len() >= self.num_k * self.width && self.c.len() >= self.num_j * self.width);
        assert!(self.rescale.is_none_or(|rescale| rescale.len() >= self.width));
        // Sums enough to hide the latency of an addition, few enough for the registers.
        match self.width / S::LANES {
            1 => self.rows::<S, 1, 8>(simd),
            2 => self.rows::<S, 2, 4>(simd),
            3 => self.rows::<S, 3, 4>(simd),
            _ => self.rows::<S, 4, 4>(simd),
        }
    }
}

impl Product<'_> {
    #[inline(always)]
    fn rows<S: Simd, const VECTORS: usize, const ROWS: usize>(&mut self, simd: S) {
        let mut j = 0;
        while self.num_j - j >= ROWS {
            self.block::<S, VECTORS, ROWS>(simd, j);
            j += ROWS;
        }
        for j in j..self.num_j {
            self.block::<S, VECTORS, 1>(simd, j);
        }
    }

    #[inline(always)]
    fn block<S: Simd, const VECTORS: usize, const ROWS: usize>(&mut self, simd: S, j: usize) {
        let mut sums = [[simd.splat(0.0); VECTORS]; ROWS];
        // SAFETY: `run` has compared the sizes with the lengths; width is VECTORS vectors.
        unsafe {
            let c = self.c.as_mut_ptr().add(j * self.width);
            if let Some(rescale) = self.rescale {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (vector, sum) in sums.iter_mut().enumerate() {
                        let factor = simd.load(rescale.as_ptr().add(vector * S::LANES));
                        *sum = simd.mul(factor, simd.load(c.add(row * self.width + vector * S::LANES)));
                    }
                }
            }
            let (mut a, mut b) = (self.a.as_ptr().add(j * self.a_strides.0), self.b.as_ptr());
            for _ in 0..self.num_k {
                let mut lanes = [simd.splat(0.0); VECTORS];
                for (vector, lanes) in lanes.iter_mut().enumerate() {
                    *lanes = simd.load(b.add(vector * S::LANES));
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let factor = simd.splat(*a.add(row * self.a_strides.0));
                    for (sum, &lanes) in sums.iter_mut().zip(&lanes) {
                        *sum = simd.mul_add(factor, lanes, *sum);
                    }
                }
                a = a.wrapping_add(self.a_strides.1);
                b = b.wrapping_add(self.width);
            }
            for (row, sums) in sums.iter().enumerate() {
                for (vector, &sum) in sums.iter().enumerate() {
                    simd.store(c.add(row * self.width + vector * S::LANES), sum);
                }
            }
        }
    }
}

/// Turn the q.k of a tile into weights against the new maxima.
struct Softmax<'a, 'b> {
    call: &'a Call<'b>,
    len: usize,
    width: usize,
    /// Whether a lane may not see a key.
    masked: bool,
    /// `[len, width]`.
    weights: &'a mut [f32],
    lanes: &'a mut Lanes,
}

impl Task for Softmax<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let options = &self.call.options;
        let nothing = simd.splat(f32::NEG_INFINITY);
        assert!(self.weights.len() >= self.len * self.width && self.lanes.sum.len() == self.width);
        for vector in (0..self.width).step_by(S::LANES) {
            // SAFETY: the arrays of the lanes and the rows of the weights have `width` elements, whole vectors.
            unsafe {
                let of = |lanes: &[f32]| simd.load(lanes.as_ptr().add(vector));
                let (first, last) = (of(&self.lanes.first), of(&self.lanes.last));
                let (distance, slope) = (of(&self.lanes.distance), of(&self.lanes.slope));
                let column = self.weights.as_mut_ptr().add(vector);
                let before = of(&self.lanes.highest);
                let mut highest = before;
                for key in 0..self.len {
                    let at = simd.splat(key as f32);
                    let mut logit = simd.load(column.add(key * self.width));
                    if let Some(cap) = options.soft_cap {
                        logit = soft_cap(simd, logit, cap);
                    }
                    if options.alibi_slopes.is_some() {
                        logit = simd.sub(logit, simd.mul(slope, simd.sub(distance, at)));
                    }
                    if self.masked {
                        logit = simd.select(simd.less(last, at), nothing, logit);
                        logit = simd.select(simd.less(at, first), nothing, logit);
                    }
                    simd.store(column.add(key * self.width), logit);
                    highest = simd.max(logit, highest);
                }
                // While nothing has a weight, all are taken against 0, as -inf - -inf would be NaN.
                let base = simd.select(simd.less(highest, simd.splat(f32::MIN)), simd.splat(0.0), highest);
                let rescale = exp(simd, simd.sub(before, base));
                let mut sum = simd.mul(of(&self.lanes.sum), rescale);
                for key in 0..self.len {
                    let weight = exp(simd, simd.sub(simd.load(column.add(key * self.width)), base));
                    simd.store(column.add(key * self.width), weight);
                    sum = simd.add(sum, weight);
                }
                simd.store(self.lanes.highest.as_mut_ptr().add(vector), highest);
                simd.store(self.lanes.rescale.as_mut_ptr().add(vector), rescale);
                simd.store(self.lanes.sum.as_mut_ptr().add(vector), sum);
            }
        }
    }
}

/// The product of weights and values where a value that some lanes may not see is infinite or NaN.
struct MaskedProduct<'a> {
    /// `[len, head_dim_v]`.
    values: &'a [f32],
    len: usize,
    width: usize,
    weights: &'a [f32],
    lanes: &'a Lanes,
    /// `[head_dim_v, width]`.
    sums: &'a mut [f32],
}

impl Task for MaskedProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let dim = self.sums.len() / self.width;
        for (element, sums) in self.sums.chunks_exact_mut(self.width).enumerate() {
            for (lane, sum) in sums.iter_mut().enumerate() {
                *sum *= self.lanes.rescale[lane];
                for key in 0..self.len {
                    if (self.lanes.first[lane]..=self.lanes.last[lane]).contains(&(key as f32)) {
                        *sum += self.weights[key * self.width + lane] * self.values[key * dim + element];
                    }
                }
            }
        }
    }
}
