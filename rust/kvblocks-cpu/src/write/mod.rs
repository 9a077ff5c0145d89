//! Storing tokens at their slots. Imports `code`, `error`, `groups`, `paged`, `simd` and `threads`.
//!
//! Elements that are stored one by one go row by row (`rows`), packed codes by groups (`groups`).
//! Invariant: a row is written for every slot >= 0 and for nothing else.

mod groups;
mod losses;
mod rows;
mod slots;

use std::sync::{Mutex, PoisonError};

pub use self::groups::GroupsMut;
use self::groups::{Encode, SharedGroups};
pub use self::losses::{amax_of_columns, Losses};
use self::rows::{Rounded, Same, Scaled, Scales, Store};
use self::slots::{check_slots, whole_groups};
use crate::code::{with_floats, Code, E4m3, E5m2, Elements, ElementsMut};
use crate::error::{check_len, product, Error, Result};
use crate::paged::Paged;
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
    /// `[num_blocks, block_size, num_heads]`, given.
    TokenHead(&'a [f32]),
    /// `[num_blocks, block_size, num_heads]`, computed from the rows and written with them.
    Made(&'a mut [f32]),
    /// As `Scaling::Group`, computed from the rows and written with them.
    Group(GroupsMut<'a>),
    /// As `Scaling::TokenGroup`, computed from the rows and written with them.
    TokenGroup(GroupsMut<'a>),
}

/// Store the first `slots.len()` rows `[.., num_heads, head_dim]`; a slot of -1 is skipped.
///
/// Rows of the cache's own element type are stored bit for bit, others rounded to nearest even. Where codes have a
/// scale, it is computed from the finite values that share it, or the one that is given. K and V are two calls. Any
/// other slot outside the storage is an error, and so are a slot that is named twice and a part of a group of tokens;
/// nothing is written then. `losses` become what is lost to codes. O(slots), and O(slots log slots) where they do not
/// ascend or are of groups of tokens.
pub fn write(
    cache: CacheMut<'_>,
    rows: Elements<'_>,
    slots: &[i64],
    mut losses: Option<&mut Losses>,
    execution: Execution,
) -> Result<()> {
    let CacheMut { data, paged, scaling } = cache;
    paged.check("cache", data.len())?;
    rows.check_floats("rows")?;
    check_slots(&paged, slots)?;
    if let Some(losses) = &mut losses {
        **losses = Losses::none(paged.num_heads);
    }
    let how = How { slots, losses: losses.map(Mutex::new), execution };
    let scales = match scaling {
        ScalingMut::Group(groups) => return how.pack(data, paged, groups, false, rows),
        ScalingMut::TokenGroup(groups) => return how.pack(data, paged, groups, true, rows),
        ScalingMut::None => None,
        ScalingMut::Head(scale) => Some(Scales::Head(scale)),
        ScalingMut::Channel(scale) => Some(Scales::Channel(scale)),
        ScalingMut::TokenHead(scale) => Some(Scales::TokenHead(scale)),
        ScalingMut::Made(scale) => Some(Scales::Made(Parts::new(scale))),
    };
    check_rows(&paged, paged.head_dim, rows.len(), slots)?;
    let Some(scales) = &scales else { return how.round(data, paged, rows) };
    let heads = paged.num_heads;
    let (got, expected) = match scales {
        Scales::Head(scale) => (scale.len(), heads),
        Scales::Channel(scale) => (scale.len(), product("scale", &[heads, paged.head_dim])?),
        Scales::TokenHead(scale) => (scale.len(), product("scale", &[paged.num_slots(), heads])?),
        Scales::Made(scale) => (scale.len(), product("scale", &[paged.num_slots(), heads])?),
    };
    check_len("scale", got, expected)?;
    match data {
        ElementsMut::E4m3(data) => {
            // Half a step beyond the limit is rounded down to it.
            let code = Scaled { scales, limit: E4m3::LIMIT, within: 464.0 };
            how.scale(data, paged, rows, code);
        }
        ElementsMut::E5m2(data) => {
            let code = Scaled { scales, limit: E5m2::LIMIT, within: 61440.0f32.next_down() };
            how.scale(data, paged, rows, code);
        }
        ElementsMut::I8(data) => {
            let code = Scaled { scales, limit: 127.0, within: 127.5f32.next_down() };
            how.scale(data, paged, rows, code);
        }
        _ => return Err(Error::Codes { argument: "cache" }),
    }
    Ok(())
}

/// What all kinds of rows have in common.
struct How<'a> {
    slots: &'a [i64],
    losses: Option<Mutex<&'a mut Losses>>,
    execution: Execution,
}

/// Where rows go, on several threads.
struct Target<'a, T> {
    data: Parts<'a, T>,
    paged: &'a Paged,
}

impl How<'_> {
    fn round(&self, data: ElementsMut<'_>, paged: Paged, rows: Elements<'_>) -> Result<()> {
        match (data, rows) {
            (ElementsMut::F32(data), Elements::F32(rows)) => self.scatter(data, paged, rows, Same),
            (ElementsMut::F16(data), Elements::F16(rows)) => self.scatter(data, paged, rows, Same),
            (ElementsMut::Bf16(data), Elements::Bf16(rows)) => self.scatter(data, paged, rows, Same),
            (data, rows) => with_floats!(ElementsMut, data, data => {
                with_floats!(Elements, rows, rows => self.scatter(data, paged, rows, Rounded), else {});
            }, else return Err(Error::Codes { argument: "cache" })),
        }
        Ok(())
    }

    fn scale<B: Code>(&self, data: &mut [B], paged: Paged, rows: Elements<'_>, code: Scaled<'_>) {
        with_floats!(Elements, rows, rows => self.scatter(data, paged, rows, code), else {});
    }

    fn pack(
        &self,
        data: ElementsMut<'_>,
        paged: Paged,
        groups: GroupsMut<'_>,
        of_tokens: bool,
        rows: Elements<'_>,
    ) -> Result<()> {
        let ElementsMut::Packed(data) = data else { return Err(Error::Codes { argument: "cache" }) };
        let groups = SharedGroups::new(groups, of_tokens, &paged)?;
        check_rows(&paged, groups.dim, rows.len(), self.slots)?;
        let order = if of_tokens {
            whole_groups(self.slots, groups.size)?
        } else {
            (0..self.slots.len()).filter(|&row| self.slots[row] >= 0).collect()
        };
        let target = Target { data: Parts::new(data), paged: &paged };
        with_floats!(Elements, rows, rows => {
            let unit_tokens = groups.unit_tokens(paged.num_heads);
            self.for_each(&paged, order.len(), unit_tokens, |scratch: &mut groups::Scratch, losses, some| {
                let encode = Encode {
                    target: &target,
                    groups: &groups,
                    rows,
                    slots: self.slots,
                    order: &order[some],
                    scratch,
                    losses,
                };
                self.execution.isa.run(encode);
            });
        }, else {});
        Ok(())
    }

    fn scatter<A: Code, B: Code>(&self, data: &mut [B], paged: Paged, rows: &[A], store: impl Store<A, B>) {
        let target = Target { data: Parts::new(data), paged: &paged };
        let unit_tokens = (UNIT_ELEMENTS / (paged.num_heads * paged.head_dim)).max(1);
        self.for_each(&paged, self.slots.len(), unit_tokens, |(): &mut (), losses, some| {
            let slots = &self.slots[some.clone()];
            let rows = &rows[some.start * paged.num_heads * paged.head_dim..];
            self.execution.isa.run(Scatter { target: &target, rows, slots, store, losses });
        });
    }

    /// Run units of some tokens each, on threads that keep a W.
    fn for_each<W: Default>(
        &self,
        paged: &Paged,
        num_tokens: usize,
        unit_tokens: usize,
        work: impl Fn(&mut W, Option<&mut Losses>, std::ops::Range<usize>) + Sync,
    ) {
        let num_units = num_tokens.div_ceil(unit_tokens);
        let num_threads = self.execution.num_threads;
        // What would be written twice is written by one thread, in order.
        let num_threads = if paged.rows_are_apart() { num_threads } else { 1 };
        let start = || (W::default(), self.losses.as_ref().map(|_| Losses::none(paged.num_heads)));
        for_each(num_units, num_threads, start, |(state, own), unit| {
            work(state, own.as_mut(), unit * unit_tokens..num_tokens.min((unit + 1) * unit_tokens));
            if let (Some(own), Some(all)) = (own, &self.losses) {
                all.lock().unwrap_or_else(PoisonError::into_inner).take(own);
            }
        });
    }
}

struct Scatter<'a, A, B, H> {
    target: &'a Target<'a, B>,
    /// From the row of the first slot on.
    rows: &'a [A],
    slots: &'a [i64],
    store: H,
    losses: Option<&'a mut Losses>,
}

impl<A: Code, B: Code, H: Store<A, B>> Task for Scatter<'_, A, B, H> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let paged = self.target.paged;
        let (dim, loss) = (paged.head_dim, self.losses.is_some());
        for (token, &slot) in self.slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            for head in 0..paged.num_heads {
                let from = &self.rows[(token * paged.num_heads + head) * dim..][..dim];
                let index = slot * paged.num_heads + head;
                // SAFETY: this is the only thread, or rows do not overlap, as no slot is named twice; see `for_each`.
                let lost = unsafe {
                    let to = self.target.data.part(paged.row(slot, head));
                    self.store.store(simd, from, to, index, head, loss)
                };
                if let (Some(losses), Some(lost)) = (&mut self.losses, lost) {
                    losses.add(head, lost);
                }
            }
        }
    }
}

/// There is a row, of `dim` elements a head, for every slot.
fn check_rows(paged: &Paged, dim: usize, rows_len: usize, slots: &[i64]) -> Result<()> {
    let needed = product("rows", &[slots.len(), paged.num_heads, dim])?;
    if rows_len < needed {
        return Err(Error::Length { argument: "rows", got: rows_len, expected: needed });
    }
    Ok(())
}
