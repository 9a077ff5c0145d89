//! Moving whole blocks and whole sequences. Imports `code`, `error`, `paged`, `simd` and `threads`.
//!
//! Invariant: bytes are moved as they are; only `gather` converts.

use std::ops::Range;

use crate::code::{with_elements, ElementsMut};
use crate::error::{check_len, product, wrong_index, Error, Result};
use crate::paged::{Cache, Paged};
use crate::simd::{Simd, Task};
use crate::threads::{for_each, Parts};
use crate::Execution;

/// Tokens of `gather` that are one unit of work.
const UNIT_TOKENS: usize = 64;

/// Copy whole blocks within K or V of one layer, in order; `copies` are pairs `[src, dst]`.
///
/// O(copies * block bytes).
pub fn copy_blocks(
    cache: ElementsMut<'_>,
    paged: &Paged,
    copies: &[[i32; 2]],
    execution: Execution,
) -> Result<()> {
    paged.check("cache", cache.len())?;
    for (row, copy) in copies.iter().enumerate() {
        if paged.wrong_column(copy, 0..2).is_some() {
            let ([src, dst], num_blocks) = (copy, paged.num_blocks);
            let problem = format!("row {row} is {src} -> {dst}, the cache has {num_blocks} blocks");
            return wrong_index("copies", problem);
        }
    }
    let num_threads = if copies.len() > 1 && execution.num_threads > 1 && are_independent(paged, copies) {
        execution.num_threads
    } else {
        1
    };
    with_elements!(ElementsMut, cache, cache => {
        let cache = Parts::new(cache);
        for_each(copies.len(), num_threads, || (), |(), row| {
            let [src, dst] = copies[row].map(|block| block as usize);
            for (from, to) in paged.runs(src).zip(paged.runs(dst)) {
                // SAFETY: this is the only thread, or nobody writes the source and nobody else the destination.
                unsafe { cache.copy_within(from, to.start) };
            }
        });
    });
    Ok(())
}

/// Whether the order of the copies does not matter.
fn are_independent(paged: &Paged, copies: &[[i32; 2]]) -> bool {
    let mut sources: Vec<i32> = copies.iter().map(|&[src, _]| src).collect();
    let mut destinations: Vec<i32> = copies.iter().map(|&[_, dst]| dst).collect();
    sources.sort_unstable();
    destinations.sort_unstable();
    paged.rows_are_apart()
        && destinations.windows(2).all(|pair| pair[0] != pair[1])
        && destinations.iter().all(|dst| sources.binary_search(dst).is_err())
}

/// The first `seq_len` tokens of a sequence into `out [seq_len, num_heads, head_dim]`. O(seq_len).
pub fn gather(
    cache: Cache<'_>,
    table: &[i32],
    seq_len: usize,
    out: &mut [f32],
    execution: Execution,
) -> Result<()> {
    let paged = cache.paged;
    cache.check("cache", "scale")?;
    let num_blocks = seq_len.div_ceil(paged.block_size);
    if num_blocks > table.len() {
        return Err(Error::Length { argument: "block_table", got: table.len(), expected: num_blocks });
    }
    if let Some(column) = paged.wrong_column(table, 0..num_blocks) {
        let (block, num_blocks) = (table[column], paged.num_blocks);
        let problem = format!("column {column} is block {block}, the cache has {num_blocks} blocks");
        return wrong_index("block_table", problem);
    }
    check_len("out", out.len(), product("out", &[seq_len, paged.num_heads, cache.dim()])?)?;
    let token = paged.num_heads * cache.dim();
    let out = Parts::new(out);
    for_each(
        seq_len.div_ceil(UNIT_TOKENS),
        execution.num_threads,
        || (),
        |(), unit| {
            let tokens = unit * UNIT_TOKENS..seq_len.min((unit + 1) * UNIT_TOKENS);
            // SAFETY: each unit has tokens of its own.
            let out = unsafe { out.part(tokens.start * token..tokens.end * token) };
            execution.isa.run(Gather { cache: &cache, table, tokens, out });
        },
    );
    Ok(())
}

struct Gather<'a> {
    cache: &'a Cache<'a>,
    table: &'a [i32],
    tokens: Range<usize>,
    out: &'a mut [f32],
}

impl Task for Gather<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { cache, table, tokens, out } = self;
        let (paged, dim) = (&cache.paged, cache.dim());
        for (position, rows) in tokens.zip(out.chunks_exact_mut(paged.num_heads * dim)) {
            let (block, offset) = (table[position / paged.block_size] as usize, position % paged.block_size);
            for (head, row) in rows.chunks_exact_mut(dim).enumerate() {
                let at = paged.row_in_block(block, offset, head).start;
                cache.decode(simd, at, block * paged.block_size + offset, head, row);
            }
        }
    }
}
