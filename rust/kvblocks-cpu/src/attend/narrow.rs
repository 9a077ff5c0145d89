//! Attention of one query: lanes are elements of a row. Imports `tile`, `products`, `code`, `simd` and `math`.
//!
//! A row of K or V is loaded once for up to four query heads, in the order in which rows lie in memory; while a tile is
//! computed, the next one is asked for.
//! Invariant: only visible keys are read.

use super::grouped;
use super::products::{are_bf16, num_steps, Logits, Order, Rows, Sums};
use super::tile::{Ahead, Tile, TILE};
use super::{soft_cap, Call, Partials, State, Unit};
use crate::code::with_elements;
use crate::math::exp;
use crate::paged::Cache;
use crate::scaling::Scaling;
use crate::simd::{Simd, Task};

/// What a thread keeps between units.
pub(super) struct Scratch {
    /// One query, or one output.
    row: Vec<f32>,
    /// `[num_q_heads, head_dim padded to lanes]`, as `Order` has them.
    q: Vec<f32>,
    /// Of K and V, where they have groups.
    scales: [grouped::Scales; 2],
    /// `[num_q_heads, TILE]`: logits, then weights.
    weights: Vec<f32>,
    /// `[2, num_heads, TILE]`: what K and V of a token are multiplied with.
    factors: Vec<f32>,
    tiles: [Tile; 2],
    ahead: Ahead,
}

impl Default for Scratch {
    fn default() -> Self {
        let tiles = [Tile::EMPTY, Tile::EMPTY];
        let [row, q, weights, factors] = [const { Vec::new() }; 4];
        let scales = [grouped::Scales::EMPTY; 2];
        Self { row, scales, q, weights, factors, tiles, ahead: Ahead::default() }
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
    let (group, head_dim, head_dim_v) = (call.group(), call.head_dim(), call.head_dim_v());
    let q_heads = unit.heads.start * group..unit.heads.end * group;
    let source = call.source(unit);
    let (k_order, v_order) = (order::<S>(source.k), order::<S>(source.v));
    let Scratch { row, scales: [k_scales, v_scales], q, weights, factors, tiles: [now, next], ahead } =
        scratch;
    row.resize(head_dim.max(head_dim_v), 0.0);
    let q_stride = head_dim.next_multiple_of(2 * S::LANES);
    q.clear();
    q.resize(q_heads.len() * q_stride, 0.0);
    // The queries, then, if they are bf16 numbers all of them, once more in pairs.
    let mut exact = S::BF16 && k_order.in_pairs();
    for pass in 0..2 {
        if pass == 1 && !exact {
            break;
        }
        let mut all = exact;
        for (to, head) in q.chunks_exact_mut(q_stride).zip(q_heads.clone()) {
            let row = &mut row[..head_dim];
            call.load_query(simd, unit.queries.start, head, row);
            if let Scaling::Channel(scale) = source.k.scaling {
                let scale = &scale[head / group * head_dim..][..head_dim];
                row.iter_mut().zip(scale).for_each(|(value, scale)| *value *= scale);
            }
            all &= are_bf16(row);
            k_order.arrange::<S>(row, pass == 1, to);
        }
        exact = all;
    }
    weights.resize(q_heads.len() * TILE, 0.0);
    factors.clear();
    factors.resize(2 * unit.heads.len() * TILE, 1.0);
    // SAFETY: no other unit has these heads of this partial result.
    let (states, sums) = unsafe { partials.of(call, unit.partial, q_heads.clone()) };

    let mut first = unit.keys.start;
    now.locate(&source, first, &unit.keys);
    while now.len > 0 {
        next.locate(&source, first + now.len, &unit.keys);
        ahead.clear();
        ahead.add(source.k, &next.k[..next.len], unit.heads.clone());
        ahead.add(source.v, &next.v[..next.len], unit.heads.clone());
        let (orders, dims) = ([&k_order, &v_order], [head_dim, head_dim_v]);
        ahead.spread(num_steps::<S>(orders, dims, now.len, unit.heads.len(), group));
        for (part, cache) in [source.k, source.v].into_iter().enumerate() {
            if matches!(cache.scaling, Scaling::Head(_) | Scaling::TokenHead(_)) {
                let factors = &mut factors[part * unit.heads.len() * TILE..][..unit.heads.len() * TILE];
                for (factors, head) in factors.chunks_exact_mut(TILE).zip(unit.heads.clone()) {
                    factors
                        .iter_mut()
                        .zip(&now.slots)
                        .for_each(|(factor, &slot)| *factor = cache.factor(slot, head));
                }
            }
        }

        if source.k.scaling.is_factor() {
            with_elements!(Elements, source.k.data, data => simd.vectorize(Logits {
                q,
                q_stride,
                in_pairs: k_order.in_pairs(),
                exact,
                rows: Rows::new(data, &source.k.paged, unit.heads.clone(), group),
                tokens: &now.k,
                len: now.len,
                logits: weights,
                ahead,
            }));
        } else {
            load_scales(simd, source.k, (now, next), unit, k_scales);
            if let Some(rows) =
                grouped::Rows::new(source.k, k_scales, unit.heads.clone(), group, (&now.k, &next.k), now.len)
            {
                simd.vectorize(grouped::Logits { rows, q, q_stride, logits: weights });
            }
        }
        let distance = unit.position - first;
        let (k_factors, v_factors) = factors.split_at(unit.heads.len() * TILE);
        simd.vectorize(Weights {
            call,
            head: q_heads.start,
            len: now.len,
            distance,
            k_factors,
            v_factors,
            weights,
            states,
            sums,
            ahead,
        });
        if source.v.scaling.is_factor() {
            with_elements!(Elements, source.v.data, data => simd.vectorize(Sums {
                weights,
                in_pairs: v_order.in_pairs(),
                rows: Rows::new(data, &source.v.paged, unit.heads.clone(), group),
                tokens: &now.v,
                len: now.len,
                sums,
                ahead,
            }));
        } else {
            load_scales(simd, source.v, (now, next), unit, v_scales);
            if let Some(rows) =
                grouped::Rows::new(source.v, v_scales, unit.heads.clone(), group, (&now.v, &next.v), now.len)
            {
                simd.vectorize(grouped::Sums { rows, weights, sums });
            }
        }
        first += now.len;
        std::mem::swap(now, next);
    }
    for sums in sums.chunks_exact_mut(head_dim_v) {
        if v_order.in_pairs() {
            v_order.restore::<S>(sums, &mut row[..head_dim_v]);
        }
    }
    if let Scaling::Channel(scale) = source.v.scaling {
        for (sums, head) in sums.chunks_exact_mut(head_dim_v).zip(q_heads) {
            let scale = &scale[head / group * head_dim_v..][..head_dim_v];
            sums.iter_mut().zip(scale).for_each(|(value, scale)| *value *= scale);
        }
    }
}

/// The order that the rows of a cache are taken in; those with groups become f32 first.
#[inline(always)]
fn order<S: Simd>(cache: &Cache<'_>) -> Order {
    if !cache.scaling.is_factor() {
        return Order::of::<S, f32>(&[], cache.dim());
    }
    with_elements!(Elements, cache.data, data => Order::of::<S, _>(data, cache.dim()))
}

/// The scales of a tile of a cache with groups.
#[inline(always)]
fn load_scales<S: Simd>(
    simd: S,
    cache: &Cache<'_>,
    (tile, next): (&Tile, &Tile),
    unit: &Unit,
    scales: &mut grouped::Scales,
) {
    let heads = unit.heads.clone();
    simd.vectorize(grouped::Load { cache, tile, next, heads, scales });
}

/// Turn the q.k of a tile into weights against the new maximum, and rescale what was summed before.
struct Weights<'a, 'b> {
    call: &'a Call<'b>,
    /// The first query head.
    head: usize,
    len: usize,
    /// From the first key of the tile to the query, in tokens.
    distance: usize,
    /// `[num_heads, TILE]`: what K and V of a token are multiplied with.
    k_factors: &'a [f32],
    v_factors: &'a [f32],
    /// `[num_q_heads, TILE]`.
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
        let (head_dim_v, group) = (self.call.head_dim_v(), self.call.group());
        let scale = simd.splat(options.scale);
        let rows =
            self.weights.chunks_exact_mut(TILE).zip(self.states).zip(self.sums.chunks_exact_mut(head_dim_v));
        let padded = self.len.next_multiple_of(S::LANES);
        for (index, ((weights, state), sums)) in rows.enumerate() {
            let slope = options.alibi_slopes.map(|slopes| slopes[self.head + index]);
            let k_factors = self.k_factors[index / group * TILE..][..TILE].as_ptr();
            let v_factors = self.v_factors[index / group * TILE..][..TILE].as_ptr();
            // SAFETY: padded is at most TILE, and a multiple of the lanes.
            unsafe {
                let weights_at = weights.as_mut_ptr();
                let mut highest = simd.splat(f32::NEG_INFINITY);
                for at in (0..padded).step_by(S::LANES) {
                    let factor = simd.mul(scale, simd.load(k_factors.add(at)));
                    let mut logit = simd.mul(factor, simd.load(weights_at.add(at)));
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
                    simd.store(weights_at.add(at), simd.mul(weight, simd.load(v_factors.add(at))));
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
