//! Attention of one query: lanes are elements of a row. Imports `grouped`, `lines`, `order`, `products`, `rows`,
//! `tile`, `code`, `simd` and `math`.
//!
//! A row of K or V is loaded once for up to four query heads, in the order in which rows lie in memory; while a tile is
//! computed, the next one is asked for.
//! Invariant: only visible keys are read.

use super::grouped;
use super::lines::Lines;
use super::order::{are_bf16, Order};
use super::products::{Logits, Sums};
use super::rows::Rows;
use super::tile::{Tile, TILE};
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
    q: Lines,
    /// Of K and V, where they have groups; and queries with scales of K in them.
    scales: [grouped::Scales; 2],
    folded: Lines,
    /// `[num_q_heads, TILE]`: logits, then weights.
    weights: Lines,
    /// `[2, num_heads, TILE]`: what K and V of a token are multiplied with.
    factors: Lines,
    /// `[num_q_heads, lanes]`: the weights so far, added up.
    lane_sums: Lines,
    tiles: [Tile; 2],
}

impl Default for Scratch {
    fn default() -> Self {
        let tiles = [Tile::EMPTY, Tile::EMPTY];
        let scales = [grouped::Scales::EMPTY; 2];
        let [folded, q, weights, factors, lane_sums] = std::array::from_fn(|_| Lines::default());
        Self { row: Vec::new(), scales, folded, q, weights, factors, lane_sums, tiles }
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
    let Scratch {
        row,
        scales: [k_scales, v_scales],
        folded,
        q,
        weights,
        factors,
        lane_sums,
        tiles: [now, next],
    } = scratch;
    row.resize(head_dim.max(head_dim_v), 0.0);
    let q_stride = head_dim.next_multiple_of(2 * S::LANES);
    let q = q.filled(q_heads.len() * q_stride, 0.0);
    let folded = folded.filled(if source.k.scaling.is_factor() { 0 } else { 4 * q_stride }, 0.0);
    let mut exact = S::BF16 && k_order.in_pairs();
    for (to, head) in q.chunks_exact_mut(q_stride).zip(q_heads.clone()) {
        let to = &mut to[..head_dim];
        call.load_query(simd, unit.queries.start, head, to);
        if let Scaling::Channel(scale) = source.k.scaling {
            let scale = &scale[head / group * head_dim..][..head_dim];
            to.iter_mut().zip(scale).for_each(|(value, scale)| *value *= scale);
        }
        exact &= are_bf16(to);
    }
    if k_order.in_pairs() {
        for to in q.chunks_exact_mut(q_stride) {
            let row = &mut row[..head_dim];
            row.copy_from_slice(&to[..head_dim]);
            k_order.arrange::<S>(row, exact, to);
        }
    }
    let weights = weights.filled(q_heads.len() * TILE, 0.0);
    let factors = factors.filled(2 * unit.heads.len() * TILE, 1.0);
    let lane_sums = lane_sums.filled(q_heads.len() * S::LANES, 0.0);
    // SAFETY: no other unit has these heads of this partial result.
    let (states, sums) = unsafe { partials.of(call, unit.partial, q_heads.clone()) };

    let mut first = unit.keys.start;
    now.locate(&source, first, &unit.keys);
    while now.len > 0 {
        next.locate(&source, first + now.len, &unit.keys);
        let [k_next, v_next] = if next.len == 0 { [&now.k, &now.v] } else { [&next.k, &next.v] };
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
            with_elements!(Elements, source.k.data, data => Logits {
                q,
                q_stride,
                in_pairs: k_order.in_pairs(),
                exact,
                rows: Rows::new(data, &source.k.paged, unit.heads.clone(), group, &now.k, now.len, k_next),
                logits: weights,
            }.run(simd));
        } else {
            load_scales(simd, source.k, (now, next), unit, k_scales);
            if let Some(rows) =
                grouped::Rows::new(source.k, k_scales, unit.heads.clone(), group, (&now.k, &next.k), now.len)
            {
                simd.vectorize(grouped::Logits { rows, q, q_stride, folded, logits: weights });
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
            lane_sums,
            sums,
        });
        if source.v.scaling.is_factor() {
            with_elements!(Elements, source.v.data, data => Sums {
                weights,
                in_pairs: v_order.in_pairs(),
                rows: Rows::new(data, &source.v.paged, unit.heads.clone(), group, &now.v, now.len, v_next),
                sums,
            }.run(simd));
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
    for (state, lane_sums) in states.iter_mut().zip(lane_sums.chunks_exact(S::LANES)) {
        // SAFETY: a chunk has the lanes.
        state.sum = simd.sum(unsafe { simd.load(lane_sums.as_ptr()) });
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
    /// `[num_q_heads, lanes]`.
    lane_sums: &'a mut [f32],
    sums: &'a mut [f32],
}

impl Task for Weights<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let options = &self.call.options;
        let (head_dim_v, group) = (self.call.head_dim_v(), self.call.group());
        let scale = simd.splat(options.scale);
        let rows = (self.weights.chunks_exact_mut(TILE).zip(self.states))
            .zip(self.sums.chunks_exact_mut(head_dim_v).zip(self.lane_sums.chunks_exact_mut(S::LANES)));
        let padded = self.len.next_multiple_of(S::LANES);
        for (index, ((weights, state), (sums, lane_sums))) in rows.enumerate() {
            let slope = options.alibi_slopes.map(|slopes| slopes[self.head + index]);
            let k_factors = self.k_factors[index / group * TILE..][..TILE].as_ptr();
            let v_factors = self.v_factors[index / group * TILE..][..TILE].as_ptr();
            // SAFETY: padded is at most TILE, and a multiple of the lanes; of the sums there are as many.
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
                // After some tiles there is seldom a new maximum, and a mask is found sooner than one.
                let rises = simd.any(simd.less(simd.splat(state.highest), highest));
                let (rescale, base) =
                    state.rise(if rises { simd.highest(highest) } else { f32::NEG_INFINITY });
                if rescale != 1.0 {
                    sums.iter_mut().for_each(|sum| *sum *= rescale);
                }
                let base = simd.splat(base);
                let mut sum = simd.mul(simd.splat(rescale), simd.load(lane_sums.as_ptr()));
                for at in (0..padded).step_by(S::LANES) {
                    let weight = exp(simd, simd.sub(simd.load(weights_at.add(at)), base));
                    sum = simd.add(sum, weight);
                    simd.store(weights_at.add(at), simd.mul(weight, simd.load(v_factors.add(at))));
                }
                simd.store(lane_sums.as_mut_ptr(), sum);
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
