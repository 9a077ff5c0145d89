//! The step: the next tokens of a batch, their slots and the index arrays of one forward pass. Imports `manager` and
//! below.
//!
//! Invariant: plan, then apply. The plan counts blocks exactly (each copy-on-write included, in row order, so that the
//! last owner of a shared block writes in place); applying it cannot fail. Copies must run before the step's writes;
//! a source is owned by others or goes last in line for eviction, so it is never a destination of the same step.
//!
//! Nearly all rows of a decode step need nothing from the pool: their next slots lie in a block that they alone own.
//! Such a row is known by its sequence's `room`. Its cursors move while it is checked, and back if the step is refused
//! or ends before it; what its arrays are to hold waits until that is known. So do those of a row that opens a block, which
//! is known later. Only the others are looked at closely.

mod plan;

use crate::error::Result;
use crate::ids::{BlockId, SeqHandle};
use crate::manager::{settle, Counts, Manager, Publish, Refusal};
use crate::pool::Pool;
use crate::sequence::{Sequence, Share};
use crate::stats::{note_evictions, Counters};
use crate::step_arrays::{ShownRows, StepArrays};

pub(crate) use plan::RowPlan;
use plan::Tail;

/// What to do with a batch that does not fit as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Schedule nothing.
    All,
    /// Schedule the longest prefix that fits, into the pool and into the arrays.
    Fit,
}

/// A batch to schedule.
#[derive(Clone, Copy, Debug)]
pub struct StepRequest<'a> {
    /// One sequence a row.
    pub handles: &'a [SeqHandle],
    /// Tokens to schedule.
    pub num_new: Counts<'a>,
    /// Slots to reserve beyond them.
    pub lookahead: Counts<'a>,
    /// What to do if not all fits.
    pub policy: Policy,
    /// Rows to fill up to with empty sequences.
    pub pad_seqs: usize,
    /// Entries of `slot_mapping` to fill up to with -1.
    pub pad_tokens: usize,
}

/// What a step holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scheduled {
    /// Rows scheduled.
    pub num_seqs: usize,
    /// Tokens scheduled.
    pub num_tokens: usize,
    /// Pairs in `copies`.
    pub num_copies: usize,
    /// Triples in `changes`.
    pub num_changes: usize,
    /// Longest block table of the step.
    pub max_blocks: usize,
    /// Why row `num_seqs` was not scheduled; `Later` with 0 blocks short: the arrays are full.
    pub refusal: Option<Refusal>,
}

/// What rows of one namespace that opened a block have changed of the counters, not counted yet.
#[derive(Default)]
struct Opened {
    namespace: u32,
    num_blocks: u32,
    num_promised: u32,
}

impl Opened {
    fn count(&self, counters: &mut Counters, pool: &mut Pool) {
        if self.num_blocks > 0 {
            pool.count_taken(self.num_blocks as usize, self.namespace);
            let old = Share { promised: self.num_promised, ..Share::default() };
            let new = Share { blocks: self.num_blocks, ..Share::default() };
            counters.total.replace(old, new);
            pool.namespaces.touch(self.namespace).replace(old, new);
        }
    }
}

impl Manager {
    /// Schedule the next tokens of a batch and fill the index arrays of the step.
    ///
    /// Errors: lengths, stale, duplicate or preempted handles, negative counts, a batch (under `Policy::Fit` a row) larger
    /// than the arrays, too many steps in flight. A refusal under `Policy::All` leaves manager and arrays unchanged.
    /// O(rows + tokens + changed columns).
    pub fn schedule(&mut self, request: &StepRequest, out: &mut StepArrays) -> Result<Scheduled> {
        let step = self.schedule_rows(request, out, None)?;
        if step.refusal.is_none() || request.policy == Policy::Fit {
            self.note_step();
        }
        Ok(step)
    }

    /// Add rows to the step that `out` holds, as `step` describes it: requests, say, that were admitted since and hit what
    /// its rows have published. Returns the whole step.
    ///
    /// As `schedule`, but for rows that would have to copy a block: the copies of one step are made at once, and what an
    /// earlier row copies from may have been given back since. Such a row is refused with `Later`, 0 blocks short. The
    /// step must not be padded yet, and its rows must be in flight with the tables that it shows: a block that one of them
    /// has given back since could be written by a new row as well. O(rows of both + tokens + changed columns).
    pub fn append(
        &mut self,
        request: &StepRequest,
        out: &mut StepArrays,
        step: &Scheduled,
    ) -> Result<Scheduled> {
        let rest = StepRequest {
            pad_seqs: request.pad_seqs.saturating_sub(step.num_seqs),
            pad_tokens: request.pad_tokens.saturating_sub(step.num_tokens),
            ..*request
        };
        let (shown, mut rest_of_arrays) = out.split(step);
        let more = self.schedule_rows(&rest, &mut rest_of_arrays, Some(shown))?;
        if more.refusal.is_some() && request.policy == Policy::All {
            return Ok(Scheduled { refusal: more.refusal, ..*step });
        }
        out.join(step, &more, rest.pad_seqs);
        Ok(Scheduled {
            num_seqs: step.num_seqs + more.num_seqs,
            num_tokens: step.num_tokens + more.num_tokens,
            num_copies: step.num_copies,
            num_changes: step.num_changes + more.num_changes,
            max_blocks: step.max_blocks.max(more.max_blocks),
            refusal: more.refusal,
        })
    }

    fn schedule_rows(
        &mut self,
        request: &StepRequest,
        out: &mut StepArrays,
        shown: Option<ShownRows>,
    ) -> Result<Scheduled> {
        let most_rows = self.check_step(request, out, shown)?;
        let (num_seqs, refusal) = self.plan_step(request, most_rows, shown.is_none());
        if refusal.is_some() && request.policy == Policy::All {
            self.retreat(request.handles, 0..most_rows);
            return Ok(Scheduled { refusal, ..Scheduled::default() });
        }
        if num_seqs < most_rows {
            self.retreat(request.handles, num_seqs..most_rows);
        }
        let mut step = Scheduled { num_seqs, refusal, ..Scheduled::default() };
        out.query_start_loc[0] = 0;
        let mut opened = Opened::default();
        let (mut row, mut num_grown, mut num_others) = (0, 0, 0);
        loop {
            // Single rows up to the next of another kind; then what is missing of those that have grown.
            let other = self.plan.get(num_others).copied().filter(|plan| plan.row < num_seqs);
            let end = other.map_or(num_seqs, |plan| plan.row);
            let single = row - num_others..end - num_others;
            let (slots, positions) = (&self.single.slots[single.clone()], &self.single.positions[single]);
            out.write_single_rows(row, step.num_tokens, slots, positions);
            while let Some(&grown) = self.single.grown.get(num_grown).filter(|&&grown| grown < end) {
                self.grow_row(
                    request.handles[grown],
                    grown,
                    step.num_tokens + grown - row,
                    &mut opened,
                    &mut step,
                    out,
                );
                num_grown += 1;
            }
            step.num_tokens += end - row;
            let Some(other) = other else { break };
            self.schedule_row(request, other, &mut step, out);
            (row, num_others) = (end + 1, num_others + 1);
        }
        opened.count(&mut self.counters, &mut self.pool);
        step.max_blocks = out.longest_table(num_seqs);
        if !self.pool.holds.is_empty() {
            // A transfer may own what comes next: ask the pool each time.
            request.handles[..num_seqs].iter().for_each(|&handle| self.seqs[handle].lose_room());
        }
        self.counters.total.copied_blocks += step.num_copies as u64;
        out.pad(&mut step, request, self.padding());
        self.note_peaks();
        Ok(step)
    }

    /// Give a single row, whose token is the `token`th of the step, the block that it needs, and bring its table up to date.
    /// What `settle` would count is counted for many rows together.
    #[inline]
    fn grow_row(
        &mut self,
        handle: SeqHandle,
        row: usize,
        token: usize,
        opened: &mut Opened,
        step: &mut Scheduled,
        out: &mut StepArrays,
    ) {
        let padding = self.padding();
        let seq = &mut self.seqs[handle];
        if seq.is_short(self.size) {
            if seq.namespace != opened.namespace {
                opened.count(&mut self.counters, &mut self.pool);
                *opened = Opened { namespace: seq.namespace, ..Opened::default() };
            }
            let evictions = self.pool.evictions;
            let Some(block) = self.pool.take_uncounted(seq.namespace) else { return };
            note_evictions(&mut self.counters, &mut self.pool, seq.namespace, evictions);
            if let Some(slot) = seq.open(block, self.size) {
                out.slot_mapping[token] = slot;
            }
            seq.share.blocks += 1;
            opened.num_blocks += 1;
            // A promise, if any, is kept with this block.
            opened.num_promised += seq.share.promised.min(1);
            seq.share.promised = seq.share.promised.saturating_sub(1);
        }
        step.num_changes += usize::from(
            out.write_block(row, seq, step.num_changes)
                || out.write_table(row, seq, padding, step.num_changes),
        );
    }

    /// Schedule a row, carrying out what was planned for it.
    fn schedule_row(
        &mut self,
        request: &StepRequest,
        plan: RowPlan,
        step: &mut Scheduled,
        out: &mut StepArrays,
    ) {
        let row = plan.row;
        let padding = self.padding();
        let seq = &mut self.seqs[request.handles[row]];
        let (num_new, lookahead) = (request.num_new.at(row), request.lookahead.at(row));
        if plan.tail != Tail::Ready {
            let evictions = self.pool.evictions;
            if let Some((src, dst)) = make_tail_writable(seq, &mut self.pool, plan.tail) {
                out.copies[2 * step.num_copies] = src.0 as i32;
                out.copies[2 * step.num_copies + 1] = dst.0 as i32;
                step.num_copies += 1;
                self.pool.namespaces.usage(seq.namespace).copied_blocks += 1;
                if plan.tail == Tail::CopyPublished {
                    // Cached now, behind all that was available: this step takes no more than that.
                    self.pool.release(src);
                }
            }
            self.pool.take_many(plan.num_new_blocks, seq.namespace, &mut seq.blocks);
            note_evictions(&mut self.counters, &mut self.pool, seq.namespace, evictions);
            seq.num_cols = seq.blocks.len() as u32;
            if num_new > 0 {
                seq.aim(self.size);
            }
        }
        let ahead = seq.ahead;
        out.write_slots(step.num_tokens, seq, num_new, lookahead, self.size);
        // Both sides of the cursor moved alike and no block came: nothing that is counted has changed.
        if seq.ahead != ahead || plan.tail != Tail::Ready {
            settle(seq, &mut self.counters, &mut self.pool);
        }
        step.num_changes += usize::from(out.write_table(row, seq, padding, step.num_changes));
        step.num_tokens += num_new;
        out.seq_lens[row] = seq.scheduled as i32;
        out.query_start_loc[row + 1] = step.num_tokens as i32;
        if self.publish == Publish::OnSchedule {
            seq.publish_known(seq.num_scheduled().min(seq.prompt_len()), &mut self.pool);
        }
    }
}

/// Let `seq` write into its partly filled tail block; returns the copy to make.
fn make_tail_writable(seq: &mut Sequence, pool: &mut Pool, tail: Tail) -> Option<(BlockId, BlockId)> {
    if matches!(tail, Tail::Ready | Tail::Writable) {
        return None;
    }
    let column = pool.block_size.column(seq.num_scheduled());
    let block = seq.blocks[column];
    let fill = pool.block_size.within(seq.num_computed(), column);
    if tail == Tail::Withdraw {
        pool.withdraw(block);
        pool.lower_fill(block, fill);
        return None;
    }
    let dst = pool.take(seq.namespace)?;
    pool.blocks.copy_tokens(block, dst, fill);
    pool.raise_fill(dst, fill);
    seq.blocks[column] = dst;
    seq.touch(column);
    Some((block, dst))
}
