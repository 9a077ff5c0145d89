//! Storing tokens at their slots. Imports `code`, `error`, `paged`, `simd` and `threads`.
//!
//! Invariant: a row is written for every slot >= 0 and for nothing else.

use std::ops::Range;

use crate::code::{convert, with_floats, Code, E4m3, E5m2, Elements, ElementsMut};
use crate::error::{check_len, product, Error, Result};
use crate::paged::Paged;
use crate::scaling::Scaling;
use crate::simd::{Simd, Task};
use crate::threads::{for_each, Parts};
use crate::Execution;

/// Elements that are worth a unit of work.
const UNIT_ELEMENTS: usize = 64 << 10;

/// K or V of one layer, to be written.
#[derive(Debug)]
pub struct CacheMut<'a> {
    /// The elements that the geometry addresses.
    pub data: ElementsMut<'a>,
    /// Where they are.
    pub paged: Paged,
    /// What their codes stand for.
    pub scaling: ScalingMut<'a>,
}

/// Who shares a scale; see `Scaling`.
#[derive(Debug)]
pub enum ScalingMut<'a> {
    /// Nobody has one.
    None,
    /// `[num_heads]`, given.
    Head(&'a [f32]),
    /// `[num_heads, head_dim]`, given.
    Channel(&'a [f32]),
    /// `[num_blocks, block_size, num_heads]`, written with the rows.
    TokenHead(&'a mut [f32]),
}

/// Store the first `slots.len()` rows `[.., num_heads, head_dim]`; a slot of -1 is skipped.
///
/// Rows of the cache's own element type are stored bit for bit, others rounded to nearest even. Where codes have a
/// scale, it is that of the largest finite magnitude of the row, or the one that is given. K and V are two calls. Any
/// other slot outside the storage is an error, and nothing is written; packed codes are not written here. O(slots).
pub fn write(cache: CacheMut<'_>, rows: Elements<'_>, slots: &[i64], execution: Execution) -> Result<()> {
    let CacheMut { data, paged, scaling } = cache;
    check_slots(&paged, data.len(), rows.len(), slots)?;
    rows.check_floats("rows")?;
    let scaling = Scales::new(scaling, &paged)?;
    match (data, rows, &scaling) {
        (ElementsMut::F32(data), Elements::F32(rows), Scales::None) => {
            scatter(data, &paged, rows, slots, execution, Same)
        }
        (ElementsMut::F16(data), Elements::F16(rows), Scales::None) => {
            scatter(data, &paged, rows, slots, execution, Same)
        }
        (ElementsMut::Bf16(data), Elements::Bf16(rows), Scales::None) => {
            scatter(data, &paged, rows, slots, execution, Same)
        }
        (data, rows, Scales::None) => with_floats!(ElementsMut, data, data => {
            with_floats!(Elements, rows, rows => scatter(data, &paged, rows, slots, execution, Rounded), else {})
        }, else return Err(Error::Codes { argument: "cache" })),
        (ElementsMut::E4m3(data), rows, _) => with_floats!(Elements, rows, rows => {
 scatter(data, &paged, rows, slots, execution, Scaled { scales: &scaling, limit: E4m3::LIMIT })
 }, else {}),
        (ElementsMut::E5m2(data), rows, _) => with_floats!(Elements, rows, rows => {
 scatter(data, &paged, rows, slots, execution, Scaled { scales: &scaling, limit: E5m2::LIMIT })
 }, else {}),
        (ElementsMut::I8(data), rows, _) => with_floats!(Elements, rows, rows => {
 scatter(data, &paged, rows, slots, execution, Scaled { scales: &scaling, limit: 127.0 })
 }, else {}),
        _ => return Err(Error::Codes { argument: "cache" }),
    }
    Ok(())
}

/// The scales that threads share.
enum Scales<'a> {
    None,
    Head(&'a [f32]),
    Channel(&'a [f32]),
    TokenHead(Parts<'a, f32>),
}

impl<'a> Scales<'a> {
    fn new(scaling: ScalingMut<'a>, paged: &Paged) -> Result<Self> {
        let (argument, heads) = ("scale", paged.num_heads);
        match scaling {
            ScalingMut::None => Ok(Self::None),
            ScalingMut::Head(scale) => check_len(argument, scale.len(), heads).map(|()| Self::Head(scale)),
            ScalingMut::Channel(scale) => {
                let len = product(argument, &[heads, paged.head_dim])?;
                check_len(argument, scale.len(), len).map(|()| Self::Channel(scale))
            }
            ScalingMut::TokenHead(scale) => {
                let len = product(argument, &[paged.num_slots(), heads])?;
                check_len(argument, scale.len(), len).map(|()| Self::TokenHead(Parts::new(scale)))
            }
        }
    }
}

/// How a row gets into the cache.
trait Store<A, B>: Copy + Send + Sync {
    /// `index` is that of the row's scale, of one scale a slot and head.
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
        scratch: &mut [f32],
    );
}

#[derive(Clone, Copy)]
struct Same;

impl<A: Code> Store<A, A> for Same {
    #[inline(always)]
    unsafe fn store<S: Simd>(self, _: S, from: &[A], to: &mut [A], _: usize, _: usize, _: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

#[derive(Clone, Copy)]
struct Rounded;

impl<A: Code, B: Code> Store<A, B> for Rounded {
    #[inline(always)]
    unsafe fn store<S: Simd>(self, simd: S, from: &[A], to: &mut [B], _: usize, _: usize, _: &mut [f32]) {
        debug_assert_eq!(from.len(), to.len());
        // SAFETY: both are slices of the rows' length.
        unsafe { convert(simd, from.as_ptr(), to.as_mut_ptr(), to.len()) };
    }
}

#[derive(Clone, Copy)]
struct Scaled<'a> {
    scales: &'a Scales<'a>,
    /// The largest magnitude of a code.
    limit: f32,
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
        scratch: &mut [f32],
    ) {
        let dim = to.len();
        // SAFETY: all are slices of the rows' length.
        unsafe { convert(simd, from.as_ptr(), scratch.as_mut_ptr(), dim) };
        match self.scales {
            Scales::None => {}
            Scales::Head(scale) => divide(scratch, scale[head]),
            Scales::Channel(scale) => {
                scratch.iter_mut().zip(&scale[head * dim..]).for_each(|(value, scale)| *value /= scale);
            }
            Scales::TokenHead(scale) => {
                let own = scale_of(largest(simd, scratch), self.limit);
                // SAFETY: the caller's.
                let place = unsafe { scale.part(index..index + 1) };
                place[0] = own;
                divide(scratch, own);
            }
        }
        // SAFETY: both are slices of the rows' length.
        unsafe { convert(simd, scratch.as_ptr(), to.as_mut_ptr(), dim) };
    }
}

#[inline(always)]
fn divide(values: &mut [f32], scale: f32) {
    values.iter_mut().for_each(|value| *value /= scale);
}

/// The largest finite magnitude; 0 of no finite values.
#[inline(always)]
pub(crate) fn largest<S: Simd>(simd: S, values: &[f32]) -> f32 {
    let mut highest = simd.splat(0.0);
    let whole = values.len() - values.len() % S::LANES;
    let finite = |values: S::F| {
        let magnitude = simd.as_float(simd.and(simd.bits(values), simd.splat_bits(0x7FFF_FFFF)));
        let is_finite = simd.less(magnitude, simd.splat(f32::INFINITY));
        simd.select(is_finite, magnitude, simd.splat(0.0))
    };
    // SAFETY: all offsets are within the slice.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            highest = simd.max(highest, finite(simd.load(values.as_ptr().add(at))));
        }
        if whole < values.len() {
            let rest = f32::load_part(simd, values.as_ptr().add(whole), values.len() - whole);
            highest = simd.max(highest, finite(rest));
        }
    }
    simd.highest(highest)
}

/// The scale with which a magnitude becomes the largest code.
#[inline(always)]
fn scale_of(amax: f32, limit: f32) -> f32 {
    if amax == 0.0 {
        1.0
    } else {
        (amax / limit).max(f32::MIN_POSITIVE)
    }
}

fn scatter<A: Code, B: Code>(
    cache: &mut [B],
    paged: &Paged,
    rows: &[A],
    slots: &[i64],
    execution: Execution,
    how: impl Store<A, B>,
) {
    let tokens_per_unit = (UNIT_ELEMENTS / (paged.num_heads * paged.head_dim)).max(1);
    let cache = Parts::new(cache);
    let unit = |scratch: &mut Vec<f32>, index: usize| {
        let tokens = index * tokens_per_unit..slots.len().min((index + 1) * tokens_per_unit);
        scratch.resize(paged.head_dim, 0.0);
        execution.isa.run(Scatter { cache: &cache, paged, rows, slots, tokens, how, scratch });
    };
    let num_units = slots.len().div_ceil(tokens_per_unit);
    // What would be written twice is written by one thread, in order.
    let apart = num_units > 1 && execution.num_threads > 1 && paged.rows_are_apart() && are_distinct(slots);
    for_each(num_units, if apart { execution.num_threads } else { 1 }, Vec::new, unit);
}

struct Scatter<'a, A, B, H> {
    cache: &'a Parts<'a, B>,
    paged: &'a Paged,
    rows: &'a [A],
    slots: &'a [i64],
    tokens: Range<usize>,
    how: H,
    scratch: &'a mut [f32],
}

impl<A: Code, B: Code, H: Store<A, B>> Task for Scatter<'_, A, B, H> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let paged = self.paged;
        for token in self.tokens {
            let Ok(slot) = usize::try_from(self.slots[token]) else { continue };
            for head in 0..paged.num_heads {
                let from = &self.rows[(token * paged.num_heads + head) * paged.head_dim..][..paged.head_dim];
                // SAFETY: this is the only thread, or rows do not overlap and no slot is named twice; see `scatter`.
                unsafe {
                    let to = self.cache.part(paged.row(slot, head));
                    self.how.store(simd, from, to, slot * paged.num_heads + head, head, self.scratch);
                }
            }
        }
    }
}

/// What quantising rows `[.., num_heads, head_dim]` costs, by head: the largest finite magnitudes, and how many values
/// lie `limit` scales or more away from 0.
///
/// scaling: the scales, one for each head, channel, or row and head. O(rows * head_dim).
pub fn survey(
    rows: Elements<'_>,
    num_heads: usize,
    head_dim: usize,
    scaling: Scaling<'_>,
    limit: f32,
    execution: Execution,
) -> Result<(Vec<f32>, Vec<i64>)> {
    let token = product("rows", &[num_heads, head_dim])?;
    if token == 0 {
        return Err(Error::Size { argument: "rows" });
    }
    let num_tokens = rows.len() / token;
    check_len("rows", rows.len(), num_tokens * token)?;
    rows.check_floats("rows")?;
    match scaling {
        Scaling::None => {}
        Scaling::Head(scale) => check_len("scale", scale.len(), num_heads)?,
        Scaling::Channel(scale) => check_len("scale", scale.len(), token)?,
        Scaling::TokenHead(scale) => check_len("scale", scale.len(), num_tokens * num_heads)?,
        Scaling::Group(_) | Scaling::TokenGroup(_) => return Err(Error::Codes { argument: "scale" }),
    }
    let (mut amax, mut num_clipped) = (vec![0.0f32; num_heads], vec![0i64; num_heads]);
    {
        let (amax, num_clipped) = (Parts::new(&mut amax), Parts::new(&mut num_clipped));
        for_each(num_heads, execution.num_threads, Vec::new, |scratch: &mut Vec<f32>, head| {
            scratch.resize(head_dim, 0.0);
            // SAFETY: each unit has a head of its own.
            let result = unsafe { (amax.part(head..head + 1), num_clipped.part(head..head + 1)) };
            let found = with_floats!(Elements, rows, rows => {
                execution.isa.run(Survey { rows, num_heads, head, scaling, limit, scratch })
            }, else (0.0, 0));
            (result.0[0], result.1[0]) = found;
        });
    }
    Ok((amax, num_clipped))
}

struct Survey<'a, T> {
    rows: &'a [T],
    num_heads: usize,
    head: usize,
    scaling: Scaling<'a>,
    limit: f32,
    scratch: &'a mut [f32],
}

impl<T: Code> Task for Survey<'_, T> {
    type Output = (f32, i64);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (f32, i64) {
        let dim = self.scratch.len();
        let (mut amax, mut num_clipped) = (0.0f32, 0i64);
        for (index, row) in self.rows.chunks_exact(dim).enumerate().skip(self.head).step_by(self.num_heads) {
            // SAFETY: both are slices of dim elements.
            unsafe { convert(simd, row.as_ptr(), self.scratch.as_mut_ptr(), dim) };
            amax = amax.max(largest(simd, self.scratch));
            match self.scaling {
                Scaling::Head(scale) => divide(self.scratch, scale[self.head]),
                Scaling::TokenHead(scale) => divide(self.scratch, scale[index]),
                Scaling::Channel(scale) => {
                    let scale = &scale[self.head * dim..][..dim];
                    self.scratch.iter_mut().zip(scale).for_each(|(value, scale)| *value /= scale);
                }
                _ => {}
            }
            let beyond: u32 = self.scratch.iter().map(|value| u32::from(value.abs() >= self.limit)).sum();
            num_clipped += i64::from(beyond);
        }
        (amax, num_clipped)
    }
}

fn are_distinct(slots: &[i64]) -> bool {
    let mut written: Vec<i64> = slots.iter().copied().filter(|&slot| slot >= 0).collect();
    written.sort_unstable();
    written.windows(2).all(|pair| pair[0] != pair[1])
}

fn check_slots(paged: &Paged, cache_len: usize, rows_len: usize, slots: &[i64]) -> Result<()> {
    paged.check("cache", cache_len)?;
    let needed = product("rows", &[slots.len(), paged.num_heads, paged.head_dim])?;
    if rows_len < needed {
        return Err(Error::Length { argument: "rows", got: rows_len, expected: needed });
    }
    let num_slots = paged.num_slots() as i64;
    match slots.iter().position(|&slot| slot < -1 || slot >= num_slots) {
        Some(row) => {
            Err(Error::Row { argument: "slot_mapping", row, got: slots[row], low: -1, high: num_slots - 1 })
        }
        None => Ok(()),
    }
}
