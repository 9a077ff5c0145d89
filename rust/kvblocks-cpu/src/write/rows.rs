//! How a row gets into a cache whose elements are stored one by one. Imports `code`, `simd` and `losses`.
//!
//! Invariant: codes and scales are those of the NumPy specification, bit for bit.

use super::losses::{finite_magnitude, Loss, LossOf};
use crate::code::{convert, Code};
use crate::simd::Simd;
use crate::threads::Parts;

/// How a row gets into the cache.
pub(super) trait Store<A, B>: Copy + Send + Sync {
    /// `index` is that of the row's scale, of one scale a slot and head. `loss`: whether anybody wants to know it.
    ///
    /// # Safety
    /// No other thread stores a row of that index.
    unsafe fn store<S: Simd>(
        self,
        simd: S,
        from: &[A],
        to: &mut [B],
        index: usize,
        head: usize,
        loss: bool,
    ) -> Option<Loss>;
}

#[derive(Clone, Copy)]
pub(super) struct Same;

impl<A: Code> Store<A, A> for Same {
    #[inline(always)]
    unsafe fn store<S: Simd>(
        self,
        _: S,
        from: &[A],
        to: &mut [A],
        _: usize,
        _: usize,
        _: bool,
    ) -> Option<Loss> {
        to.copy_from_slice(from);
        None
    }
}

#[derive(Clone, Copy)]
pub(super) struct Rounded;

impl<A: Code, B: Code> Store<A, B> for Rounded {
    #[inline(always)]
    unsafe fn store<S: Simd>(
        self,
        simd: S,
        from: &[A],
        to: &mut [B],
        _: usize,
        _: usize,
        _: bool,
    ) -> Option<Loss> {
        debug_assert_eq!(from.len(), to.len());
        // SAFETY: both are slices of the rows' length.
        unsafe { convert(simd, from.as_ptr(), to.as_mut_ptr(), to.len()) };
        None
    }
}

/// Scales that threads share.
pub(super) enum Scales<'a> {
    Head(&'a [f32]),
    Channel(&'a [f32]),
    /// Of each slot and head: given, or made here.
    TokenHead(&'a [f32]),
    Made(Parts<'a, f32>),
}

#[derive(Clone, Copy)]
pub(super) struct Scaled<'a> {
    pub scales: &'a Scales<'a>,
    /// The largest magnitude of a code, and that of a ratio which is not clipped.
    pub limit: f32,
    pub within: f32,
}

impl<A: Code, B: Code> Store<A, B> for Scaled<'_> {
    #[inline(always)]
    unsafe fn store<S: Simd>(
        self,
        simd: S,
        from: &[A],
        to: &mut [B],
        index: usize,
        head: usize,
        loss: bool,
    ) -> Option<Loss> {
        let divisor = match self.scales {
            Scales::Head(scale) => Divisor::One(scale[head]),
            Scales::Channel(scale) => Divisor::Each(&scale[head * to.len()..][..to.len()]),
            Scales::TokenHead(scale) => Divisor::One(scale[index]),
            Scales::Made(scale) => {
                let own = scale_of(largest(simd, from), self.limit);
                // SAFETY: the caller's.
                let place = unsafe { scale.part(index..index + 1) };
                place[0] = own;
                Divisor::One(own)
            }
        };
        if loss {
            return Some(divide::<S, A, B, true>(simd, from, to, divisor, self.within));
        }
        divide::<S, A, B, false>(simd, from, to, divisor, self.within);
        None
    }
}

/// One divisor of all elements of a row, or one of each.
#[derive(Clone, Copy)]
enum Divisor<'a> {
    One(f32),
    Each(&'a [f32]),
}

/// Codes of values divided by their scales; nothing is lost where nobody counts.
#[inline(always)]
fn divide<S: Simd, A: Code, B: Code, const COUNT: bool>(
    simd: S,
    from: &[A],
    to: &mut [B],
    divisor: Divisor<'_>,
    within: f32,
) -> Loss {
    debug_assert_eq!(from.len(), to.len());
    let mut loss = LossOf::nothing(simd);
    let whole = to.len() - to.len() % S::LANES;
    // SAFETY: all are slices of the rows' length, and all offsets are below that.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            let values = A::load(simd, from.as_ptr().add(at));
            let divisor = match divisor {
                Divisor::One(scale) => simd.splat(scale),
                Divisor::Each(scales) => simd.load(scales.as_ptr().add(at)),
            };
            let ratios = simd.div(values, divisor);
            if COUNT {
                loss.add(simd, values, ratios, within);
            }
            B::store(simd, to.as_mut_ptr().add(at), ratios);
        }
        if whole < to.len() {
            let rest = to.len() - whole;
            let values = A::load_part(simd, from.as_ptr().add(whole), rest);
            let divisor = match divisor {
                Divisor::One(scale) => simd.splat(scale),
                Divisor::Each(scales) => f32::load_part(simd, scales.as_ptr().add(whole), rest),
            };
            let ratios = simd.div(values, divisor);
            if COUNT {
                // Lanes beyond the row are 0, or 0 / 0: neither is counted.
                loss.add(simd, values, ratios, within);
            }
            B::store_part(simd, to.as_mut_ptr().add(whole), rest, ratios);
        }
    }
    loss.total(simd)
}

/// The largest finite magnitude; 0 of no finite values.
#[inline(always)]
fn largest<S: Simd, A: Code>(simd: S, values: &[A]) -> f32 {
    let mut highest = simd.splat(0.0);
    let whole = values.len() - values.len() % S::LANES;
    // SAFETY: all offsets are within the slice.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            highest = simd.max(highest, finite_magnitude(simd, A::load(simd, values.as_ptr().add(at))));
        }
        if whole < values.len() {
            let rest = A::load_part(simd, values.as_ptr().add(whole), values.len() - whole);
            highest = simd.max(highest, finite_magnitude(simd, rest));
        }
    }
    simd.highest(highest)
}

/// The scale with which a magnitude becomes the largest code: the next smaller one where that would be infinite.
#[inline(always)]
fn scale_of(amax: f32, limit: f32) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    let scale = (amax / limit).max(f32::MIN_POSITIVE);
    if (scale * limit).is_finite() {
        scale
    } else {
        scale.next_down()
    }
}
