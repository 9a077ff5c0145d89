//! Causal attention over block tables. Imports `element`, `error` and `paged`.
//!
//! One unit of work is the query heads of one token that share a key head: they walk the token's visible keys once,
//! in tiles, with a running maximum and sum per head. Units are independent.
//!
//! Invariant: a key that a query may not see is never read for it, so no value of it can matter.

use std::ops::Range;

use crate::element::Element;
use crate::error::{check_len, product, Error, Result};
use crate::paged::{Cache, Paged};

/// The index arrays of a step over n rows.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Block ids `[n, max_blocks]`, read only where a visible key lives.
    pub block_tables: &'a [i32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
    /// Keys of each row `[n]`.
    pub seq_lens: &'a [i32],
    /// Row i owns the queries `query_start_loc[i]..query_start_loc[i + 1]`, the last positions of its sequence.
    pub query_start_loc: &'a [i32],
}

/// The optional parts of attention.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Factor of q.k.
    pub scale: f32,
    /// A query at position p sees keys `max(0, p + 1 - window)..=p`; at least 1.
    pub window: Option<usize>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
    /// Per query head, a logit without a value that joins the denominator.
    pub sinks: Option<&'a [f32]>,
    /// Per query head, times (key position - query position), added to the logit.
    pub alibi_slopes: Option<&'a [f32]>,
}

/// Where the results go.
#[derive(Debug)]
pub struct Output<'a, Q> {
    /// `[num_tokens, num_q_heads, head_dim_v]`.
    pub out: &'a mut [Q],
    /// `[num_tokens, num_q_heads]`: the natural log of the denominator, the sink included.
    pub lse: Option<&'a mut [f32]>,
}

/// Keys per tile: their logits for a group of heads stay in the first-level cache.
const TILE: usize = 64;
/// Independent sums of a dot product, enough for the widest registers in use.
const LANES: usize = 16;

/// Attention of `q [num_tokens, num_q_heads, head_dim]` over the keys of each row.
///
/// Rows of seq_len 0, queries of no row and queries whose logits are all -inf give 0 and -inf. All of the output is written, or nothing.
pub fn attend<Q: Element, T: Element>(
    q: &[Q],
    num_q_heads: usize,
    k: Cache<'_, T>,
    v: Cache<'_, T>,
    batch: Batch<'_>,
    options: Options<'_>,
    output: Output<'_, Q>,
) -> Result<()> {
    let Output { out, mut lse } = output;
    let num_tokens = check_shapes(q.len(), num_q_heads, &k, &v, options, out.len(), lse.as_deref())?;
    check_rows(&k.paged, num_tokens, batch, options.window)?;
    if num_tokens == 0 {
        return Ok(()); // before any scratch is sized by num_q_heads, which nothing bounds here
    }
    out.fill(Q::ZERO);
    if let Some(lse) = lse.as_deref_mut() {
        lse.fill(f32::NEG_INFINITY);
    }

    let num_kv_heads = k.paged.num_heads;
    let group = num_q_heads / num_kv_heads;
    let (q_unit, out_unit) = (group * k.paged.head_dim, group * v.paged.head_dim);
    let mut state = State::new(group, v.paged.head_dim);
    for (row, &seq_len) in batch.seq_lens.iter().enumerate() {
        let queries = batch.queries(row);
        if seq_len == 0 {
            continue;
        }
        let table = &batch.block_tables[row * batch.max_blocks..][..batch.max_blocks];
        let first_position = seq_len as usize - queries.len();
        for (index, token) in queries.enumerate() {
            let position = first_position + index;
            let keys = options.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1;
            for head in 0..num_kv_heads {
                let unit = token * num_kv_heads + head;
                let q = &q[unit * q_unit..][..q_unit];
                state.start(q, options, head * group);
                state.walk(&k, &v, head, table, keys.clone(), options);
                Q::narrow(state.finish(), &mut out[unit * out_unit..][..out_unit]);
                if let Some(lse) = lse.as_deref_mut() {
                    lse[unit * group..][..group].copy_from_slice(&state.lse);
                }
            }
        }
    }
    Ok(())
}

impl Batch<'_> {
    /// The queries of a row; empty where a length or bound is no size, which `check_rows` refuses.
    fn queries(&self, row: usize) -> Range<usize> {
        let bound = |at: usize| usize::try_from(self.query_start_loc[at]).unwrap_or(0);
        bound(row)..bound(row + 1)
    }
}

/// The running softmax of the heads of one unit.
struct State {
    group: usize,
    /// `[group, head_dim]`, scaled.
    q: Vec<f32>,
    /// `[group]` each.
    slopes: Vec<f32>,
    highest: Vec<f32>,
    sum: Vec<f32>,
    lse: Vec<f32>,
    /// `[group, TILE]`: logits, then weights.
    weights: Vec<f32>,
    /// `[group, head_dim_v]`.
    out: Vec<f32>,
    /// One row of K or V (or the queries) in f32.
    row: Vec<f32>,
}

impl State {
    fn new(group: usize, head_dim_v: usize) -> Self {
        Self {
            group,
            q: Vec::new(),
            slopes: vec![0.0; group],
            highest: vec![0.0; group],
            sum: vec![0.0; group],
            lse: vec![0.0; group],
            weights: vec![0.0; group * TILE],
            out: vec![0.0; group * head_dim_v],
            row: Vec::new(),
        }
    }

    /// Begin a unit whose first query head is `head`.
    fn start<Q: Element>(&mut self, q: &[Q], options: Options<'_>, head: usize) {
        self.q.clear();
        self.q.extend(Q::widen(q, &mut self.row).iter().map(|value| value * options.scale));
        self.out.fill(0.0);
        if let Some(slopes) = options.alibi_slopes {
            self.slopes.copy_from_slice(&slopes[head..][..self.group]);
        }
        match options.sinks {
            Some(sinks) => {
                self.highest.copy_from_slice(&sinks[head..][..self.group]);
                for (sum, &sink) in self.sum.iter_mut().zip(&self.highest) {
                    *sum = if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 };
                }
            }
            None => {
                self.highest.fill(f32::NEG_INFINITY);
                self.sum.fill(0.0);
            }
        }
    }

    /// Take in the keys of a range of positions.
    fn walk<T: Element>(
        &mut self,
        k: &Cache<'_, T>,
        v: &Cache<'_, T>,
        head: usize,
        table: &[i32],
        keys: Range<usize>,
        options: Options<'_>,
    ) {
        let (last, block_size) = (keys.end - 1, k.paged.block_size);
        let place = |position: usize| (table[position / block_size] as usize, position % block_size);
        for first in keys.clone().step_by(TILE) {
            let tile = first..keys.end.min(first + TILE);
            for (column, position) in tile.clone().enumerate() {
                let (block, offset) = place(position);
                let row = &k.data[k.paged.row_in_block(block, offset, head)];
                let row = T::widen(row, &mut self.row);
                for (index, q) in self.q.chunks_exact(row.len()).enumerate() {
                    self.weights[index * TILE + column] = dot(q, row);
                }
            }
            self.turn_logits_into_weights(tile.len(), last - first, options);
            for (column, position) in tile.enumerate() {
                let (block, offset) = place(position);
                let row = &v.data[v.paged.row_in_block(block, offset, head)];
                let row = T::widen(row, &mut self.row);
                for (index, out) in self.out.chunks_exact_mut(row.len()).enumerate() {
                    let weight = self.weights[index * TILE + column];
                    for (out, &value) in out.iter_mut().zip(row) {
                        *out += weight * value;
                    }
                }
            }
        }
    }

    /// Turn the q.k of a tile into weights against the new maximum, and rescale what was summed before.
    ///
    /// distance: from the first key of the tile to the query, in tokens.
    fn turn_logits_into_weights(&mut self, len: usize, distance: usize, options: Options<'_>) {
        let head_dim_v = self.out.len() / self.group;
        for index in 0..self.group {
            let weights = &mut self.weights[index * TILE..][..len];
            if let Some(cap) = options.soft_cap {
                weights.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
            }
            if options.alibi_slopes.is_some() {
                for (column, logit) in weights.iter_mut().enumerate() {
                    *logit -= self.slopes[index] * (distance - column) as f32;
                }
            }
            let before = self.highest[index];
            let highest = weights.iter().copied().fold(before, f32::max);
            // While nothing has a weight, all are taken against 0: -inf - -inf would be NaN.
            let base = if highest == f32::NEG_INFINITY { 0.0 } else { highest };
            let rescale = if before == f32::NEG_INFINITY { 0.0 } else { (before - base).exp() };
            let mut sum = self.sum[index] * rescale;
            for weight in weights {
                *weight = (*weight - base).exp();
                sum += *weight;
            }
            self.sum[index] = sum;
            self.highest[index] = highest;
            self.out[index * head_dim_v..][..head_dim_v].iter_mut().for_each(|value| *value *= rescale);
        }
    }

    /// The outputs `[group, head_dim_v]`; fills `lse`.
    fn finish(&mut self) -> &[f32] {
        let head_dim_v = self.out.len() / self.group;
        for (index, out) in self.out.chunks_exact_mut(head_dim_v).enumerate() {
            let sum = self.sum[index];
            if sum == 0.0 {
                out.fill(0.0); // no key has a weight; the log below is -inf
            } else {
                out.iter_mut().for_each(|value| *value /= sum);
            }
            self.lse[index] = self.highest[index] + sum.ln();
        }
        &self.out
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    // Pairwise, so that the rounding error grows with the logarithm of the lanes.
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0] + rest
}

/// Check the lengths of everything but the index arrays; returns the number of tokens.
fn check_shapes<T>(
    q_len: usize,
    num_q_heads: usize,
    k: &Cache<'_, T>,
    v: &Cache<'_, T>,
    options: Options<'_>,
    out_len: usize,
    lse: Option<&[f32]>,
) -> Result<usize> {
    k.paged.check("cache.k", k.data.len())?;
    v.paged.check("cache.v", v.data.len())?;
    for (axis, of_k, of_v) in [
        ("num_blocks", k.paged.num_blocks, v.paged.num_blocks),
        ("block_size", k.paged.block_size, v.paged.block_size),
        ("num_heads", k.paged.num_heads, v.paged.num_heads),
    ] {
        if of_k != of_v {
            return Err(Error::Geometry(axis));
        }
    }
    let num_kv_heads = k.paged.num_heads;
    if num_q_heads == 0 || !num_q_heads.is_multiple_of(num_kv_heads) {
        return Err(Error::Heads { num_q_heads, num_kv_heads });
    }
    let token = product("q", &[num_q_heads, k.paged.head_dim])?;
    let num_tokens = q_len / token;
    check_len("q", q_len, num_tokens * token)?;
    check_len("out", out_len, product("out", &[num_tokens, num_q_heads, v.paged.head_dim])?)?;
    if let Some(lse) = lse {
        check_len("lse", lse.len(), product("lse", &[num_tokens, num_q_heads])?)?;
    }
    for (argument, per_head) in [("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)] {
        if let Some(per_head) = per_head {
            check_len(argument, per_head.len(), num_q_heads)?;
        }
    }
    if options.window == Some(0) {
        return Err(Error::Size { argument: "window" });
    }
    Ok(num_tokens)
}

/// Check the index arrays, values included.
fn check_rows(paged: &Paged, num_tokens: usize, batch: Batch<'_>, window: Option<usize>) -> Result<()> {
    let num_seqs = batch.seq_lens.len();
    check_len("query_start_loc", batch.query_start_loc.len(), num_seqs + 1)?;
    check_len(
        "block_tables",
        batch.block_tables.len(),
        product("block_tables", &[num_seqs, batch.max_blocks])?,
    )?;
    let capacity = batch.max_blocks.saturating_mul(paged.block_size);
    let mut low = 0;
    for (row, &start) in batch.query_start_loc.iter().enumerate() {
        let high = if row == 0 { 0 } else { num_tokens as i64 };
        check_value("query_start_loc", row, i64::from(start), low, high)?;
        low = i64::from(start);
    }
    for (row, &seq_len) in batch.seq_lens.iter().enumerate() {
        check_value("seq_lens", row, i64::from(seq_len), 0, i64::try_from(capacity).unwrap_or(i64::MAX))?;
        let num_queries = batch.queries(row).len();
        if seq_len == 0 || num_queries == 0 {
            continue;
        }
        check_value("seq_lens", row, i64::from(seq_len), num_queries as i64, i64::MAX)?;
        let seq_len = seq_len as usize;
        let first = window.map_or(0, |window| (seq_len - num_queries + 1).saturating_sub(window));
        let columns = first / paged.block_size..seq_len.div_ceil(paged.block_size);
        let table = &batch.block_tables[row * batch.max_blocks..][..batch.max_blocks];
        paged.check_table("block_tables", table, columns).map_err(|error| crate::copy::at_row(error, row))?;
    }
    Ok(())
}

fn check_value(argument: &'static str, row: usize, got: i64, low: i64, high: i64) -> Result<()> {
    if (low..=high).contains(&got) {
        Ok(())
    } else {
        Err(Error::Row { argument, row, got, low, high })
    }
}
