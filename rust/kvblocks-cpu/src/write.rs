//! Storing tokens at their slots. Imports `element`, `error` and `paged`.
//!
//! Invariant: a row is written for every slot >= 0 and for nothing else.

use crate::element::Element;
use crate::error::{product, Error, Result};
use crate::paged::Paged;

/// Store the first `slots.len()` rows `[.., num_heads, head_dim]`, bit for bit; a slot of -1 is skipped.
///
/// K and V are two calls. Any other slot outside the storage is an error, and nothing is written. O(slots).
pub fn write<T: Element>(cache: &mut [T], paged: &Paged, rows: &[T], slots: &[i64]) -> Result<()> {
    scatter(cache, paged, rows, slots, |row, source| row.copy_from_slice(source))
}

/// Like [`write()`](fn@write), for rows of another element type: rounded to nearest even.
pub fn write_converted<S: Element, T: Element>(
    cache: &mut [T],
    paged: &Paged,
    rows: &[S],
    slots: &[i64],
) -> Result<()> {
    let mut scratch = Vec::new();
    scatter(cache, paged, rows, slots, |row, source| T::narrow(S::widen(source, &mut scratch), row))
}

fn scatter<S, T>(
    cache: &mut [T],
    paged: &Paged,
    rows: &[S],
    slots: &[i64],
    mut store: impl FnMut(&mut [T], &[S]),
) -> Result<()> {
    check_slots(paged, cache.len(), rows.len(), slots)?;
    let token = paged.num_heads * paged.head_dim;
    for (&slot, source) in slots.iter().zip(rows.chunks_exact(token)) {
        if let Ok(slot) = usize::try_from(slot) {
            for (head, source) in source.chunks_exact(paged.head_dim).enumerate() {
                store(&mut cache[paged.row(slot, head)], source);
            }
        }
    }
    Ok(())
}

fn check_slots(paged: &Paged, cache_len: usize, rows_len: usize, slots: &[i64]) -> Result<()> {
    paged.check("cache", cache_len)?;
    let needed = product("rows", &[slots.len(), paged.num_heads, paged.head_dim])?;
    if rows_len < needed {
        return Err(Error::Length { argument: "rows", got: rows_len, expected: needed });
    }
    let num_slots = paged.num_slots() as i64;
    match slots.iter().position(|&slot| slot < -1 || slot >= num_slots) {
        Some(row) => {
            Err(Error::Row { argument: "slot_mapping", row, got: slots[row], low: -1, high: num_slots - 1 })
        }
        None => Ok(()),
    }
}
