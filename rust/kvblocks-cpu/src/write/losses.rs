//! What quantising costs: magnitudes, and values that no code reaches. Imports `code`, `error`, `simd` and `threads`.
//!
//! Invariant: nothing depends on the order in which rows are looked at.

use std::sync::{Mutex, PoisonError};

use crate::code::{with_floats, Code, Elements};
use crate::error::{check_len, product, Error, Result};
use crate::simd::{Simd, Task};
use crate::threads::for_each;
use crate::Execution;

/// Of each head, what a write has met.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Losses {
    /// The largest finite magnitude.
    pub amax: Vec<f32>,
    /// Values that a format's largest code, or f16 in a format with groups, does not reach; infinities among them.
    pub num_clipped: Vec<i64>,
}

impl Losses {
    /// Nothing has been met.
    pub(super) fn none(num_heads: usize) -> Self {
        Self { amax: vec![0.0; num_heads], num_clipped: vec![0; num_heads] }
    }

    /// Take in a row of a head.
    #[inline(always)]
    pub(super) fn add(&mut self, head: usize, row: Loss) {
        self.amax[head] = self.amax[head].max(row.amax);
        self.num_clipped[head] += i64::from(row.num_clipped);
    }

    /// Take in what another one has met, and make that forget it.
    pub(super) fn take(&mut self, other: &mut Self) {
        for head in 0..self.amax.len() {
            let row = (std::mem::take(&mut other.amax[head]), std::mem::take(&mut other.num_clipped[head]));
            self.amax[head] = self.amax[head].max(row.0);
            self.num_clipped[head] += row.1;
        }
    }
}

/// What has been met in a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Loss {
    pub amax: f32,
    pub num_clipped: u32,
}

/// The same in lanes, while a row is gone through.
#[derive(Clone, Copy)]
pub(super) struct LossOf<S: Simd> {
    amax: S::F,
    num_clipped: S::F,
}

impl<S: Simd> LossOf<S> {
    #[inline(always)]
    pub(super) fn nothing(simd: S) -> Self {
        Self { amax: simd.splat(0.0), num_clipped: simd.splat(0.0) }
    }

    /// Take in values, which are clipped where the magnitude of their ratio is above `within`.
    #[inline(always)]
    pub(super) fn add(&mut self, simd: S, values: S::F, ratios: S::F, within: f32) {
        let is_clipped = simd.less(simd.splat(within), magnitude(simd, ratios));
        self.amax = simd.max(self.amax, finite_magnitude(simd, values));
        let one_more = simd.add(self.num_clipped, simd.splat(1.0));
        self.num_clipped = simd.select(is_clipped, one_more, self.num_clipped);
    }

    #[inline(always)]
    pub(super) fn total(&self, simd: S) -> Loss {
        // Exact: a row has far fewer elements than 2^24 times the lanes.
        Loss { amax: simd.highest(self.amax), num_clipped: simd.sum(self.num_clipped) as u32 }
    }
}

#[inline(always)]
pub(super) fn magnitude<S: Simd>(simd: S, values: S::F) -> S::F {
    simd.as_float(simd.and(simd.bits(values), simd.splat_bits(0x7FFF_FFFF)))
}

/// Magnitudes, and 0 where a value is infinite or NaN.
#[inline(always)]
pub(super) fn finite_magnitude<S: Simd>(simd: S, values: S::F) -> S::F {
    let magnitude = magnitude(simd, values);
    let is_finite = simd.less(magnitude, simd.splat(f32::INFINITY));
    simd.select(is_finite, magnitude, simd.splat(0.0))
}

/// Tokens that are one unit of work.
const UNIT_TOKENS: usize = 64;

/// The largest finite magnitude in each of `num_columns` columns of rows `[.., num_columns]`; 0 of no finite values.
///
/// There is a row at least. O(rows * columns).
pub fn amax_of_columns(rows: Elements<'_>, num_columns: usize, execution: Execution) -> Result<Vec<f32>> {
    if num_columns == 0 || rows.is_empty() {
        return Err(Error::Size { argument: "rows" });
    }
    let num_rows = rows.len() / num_columns;
    check_len("rows", rows.len(), product("rows", &[num_rows, num_columns])?)?;
    rows.check_floats("rows")?;
    let amax = Mutex::new(vec![0.0f32; num_columns]);
    let start = || vec![0.0f32; num_columns];
    for_each(num_rows.div_ceil(UNIT_TOKENS), execution.num_threads, start, |own: &mut Vec<f32>, unit| {
        own.fill(0.0);
        let some = unit * UNIT_TOKENS..num_rows.min((unit + 1) * UNIT_TOKENS);
        with_floats!(Elements, rows, rows => {
            let rows = &rows[some.start * num_columns..some.end * num_columns];
            execution.isa.run(Columns { rows, amax: own });
        }, else {});
        let mut amax = amax.lock().unwrap_or_else(PoisonError::into_inner);
        amax.iter_mut().zip(own).for_each(|(amax, own)| *amax = amax.max(*own));
    });
    Ok(amax.into_inner().unwrap_or_else(PoisonError::into_inner))
}

struct Columns<'a, T> {
    rows: &'a [T],
    amax: &'a mut [f32],
}

impl<T: Code> Task for Columns<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let whole = self.amax.len() - self.amax.len() % S::LANES;
        for row in self.rows.chunks_exact(self.amax.len()) {
            // SAFETY: a row has the columns of amax, and all offsets are below that.
            unsafe {
                for at in (0..whole).step_by(S::LANES) {
                    let to = self.amax.as_mut_ptr().add(at);
                    let values = finite_magnitude(simd, T::load(simd, row.as_ptr().add(at)));
                    simd.store(to, simd.max(simd.load(to), values));
                }
                if whole < row.len() {
                    let (to, rest) = (self.amax.as_mut_ptr().add(whole), row.len() - whole);
                    let values = finite_magnitude(simd, T::load_part(simd, row.as_ptr().add(whole), rest));
                    f32::store_part(simd, to, rest, simd.max(f32::load_part(simd, to, rest), values));
                }
            }
        }
    }
}
