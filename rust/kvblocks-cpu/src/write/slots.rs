//! The slots of a write: all in the cache, none named twice, groups of tokens whole. Imports `error` and `paged`.
//!
//! Invariant: slots that passed `check_slots` can be written by several threads at once.

use crate::error::{wrong_index, Result};
use crate::paged::Paged;

const ARGUMENT: &str = "slot_mapping";

/// Slots are -1 or in a cache whose geometry has been checked, each at most once. O(slots) where they ascend.
pub(super) fn check_slots(paged: &Paged, slots: &[i64]) -> Result<()> {
    let num_slots = paged.num_slots();
    if let Some(row) = slots.iter().position(|&slot| slot < -1 || slot >= num_slots as i64) {
        let slot = slots[row];
        let expected = format!("expected -1 (skip) or one of the cache's {num_slots} slots");
        return wrong_index(ARGUMENT, format!("row {row} is slot {slot}, {expected}"));
    }
    let Some(twice) = first_twice(slots) else { return Ok(()) };
    let mut rows = (0..slots.len()).filter(|&row| slots[row] == twice);
    let (first, second) = (rows.next().unwrap_or(0), rows.next().unwrap_or(0));
    wrong_index(ARGUMENT, format!("rows {first} and {second} both name slot {twice}"))
}

/// The lowest slot that is named more than once.
fn first_twice(slots: &[i64]) -> Option<i64> {
    if slots.is_sorted_by(|a, b| a < b) {
        return None;
    }
    let mut written: Vec<i64> = slots.iter().copied().filter(|&slot| slot >= 0).collect();
    written.sort_unstable();
    written.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// The rows of checked slots in ascending order, which puts the tokens of a group together; groups have to be whole.
pub(super) fn whole_groups(slots: &[i64], size: usize) -> Result<Vec<usize>> {
    let group = |row: usize| slots[row] / size as i64;
    let mut rows: Vec<usize> = (0..slots.len()).filter(|&row| slots[row] >= 0).collect();
    rows.sort_unstable_by_key(|&row| slots[row]);
    if let Some(part) = rows.chunk_by(|&a, &b| group(a) == group(b)).find(|part| part.len() != size) {
        let first = group(part[0]) * size as i64;
        let (end, named) = (first + size as i64, part.len());
        let written = format!("which is written as a whole, and {named} of them are named");
        return wrong_index(ARGUMENT, format!("slots {first}..{end} are a group of tokens, {written}"));
    }
    Ok(rows)
}
