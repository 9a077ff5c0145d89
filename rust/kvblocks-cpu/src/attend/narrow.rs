//! Attention of one query: lanes are elements of a row. Imports `tile`, `products`, `code`, `simd` and `math`.
//!
//! A row of K or V is loaded once for up to four query heads, in the order in which rows lie in memory; while a tile is
//! computed, the next one is asked for.
//! Invariant: only visible keys are read.

use super::products::{num_steps, Logits, Order, Rows, Sums};
use super::tile::{Ahead, Tile, TILE};
use super::{soft_cap, Call, Partials, State, Unit};
use crate::code::with_elements;
use crate::math::exp;
use crate::simd::{Simd, Task};

/// What a thread keeps between units.
pub(super) struct Scratch {
    /// One query, or one output.
    row: Vec<f32>,
    /// `[num_q_heads, head_dim padded to lanes]`, as `Order` has them.
    q: Vec<f32>,
    /// `[num_q_heads, TILE]`: logits, then weights.
    weights: Vec<f32>,
    tiles: [Tile; 2],
    ahead: Ahead,
}

impl Default for Scratch {
    fn default() -> Self {
        let tiles = [Tile::EMPTY, Tile::EMPTY];
        Self { row: Vec::new(), q: Vec::new(), weights: Vec::new(), tiles, ahead: Ahead::default() }
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
    let Scratch { row, q, weights, tiles: [now, next], ahead } = scratch;
    let k_order = with_elements!(Elements, call.k.data, data => Order::of::<S, _>(data, head_dim));
    let v_order = with_elements!(Elements, call.v.data, data => Order::of::<S, _>(data, head_dim_v));
    row.resize(head_dim.max(head_dim_v), 0.0);
    q.clear();
    q.resize(q_heads.len() * q_stride, 0.0);
    let mut in_halves = false;
    for (to, head) in q.chunks_exact_mut(q_stride).zip(q_heads.clone()) {
        call.load_query(simd, unit.queries.start, head, &mut row[..head_dim]);
        in_halves |= k_order.arrange::<S>(&row[..head_dim], to);
    }
    weights.resize(q_heads.len() * TILE, 0.0);
    // SAFETY: no other unit has these heads of this partial result.
    let (states, sums) = unsafe { partials.of(call, unit.partial, q_heads.clone()) };

    let table = call.batch.table(unit.row);
    let mut first = unit.keys.start;
    now.locate(&call.k.paged, &call.v.paged, table, first, &unit.keys);
    while now.len > 0 {
        next.locate(&call.k.paged, &call.v.paged, table, first + now.len, &unit.keys);
        ahead.clear();
        ahead.add(&call.k, &next.k[..next.len], unit.heads.clone());
        ahead.add(&call.v, &next.v[..next.len], unit.heads.clone());
        let (orders, dims) = ([&k_order, &v_order], [head_dim, head_dim_v]);
        ahead.spread(num_steps::<S>(orders, dims, now.len, unit.heads.len(), group));
        with_elements!(Elements, call.k.data, data => simd.vectorize(Logits {
            q,
            q_stride,
            in_pairs: k_order.in_pairs(),
            in_halves,
            rows: Rows::new(data, &call.k.paged, unit.heads.clone(), group),
            tokens: &now.k,
            len: now.len,
            logits: weights,
            ahead,
        }));
        let distance = unit.position - first;
        simd.vectorize(Weights {
            call,
            head: q_heads.start,
            len: now.len,
            distance,
            weights,
            states,
            sums,
            ahead,
        });
        with_elements!(Elements, call.v.data, data => simd.vectorize(Sums {
            weights,
            in_pairs: v_order.in_pairs(),
            rows: Rows::new(data, &call.v.paged, unit.heads.clone(), group),
            tokens: &now.v,
            len: now.len,
            sums,
            ahead,
        }));
        first += now.len;
        std::mem::swap(now, next);
    }
    if v_order.in_pairs() {
        for sums in sums.chunks_exact_mut(head_dim_v) {
            v_order.restore::<S>(sums, &mut row[..head_dim_v]);
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
    ahead: &'a mut Ahead,
}

impl Task for Weights<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let options = &self.call.options;
        let head_dim_v = self.call.v.paged.head_dim;
        let scale = simd.splat(options.scale);
        let rows =
            self.weights.chunks_exact_mut(TILE).zip(self.states).zip(self.sums.chunks_exact_mut(head_dim_v));
        let padded = self.len.next_multiple_of(S::LANES);
        for (index, ((weights, state), sums)) in rows.enumerate() {
            let slope = options.alibi_slopes.map(|slopes| slopes[self.head + index]);
            // SAFETY: padded is at most TILE, and a multiple of the lanes.
            unsafe {
                let weights_at = weights.as_mut_ptr();
                let mut highest = simd.splat(f32::NEG_INFINITY);
                for at in (0..padded).step_by(S::LANES) {
                    let mut logit = simd.mul(scale, simd.load(weights_at.add(at)));
                    if let Some(cap) = options.soft_cap {
                        logit = soft_cap(simd, logit, cap);
                    }
                    if let Some(slope) = slope {
                        logit = tilt(simd, logit, slope, self.distance - at);
                    }
                    if at + S::LANES > self.len {
                        // Beyond the keys: no weight.
                        let is_key = simd.less(simd.iota(), simd.splat((self.len - at) as f32));
                        logit = simd.select(is_key, logit, simd.splat(f32::NEG_INFINITY));
                    }
                    simd.store(weights_at.add(at), logit);
                    highest = simd.max(highest, logit);
                }
                let (rescale, base) = state.rise(simd.highest(highest));
                if rescale != 1.0 {
                    sums.iter_mut().for_each(|sum| *sum *= rescale);
                }
                let base = simd.splat(base);
                let mut sum = simd.splat(0.0);
                for at in (0..padded).step_by(S::LANES) {
                    // Twice, as this takes about two steps of the products.
                    self.ahead.step(simd);
                    self.ahead.step(simd);
                    let weight = exp(simd, simd.sub(simd.load(weights_at.add(at)), base));
                    sum = simd.add(sum, weight);
                    simd.store(weights_at.add(at), weight);
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
