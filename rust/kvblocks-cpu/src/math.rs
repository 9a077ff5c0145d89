//! Elementary functions of whole vectors. Imports `simd`.
//!
//! Coefficients of the polynomials: the Cephes library's single precision functions.

use crate::simd::Simd;

/// e^x for x <= 88, to two units in the last place; exactly 0 from -104 down, and NaN for NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::F) -> S::F {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // In this order a NaN of x stays.
    let x = simd.max(simd.splat(-104.0), x);
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    let r = simd.mul_add(n, simd.splat(-LN_2_HIGH), x);
    let r = simd.mul_add(n, simd.splat(-LN_2_LOW), r);
    let mut p = simd.splat(1.987_569_1e-4);
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = simd.mul_add(p, r, simd.splat(coefficient));
    }
    let p = simd.mul_add(p, simd.mul(r, r), simd.add(r, simd.splat(1.0)));
    simd.scale(p, n)
}

/// tanh(x), to a few units in the last place, also for the smallest x.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::F) -> S::F {
    let sign = simd.and(simd.bits(x), simd.splat_bits(1 << 31));
    let magnitude = simd.as_float(simd.and(simd.bits(x), simd.splat_bits(0x7FFF_FFFF)));
    let z = simd.mul(x, x);
    let mut p = simd.splat(-5.704_988_7e-3);
    for coefficient in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = simd.mul_add(p, z, simd.splat(coefficient));
    }
    let small = simd.mul_add(simd.mul(p, z), x, x);
    // 1 - 2 / (e^2x + 1) = (1 - e^-2x) / (1 + e^-2x)
    let e = exp(simd, simd.mul(magnitude, simd.splat(-2.0)));
    let one = simd.splat(1.0);
    let large = simd.div(simd.sub(one, e), simd.add(one, e));
    let large = simd.as_float(simd.or(simd.bits(large), sign));
    simd.select(simd.less(magnitude, simd.splat(0.625)), small, large)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, Task, MAX_LANES};

    struct Apply(f32, bool);

    impl Task for Apply {
        type Output = f32;

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> f32 {
            let x = simd.splat(self.0);
            let y = if self.1 { tanh(simd, x) } else { exp(simd, x) };
            let mut lanes = [0.0; MAX_LANES];
            // SAFETY: the buffer holds the lanes of every instruction set.
            unsafe { simd.store(lanes.as_mut_ptr(), y) };
            lanes[S::LANES - 1]
        }
    }

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::NAMES.iter().filter_map(|name| Isa::named(name))
    }

    #[test]
    fn exp_agrees_with_f64() {
        for isa in isas() {
            for step in -40_000..200_000 {
                let x = -103.9 * (step as f32 / 200_000.0).powi(2) * (step as f32).signum();
                let (got, expected) = (f64::from(isa.run(Apply(x, false))), f64::from(x).exp());
                let limit = expected * 2.0f64.powi(-22) + 2.0f64.powi(-149);
                assert!((got - expected).abs() <= limit, "{isa:?} {x}: {got:e}, not {expected:e}");
            }
            assert_eq!(isa.run(Apply(0.0, false)), 1.0);
            for x in [-104.0, -1e30, f32::NEG_INFINITY] {
                assert_eq!(isa.run(Apply(x, false)).to_bits(), 0, "{isa:?} {x}");
            }
            assert!(isa.run(Apply(f32::NAN, false)).is_nan());
        }
    }

    #[test]
    fn tanh_agrees_with_f64() {
        for isa in isas() {
            for step in -100_000..100_000 {
                let x = 12.0 * (step as f32 / 100_000.0).powi(3);
                let (got, expected) = (f64::from(isa.run(Apply(x, true))), f64::from(x).tanh());
                let limit = expected.abs() * 2.0f64.powi(-21);
                assert!((got - expected).abs() <= limit, "{isa:?} {x}: {got:e}, not {expected:e}");
            }
            for x in [1e-40, -1e-30, 0.0] {
                assert_eq!(isa.run(Apply(x, true)), x);
            }
            assert_eq!(isa.run(Apply(f32::INFINITY, true)), 1.0);
            assert_eq!(isa.run(Apply(f32::NEG_INFINITY, true)), -1.0);
            assert!(isa.run(Apply(f32::NAN, true)).is_nan());
        }
    }
}
