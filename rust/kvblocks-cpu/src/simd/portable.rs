//! Eight lanes in plain Rust, for any processor; the compiler may vectorise it.

use super::{Simd, Task};
use crate::code::{e4m3_value, e5m2_value};

/// Plain Rust.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Portable;

const LANES: usize = 8;
type F = [f32; LANES];
type I = [u32; LANES];

#[inline(always)]
fn lanes<T>(lane: impl Fn(usize) -> T) -> [T; LANES] {
    std::array::from_fn(lane)
}

/// # Safety
/// `LANES` elements from the pointer on are readable.
#[inline(always)]
unsafe fn read<T: Copy>(from: *const T) -> [T; LANES] {
    // SAFETY: the caller's.
    unsafe { from.cast::<[T; LANES]>().read_unaligned() }
}

/// # Safety
/// `LANES` elements from the pointer on are writable.
#[inline(always)]
unsafe fn write<T: Copy>(to: *mut T, values: [T; LANES]) {
    // SAFETY: the caller's.
    unsafe { to.cast::<[T; LANES]>().write_unaligned(values) }
}

impl Simd for Portable {
    type F = F;
    type I = I;
    type M = [bool; LANES];
    /// Scale and zero.
    type Table = [f32; 2];
    const LANES: usize = LANES;
    const VECTORS: usize = 2;
    const BF16: bool = false;

    #[inline(always)]
    fn vectorize<T: Task>(self, task: T) -> T::Output {
        task.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> F {
        [value; LANES]
    }

    #[inline(always)]
    fn iota(self) -> F {
        lanes(|i| i as f32)
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        lanes(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        lanes(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        lanes(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        lanes(|i| a[i] / b[i])
    }

    /// Rounded twice: without the instruction, `f32::mul_add` is a slow function.
    #[inline(always)]
    fn mul_add(self, a: F, b: F, c: F) -> F {
        lanes(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        lanes(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn round(self, a: F) -> F {
        // Adding 1.5 * 2^23 leaves no bits for a fraction; what is larger than that has none.
        const SHIFT: f32 = 12_582_912.0;
        lanes(|i| if a[i].abs() < 4_194_304.0 { (a[i] + SHIFT) - SHIFT } else { a[i].round_ties_even() })
    }

    #[inline(always)]
    fn scale(self, a: F, n: F) -> F {
        // In two factors, as 2^n alone may be subnormal where the product is rounded only once.
        let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
        lanes(|i| {
            let n = n[i] as i32;
            a[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }

    #[inline(always)]
    fn less(self, a: F, b: F) -> [bool; LANES] {
        lanes(|i| a[i] < b[i])
    }

    #[inline(always)]
    fn is_nan(self, a: F) -> [bool; LANES] {
        lanes(|i| a[i].is_nan())
    }

    #[inline(always)]
    fn any(self, mask: [bool; LANES]) -> bool {
        mask.contains(&true)
    }

    #[inline(always)]
    fn select(self, mask: [bool; LANES], a: F, b: F) -> F {
        lanes(|i| if mask[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn bits(self, a: F) -> I {
        lanes(|i| a[i].to_bits())
    }

    #[inline(always)]
    fn as_float(self, a: I) -> F {
        lanes(|i| f32::from_bits(a[i]))
    }

    #[inline(always)]
    fn splat_bits(self, value: u32) -> I {
        [value; LANES]
    }

    #[inline(always)]
    fn and(self, a: I, b: I) -> I {
        lanes(|i| a[i] & b[i])
    }

    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        lanes(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn add_bits(self, a: I, b: I) -> I {
        lanes(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn shift_left<const N: u32>(self, a: I) -> I {
        lanes(|i| a[i] << N)
    }

    #[inline(always)]
    fn shift_right<const N: u32>(self, a: I) -> I {
        lanes(|i| a[i] >> N)
    }

    #[inline(always)]
    fn select_bits(self, mask: [bool; LANES], a: I, b: I) -> I {
        lanes(|i| if mask[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn to_float(self, a: I) -> F {
        lanes(|i| a[i] as i32 as f32)
    }

    #[inline(always)]
    fn to_int(self, a: F) -> I {
        self.round(a).map(|value| value as i32 as u32)
    }

    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }

    #[inline(always)]
    fn highest(self, a: F) -> f32 {
        a.iter().copied().fold(f32::NEG_INFINITY, |high, value| if high > value { high } else { value })
    }

    #[inline(always)]
    fn sum_4(self, a: [F; 4]) -> [f32; 4] {
        a.map(|a| self.sum(a))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> F {
        // SAFETY: the caller's.
        unsafe { read(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: F) {
        // SAFETY: the caller's.
        unsafe { write(to, a) }
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u32) -> I {
        // SAFETY: the caller's.
        unsafe { read(from) }
    }

    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> I {
        // SAFETY: the caller's.
        unsafe { read(from) }.map(u32::from)
    }

    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> I {
        // SAFETY: the caller's.
        unsafe { read(from) }.map(|value| i32::from(value) as u32)
    }

    #[inline(always)]
    unsafe fn load_u16(self, from: *const u16) -> I {
        // SAFETY: the caller's.
        unsafe { read(from) }.map(u32::from)
    }

    #[inline(always)]
    unsafe fn store_u8(self, to: *mut u8, a: I) {
        // SAFETY: the caller's.
        unsafe { write(to, a.map(|value| value as u8)) }
    }

    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16, a: I) {
        // SAFETY: the caller's.
        unsafe { write(to, a.map(|value| value as u16)) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> F {
        // SAFETY: the caller's.
        unsafe { read(from) }.map(|bits| half::f16::from_bits(bits).to_f32_const())
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, a: F) {
        // SAFETY: the caller's.
        unsafe { write(to, a.map(|value| half::f16::from_f32_const(value).to_bits())) }
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> F {
        // SAFETY: the caller's.
        unsafe { read(from) }.map(e4m3_value)
    }

    #[inline(always)]
    unsafe fn load_e5m2(self, from: *const u8) -> F {
        // SAFETY: the caller's.
        unsafe { read(from) }.map(e5m2_value)
    }

    #[inline(always)]
    fn half(self, bits: u16) -> f32 {
        half::f16::from_bits(bits).to_f32_const()
    }

    #[inline(always)]
    fn table<const BITS: usize>(self, scale: f32, zero: f32) -> [f32; 2] {
        [scale, zero]
    }

    #[inline(always)]
    fn look_up<const BITS: usize>(self, [scale, zero]: [f32; 2], codes: I) -> F {
        codes.map(|code| (code & ((1 << BITS) - 1)) as f32 * scale + zero)
    }

    #[inline(always)]
    unsafe fn load_codes<const BITS: usize>(self, from: *const u8) -> I {
        // SAFETY: the caller's: LANES * BITS / 8 = BITS bytes.
        let packed = unsafe {
            if BITS == 2 {
                u32::from(from.cast::<u16>().read_unaligned().to_le())
            } else {
                from.cast::<u32>().read_unaligned().to_le()
            }
        };
        lanes(|i| packed >> (i * BITS))
    }

    #[inline(always)]
    unsafe fn store_codes<const BITS: usize>(self, to: *mut u8, codes: I) {
        let packed = codes.iter().enumerate().fold(0, |packed, (lane, code)| packed | code << (lane * BITS));
        // SAFETY: the caller's: LANES * BITS / 8 = BITS bytes.
        unsafe { std::ptr::copy_nonoverlapping(packed.to_le_bytes().as_ptr(), to, BITS) }
    }

    #[inline(always)]
    fn prefetch_near(self, _: *const u8) {}

    #[inline(always)]
    fn prefetch_far(self, _: *const u8) {}
}
