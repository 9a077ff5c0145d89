//! What the arguments of `attend` must agree on. Imports `paged` and the arguments.
//!
//! Invariant: what passes can be computed without a further check; every table entry that a key needs names a block.

use super::{Batch, Options, TailCache};
use crate::error::{check_len, product, Error, Result};
use crate::paged::{Cache, Paged};

/// Check the lengths of everything but the index arrays; returns the number of tokens.
pub(super) fn check_shapes(
    q_len: usize,
    num_q_heads: usize,
    k: &Cache<'_>,
    v: &Cache<'_>,
    options: Options<'_>,
    out_len: usize,
    lse: Option<&[f32]>,
) -> Result<usize> {
    k.check("cache.k", "cache.k_scale")?;
    v.check("cache.v", "cache.v_scale")?;
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
    let token = product("q", &[num_q_heads, k.dim()])?;
    let num_tokens = q_len / token;
    check_len("q", q_len, num_tokens * token)?;
    check_len("out", out_len, product("out", &[num_tokens, num_q_heads, v.dim()])?)?;
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
pub(super) fn check_rows(
    paged: &Paged,
    num_tokens: usize,
    batch: Batch<'_>,
    window: Option<usize>,
    tail: Option<&TailCache<'_>>,
) -> Result<()> {
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
    let mut low = 0;
    for (row, &start) in tail.map_or(&[][..], |tail| tail.start_loc).iter().enumerate() {
        let high = if row == 0 { 0 } else { i64::from(i32::MAX) };
        check_value("tail.start_loc", row, i64::from(start), low, high)?;
        low = i64::from(start);
    }
    for (row, &seq_len) in batch.seq_lens.iter().enumerate() {
        let num_tail = tail.map_or(0, |tail| tail.rows(row).len());
        let high = i64::try_from(capacity.saturating_add(num_tail)).unwrap_or(i64::MAX);
        check_value("seq_lens", row, i64::from(seq_len), 0, high)?;
        let num_queries = batch.queries(row).len();
        if seq_len == 0 || num_queries == 0 {
            continue;
        }
        check_value("seq_lens", row, i64::from(seq_len), num_queries as i64, i64::MAX)?;
        let seq_len = seq_len as usize;
        let first = window.map_or(0, |window| (seq_len - num_queries + 1).saturating_sub(window));
        if num_tail > seq_len {
            return Err(Error::Row {
                argument: "tail.start_loc",
                row,
                got: num_tail as i64,
                low: 0,
                high: seq_len as i64,
            });
        }
        let columns = first / paged.block_size..(seq_len - num_tail).div_ceil(paged.block_size);
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
