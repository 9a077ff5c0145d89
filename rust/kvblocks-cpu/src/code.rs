//! The number formats that a cache, a query or an output may have, one element at a time. Imports `error` and `simd`.
//!
//! Invariant: conversion to f32 is exact; conversion from f32 rounds to nearest even and keeps a NaN a NaN.

use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::simd::{Simd, MAX_LANES};

/// One element as it is stored.
pub(crate) trait Code: Copy + Send + Sync + 'static {
    const ZERO: Self;
    /// What is added to each number in pairs, for it to be a bf16.
    const PAIR_OFFSET: f32 = 0.0;

    /// `S::LANES` elements as f32.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F;

    /// `S::LANES` rounded elements.
    ///
    /// # Safety
    /// They are writable.
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, values: S::F);

    /// Vectors of pairs of bf16 that a block of elements becomes; 0 where there is no quick way to it.
    ///
    /// A row of whole blocks can then be multiplied, and added up, without becoming f32 first.
    #[inline(always)]
    fn vectors_of_pairs<S: Simd>() -> usize {
        0
    }

    /// A block of `vectors_of_pairs * 2 * S::LANES` elements; only so many of the vectors count.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn load_pairs<S: Simd>(simd: S, from: *const Self) -> [S::I; 2] {
        let _ = from;
        [simd.splat_bits(0); 2]
    }

    /// Which element of its block the low half of a lane of a vector is; the high half is the next one.
    fn place_of_pair(vector: usize, lane: usize) -> usize {
        let _ = vector;
        2 * lane
    }

    /// Whether going in pairs is the quickest way to f32 as well.
    #[inline(always)]
    fn widens_by_pairs<S: Simd>() -> bool {
        Self::vectors_of_pairs::<S>() > 0
    }

    /// A block of each of two rows, as they are stored, in pairs of bf16 of the first and the second row: twice
    /// `vectors_of_pairs` vectors; only so many count. Only where `S::BF16` is true.
    #[inline(always)]
    fn pair_rows<S: Simd>(simd: S, a: S::I, b: S::I) -> [S::I; 4] {
        let _ = (a, b);
        [simd.splat_bits(0); 4]
    }

    /// Which element of its block a lane of a vector of `pair_rows` is.
    fn place_of_row_pair(vector: usize, lane: usize) -> usize {
        vector * 4 + lane % 4 + lane / 4 * 8
    }

    /// The first `len` lanes from memory, 0 in the others.
    ///
    /// # Safety
    /// `len` elements are readable, and `len` is below `S::LANES`.
    #[inline(always)]
    unsafe fn load_part<S: Simd>(simd: S, from: *const Self, len: usize) -> S::F {
        let mut buffer = [Self::ZERO; MAX_LANES];
        // SAFETY: the caller's; the buffer holds the lanes of every instruction set.
        unsafe {
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), len);
            Self::load(simd, buffer.as_ptr())
        }
    }

    /// The first `len` lanes to memory.
    ///
    /// # Safety
    /// `len` elements are writable, and `len` is below `S::LANES`.
    #[inline(always)]
    unsafe fn store_part<S: Simd>(simd: S, to: *mut Self, len: usize, values: S::F) {
        let mut buffer = [Self::ZERO; MAX_LANES];
        // SAFETY: the caller's; the buffer holds the lanes of every instruction set.
        unsafe {
            Self::store(simd, buffer.as_mut_ptr(), values);
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, len);
        }
    }
}

impl Code for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's.
        unsafe { simd.load(from) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, values: S::F) {
        // SAFETY: the caller's.
        unsafe { simd.store(to, values) }
    }
}

impl Code for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's; an f16 is its bits.
        unsafe { simd.load_f16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, values: S::F) {
        // SAFETY: the caller's; an f16 is its bits.
        unsafe { simd.store_f16(to.cast(), values) }
    }
}

impl Code for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn vectors_of_pairs<S: Simd>() -> usize {
        1
    }

    #[inline(always)]
    unsafe fn load_pairs<S: Simd>(simd: S, from: *const Self) -> [S::I; 2] {
        // SAFETY: the caller's.
        [unsafe { simd.load_bits(from.cast()) }, simd.splat_bits(0)]
    }

    #[inline(always)]
    fn pair_rows<S: Simd>(simd: S, a: S::I, b: S::I) -> [S::I; 4] {
        let [low, high] = simd.interleave::<16>(a, b);
        [low, high, low, high]
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's; a bf16 is its bits, the upper half of an f32.
        simd.as_float(simd.shift_left::<16>(unsafe { simd.load_u16(from.cast()) }))
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, values: S::F) {
        let bits = simd.bits(values);
        let high = simd.shift_right::<16>(bits);
        // Half of the dropped field, less one if the kept part is even; the carry may run into the exponent.
        let odd = simd.and(high, simd.splat_bits(1));
        let rounded = simd.add_bits(simd.add_bits(bits, simd.splat_bits(0x7FFF)), odd);
        // The quiet bit: a NaN whose payload lies in the dropped half must not become infinite.
        let nan = simd.or(high, simd.splat_bits(0x40));
        let kept = simd.select_bits(simd.is_nan(values), nan, simd.shift_right::<16>(rounded));
        // SAFETY: the caller's; a bf16 is its bits.
        unsafe { simd.store_u16(to.cast(), kept) }
    }
}

/// An 8-bit float: sign, 4 bits of exponent, 3 of mantissa, no infinity, NaN in the largest codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// An 8-bit float: the upper half of an f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct E5m2(pub u8);

macro_rules! fp8 {
    ($type:ident, $load:ident, $value:path, mantissa: $mantissa:literal, bias: $bias:literal, limit: $limit:literal) => {
        impl $type {
            /// The largest magnitude of a code.
            pub const LIMIT: f32 = $limit;

            /// Codes of bytes.
            pub fn from_bytes(bytes: &[u8]) -> &[Self] {
                // SAFETY: the type is its byte.
                unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
            }

            /// Codes of bytes.
            pub fn from_bytes_mut(bytes: &mut [u8]) -> &mut [Self] {
                // SAFETY: the type is its byte, and every byte is a code.
                unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len()) }
            }

            /// The two bytes of the bf16 that each magnitude is, low bytes first; exact, NaN included.
            const PAIRS: [[u8; 128]; 2] = {
                let mut tables = [[0; 128]; 2];
                let mut magnitude = 0;
                while magnitude < 128 {
                    let bits = $value(magnitude as u8).to_bits();
                    // A NaN of any payload, as a quiet one.
                    let bits = if bits > 0x7F80_0000 { 0x7FC0_0000 } else { bits };
                    tables[0][magnitude] = (bits >> 16) as u8;
                    tables[1][magnitude] = (bits >> 24) as u8;
                    magnitude += 1;
                }
                tables
            };
        }

        impl Code for $type {
            const ZERO: Self = $type(0);

            #[inline(always)]
            fn vectors_of_pairs<S: Simd>() -> usize {
                if S::BF16 {
                    2
                } else {
                    0
                }
            }

            #[inline(always)]
            unsafe fn load_pairs<S: Simd>(simd: S, from: *const Self) -> [S::I; 2] {
                // SAFETY: the caller's.
                let codes = unsafe { simd.load_bits(from.cast()) };
                simd.look_up_pairs(codes, codes, &Self::PAIRS)
            }

            /// The bytes of each 16-byte part are paired in two halves of it: 8 to the first vector, 8 to the second.
            fn place_of_pair(vector: usize, lane: usize) -> usize {
                lane / 4 * 16 + vector * 8 + lane % 4 * 2
            }

            #[inline(always)]
            fn pair_rows<S: Simd>(simd: S, a: S::I, b: S::I) -> [S::I; 4] {
                let [low, high] = simd.interleave::<8>(a, b);
                let [first, second] = simd.look_up_pairs(low, low, &Self::PAIRS);
                let [third, fourth] = simd.look_up_pairs(high, high, &Self::PAIRS);
                [first, second, third, fourth]
            }

            fn place_of_row_pair(vector: usize, lane: usize) -> usize {
                lane / 4 * 16 + vector * 4 + lane % 4
            }

            #[inline(always)]
            unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
                // SAFETY: the caller's.
                unsafe { simd.$load(from.cast()) }
            }

            /// Beyond the limit, an infinity included, the largest code.
            #[inline(always)]
            unsafe fn store<S: Simd>(simd: S, to: *mut Self, values: S::F) {
                const DROPPED: u32 = 23 - $mantissa;
                let sign = simd.and(simd.shift_right::<24>(simd.bits(values)), simd.splat_bits(0x80));
                let magnitude = simd.as_float(simd.and(simd.bits(values), simd.splat_bits(0x7FFF_FFFF)));
                let nan = simd.is_nan(magnitude);
                let magnitude = simd.min(simd.splat($limit), magnitude);
                let wide = simd.bits(magnitude);
                // Half of the dropped field, less one if the kept part is even; the carry may run into the exponent.
                let odd = simd.and(simd.shift_right::<DROPPED>(wide), simd.splat_bits(1));
                let half = simd.splat_bits((1 << (DROPPED - 1)) - 1);
                let rounded = simd.shift_right::<DROPPED>(simd.add_bits(simd.add_bits(wide, half), odd));
                let normal = simd
                    .add_bits(rounded, simd.splat_bits((((127 - $bias) << $mantissa) as u32).wrapping_neg()));
                // Below the smallest normal number the steps are even; the multiplication is exact.
                let steps = simd.splat((1u32 << ($bias - 1 + $mantissa)) as f32);
                let subnormal = simd.to_int(simd.mul(magnitude, steps));
                let is_subnormal = simd.less(magnitude, simd.splat(1.0 / (1u32 << ($bias - 1)) as f32));
                let code = simd.select_bits(is_subnormal, subnormal, normal);
                let code = simd.select_bits(nan, simd.splat_bits(0x7F), code);
                // SAFETY: the caller's; the type is its byte.
                unsafe { simd.store_u8(to.cast(), simd.or(code, sign)) }
            }
        }
    };
}

fp8!(E4m3, load_e4m3, e4m3_value, mantissa: 3, bias: 7, limit: 448.0);
fp8!(E5m2, load_e5m2, e5m2_value, mantissa: 2, bias: 15, limit: 57344.0);

/// The two bytes of the bf16 that i + 0.5 is, low bytes first: as -1 - i is the same with a sign, 128 of them are enough.
const HALVES: [[u8; 128]; 2] = {
    let mut tables = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let bits = (code as f32 + 0.5).to_bits();
        tables[0][code] = (bits >> 16) as u8;
        tables[1][code] = (bits >> 24) as u8;
        code += 1;
    }
    tables
};

impl Code for i8 {
    const ZERO: Self = 0;
    const PAIR_OFFSET: f32 = 0.5;

    #[inline(always)]
    fn vectors_of_pairs<S: Simd>() -> usize {
        if S::BF16 {
            2
        } else {
            0
        }
    }

    #[inline(always)]
    fn widens_by_pairs<S: Simd>() -> bool {
        false
    }

    #[inline(always)]
    unsafe fn load_pairs<S: Simd>(simd: S, from: *const Self) -> [S::I; 2] {
        // SAFETY: the caller's.
        let codes = unsafe { simd.load_bits(from.cast()) };
        simd.look_up_pairs(simd.fold_bytes(codes), codes, &HALVES)
    }

    fn place_of_pair(vector: usize, lane: usize) -> usize {
        E4m3::place_of_pair(vector, lane)
    }

    #[inline(always)]
    fn pair_rows<S: Simd>(simd: S, a: S::I, b: S::I) -> [S::I; 4] {
        let [low, high] = simd.interleave::<8>(a, b);
        let [first, second] = simd.look_up_pairs(simd.fold_bytes(low), low, &HALVES);
        let [third, fourth] = simd.look_up_pairs(simd.fold_bytes(high), high, &HALVES);
        [first, second, third, fourth]
    }

    fn place_of_row_pair(vector: usize, lane: usize) -> usize {
        E4m3::place_of_row_pair(vector, lane)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's.
        simd.to_float(unsafe { simd.load_i8(from) })
    }

    /// Within -127..=127; a NaN is 0.
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, values: S::F) {
        let within = simd.max(simd.splat(-127.0), simd.min(simd.splat(127.0), values));
        let number = simd.select(simd.is_nan(values), simd.splat(0.0), within);
        // SAFETY: the caller's.
        unsafe { simd.store_u8(to.cast(), simd.to_int(number)) }
    }
}

/// Packed codes, as the bytes that they are.
impl Code for u8 {
    const ZERO: Self = 0;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F {
        // SAFETY: the caller's.
        simd.to_float(unsafe { simd.load_u8(from) })
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, to: *mut Self, values: S::F) {
        // SAFETY: the caller's.
        unsafe { simd.store_u8(to, simd.to_int(values)) }
    }
}

/// Elements of one type.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// The upper half of an f32.
    Bf16(&'a [bf16]),
    /// Codes of a format with scales.
    E4m3(&'a [E4m3]),
    /// Codes of a format with scales.
    E5m2(&'a [E5m2]),
    /// Codes of a format with scales.
    I8(&'a [i8]),
    /// Bytes of packed codes of a format with scales and zeros.
    Packed(&'a [u8]),
}

/// Elements of one type, to be written.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    /// IEEE single precision.
    F32(&'a mut [f32]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
    /// The upper half of an f32.
    Bf16(&'a mut [bf16]),
    /// Codes of a format with scales.
    E4m3(&'a mut [E4m3]),
    /// Codes of a format with scales.
    E5m2(&'a mut [E5m2]),
    /// Codes of a format with scales.
    I8(&'a mut [i8]),
    /// Bytes of packed codes of a format with scales and zeros.
    Packed(&'a mut [u8]),
}

/// Run a body with `$slice` standing for the typed slice in an `Elements` or `ElementsMut`.
macro_rules! with_elements {
    ($kind:ident, $elements:expr, $slice:ident => $body:expr) => {
        match $elements {
            $crate::code::$kind::F32($slice) => $body,
            $crate::code::$kind::F16($slice) => $body,
            $crate::code::$kind::Bf16($slice) => $body,
            $crate::code::$kind::E4m3($slice) => $body,
            $crate::code::$kind::E5m2($slice) => $body,
            $crate::code::$kind::I8($slice) => $body,
            $crate::code::$kind::Packed($slice) => $body,
        }
    };
}
pub(crate) use with_elements;

/// The same for plain numbers, with a body for codes of formats with scales: fewer instances to compile.
macro_rules! with_floats {
    ($kind:ident, $elements:expr, $slice:ident => $body:expr, else $other:expr) => {
        match $elements {
            $crate::code::$kind::F32($slice) => $body,
            $crate::code::$kind::F16($slice) => $body,
            $crate::code::$kind::Bf16($slice) => $body,
            _ => $other,
        }
    };
}
pub(crate) use with_floats;

impl Elements<'_> {
    /// Err(Codes) for codes of formats with scales.
    pub(crate) fn check_floats(&self, argument: &'static str) -> Result<()> {
        with_floats!(Elements, self, _slice => Ok(()), else Err(Error::Codes { argument }))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_elements!(Elements, self, slice => slice.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ElementsMut<'_> {
    /// Err(Codes) for codes of formats with scales.
    pub(crate) fn check_floats(&self, argument: &'static str) -> Result<()> {
        with_floats!(ElementsMut, self, _slice => Ok(()), else Err(Error::Codes { argument }))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_elements!(ElementsMut, self, slice => slice.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Convert `len` elements.
///
/// # Safety
/// They are readable and writable, and do not overlap.
#[inline(always)]
pub(crate) unsafe fn convert<S: Simd, A: Code, B: Code>(simd: S, from: *const A, to: *mut B, len: usize) {
    let whole = len - len % S::LANES;
    // SAFETY: all offsets are below len.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            B::store(simd, to.add(at), A::load(simd, from.add(at)));
        }
        if whole < len {
            let values = A::load_part(simd, from.add(whole), len - whole);
            B::store_part(simd, to.add(whole), len - whole, values);
        }
    }
}

/// The value of an e4m3 code.
pub(crate) const fn e4m3_value(code: u8) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    let sign = ((code & 0x80) as u32) << 24;
    match magnitude {
        0x7F => f32::NAN,
        // Steps of 2^-9.
        0..8 => f32::from_bits((magnitude as f32 / 512.0).to_bits() | sign),
        _ => f32::from_bits(((magnitude << 20) + (120 << 23)) | sign),
    }
}

/// The value of an e5m2 code.
pub(crate) const fn e5m2_value(code: u8) -> f32 {
    f16::from_bits((code as u16) << 8).to_f32_const()
}
