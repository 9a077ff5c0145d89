//! The number formats that a cache, a query or an output may have, one element at a time. Imports `simd`.
//!
//! Invariant: conversion to f32 is exact; conversion from f32 rounds to nearest even and keeps a NaN a NaN.

use half::{bf16, f16};

use crate::simd::{Simd, MAX_LANES};

/// One element as it is stored.
pub(crate) trait Code: Copy + Send + Sync + 'static {
    const ZERO: Self;

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

/// Elements of one type.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// IEEE single precision.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// The upper half of an f32.
    Bf16(&'a [bf16]),
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
}

/// Run a body with `$slice` standing for the typed slice in an `Elements` or `ElementsMut`.
macro_rules! with_elements {
    ($kind:ident, $elements:expr, $slice:ident => $body:expr) => {
        match $elements {
            $crate::code::$kind::F32($slice) => $body,
            $crate::code::$kind::F16($slice) => $body,
            $crate::code::$kind::Bf16($slice) => $body,
        }
    };
}
pub(crate) use with_elements;

impl Elements<'_> {
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

/// The value of an e4m3 code: sign, 4 bits of exponent, 3 of mantissa, no infinity.
pub(crate) fn e4m3_value(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7F);
    let sign = u32::from(code & 0x80) << 24;
    match magnitude {
        0x7F => f32::NAN,
        0..8 => f32::from_bits((magnitude as f32 * 2.0f32.powi(-9)).to_bits() | sign),
        _ => f32::from_bits(((magnitude << 20) + (120 << 23)) | sign),
    }
}

/// The value of an e5m2 code: the upper half of an f16.
pub(crate) fn e5m2_value(code: u8) -> f32 {
    f16::from_bits(u16::from(code) << 8).to_f32_const()
}
