//! Causal attention over block tables. Imports `code`, `error`, `paged`, `simd` and `threads`.
//!
//! A call is cut into units (`plan`): some query heads over a run of keys, at most `SPLIT` of them. Few rows of queries
//! go one by one (`narrow`: lanes are elements of a row), many go together (`wide`: lanes are queries). What the units
//! of a query leave, a running softmax each, is merged in the order of the keys.
//!
//! Invariant: how the work is cut depends on the arguments and the instruction set only, so any number of threads
//! gives the same bits. A key that a query may not see has no influence on it, whatever its slot holds.

mod checks;
mod grouped;
mod lines;
mod narrow;
mod order;
mod packed;
mod pairs;
mod plan;
mod products;
mod rows;
mod tile;
mod wide;

use std::ops::Range;

use self::lines::Lines;
use self::plan::{Plan, Unit};
use crate::code::{convert, with_floats, Code, Elements, ElementsMut};
use crate::error::Result;
use crate::math::tanh;
use crate::paged::{Cache, Paged};
use crate::scaling::Scaling;
use crate::simd::{Simd, Task};
use crate::threads::{for_each, for_each_ahead, Parts};
use crate::Execution;

/// The index arrays of a step over n rows.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Block ids `[n, max_blocks]`, read only where a visible key lives.
    pub block_tables: &'a [i32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
    /// Keys of each row `[n]`.
    pub seq_lens: &'a [i32],
    /// Row i owns the queries `query_start_loc[i]..query_start_loc[i + 1]`, the last positions of its sequence.
    pub query_start_loc: &'a [i32],
}

impl Batch<'_> {
    /// The queries of a row; empty where a length or bound is no size, which `check_rows` refuses.
    fn queries(&self, row: usize) -> Range<usize> {
        let bound = |at: usize| usize::try_from(self.query_start_loc[at]).unwrap_or(0);
        bound(row)..bound(row + 1)
    }

    fn table(&self, row: usize) -> &[i32] {
        &self.block_tables[row * self.max_blocks..][..self.max_blocks]
    }
}

/// The optional parts of attention.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// Factor of q.k.
    pub scale: f32,
    /// A query at position p sees keys `max(0, p + 1 - window)..=p`; at least 1.
    pub window: Option<usize>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
    /// Per query head, a logit without a value that joins the denominator.
    pub sinks: Option<&'a [f32]>,
    /// Per query head, times (key position - query position), added to the logit.
    pub alibi_slopes: Option<&'a [f32]>,
}

impl Options<'_> {
    /// The keys that a query at a position sees.
    fn keys(&self, position: usize) -> Range<usize> {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
    }

    /// A head's sink as a softmax without values.
    fn sink(&self, head: usize) -> State {
        match self.sinks.map(|sinks| sinks[head]) {
            Some(base) if base != f32::NEG_INFINITY => State { base, sum: 1.0, divisor: 1.0 },
            _ => State::NOTHING,
        }
    }
}

/// The newest keys and values of the rows, which stand here and not in the cache.
#[derive(Debug, Clone, Copy)]
pub struct Tail<'a> {
    /// `[num_tail, num_heads, head_dim]`, contiguous, of any type without scales.
    pub k: Elements<'a>,
    /// `[num_tail, num_heads, head_dim_v]`.
    pub v: Elements<'a>,
    /// Row i has the last keys of its sequence at `start_loc[i]..start_loc[i + 1]`; `[n + 1]`.
    pub start_loc: &'a [i32],
}

/// K and V of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Storage<'a> {
    /// Of the same blocks and heads as `v`.
    pub k: Cache<'a>,
    /// Of the same blocks and heads as `k`.
    pub v: Cache<'a>,
    /// What is not in the blocks yet.
    pub tail: Option<Tail<'a>>,
}

/// The queries of a step.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// `[num_tokens, num_heads, head_dim]`.
    pub data: Elements<'a>,
    /// A multiple of the heads of K and V.
    pub num_heads: usize,
}

/// Where the results go.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[num_tokens, num_q_heads, head_dim_v]`.
    pub out: ElementsMut<'a>,
    /// `[num_tokens, num_q_heads]`: the natural log of the denominator, the sink included.
    pub lse: Option<&'a mut [f32]>,
}

/// Attention of queries over the keys of each row.
///
/// Rows of seq_len 0, queries of no row and queries whose logits are all -inf give 0 and -inf. All of the output is
/// written, or nothing. Products and sums are float32. Where queries and output are bf16 and the processor multiplies
/// pairs of bf16, few queries round the weights of V to bf16 as well, and divide by the sum of what was rounded; the
/// log-sum-exp is that of the weights before.
pub fn attend(
    queries: Queries<'_>,
    storage: Storage<'_>,
    batch: Batch<'_>,
    options: Options<'_>,
    output: Output<'_>,
    execution: Execution,
) -> Result<()> {
    let Queries { data: q, num_heads: num_q_heads } = queries;
    let Output { out, lse } = output;
    let Storage { k, v, tail } = storage;
    q.check_floats("q")?;
    out.check_floats("out")?;
    let num_tokens = checks::check_shapes(q.len(), num_q_heads, &k, &v, options, out.len(), lse.as_deref())?;
    if let Some(tail) = &tail {
        checks::check_tail(tail, &k, &v, batch)?;
    }
    let tail = tail.map(|tail| TailCache::new(tail, &k, &v)).transpose()?;
    checks::check_rows(&k.paged, num_tokens, batch, options.window, tail.as_ref())?;
    if num_tokens == 0 {
        return Ok(()); // before any scratch is sized by num_q_heads, which nothing bounds here
    }
    let rounds = matches!((&q, &out), (Elements::Bf16(_), ElementsMut::Bf16(_)));
    let call = Call { q, num_q_heads, k, v, tail, batch, options, rounds };
    let plan = Plan::new(&call, execution);
    let head_dim_v = call.head_dim_v();
    let mut states = vec![State::NOTHING; plan.num_partials * num_q_heads];
    let mut sums = Lines::default();
    let sums = sums.filled(plan.num_partials * num_q_heads * head_dim_v, 0.0);
    {
        let partials = Partials { states: Parts::new(&mut states), sums: Parts::new(sums) };
        for_each_ahead(plan.units.len(), execution.num_threads, Scratch::default, |scratch, index, next| {
            let unit = &plan.units[index];
            let following = &mut || next().map(|index| &plan.units[index]);
            execution.isa.run(RunUnit { call: &call, unit, following, partials: &partials, scratch });
        });
    }
    with_floats!(ElementsMut, out, out => {
        let out = Parts::new(out);
        let lse = lse.map(Parts::new);
        let merged = |_: &mut (), chunk: usize| {
            let tokens = chunk * MERGE_TOKENS..num_tokens.min((chunk + 1) * MERGE_TOKENS);
            execution.isa.run(Merge { call: &call, plan: &plan, states: &states, sums, tokens, out: &out, lse: lse.as_ref() });
        };
        for_each(num_tokens.div_ceil(MERGE_TOKENS), execution.num_threads, || (), merged);
    }, else {});
    Ok(())
}

/// The arguments of a call, checked.
struct Call<'a> {
    q: Elements<'a>,
    num_q_heads: usize,
    k: Cache<'a>,
    v: Cache<'a>,
    tail: Option<TailCache<'a>>,
    batch: Batch<'a>,
    options: Options<'a>,
    /// Whether queries and results are bf16, so that weights may be rounded to it.
    rounds: bool,
}

/// A tail as a cache of blocks of one token.
struct TailCache<'a> {
    k: Cache<'a>,
    v: Cache<'a>,
    start_loc: &'a [i32],
    /// The blocks in order: every row's table is a part of it.
    table: Vec<i32>,
}

impl<'a> TailCache<'a> {
    fn new(tail: Tail<'a>, k: &Cache<'_>, v: &Cache<'_>) -> Result<Self> {
        let num_heads = k.paged.num_heads;
        let num_tail = tail.start_loc.last().copied().unwrap_or(0);
        let cache = |data: Elements<'a>, dim| -> Result<Cache<'a>> {
            let paged = Paged::nhd(num_tail.max(1) as usize, 1, num_heads, dim)?;
            Ok(Cache { data, paged, scaling: Scaling::None })
        };
        Ok(Self {
            k: cache(tail.k, k.dim())?,
            v: cache(tail.v, v.dim())?,
            start_loc: tail.start_loc,
            table: (0..num_tail).collect(),
        })
    }

    /// The keys of a row.
    fn rows(&self, row: usize) -> Range<usize> {
        let bound = |at: usize| usize::try_from(self.start_loc[at]).unwrap_or(0);
        bound(row)..bound(row + 1)
    }
}

/// Where the keys of a unit are.
struct Source<'a> {
    k: &'a Cache<'a>,
    v: &'a Cache<'a>,
    /// Of the tokens from position `first` on.
    table: &'a [i32],
    first: usize,
}

impl Call<'_> {
    fn num_tokens(&self) -> usize {
        self.q.len() / (self.num_q_heads * self.head_dim())
    }

    fn head_dim(&self) -> usize {
        self.k.dim()
    }

    fn head_dim_v(&self) -> usize {
        self.v.dim()
    }

    /// Keys of a row that are in the cache; the others are in the tail.
    fn num_stored(&self, row: usize) -> usize {
        let num_tail = self.tail.as_ref().map_or(0, |tail| tail.rows(row).len());
        (self.batch.seq_lens[row].max(0) as usize).saturating_sub(num_tail)
    }

    /// Where the keys of a unit are.
    fn source(&self, unit: &Unit) -> Source<'_> {
        match &self.tail {
            Some(tail) if unit.in_tail => {
                let table = &tail.table[tail.rows(unit.row)];
                Source { k: &tail.k, v: &tail.v, table, first: self.num_stored(unit.row) }
            }
            _ => Source { k: &self.k, v: &self.v, table: self.batch.table(unit.row), first: 0 },
        }
    }

    /// Query heads that share a head of K and V.
    fn group(&self) -> usize {
        self.num_q_heads / self.k.paged.num_heads
    }

    /// A head of a query.
    #[inline(always)]
    fn load_query<S: Simd>(&self, simd: S, token: usize, head: usize, row: &mut [f32]) {
        let start = (token * self.num_q_heads + head) * self.head_dim();
        with_floats!(Elements, self.q, q => {
            let q = &q[start..][..row.len()];
            // SAFETY: both are slices of that length.
            unsafe { convert(simd, q.as_ptr(), row.as_mut_ptr(), row.len()) };
        }, else {});
    }
}

/// The running softmax of a head, besides its weighted values.
#[derive(Debug, Clone, Copy)]
struct State {
    /// What weights are taken against: a logit, at most `SLACK` below the highest.
    base: f32,
    /// The sum of the weights.
    sum: f32,
    /// The same of the weights that the values have been multiplied with, which may be rounded.
    divisor: f32,
}

impl State {
    const NOTHING: Self = Self { base: f32::NEG_INFINITY, sum: 0.0, divisor: 0.0 };

    /// Logits may be so much above the base: a weight is below 2^8 then, and most new maxima, which are small steps, cost no
    /// rescaling of all that was summed before.
    const SLACK: f32 = 5.5;

    /// What logits may be without a rise.
    #[inline(always)]
    fn limit(&self) -> f32 {
        self.base + Self::SLACK
    }

    /// Take in the highest of new logits: (the factor of all that was summed before, what to take logits against).
    ///
    /// While nothing has a weight, all are taken against 0, as -inf - -inf would be NaN.
    #[inline(always)]
    fn rise(&mut self, highest: f32) -> (f32, f32) {
        let before = self.base;
        if highest > self.limit() {
            self.base = highest;
            (if before == f32::NEG_INFINITY { 0.0 } else { (before - highest).exp() }, highest)
        } else {
            (1.0, if before == f32::NEG_INFINITY { 0.0 } else { before })
        }
    }
}

/// What the units leave: a state and weighted values for each partial result and query head.
struct Partials<'a> {
    /// `[num_partials, num_q_heads]`.
    states: Parts<'a, State>,
    /// `[num_partials, num_q_heads, head_dim_v]`.
    sums: Parts<'a, f32>,
}

impl Partials<'_> {
    /// The states and weighted values of some query heads.
    ///
    /// # Safety
    /// Nobody else has those of these heads.
    #[allow(clippy::mut_from_ref)]
    unsafe fn of(
        &self,
        call: &Call<'_>,
        partial: usize,
        q_heads: Range<usize>,
    ) -> (&mut [State], &mut [f32]) {
        let first = partial * call.num_q_heads + q_heads.start;
        let (states, dim) = (first..first + q_heads.len(), call.head_dim_v());
        // SAFETY: the caller's.
        unsafe { (self.states.part(states.clone()), self.sums.part(states.start * dim..states.end * dim)) }
    }
}

/// What a thread keeps between units.
#[derive(Default)]
struct Scratch {
    narrow: narrow::Scratch,
    wide: wide::Scratch,
}

struct RunUnit<'a, 'b> {
    call: &'a Call<'b>,
    unit: &'a Unit,
    /// What this thread runs next.
    following: &'a mut dyn FnMut() -> Option<&'a Unit>,
    partials: &'a Partials<'b>,
    scratch: &'a mut Scratch,
}

impl Task for RunUnit<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if self.unit.wide {
            wide::run(simd, self.call, self.unit, self.partials, &mut self.scratch.wide);
        } else {
            narrow::run(simd, self.call, self.unit, self.following, self.partials, &mut self.scratch.narrow);
        }
    }
}

/// Tokens whose results are merged as one unit of work.
const MERGE_TOKENS: usize = 4;

/// Merge the partial results of some tokens, and the sinks, into the output.
struct Merge<'a, 'b, T> {
    call: &'a Call<'b>,
    plan: &'a Plan,
    states: &'a [State],
    sums: &'a [f32],
    tokens: Range<usize>,
    out: &'a Parts<'a, T>,
    lse: Option<&'a Parts<'a, f32>>,
}

impl<T: Code> Task for Merge<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (num_q_heads, dim) = (self.call.num_q_heads, self.call.head_dim_v());
        let mut row = vec![0.0f32; dim];
        for token in self.tokens {
            let partials = self.plan.partials[token].clone();
            for head in 0..num_q_heads {
                let states = partials.clone().map(|partial| self.states[partial * num_q_heads + head]);
                // Tokens of no row have no sink either.
                let sink = if partials.is_empty() { State::NOTHING } else { self.call.options.sink(head) };
                let highest = states.clone().fold(sink.base, |high, state| high.max(state.base));
                let base = if highest == f32::NEG_INFINITY { 0.0 } else { highest };
                let mut sum = sink.sum * (sink.base - base).exp();
                let mut divisor = sum;
                row.fill(0.0);
                for (state, partial) in states.zip(partials.clone()) {
                    let weight = (state.base - base).exp();
                    sum += weight * state.sum;
                    divisor += weight * state.divisor;
                    let values = &self.sums[(partial * num_q_heads + head) * dim..][..dim];
                    row.iter_mut().zip(values).for_each(|(row, value)| *row += weight * value);
                }
                if sum == 0.0 {
                    row.fill(0.0); // no key has a weight; the log below is -inf
                } else {
                    row.iter_mut().for_each(|value| *value /= divisor);
                }
                let at = token * num_q_heads + head;
                // SAFETY: this unit has these tokens alone; the rows have dim elements each.
                unsafe {
                    convert(simd, row.as_ptr(), self.out.part(at * dim..(at + 1) * dim).as_mut_ptr(), dim);
                    if let Some(lse) = self.lse {
                        lse.part(at..at + 1)[0] = base + sum.ln();
                    }
                }
            }
        }
    }
}

/// `cap * tanh(logit / cap)`.
#[inline(always)]
fn soft_cap<S: Simd>(simd: S, logit: S::F, cap: f32) -> S::F {
    let cap = simd.splat(cap);
    simd.mul(cap, tanh(simd, simd.div(logit, cap)))
}
