//! Packed codes that share a scale and a zero point in groups: what they stand for. Imports `code` and `simd`.
//!
//! Invariant: values are float32, product and sum rounded; bit for bit what the NumPy specification gives.

use half::f16;

use crate::code::Code;
use crate::simd::{Simd, MAX_LANES};

/// Scales and zeros of groups, and how their codes are packed: the first in the lowest bits.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// Elements of a group, a multiple of 32; or tokens of a group.
    pub size: usize,
    /// Bits of a code: 2 or 4.
    pub bits: usize,
    /// What a step of the code is worth.
    pub scale: &'a [f16],
    /// What the code 0 is worth.
    pub zero: &'a [f16],
}

/// Whether neighbouring elements of a row can be a group: two vectors of every instruction set, or more such pairs.
pub(crate) fn is_group_of_elements(size: usize) -> bool {
    size > 0 && size.is_multiple_of(2 * MAX_LANES)
}

impl Groups<'_> {
    /// The values of a row whose groups are neighbouring elements; `first` is its first group.
    #[inline(always)]
    pub(crate) fn decode_elements<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        packed: &[u8],
        first: usize,
        out: &mut [f32],
    ) {
        let packed = &packed[..out.len() * BITS / 8];
        let (scale, zero) = (&self.scale[first..], &self.zero[first..]);
        for (group, out) in out.chunks_mut(self.size).enumerate() {
            let table =
                simd.table::<BITS>(simd.half(scale[group].to_bits()), simd.half(zero[group].to_bits()));
            let (whole, start) = (out.len() - out.len() % S::LANES, group * self.size);
            // SAFETY: `packed` has the bytes of all elements, and all offsets are below that.
            unsafe {
                for at in (0..whole).step_by(S::LANES) {
                    let codes = simd.load_codes::<BITS>(packed.as_ptr().add((start + at) * BITS / 8));
                    simd.store(out.as_mut_ptr().add(at), simd.look_up::<BITS>(table, codes));
                }
                if whole < out.len() {
                    let rest = out.len() - whole;
                    let from = packed.as_ptr().add((start + whole) * BITS / 8);
                    let values = simd.look_up::<BITS>(table, load_codes_part::<S, BITS>(simd, from, rest));
                    f32::store_part(simd, out.as_mut_ptr().add(whole), rest, values);
                }
            }
        }
    }

    /// The values of a row whose elements have groups of their own, of several tokens; `first` is that of element 0.
    #[inline(always)]
    pub(crate) fn decode_tokens<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        packed: &[u8],
        first: usize,
        out: &mut [f32],
    ) {
        let packed = &packed[..out.len() * BITS / 8];
        let (scale, zero) = (&self.scale[first..][..out.len()], &self.zero[first..][..out.len()]);
        let codes_themselves = simd.table::<BITS>(1.0, 0.0);
        let whole = out.len() - out.len() % S::LANES;
        // SAFETY: all have the elements of the row, and all offsets are below that.
        unsafe {
            for at in (0..whole).step_by(S::LANES) {
                let codes = simd.load_codes::<BITS>(packed.as_ptr().add(at * BITS / 8));
                let values = simd.mul(
                    simd.look_up::<BITS>(codes_themselves, codes),
                    f16::load(simd, scale.as_ptr().add(at)),
                );
                let values = simd.add(values, f16::load(simd, zero.as_ptr().add(at)));
                simd.store(out.as_mut_ptr().add(at), values);
            }
            if whole < out.len() {
                let rest = out.len() - whole;
                let codes = load_codes_part::<S, BITS>(simd, packed.as_ptr().add(whole * BITS / 8), rest);
                let values = simd.mul(
                    simd.look_up::<BITS>(codes_themselves, codes),
                    f16::load_part(simd, scale.as_ptr().add(whole), rest),
                );
                let values = simd.add(values, f16::load_part(simd, zero.as_ptr().add(whole), rest));
                f32::store_part(simd, out.as_mut_ptr().add(whole), rest, values);
            }
        }
    }
}

/// The first `len` packed codes, and 0 in the other lanes.
///
/// # Safety
/// `len * BITS / 8` bytes are readable, and `len` is below `S::LANES`.
#[inline(always)]
pub(crate) unsafe fn load_codes_part<S: Simd, const BITS: usize>(
    simd: S,
    from: *const u8,
    len: usize,
) -> S::I {
    let mut buffer = [0; MAX_LANES / 2];
    // SAFETY: the caller's; the buffer holds the codes of every instruction set.
    unsafe {
        std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), len * BITS / 8);
        simd.load_codes::<BITS>(buffer.as_ptr())
    }
}

/// Pack the first `len` codes.
///
/// # Safety
/// `len * BITS / 8` bytes are writable, and `len` is below `S::LANES`.
#[inline(always)]
pub(crate) unsafe fn store_codes_part<S: Simd, const BITS: usize>(
    simd: S,
    to: *mut u8,
    len: usize,
    codes: S::I,
) {
    let mut buffer = [0; MAX_LANES / 2];
    // SAFETY: the caller's; the buffer holds the codes of every instruction set.
    unsafe {
        simd.store_codes::<BITS>(buffer.as_mut_ptr(), codes);
        std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, len * BITS / 8);
    }
}
