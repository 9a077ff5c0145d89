//! Attention of one query: lanes are elements of a row. Imports `grouped`, `lines`, `order`, `packed`, `pairs`, `products`,
//! `rows`, `tile`, `code`, `simd` and `math`.
//!
//! A row of K or V is loaded once for up to four query heads, in the order in which rows lie in memory; while a tile is
//! computed, the next one is asked for. Where queries and results are bf16, so are the weights of V, and the values are
//! divided by the sum of the weights as they were rounded: they stay an average of V, exact where one key has it all.
//! Invariant: only visible keys are read.

use std::ops::Range;

use super::grouped;
use super::lines::Lines;
use super::order::{are_bf16, Order};
use super::packed;
use super::pairs::PairSums;
use super::products::{How, Logits, Sums};
use super::rows::{Ahead, Rows};
use super::tile::{Tile, TILE};
use super::{soft_cap, Call, Partials, State, Unit};
use crate::code::{with_elements, Code};
use crate::math::exp;
use crate::paged::Cache;
use crate::scaling::Scaling;
use crate::simd::{Simd, Task, MIN_LANES};

/// What a thread keeps between units.
pub(super) struct Scratch {
    /// One query, or one output.
    row: Vec<f32>,
    /// `[num_q_heads, head_dim padded to lanes]`, as `Order` has them.
    q: Lines,
    /// Of K and V, where they have groups; and queries with scales of K in them.
    scales: [grouped::Scales; 2],
    folded: Lines,
    pairs: [packed::Pairs; 4],
    /// `[num_q_heads, TILE]`: logits, then weights.
    weights: Lines,
    /// `[3, num_heads, TILE]`: what q.k is multiplied with; what V of a token is, and what undoes that.
    factors: Lines,
    /// `[num_q_heads, 3, lanes]`: the weights so far, added up; what to divide by; what V was multiplied with.
    lane_sums: Lines,
    tiles: [Tile; 2],
}

impl Default for Scratch {
    fn default() -> Self {
        let tiles = [Tile::EMPTY, Tile::EMPTY];
        let scales = [grouped::Scales::EMPTY; 2];
        let [folded, q, weights, factors, lane_sums] = std::array::from_fn(|_| Lines::default());
        let pairs = [const { packed::Pairs::NONE }; 4];
        Self { row: Vec::new(), scales, folded, pairs, q, weights, factors, lane_sums, tiles }
    }
}

/// Run a unit of one query; `following` tells what this thread runs after it.
#[inline(always)]
pub(super) fn run<'a, S: Simd>(
    simd: S,
    call: &Call<'_>,
    unit: &'a Unit,
    following: &mut dyn FnMut() -> Option<&'a Unit>,
    partials: &Partials<'_>,
    scratch: &mut Scratch,
) {
    let (group, head_dim, head_dim_v) = (call.group(), call.head_dim(), call.head_dim_v());
    let q_heads = unit.heads.start * group..unit.heads.end * group;
    let source = call.source(unit);
    let Scratch { row, scales: [k_scales, v_scales], folded, q, weights, factors, lane_sums, tiles, pairs } =
        scratch;
    let [mut now, mut next] = tiles.each_mut();
    row.resize(head_dim.max(head_dim_v), 0.0);
    let q_stride = head_dim.next_multiple_of(2 * S::LANES);
    let q = q.filled(q_heads.len() * q_stride, 0.0);
    let folded = folded.filled(if source.k.scaling.is_factor() { 0 } else { 4 * q_stride }, 0.0);
    let mut exact = S::BF16;
    for (to, head) in q.chunks_exact_mut(q_stride).zip(q_heads.clone()) {
        let to = &mut to[..head_dim];
        call.load_query(simd, unit.queries.start, head, to);
        if let Scaling::Channel(scale) = source.k.scaling {
            let scale = &scale[head / group * head_dim..][..head_dim];
            to.iter_mut().zip(scale).for_each(|(value, scale)| *value *= scale);
        }
        exact &= are_bf16(to);
    }
    let (how, k_order) = order_of_k::<S>(source.k, exact);
    if how != How::Elements {
        for to in q.chunks_exact_mut(q_stride) {
            let row = &mut row[..head_dim];
            row.copy_from_slice(&to[..head_dim]);
            to.fill(0.0);
            match how {
                How::Pairs => k_order.arrange_pairs::<S>(row, to),
                _ => k_order.arrange(row, to),
            }
        }
    }
    let (rounded, v_order) = order_of_v::<S>(source.v, call.rounds);
    let weights = weights.filled(q_heads.len() * TILE, 0.0);
    let all_factors = unit.heads.len() * TILE;
    let factors = factors.filled(3 * all_factors, 1.0);
    let (k_factors, v_factors) = factors.split_at_mut(all_factors);
    let (v_factors, undo_v_factors) = v_factors.split_at_mut(all_factors);
    k_factors.fill(call.options.scale);
    if let Scaling::Head(scale) = source.k.scaling {
        let of_heads = k_factors.chunks_exact_mut(TILE).zip(&scale[unit.heads.clone()]);
        of_heads.for_each(|(factors, scale)| factors.fill(call.options.scale * scale));
    }
    let mut all_undone = true;
    let lane_sums = lane_sums.filled(q_heads.len() * 3 * S::LANES, 0.0);
    // SAFETY: no other unit has these heads of this partial result.
    let (states, sums) = unsafe { partials.of(call, unit.partial, q_heads.clone()) };

    let mut first = unit.keys.start;
    now.locate(&source, first, &unit.keys);
    while now.len > 0 {
        next.locate(&source, first + now.len, &unit.keys);
        let is_last = next.len == 0;
        let ahead = if is_last { first_of_following(call, following, next).unwrap_or(unit) } else { unit };
        let [after_k, after_v] = after(call, (unit, now), (ahead, next));
        load_factors(simd, source.k, (now, next), &unit.heads, call.options.scale, k_factors);
        load_factors(simd, source.v, (now, next), &unit.heads, 1.0, v_factors);
        if rounded && matches!(source.v.scaling, Scaling::TokenHead(_)) {
            let factors = undo_v_factors.iter_mut().zip(&*v_factors);
            all_undone = factors.fold(true, |all, (undo, &factor)| {
                *undo = undoing(factor);
                all & (*undo != 0.0)
            });
        }

        if source.k.scaling.is_factor() {
            with_elements!(Elements, source.k.data, data => Logits {
                q,
                q_stride,
                how,
                rows: Rows::new(data, &source.k.paged, unit.heads.clone(), group, &now.k, now.len, after_k),
                logits: weights,
            }.run(simd));
        } else {
            load_scales(simd, source.k, (now, next), unit, k_scales);
            if let Some(rows) =
                grouped::Rows::new(source.k, k_scales, unit.heads.clone(), group, &now.k, now.len, after_k)
            {
                if how == How::Pairs {
                    simd.vectorize(packed::Logits { rows, q, q_stride, logits: weights });
                } else {
                    simd.vectorize(grouped::Logits { rows, q, q_stride, folded, logits: weights });
                }
            }
        }
        let weigh = Weights {
            call,
            head: q_heads.start,
            len: now.len,
            distance: unit.position - first,
            k_factors,
            v_factors,
            undo_v_factors,
            all_undone,
            totals: v_order.needs_total(),
            weights,
            states,
            lane_sums,
            sums,
        };
        if rounded {
            simd.vectorize(Rounded(weigh));
        } else {
            simd.vectorize(weigh);
        }
        if source.v.scaling.is_factor() {
            with_elements!(Elements, source.v.data, data => {
                let rows = Rows::new(data, &source.v.paged, unit.heads.clone(), group, &now.v, now.len, after_v);
                if rounded {
                    PairSums { weights, rows, sums }.run(simd);
                } else {
                    Sums { weights, in_pairs: !v_order.is_plain(), rows, sums }.run(simd);
                }
            });
        } else {
            load_scales(simd, source.v, (now, next), unit, v_scales);
            if let Some(rows) =
                grouped::Rows::new(source.v, v_scales, unit.heads.clone(), group, &now.v, now.len, after_v)
            {
                if v_order.is_plain() {
                    simd.vectorize(grouped::Sums { rows, weights, sums });
                } else {
                    simd.vectorize(packed::Sums { rows, weights, sums, pairs });
                }
            }
        }
        if is_last {
            break;
        }
        first += now.len;
        std::mem::swap(&mut now, &mut next);
    }
    let rows =
        states.iter_mut().zip(sums.chunks_exact_mut(head_dim_v)).zip(lane_sums.chunks_exact(3 * S::LANES));
    for (((state, sums), lane_sums), head) in rows.zip(q_heads) {
        let [sum, divisor, total] = three_sums(simd, lane_sums);
        state.sum = sum;
        state.divisor = if rounded { divisor } else { sum };
        v_order.restore(sums, total, &mut row[..head_dim_v]);
        match source.v.scaling {
            Scaling::Head(scale) => sums.iter_mut().for_each(|value| *value *= scale[head / group]),
            Scaling::Channel(scale) => {
                let scale = &scale[head / group * head_dim_v..][..head_dim_v];
                sums.iter_mut().zip(scale).for_each(|(value, scale)| *value *= scale);
            }
            _ => {}
        }
    }
}

/// Find the first tile of the unit that follows: None where there is none, or one whose rows are not read like these.
fn first_of_following<'a>(
    call: &Call<'_>,
    following: &mut dyn FnMut() -> Option<&'a Unit>,
    tile: &mut Tile,
) -> Option<&'a Unit> {
    let unit = following().filter(|unit| !unit.wide && !unit.in_tail)?;
    tile.locate(&call.source(unit), unit.keys.start, &unit.keys);
    Some(unit)
}

/// What is computed on after K and after V of a tile: its V and the K of the next one; where rows of K and V differ in
/// length, the K and the V of the next one. Without a next one, the tile again.
fn after(call: &Call<'_>, (unit, now): (&Unit, &Tile), (ahead, next): (&Unit, &Tile)) -> [Ahead; 2] {
    let source = call.source(ahead);
    let next = if next.len == 0 { now } else { next };
    let next_k = Ahead::new(source.k, &ahead.heads, &next.k);
    if source.k.row_bytes() == source.v.row_bytes() {
        [Ahead::new(call.source(unit).v, &unit.heads, &now.v), next_k]
    } else {
        [next_k, Ahead::new(source.v, &ahead.heads, &next.v)]
    }
}

/// The sums of three vectors.
#[inline(always)]
fn three_sums<S: Simd>(simd: S, lanes: &[f32]) -> [f32; 3] {
    let mut sums = [0.0; 3];
    for (sum, lanes) in sums.iter_mut().zip(lanes.chunks_exact(S::LANES)) {
        // SAFETY: a chunk has the lanes.
        *sum = simd.sum(unsafe { simd.load(lanes.as_ptr()) });
    }
    sums
}

/// How rows of K are multiplied with queries, and the order that queries stand in.
#[inline(always)]
fn order_of_k<S: Simd>(cache: &Cache<'_>, exact: bool) -> (How, Order) {
    /// A slice stands for its type.
    #[inline(always)]
    fn of<S: Simd, T: Code>(_: &[T], dim: usize, exact: bool) -> (How, Order) {
        let order =
            if exact || T::widens_by_pairs::<S>() { Order::of_pairs::<S, T>(dim) } else { Order::PLAIN };
        let how = match (order.is_plain(), exact) {
            (true, _) => How::Elements,
            (false, true) => How::Pairs,
            (false, false) => How::PairsOfK,
        };
        (how, order)
    }
    match packed::bits_of::<S>(cache) {
        Some(bits) if exact => (How::Pairs, packed::order_of_k(bits, cache.dim())),
        _ if !cache.scaling.is_factor() => (How::Elements, Order::PLAIN),
        _ => with_elements!(Elements, cache.data, data => of::<S, _>(data, cache.dim(), exact)),
    }
}

/// Whether weights of V are rounded, for pairs of keys, and the order that the sums stand in.
#[inline(always)]
fn order_of_v<S: Simd>(cache: &Cache<'_>, rounds: bool) -> (bool, Order) {
    /// A slice stands for its type.
    #[inline(always)]
    fn of<S: Simd, T: Code>(_: &[T], dim: usize, rounds: bool) -> (bool, Order) {
        let order = if S::BF16 && rounds { Order::of_row_pairs::<S, T>(dim) } else { Order::PLAIN };
        if order.is_plain() && T::widens_by_pairs::<S>() {
            return (false, Order::of_pairs::<S, T>(dim));
        }
        (!order.is_plain(), order)
    }
    match packed::bits_of::<S>(cache) {
        Some(bits) if rounds => (false, packed::order_of_v(bits, cache.dim())),
        _ if !cache.scaling.is_factor() => (false, Order::PLAIN),
        _ => with_elements!(Elements, cache.data, data => of::<S, _>(data, cache.dim(), rounds)),
    }
}

/// The factors of the tokens of a tile times a scale, `[num_heads, TILE]`, where each token has its own.
#[inline(always)]
fn load_factors<S: Simd>(
    simd: S,
    cache: &Cache<'_>,
    (tile, next): (&Tile, &Tile),
    heads: &Range<usize>,
    scale: f32,
    factors: &mut [f32],
) {
    let Scaling::TokenHead(scales) = cache.scaling else { return };
    let first = |slot: usize| slot * cache.paged.num_heads + heads.start;
    for &slot in &next.slots[..next.len] {
        simd.prefetch_near(scales[first(slot)..].as_ptr().cast());
    }
    for (head, factors) in factors.chunks_exact_mut(TILE).enumerate() {
        let factors = factors.iter_mut().zip(&tile.slots);
        factors.for_each(|(factor, &slot)| *factor = scale * scales[first(slot) + head]);
    }
}

/// What makes a weight times a factor the weight again; 0 where the product may be no number that says so.
fn undoing(factor: f32) -> f32 {
    const FAR: f32 = 1e15; // its square is a number
    if (1.0 / FAR..=FAR).contains(&factor.abs()) {
        1.0 / factor
    } else {
        0.0
    }
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
    /// `[num_heads, TILE]`: what q.k is multiplied with; what V of a token is, and what undoes that, 0 where nothing does.
    k_factors: &'a [f32],
    v_factors: &'a [f32],
    undo_v_factors: &'a [f32],
    /// Whether there is no such 0.
    all_undone: bool,
    /// Whether anybody asks for the sum of the rounded ones.
    totals: bool,
    /// `[num_q_heads, TILE]`.
    weights: &'a mut [f32],
    states: &'a mut [State],
    /// `[num_q_heads, 3, lanes]`: the weights; where they are rounded, what to divide by, and the rounded ones times factors.
    lane_sums: &'a mut [f32],
    sums: &'a mut [f32],
}

impl Task for Weights<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.weigh::<S, false>(simd);
    }
}

/// The same with weights, times the factors of V, rounded to pairs of bf16: as `PairSums` wants them.
struct Rounded<'a, 'b>(Weights<'a, 'b>);

impl Task for Rounded<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.0.weigh::<S, true>(simd);
    }
}

impl Weights<'_, '_> {
    #[inline(always)]
    fn weigh<S: Simd, const ROUNDED: bool>(self, simd: S) {
        let options = &self.call.options;
        let (head_dim_v, group) = (self.call.head_dim_v(), self.call.group());
        let rows = (self.weights.chunks_exact_mut(TILE).zip(self.states))
            .zip(self.sums.chunks_exact_mut(head_dim_v).zip(self.lane_sums.chunks_exact_mut(3 * S::LANES)));
        for (index, ((weights, state), (sums, lane_sums))) in rows.enumerate() {
            let slope = options.alibi_slopes.map(|slopes| slopes[self.head + index]);
            let k_factors = self.k_factors[index / group * TILE..][..TILE].as_ptr();
            let v_factors = self.v_factors[index / group * TILE..][..TILE].as_ptr();
            let undo = self.undo_v_factors[index / group * TILE..][..TILE].as_ptr();
            // SAFETY: vectors are of the tile; of the sums there are three.
            unsafe {
                let weights_at = weights.as_mut_ptr();
                let mut logits = [simd.splat(f32::NEG_INFINITY); TILE / MIN_LANES];
                let mut highest = simd.splat(f32::NEG_INFINITY);
                for (vector, to) in logits.iter_mut().enumerate().take(TILE / S::LANES) {
                    let at = vector * S::LANES;
                    let mut logit = simd.mul(simd.load(k_factors.add(at)), simd.load(weights_at.add(at)));
                    if let Some(cap) = options.soft_cap {
                        logit = soft_cap(simd, logit, cap);
                    }
                    if let Some(slope) = slope {
                        logit = tilt(simd, logit, slope, self.distance as i64 - at as i64);
                    }
                    if at + S::LANES > self.len {
                        // Beyond the keys: no weight.
                        let is_key = simd.less(simd.iota(), simd.splat(self.len as f32 - at as f32));
                        logit = simd.select(is_key, logit, simd.splat(f32::NEG_INFINITY));
                    }
                    highest = simd.max(highest, logit);
                    *to = logit;
                }
                // After the first tile the base seldom rises, and a mask is found sooner than a maximum.
                let rises = simd.any(simd.less(simd.splat(state.limit()), highest));
                let (rescale, base) =
                    state.rise(if rises { simd.highest(highest) } else { f32::NEG_INFINITY });
                if rescale != 1.0 {
                    sums.iter_mut().chain(&mut *lane_sums).for_each(|sum| *sum *= rescale);
                }
                let base = simd.splat(base);
                let lane_sums = lane_sums.as_mut_ptr();
                let mut sum = simd.load(lane_sums);
                let mut divisor = simd.load(lane_sums.add(S::LANES));
                let mut total = simd.load(lane_sums.add(2 * S::LANES));
                for (vector, &logit) in logits.iter().enumerate().take(TILE / S::LANES) {
                    let at = vector * S::LANES;
                    let weight = exp(simd, simd.sub(logit, base));
                    sum = simd.add(sum, weight);
                    let factored = simd.mul(weight, simd.load(v_factors.add(at)));
                    if ROUNDED {
                        // Half as wide, in the place of what has been read.
                        let stored = simd.store_bf16(weights_at.cast::<u16>().add(at), factored);
                        let undo = simd.load(undo.add(at));
                        if self.all_undone {
                            divisor = simd.mul_add(stored, undo, divisor);
                        } else {
                            let has_undo = simd.less(simd.splat(0.0), simd.mul(undo, undo));
                            divisor =
                                simd.add(divisor, simd.select(has_undo, simd.mul(stored, undo), weight));
                        }
                        if self.totals {
                            total = simd.add(total, stored);
                        }
                    } else {
                        simd.store(weights_at.add(at), factored);
                    }
                }
                simd.store(lane_sums, sum);
                if ROUNDED {
                    simd.store(lane_sums.add(S::LANES), divisor);
                    simd.store(lane_sums.add(2 * S::LANES), total);
                }
            }
        }
    }
}

/// Logits less what distance costs; the key of the first lane is `distance` tokens before the query.
#[inline(always)]
fn tilt<S: Simd>(simd: S, logits: S::F, slope: f32, distance: i64) -> S::F {
    let distance = simd.sub(simd.splat(distance as f32), simd.iota());
    simd.sub(logits, simd.mul(simd.splat(slope), distance))
}
