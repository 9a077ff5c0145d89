//! What codes stand for: code * scale + zero. Imports `code`, `error`, `paged` and `simd`.
//!
//! Invariant: values are float32, each operation rounded; bit for bit what the NumPy specification gives.

use half::f16;

use crate::code::{convert, with_elements, Elements};
use crate::error::{check_len, product, Error, Result};
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

/// Scales and zeros of groups, and how their codes are packed: the first in the lowest bits.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// Elements, or tokens, of a group.
    pub size: usize,
    /// Bits of a code: 2 or 4.
    pub bits: usize,
    /// What a step of the code is worth.
    pub scale: &'a [f16],
    /// What the code 0 is worth.
    pub zero: &'a [f16],
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
                if !is_packed
                    || groups.size == 0
                    || (by_token && !paged.block_size.is_multiple_of(groups.size))
                {
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
        match self.scaling {
            Scaling::Group(groups) => {
                let num_groups = dim.div_ceil(groups.size);
                let first = (slot * self.paged.num_heads + head) * num_groups;
                self.unpack(groups.bits, at, out);
                for (group, out) in out.chunks_mut(groups.size).enumerate() {
                    let (scale, zero) =
                        (groups.scale[first + group].to_f32(), groups.zero[first + group].to_f32());
                    out.iter_mut().for_each(|value| *value = *value * scale + zero);
                }
            }
            Scaling::TokenGroup(groups) => {
                let first = (slot / groups.size * self.paged.num_heads + head) * dim;
                self.unpack(groups.bits, at, out);
                let mut buffer = [[0.0f32; 64]; 2];
                for (chunk, out) in out.chunks_mut(64).enumerate() {
                    let first = first + chunk * 64;
                    let [scale, zero] = &mut buffer;
                    // SAFETY: `check` has compared the sizes; a chunk has at most 64 elements.
                    unsafe {
                        convert(
                            simd,
                            groups.scale[first..][..out.len()].as_ptr(),
                            scale.as_mut_ptr(),
                            out.len(),
                        );
                        convert(
                            simd,
                            groups.zero[first..][..out.len()].as_ptr(),
                            zero.as_mut_ptr(),
                            out.len(),
                        );
                    }
                    for ((value, scale), zero) in out.iter_mut().zip(scale).zip(zero) {
                        *value = *value * *scale + *zero;
                    }
                }
            }
            _ => {
                with_elements!(Elements, self.data, data => {
                    let row = &data[at..][..dim];
                    // SAFETY: both are slices of dim elements.
                    unsafe { convert(simd, row.as_ptr(), out.as_mut_ptr(), dim) };
                });
                match self.scaling {
                    Scaling::Channel(scale) => {
                        let scale = &scale[head * dim..][..dim];
                        out.iter_mut().zip(scale).for_each(|(value, scale)| *value *= scale);
                    }
                    Scaling::Head(_) | Scaling::TokenHead(_) => {
                        let factor = self.factor(slot, head);
                        out.iter_mut().for_each(|value| *value *= factor);
                    }
                    _ => {}
                }
            }
        }
    }

    /// The packed codes of a row as numbers.
    #[inline(always)]
    fn unpack(&self, bits: usize, at: usize, out: &mut [f32]) {
        let Elements::Packed(data) = self.data else { return };
        if bits == 4 {
            for (out, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(&data[at..]) {
                *out = [f32::from(byte & 15), f32::from(byte >> 4)];
            }
        } else {
            for (out, byte) in out.as_chunks_mut::<4>().0.iter_mut().zip(&data[at..]) {
                *out = [0, 2, 4, 6].map(|shift| f32::from(byte >> shift & 3));
            }
        }
    }
}
