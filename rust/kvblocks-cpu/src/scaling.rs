//! What codes stand for: code * scale + zero. Imports `code`, `error`, `groups`,
//! `paged` and `simd`.
//!
//! Invariant: values are float32, each operation rounded; bit for bit what the NumPy specification gives.

use crate::code::{convert, with_elements, Code, Elements};
use crate::error::{check_len, product, Error, Result};
use crate::groups::{is_group_of_elements, Groups};
use crate::paged::{Cache, Paged};
use crate::simd::Simd;

/// Who shares a scale. Arrays are contiguous and in NHD order whatever the order of the codes.
#[derive(Debug, Clone, Copy)]
pub enum Scaling<'a> {
    /// Nobody has one: an element is its own value.
    None,
    /// `[num_heads]`.
    Head(&'a [f32]),
    /// `[num_heads, dim]`.
    Channel(&'a [f32]),
    /// `[num_blocks, block_size, num_heads]`.
    TokenHead(&'a [f32]),
    /// `[num_blocks, block_size, num_heads, groups]`: neighbouring elements of a row, the last group perhaps fewer.
    Group(Groups<'a>),
    /// `[num_blocks, block_size / size, num_heads, dim]`: a channel of tokens that start at a multiple of the size.
    TokenGroup(Groups<'a>),
}

impl Scaling<'_> {
    /// Whether a code times a scale is the value, so that the scale can be left for later.
    pub(crate) fn is_factor(&self) -> bool {
        !matches!(self, Self::Group(_) | Self::TokenGroup(_))
    }

    /// Elements of a row of `stored` elements.
    pub(crate) fn dim(&self, stored: usize) -> usize {
        match self {
            Self::Group(groups) | Self::TokenGroup(groups) => {
                stored.saturating_mul(8 / groups.bits.clamp(1, 8))
            }
            _ => stored,
        }
    }

    /// The arrays have the sizes that the storage needs.
    pub(crate) fn check(&self, argument: &'static str, paged: &Paged, data: &Elements<'_>) -> Result<()> {
        let (heads, slots, dim) = (paged.num_heads, paged.num_slots(), self.dim(paged.head_dim));
        match *self {
            Self::None => Ok(()),
            Self::Head(scale) => check_len(argument, scale.len(), heads),
            Self::Channel(scale) => check_len(argument, scale.len(), product(argument, &[heads, dim])?),
            Self::TokenHead(scale) => check_len(argument, scale.len(), product(argument, &[slots, heads])?),
            Self::Group(groups) | Self::TokenGroup(groups) => {
                let by_token = matches!(self, Self::TokenGroup(_));
                let is_packed = matches!(data, Elements::Packed(_)) && matches!(groups.bits, 2 | 4);
                let is_size = if by_token {
                    groups.size > 0 && paged.block_size.is_multiple_of(groups.size)
                } else {
                    is_group_of_elements(groups.size)
                };
                if !is_packed || !is_size {
                    return Err(Error::Size { argument });
                }
                let sizes = if by_token {
                    [slots / groups.size, heads, dim]
                } else {
                    [slots, heads, dim.div_ceil(groups.size)]
                };
                let len = product(argument, &sizes)?;
                check_len(argument, groups.scale.len(), len)?;
                check_len(argument, groups.zero.len(), len)
            }
        }
    }
}

impl Cache<'_> {
    /// Elements of a row as values.
    pub fn dim(&self) -> usize {
        self.scaling.dim(self.paged.head_dim)
    }

    /// Sizes, strides and scales agree with the data.
    pub(crate) fn check(&self, argument: &'static str, scales: &'static str) -> Result<()> {
        self.paged.check(argument, self.data.len())?;
        self.scaling.check(scales, &self.paged, &self.data)
    }

    /// The factor of a row's codes, besides that of its channels; 1 where they have none.
    #[inline(always)]
    pub(crate) fn factor(&self, slot: usize, head: usize) -> f32 {
        match self.scaling {
            Scaling::Head(scale) => scale[head],
            Scaling::TokenHead(scale) => scale[slot * self.paged.num_heads + head],
            _ => 1.0,
        }
    }

    /// The values of a row, into `out` of `dim` elements; `at` is where the row starts in the data.
    #[inline(always)]
    pub(crate) fn decode<S: Simd>(&self, simd: S, at: usize, slot: usize, head: usize, out: &mut [f32]) {
        let dim = out.len();
        match (self.scaling, self.data) {
            (Scaling::Group(groups), Elements::Packed(data)) => {
                let first = (slot * self.paged.num_heads + head) * dim.div_ceil(groups.size);
                match groups.bits {
                    4 => groups.decode_elements::<S, 4>(simd, &data[at..], first, out),
                    _ => groups.decode_elements::<S, 2>(simd, &data[at..], first, out),
                }
            }
            (Scaling::TokenGroup(groups), Elements::Packed(data)) => {
                let first = (slot / groups.size * self.paged.num_heads + head) * dim;
                match groups.bits {
                    4 => groups.decode_tokens::<S, 4>(simd, &data[at..], first, out),
                    _ => groups.decode_tokens::<S, 2>(simd, &data[at..], first, out),
                }
            }
            (scaling, data) => with_elements!(Elements, data, data => {
                let row = &data[at..][..dim];
                match scaling {
                    Scaling::Channel(scale) => {
                        let scale = &scale[head * dim..][..dim];
                        // SAFETY: all are slices of dim elements.
                        unsafe { multiply(simd, row.as_ptr(), Factor::Each(scale.as_ptr()), out.as_mut_ptr(), dim) };
                    }
                    Scaling::Head(_) | Scaling::TokenHead(_) => {
                        let factor = Factor::One(self.factor(slot, head));
                        // SAFETY: both are slices of dim elements.
                        unsafe { multiply(simd, row.as_ptr(), factor, out.as_mut_ptr(), dim) };
                    }
                    // SAFETY: both are slices of dim elements.
                    _ => unsafe { convert(simd, row.as_ptr(), out.as_mut_ptr(), dim) },
                }
            }),
        }
    }
}

/// One factor of all elements of a row, or one of each.
#[derive(Clone, Copy)]
enum Factor {
    One(f32),
    Each(*const f32),
}

/// Convert `len` elements, times their factors.
///
/// # Safety
/// They are readable, and writable, and do not overlap; a factor of each is readable as well.
#[inline(always)]
unsafe fn multiply<S: Simd, A: Code>(simd: S, from: *const A, factor: Factor, to: *mut f32, len: usize) {
    let whole = len - len % S::LANES;
    // SAFETY: all offsets are below len.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            let factor = match factor {
                Factor::One(factor) => simd.splat(factor),
                Factor::Each(factors) => simd.load(factors.add(at)),
            };
            simd.store(to.add(at), simd.mul(A::load(simd, from.add(at)), factor));
        }
        if whole < len {
            let rest = len - whole;
            let factor = match factor {
                Factor::One(factor) => simd.splat(factor),
                Factor::Each(factors) => f32::load_part(simd, factors.add(whole), rest),
            };
            let values = A::load_part(simd, from.add(whole), rest);
            f32::store_part(simd, to.add(whole), rest, simd.mul(values, factor));
        }
    }
}
