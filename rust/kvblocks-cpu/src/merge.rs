//! Attention over the union of two disjoint sets of keys. Imports `code`, `error` and `simd`.
//!
//! Invariant: a state whose log-sum-exp is -inf takes no part, whatever its output holds.

use crate::code::{convert, with_floats, Code, Elements, ElementsMut};
use crate::error::{check_len, product, Error, Result};
use crate::simd::{Simd, Task};
use crate::Execution;

/// Merge two states into `out [rows, head_dim]` and `lse [rows]`; each state is (out, lse) of the same lengths.
///
/// All outputs are of one type. lse is a natural logarithm. O(rows * head_dim).
pub fn merge_states(
    a: (Elements<'_>, &[f32]),
    b: (Elements<'_>, &[f32]),
    head_dim: usize,
    out: ElementsMut<'_>,
    lse: &mut [f32],
    execution: Execution,
) -> Result<()> {
    if head_dim == 0 {
        return Err(Error::Size { argument: "head_dim" });
    }
    let len = product("out", &[lse.len(), head_dim])?;
    check_len("out", out.len(), len)?;
    check_len("out_a", a.0.len(), len)?;
    check_len("out_b", b.0.len(), len)?;
    check_len("lse_a", a.1.len(), lse.len())?;
    check_len("lse_b", b.1.len(), lse.len())?;
    if lse.is_empty() {
        return Ok(()); // before a row is sized by head_dim, which nothing bounds here
    }
    a.0.check_floats("out_a")?;
    b.0.check_floats("out_b")?;
    with_floats!(ElementsMut, out, out => {
        execution.isa.run(Merge { a, b, head_dim, out, lse });
        Ok(())
    }, else Err(Error::Codes { argument: "out" }))
}

struct Merge<'a, T> {
    a: (Elements<'a>, &'a [f32]),
    b: (Elements<'a>, &'a [f32]),
    head_dim: usize,
    out: &'a mut [T],
    lse: &'a mut [f32],
}

impl<T: Code> Task for Merge<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { a, b, head_dim, out, lse } = self;
        let (mut values, mut sum) = (vec![0.0f32; head_dim], vec![0.0f32; head_dim]);
        for (row, (out, lse)) in out.chunks_exact_mut(head_dim).zip(lse).enumerate() {
            *lse = log_add_exp(a.1[row], b.1[row]);
            sum.fill(0.0);
            for (state, part) in [(a.0, a.1[row]), (b.0, b.1[row])] {
                if part == f32::NEG_INFINITY {
                    continue;
                }
                let weight = (part - *lse).exp();
                with_floats!(Elements, state, state => {
                    let state = &state[row * head_dim..][..head_dim];
                    // SAFETY: both are slices of head_dim elements.
                    unsafe { convert(simd, state.as_ptr(), values.as_mut_ptr(), head_dim) };
                }, else {});
                sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += weight * value);
            }
            // SAFETY: both are slices of head_dim elements.
            unsafe { convert(simd, sum.as_ptr(), out.as_mut_ptr(), head_dim) };
        }
    }
}

fn log_add_exp(a: f32, b: f32) -> f32 {
    // f32::max drops a NaN, so equality decides first; with a NaN the sum below is one.
    if a == b {
        return a + std::f32::consts::LN_2;
    }
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    high + (low - high).exp().ln_1p()
}
