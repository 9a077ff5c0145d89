//! Moving whole blocks and whole sequences. Imports `element`, `error` and `paged`.
//!
//! Invariant: bytes are moved as they are; only `gather` converts.

use crate::element::Element;
use crate::error::{check_len, product, Error, Result};
use crate::paged::{Cache, Paged};

/// Copy whole blocks within K or V of one layer, in order; `copies` are pairs `[src, dst]`.
///
/// O(copies * block bytes).
pub fn copy_blocks<T: Element>(cache: &mut [T], paged: &Paged, copies: &[[i32; 2]]) -> Result<()> {
    paged.check("cache", cache.len())?;
    for (row, copy) in copies.iter().enumerate() {
        paged.check_table("copies", copy, 0..2).map_err(|error| at_row(error, row))?;
    }
    for &[src, dst] in copies {
        for head in 0..paged.num_heads {
            for offset in 0..paged.block_size {
                let source = paged.row_in_block(src as usize, offset, head);
                cache.copy_within(source, paged.row_in_block(dst as usize, offset, head).start);
            }
        }
    }
    Ok(())
}

/// The first `seq_len` tokens of a sequence into `out [seq_len, num_heads, head_dim]`. O(seq_len).
pub fn gather<T: Element>(cache: Cache<'_, T>, table: &[i32], seq_len: usize, out: &mut [f32]) -> Result<()> {
    let paged = cache.paged;
    paged.check("cache", cache.data.len())?;
    let num_blocks = seq_len.div_ceil(paged.block_size);
    if num_blocks > table.len() {
        return Err(Error::Length { argument: "block_table", got: table.len(), expected: num_blocks });
    }
    paged.check_table("block_table", table, 0..num_blocks)?;
    check_len("out", out.len(), product("out", &[seq_len, paged.num_heads, paged.head_dim])?)?;
    let mut scratch = Vec::new();
    for (index, row) in out.chunks_exact_mut(paged.head_dim).enumerate() {
        let (position, head) = (index / paged.num_heads, index % paged.num_heads);
        let block = table[position / paged.block_size] as usize;
        let source = paged.row_in_block(block, position % paged.block_size, head);
        row.copy_from_slice(T::widen(&cache.data[source], &mut scratch));
    }
    Ok(())
}

/// The error of one entry, as that of its row in an array of rows.
pub(crate) fn at_row(error: Error, row: usize) -> Error {
    match error {
        Error::Row { argument, got, low, high, .. } => Error::Row { argument, row, got, low, high },
        other => other,
    }
}
