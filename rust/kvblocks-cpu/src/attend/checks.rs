//! What the arguments of `attend` must agree on. Imports `paged` and the arguments.
//!
//! Invariant: what passes can be computed without a further check; every table entry that a key needs names a block.

use super::{Batch, Options, Tail, TailCache};
use crate::error::{check_len, product, wrong_index, Error, Result};
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

/// Check that the tail has the rows that its starts name, and no more of a sequence than there is.
pub(super) fn check_tail(tail: &Tail<'_>, k: &Cache<'_>, v: &Cache<'_>, batch: Batch<'_>) -> Result<()> {
    let (argument, starts) = ("tail.start_loc", tail.start_loc);
    check_len(argument, starts.len(), batch.seq_lens.len() + 1)?;
    let num_heads = k.paged.num_heads;
    let num_rows = (tail.k.len() / product("tail.k", &[num_heads, k.dim()])?)
        .min(tail.v.len() / product("tail.v", &[num_heads, v.dim()])?);
    let (first, last) = (starts[0], starts[starts.len() - 1]);
    if first != 0 || i64::from(last) > num_rows as i64 {
        let expected = format!("expected from 0 to at most the {num_rows} rows of k and v");
        return wrong_index(argument, format!("from {first} to {last}, {expected}"));
    }
    for (row, (bounds, &seq_len)) in starts.windows(2).zip(batch.seq_lens).enumerate() {
        let num_keys = i64::from(bounds[1]) - i64::from(bounds[0]);
        if num_keys < 0 || num_keys > i64::from(seq_len) {
            let problem = format!("row {row} has {num_keys} keys, seq_lens gives it {seq_len} in all");
            return wrong_index(argument, problem);
        }
    }
    Ok(())
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
    let table_len = product("block_tables", &[num_seqs, batch.max_blocks])?;
    check_len("block_tables", batch.block_tables.len(), table_len)?;
    check_starts(batch.query_start_loc, num_tokens)?;

    let num_tail = |row| tail.map_or(0, |tail| tail.rows(row).len());
    let (max_blocks, block_size) = (batch.max_blocks, paged.block_size);
    let capacity = max_blocks.saturating_mul(block_size);
    for (row, &seq_len) in batch.seq_lens.iter().enumerate() {
        if usize::try_from(seq_len).map_or(true, |keys| keys.saturating_sub(num_tail(row)) > capacity) {
            let table =
                format!("its table of {max_blocks} blocks of {block_size} holds 0..{capacity} tokens");
            return wrong_index("seq_lens", format!("row {row} is {seq_len}, {table}"));
        }
    }
    for (row, &seq_len) in batch.seq_lens.iter().enumerate() {
        let num_queries = batch.queries(row).len();
        if seq_len > 0 && num_queries > seq_len as usize {
            let problem = format!("row {row} has {num_queries} queries, seq_lens gives it {seq_len} keys");
            return wrong_index("query_start_loc", problem);
        }
    }
    for (row, &seq_len) in batch.seq_lens.iter().enumerate() {
        let (num_queries, seq_len) = (batch.queries(row).len(), seq_len as usize);
        if seq_len == 0 || num_queries == 0 {
            continue;
        }
        // Keys before the window of a row's first query are never read, so their blocks may be gone.
        let first = window.map_or(0, |window| (seq_len - num_queries + 1).saturating_sub(window));
        let columns = first / block_size..(seq_len - num_tail(row)).div_ceil(block_size);
        let table = batch.table(row);
        if let Some(column) = paged.wrong_column(table, columns) {
            let (block, num_blocks) = (table[column], paged.num_blocks);
            let cache = format!("the cache has {num_blocks} blocks");
            let problem = format!("row {row}, column {column} is block {block}, {cache}");
            return wrong_index("block_tables", problem);
        }
    }
    Ok(())
}

/// Check that the queries of each row follow those of the row before, and that they are there.
fn check_starts(starts: &[i32], num_tokens: usize) -> Result<()> {
    let argument = "query_start_loc";
    if starts[0] != 0 {
        return wrong_index(argument, format!("row 0 starts at {}, expected 0", starts[0]));
    }
    if let Some(row) = starts.windows(2).position(|bounds| bounds[0] > bounds[1]) {
        let (start, end) = (starts[row], starts[row + 1]);
        return wrong_index(argument, format!("row {row} starts at {start} and ends before that, at {end}"));
    }
    let (last, end) = (starts.len() as i64 - 2, starts[starts.len() - 1]);
    if i64::from(end) > num_tokens as i64 {
        return wrong_index(argument, format!("row {last} ends at {end}, q has {num_tokens} tokens"));
    }
    Ok(())
}
