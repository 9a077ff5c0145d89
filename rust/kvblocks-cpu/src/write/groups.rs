//! Storing tokens in formats whose packed codes share a scale and a zero point in groups. Imports `code`, `groups`,
//! `paged`, `simd`, `threads` and `losses`.
//!
//! Over the finite values of a group, held within f16's range, and 0 if there are none: the zero is the smallest one as
//! an f16, a step what is left divided by the largest code. Invariant: codes, scales and zeros are those of the NumPy
//! specification, bit for bit; neither a scale nor a zero is ever -0.

use half::f16;

use super::losses::{LossOf, Losses};
use super::{Target, UNIT_ELEMENTS};
use crate::code::{convert, Code};
use crate::error::{check_len, product, Error, Result};
use crate::groups::{is_group_of_elements, store_codes_part};
use crate::paged::Paged;
use crate::simd::{Simd, Task, MAX_LANES};
use crate::threads::Parts;

/// What f16 ends at.
const LARGEST_HALF: f32 = 65504.0;

/// Scales and zeros of groups, to be written with the codes; see `Groups`.
#[derive(Debug)]
pub struct GroupsMut<'a> {
    /// Elements of a group, a multiple of 32; or tokens of a group.
    pub size: usize,
    /// Bits of a code: 2 or 4.
    pub bits: usize,
    /// What a step of the code is worth.
    pub scale: &'a mut [f16],
    /// What the code 0 is worth.
    pub zero: &'a mut [f16],
}

/// The groups that threads share.
pub(super) struct SharedGroups<'a> {
    pub size: usize,
    bits: usize,
    /// Whether a group is an element of several tokens.
    pub of_tokens: bool,
    /// Elements of a row.
    pub dim: usize,
    scale: Parts<'a, f16>,
    zero: Parts<'a, f16>,
}

impl<'a> SharedGroups<'a> {
    pub(super) fn new(groups: GroupsMut<'a>, of_tokens: bool, paged: &Paged) -> Result<Self> {
        let GroupsMut { size, bits, scale, zero } = groups;
        let (argument, heads, slots) = ("scale", paged.num_heads, paged.num_slots());
        let is_size = if of_tokens {
            size > 0 && paged.block_size.is_multiple_of(size)
        } else {
            is_group_of_elements(size)
        };
        if !is_size || !matches!(bits, 2 | 4) {
            return Err(Error::Size { argument });
        }
        let dim = product(argument, &[paged.head_dim, 8 / bits])?;
        let sizes = if of_tokens { [slots / size, heads, dim] } else { [slots, heads, dim.div_ceil(size)] };
        let len = product(argument, &sizes)?;
        check_len(argument, scale.len(), len)?;
        check_len("zero", zero.len(), len)?;
        Ok(Self { size, bits, of_tokens, dim, scale: Parts::new(scale), zero: Parts::new(zero) })
    }

    /// Tokens that are one unit of work.
    pub(super) fn unit_tokens(&self, num_heads: usize) -> usize {
        let tokens = (UNIT_ELEMENTS / (num_heads * self.dim)).max(1);
        if self.of_tokens {
            tokens.next_multiple_of(self.size)
        } else {
            tokens
        }
    }

    /// Scales and zeros from group `first` on.
    ///
    /// # Safety
    /// No other thread has them.
    #[allow(clippy::mut_from_ref)]
    unsafe fn part(&self, first: usize, len: usize) -> [&mut [f16]; 2] {
        // SAFETY: the caller's.
        unsafe { [self.scale.part(first..first + len), self.zero.part(first..first + len)] }
    }
}

/// What a thread keeps between units.
#[derive(Default)]
pub(super) struct Scratch {
    /// Rows as f32, each padded to whole vectors.
    rows: Vec<f32>,
    /// The ends of each group, then scales and zeros.
    ends: [Vec<f32>; 2],
    halves: [Vec<f16>; 2],
}

/// Store some tokens: of `order`, rows and slots.
pub(super) struct Encode<'a, A> {
    pub target: &'a Target<'a, u8>,
    pub groups: &'a SharedGroups<'a>,
    pub rows: &'a [A],
    pub slots: &'a [i64],
    /// Rows in the order in which they are stored; whole groups where these are of tokens.
    pub order: &'a [usize],
    pub scratch: &'a mut Scratch,
    pub losses: Option<&'a mut Losses>,
}

impl<A: Code> Task for Encode<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.groups.bits {
            4 => self.with_bits::<S, 4>(simd),
            _ => self.with_bits::<S, 2>(simd),
        }
    }
}

impl<A: Code> Encode<'_, A> {
    #[inline(always)]
    fn with_bits<S: Simd, const BITS: usize>(mut self, simd: S) {
        let together = if self.groups.of_tokens { self.groups.size } else { 1 };
        for rows in self.order.chunks_exact(together) {
            for head in 0..self.target.paged.num_heads {
                self.load_rows(simd, rows, head);
                if self.groups.of_tokens {
                    self.group_of_tokens::<S, BITS>(simd, rows, head);
                } else {
                    self.row::<S, BITS>(simd, rows[0], head);
                }
            }
        }
    }

    /// Elements of a row in scratch.
    fn stride(&self) -> usize {
        self.groups.dim.next_multiple_of(MAX_LANES)
    }

    /// Rows of a head as f32, and NaN, a value of no group, beyond their ends.
    #[inline(always)]
    fn load_rows<S: Simd>(&mut self, simd: S, rows: &[usize], head: usize) {
        let (dim, stride) = (self.groups.dim, self.stride());
        self.scratch.rows.resize(rows.len() * stride, 0.0);
        for (&row, to) in rows.iter().zip(self.scratch.rows.chunks_exact_mut(stride)) {
            let from = &self.rows[(row * self.target.paged.num_heads + head) * dim..][..dim];
            // SAFETY: both are slices of dim elements.
            unsafe { convert(simd, from.as_ptr(), to[..dim].as_mut_ptr(), dim) };
            to[dim..].fill(f32::NAN);
        }
        if let Some(losses) = &mut self.losses {
            let mut loss = LossOf::nothing(simd);
            for values in self.scratch.rows.chunks_exact(S::LANES) {
                // SAFETY: a chunk is a vector.
                let values = unsafe { simd.load(values.as_ptr()) };
                loss.add(simd, values, values, LARGEST_HALF);
            }
            losses.add(head, loss.total(simd));
        }
    }

    /// The groups of a row.
    #[inline(always)]
    fn row<S: Simd, const BITS: usize>(&mut self, simd: S, row: usize, head: usize) {
        let (dim, size, paged) = (self.groups.dim, self.groups.size, self.target.paged);
        let (slot, num_groups) = (self.slots[row] as usize, dim.div_ceil(size));
        let Scratch { rows, ends, halves } = &mut *self.scratch;
        let padded = num_groups.next_multiple_of(MAX_LANES);
        ends.iter_mut().for_each(|ends| ends.resize(padded, 0.0));
        halves.iter_mut().for_each(|halves| halves.resize(padded, f16::ZERO));
        let [lows, highs] = ends;
        for (group, values) in rows.chunks(size).enumerate() {
            let mut ends = Ends::none(simd);
            for values in values.chunks_exact(S::LANES) {
                // SAFETY: a chunk is a vector.
                ends.add(simd, unsafe { simd.load(values.as_ptr()) });
            }
            // The smallest lane, by way of the largest.
            lows[group] = -simd.highest(simd.sub(simd.splat(0.0), ends.low));
            highs[group] = simd.highest(ends.high);
        }
        let [scales, zeros] = halves;
        // SAFETY: all have `padded` elements, a multiple of the lanes; no other thread has this row.
        unsafe {
            for at in (0..padded).step_by(S::LANES) {
                let (low, high) = (lows.as_mut_ptr().add(at), highs.as_mut_ptr().add(at));
                let ends = Ends { low: simd.load(low), high: simd.load(high) };
                let (scale, zero) = (scales.as_mut_ptr().add(at), zeros.as_mut_ptr().add(at));
                let steps = ends.steps(simd, BITS, scale, zero);
                simd.store(low, steps.scale);
                simd.store(high, steps.zero);
            }
            let [scale, zero] = self.groups.part((slot * paged.num_heads + head) * num_groups, num_groups);
            scale.copy_from_slice(&scales[..num_groups]);
            zero.copy_from_slice(&zeros[..num_groups]);
            let to = self.target.data.part(paged.row(slot, head));
            for (group, values) in rows[..dim].chunks(size).enumerate() {
                let steps = Steps { scale: simd.splat(lows[group]), zero: simd.splat(highs[group]) };
                steps.encode::<BITS>(simd, values, &mut to[group * size * BITS / 8..]);
            }
        }
    }

    /// The groups of some tokens: one of each element.
    #[inline(always)]
    fn group_of_tokens<S: Simd, const BITS: usize>(&mut self, simd: S, rows: &[usize], head: usize) {
        let (dim, stride, paged) = (self.groups.dim, self.stride(), self.target.paged);
        let group = self.slots[rows[0]] as usize / self.groups.size;
        let Scratch { rows: values, halves, .. } = &mut *self.scratch;
        halves.iter_mut().for_each(|halves| halves.resize(stride, f16::ZERO));
        let [scales, zeros] = halves;
        // SAFETY: scratch has whole vectors, rows of `stride` elements; no other thread has this group.
        unsafe {
            for at in (0..dim).step_by(S::LANES) {
                let mut ends = Ends::none(simd);
                for token in 0..rows.len() {
                    ends.add(simd, simd.load(values.as_ptr().add(token * stride + at)));
                }
                let (scale, zero) = (scales.as_mut_ptr().add(at), zeros.as_mut_ptr().add(at));
                let steps = ends.steps(simd, BITS, scale, zero);
                let len = S::LANES.min(dim - at);
                for (token, &row) in rows.iter().enumerate() {
                    let to = self.target.data.part(paged.row(self.slots[row] as usize, head));
                    steps.encode::<BITS>(
                        simd,
                        &values[token * stride + at..][..len],
                        &mut to[at * BITS / 8..],
                    );
                }
            }
            let [scale, zero] = self.groups.part((group * paged.num_heads + head) * dim, dim);
            scale.copy_from_slice(&scales[..dim]);
            zero.copy_from_slice(&zeros[..dim]);
        }
    }
}

/// The smallest and the largest finite value; of no value, +inf and -inf.
#[derive(Clone, Copy)]
struct Ends<S: Simd> {
    low: S::F,
    high: S::F,
}

impl<S: Simd> Ends<S> {
    #[inline(always)]
    fn none(simd: S) -> Self {
        Self { low: simd.splat(f32::INFINITY), high: simd.splat(f32::NEG_INFINITY) }
    }

    #[inline(always)]
    fn add(&mut self, simd: S, values: S::F) {
        let is_finite = simd.less(super::losses::magnitude(simd, values), simd.splat(f32::INFINITY));
        self.low = simd.min(self.low, simd.select(is_finite, values, simd.splat(f32::INFINITY)));
        self.high = simd.max(self.high, simd.select(is_finite, values, simd.splat(f32::NEG_INFINITY)));
    }

    /// The steps of a group between these ends, which are stored as well.
    ///
    /// # Safety
    /// A vector of each is writable.
    #[inline(always)]
    unsafe fn steps(self, simd: S, bits: usize, scale: *mut f16, zero: *mut f16) -> Steps<S> {
        let (nothing, none) = (simd.less(self.high, self.low), simd.splat(0.0));
        let within = |end| {
            let end = simd.min(simd.splat(LARGEST_HALF), simd.max(simd.splat(-LARGEST_HALF), end));
            simd.select(nothing, none, end)
        };
        let (low, high) = (within(self.low), within(self.high));
        // SAFETY: the caller's.
        unsafe {
            // Adding 0 makes a -0 of it 0.
            f16::store(simd, zero, low);
            let low = simd.add(f16::load(simd, zero), none);
            f16::store(simd, zero, low);
            let spread = simd.add(simd.max(simd.sub(high, low), none), none);
            f16::store(simd, scale, simd.div(spread, simd.splat(((1 << bits) - 1) as f32)));
            Steps { scale: f16::load(simd, scale), zero: low }
        }
    }
}

/// What a code is worth.
#[derive(Clone, Copy)]
struct Steps<S: Simd> {
    scale: S::F,
    zero: S::F,
}

impl<S: Simd> Steps<S> {
    /// The codes of values, packed.
    #[inline(always)]
    fn encode<const BITS: usize>(self, simd: S, values: &[f32], to: &mut [u8]) {
        let to = &mut to[..values.len() * BITS / 8];
        let whole = values.len() - values.len() % S::LANES;
        // SAFETY: `to` has the bytes of all codes, and all offsets are below that.
        unsafe {
            for at in (0..whole).step_by(S::LANES) {
                let codes = self.codes::<BITS>(simd, simd.load(values.as_ptr().add(at)));
                simd.store_codes::<BITS>(to.as_mut_ptr().add(at * BITS / 8), codes);
            }
            if whole < values.len() {
                let rest = values.len() - whole;
                let codes = self.codes::<BITS>(simd, f32::load_part(simd, values.as_ptr().add(whole), rest));
                store_codes_part::<S, BITS>(simd, to.as_mut_ptr().add(whole * BITS / 8), rest, codes);
            }
        }
    }

    /// 0 for a NaN, and for all where a step is worth nothing.
    #[inline(always)]
    fn codes<const BITS: usize>(self, simd: S, values: S::F) -> S::I {
        let none = simd.splat(0.0);
        let steps = simd.div(simd.sub(values, self.zero), self.scale);
        // In this order a NaN becomes 0; within whole bounds it does not matter when it is rounded.
        let steps = simd.min(simd.max(steps, none), simd.splat(((1 << BITS) - 1) as f32));
        simd.to_int(simd.select(simd.less(none, self.scale), steps, none))
    }
}
