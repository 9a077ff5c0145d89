//! Storing tokens at their slots. Imports `code`, `error`, `paged`, `simd` and `threads`.
//!
//! Invariant: a row is written for every slot >= 0 and for nothing else.

use std::ops::Range;

use crate::code::{convert, with_elements, Code, Elements, ElementsMut};
use crate::error::{product, Error, Result};
use crate::paged::Paged;
use crate::simd::{Simd, Task};
use crate::threads::{for_each, Parts};
use crate::Execution;

/// Elements that are worth a unit of work.
const UNIT_ELEMENTS: usize = 64 << 10;

/// Store the first `slots.len()` rows `[.., num_heads, head_dim]`; a slot of -1 is skipped.
///
/// Rows of the cache's own element type are stored bit for bit, others rounded to nearest even. K and V are two calls.
/// Any other slot outside the storage is an error, and nothing is written. O(slots).
pub fn write(
    cache: ElementsMut<'_>,
    paged: &Paged,
    rows: Elements<'_>,
    slots: &[i64],
    execution: Execution,
) -> Result<()> {
    check_slots(paged, cache.len(), rows.len(), slots)?;
    match (cache, rows) {
        (ElementsMut::F32(cache), Elements::F32(rows)) => scatter(cache, paged, rows, slots, execution, Same),
        (ElementsMut::F16(cache), Elements::F16(rows)) => scatter(cache, paged, rows, slots, execution, Same),
        (ElementsMut::Bf16(cache), Elements::Bf16(rows)) => {
            scatter(cache, paged, rows, slots, execution, Same)
        }
        (cache, rows) => with_elements!(ElementsMut, cache, cache => {
            with_elements!(Elements, rows, rows => scatter(cache, paged, rows, slots, execution, Rounded))
        }),
    }
    Ok(())
}

/// How a row gets into the cache.
trait Store<A, B>: Copy + Send + Sync {
    fn store<S: Simd>(self, simd: S, from: &[A], to: &mut [B]);
}

#[derive(Clone, Copy)]
struct Same;

impl<A: Code> Store<A, A> for Same {
    #[inline(always)]
    fn store<S: Simd>(self, _: S, from: &[A], to: &mut [A]) {
        to.copy_from_slice(from);
    }
}

#[derive(Clone, Copy)]
struct Rounded;

impl<A: Code, B: Code> Store<A, B> for Rounded {
    #[inline(always)]
    fn store<S: Simd>(self, simd: S, from: &[A], to: &mut [B]) {
        debug_assert_eq!(from.len(), to.len());
        // SAFETY: both are slices of the rows' length.
        unsafe { convert(simd, from.as_ptr(), to.as_mut_ptr(), to.len()) };
    }
}

fn scatter<A: Code, B: Code>(
    cache: &mut [B],
    paged: &Paged,
    rows: &[A],
    slots: &[i64],
    execution: Execution,
    how: impl Store<A, B>,
) {
    let tokens_per_unit = (UNIT_ELEMENTS / (paged.num_heads * paged.head_dim)).max(1);
    let cache = Parts::new(cache);
    let unit = |(): &mut (), index: usize| {
        let tokens = index * tokens_per_unit..slots.len().min((index + 1) * tokens_per_unit);
        execution.isa.run(Scatter { cache: &cache, paged, rows, slots, tokens, how });
    };
    let num_units = slots.len().div_ceil(tokens_per_unit);
    // What would be written twice is written by one thread, in order.
    let apart = num_units > 1 && execution.num_threads > 1 && paged.rows_are_apart() && are_distinct(slots);
    for_each(num_units, if apart { execution.num_threads } else { 1 }, || (), unit);
}

struct Scatter<'a, A, B, H> {
    cache: &'a Parts<'a, B>,
    paged: &'a Paged,
    rows: &'a [A],
    slots: &'a [i64],
    tokens: Range<usize>,
    how: H,
}

impl<A: Code, B: Code, H: Store<A, B>> Task for Scatter<'_, A, B, H> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let paged = self.paged;
        for token in self.tokens {
            let Ok(slot) = usize::try_from(self.slots[token]) else { continue };
            for head in 0..paged.num_heads {
                let from = &self.rows[(token * paged.num_heads + head) * paged.head_dim..][..paged.head_dim];
                // SAFETY: this is the only thread, or rows do not overlap and no slot is named twice; see `scatter`.
                self.how.store(simd, from, unsafe { self.cache.part(paged.row(slot, head)) });
            }
        }
    }
}

fn are_distinct(slots: &[i64]) -> bool {
    let mut written: Vec<i64> = slots.iter().copied().filter(|&slot| slot >= 0).collect();
    written.sort_unstable();
    written.windows(2).all(|pair| pair[0] != pair[1])
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
