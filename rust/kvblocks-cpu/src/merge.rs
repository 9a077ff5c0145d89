//! Attention over the union of two disjoint sets of keys. Imports `element` and `error`.
//!
//! Invariant: a state whose log-sum-exp is -inf takes no part, whatever its output holds.

use crate::element::Element;
use crate::error::{check_len, product, Error, Result};

/// Merge two states into `out [rows, head_dim]` and `lse [rows]`; each state is (out, lse) of the same lengths.
///
/// lse is a natural logarithm. O(rows * head_dim).
pub fn merge_states<T: Element>(
    a: (&[T], &[f32]),
    b: (&[T], &[f32]),
    head_dim: usize,
    out: &mut [T],
    lse: &mut [f32],
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
        return Ok(());
    }
    let (mut scratch, mut sum) = (Vec::new(), vec![0.0; head_dim]);
    for (row, (out, lse)) in out.chunks_exact_mut(head_dim).zip(lse).enumerate() {
        let (lse_a, lse_b) = (a.1[row], b.1[row]);
        *lse = log_add_exp(lse_a, lse_b);
        sum.fill(0.0);
        for (values, part) in [(a.0, lse_a), (b.0, lse_b)] {
            if part == f32::NEG_INFINITY {
                continue;
            }
            let weight = (part - *lse).exp();
            let values = T::widen(&values[row * head_dim..][..head_dim], &mut scratch);
            for (sum, &value) in sum.iter_mut().zip(values) {
                *sum += weight * value;
            }
        }
        T::narrow(&sum, out);
    }
    Ok(())
}

fn log_add_exp(a: f32, b: f32) -> f32 {
    // f32::max drops a NaN, so equality decides first; with a NaN the sum below is one.
    if a == b {
        return a + std::f32::consts::LN_2;
    }
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    high + (low - high).exp().ln_1p()
}
