//! The step: the next tokens of a batch, their slots and the index arrays of one forward pass. Imports `manager` and
//! below.
//!
//! Invariant: plan, then apply. The plan counts blocks exactly (each copy-on-write included, in row order, so that the
//! last owner of a shared block writes in place); applying it cannot fail. Copies must run before the step's writes;
//! a source is owned by others or goes last in line for eviction, so it is never a destination of the same step.
//!
//! Nearly all rows of a decode step need nothing from the pool: their next slots lie in a block that they alone own.
//! Such a row is known by its sequence's `room`. Its cursors move while it is checked, and back if the step is refused
//! or ends before it; what its arrays are to hold waits until that is known. Only the others are looked at closely.

use std::ops::Range;

use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqHandle};
use crate::manager::{check_member, settle, Counts, Manager, Publish, Refusal};
use crate::pool::Pool;
use crate::prefetch::prefetch;
use crate::sequence::{Sequence, Share, MAX_IN_FLIGHT};
use crate::sequences::SEQS_AHEAD;
use crate::stats::{note_evictions, Counters};
use crate::step_arrays::{RowState, ShownRows, StepArrays};

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

/// What a row that is not plain needs that its sequence does not have.
#[derive(Clone, Copy)]
pub(crate) struct RowPlan {
    row: usize,
    num_new_blocks: usize,
    tail: Tail,
}

/// How a row gets to write into the block that its next token shares with earlier ones.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tail {
    /// It may already, and needs no block: there is nothing to plan.
    Ready,
    /// One token, in a block that it opens or may write already; its reservation grows by that token, and so by a block.
    Opens,
    /// It may already, or the token opens a block.
    Writable,
    /// Others own the block too: copy it, and leave it to them (the plan has already).
    CopyShared,
    /// A truncation ended inside a published block that nobody else owns. Copied while there is room, so that its
    /// content can still be hit, as can its cached successors.
    CopyPublished,
    /// As before, without room: nothing is cached then, so no successor is lost by overwriting it.
    Withdraw,
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
        let (mut row, mut num_planned, mut num_others) = (0, 0, 0);
        loop {
            // Rows of one token each up to the next of another kind; then what is missing of those that open a block.
            let plans = &self.plan[num_planned..];
            let num_opening = plans.iter().take_while(|plan| plan.tail == Tail::Opens).count();
            let other = plans.get(num_opening).copied().filter(|plan| plan.row < num_seqs);
            let end = other.map_or(num_seqs, |plan| plan.row);
            let single = row - num_others..end - num_others;
            let (slots, positions) = (&self.single.slots[single.clone()], &self.single.positions[single]);
            out.write_single_rows(row, step.num_tokens, slots, positions);
            for at in num_planned..num_planned + num_opening {
                let opening = self.plan[at].row;
                if opening >= num_seqs {
                    break;
                }
                let token = step.num_tokens + opening - row;
                self.open_block(request, opening, token, &mut opened, &mut step, out);
            }
            step.num_tokens += end - row;
            let Some(other) = other else { break };
            self.schedule_row(request, other, &mut step, out);
            (row, num_planned, num_others) = (end + 1, num_planned + num_opening + 1, num_others + 1);
        }
        opened.count(&mut self.counters, &mut self.pool);
        step.max_blocks = out.longest_table(num_seqs);
        if !self.pool.holds.is_empty() {
            // A transfer may own what comes next: ask the pool each time.
            request.handles[..num_seqs].iter().for_each(|&handle| self.seqs[handle].room = 0);
        }
        self.counters.total.copied_blocks += step.num_copies as u64;
        out.pad(&mut step, request, self.padding());
        self.note_peaks();
        Ok(step)
    }

    /// Schedule a row of one token, the `token`th of the step, that needs one block. What `settle` would count is counted
    /// for many rows together.
    #[inline]
    fn open_block(
        &mut self,
        request: &StepRequest,
        row: usize,
        token: usize,
        opened: &mut Opened,
        step: &mut Scheduled,
        out: &mut StepArrays,
    ) {
        let (padding, handle) = (self.padding(), request.handles[row]);
        let seq = &mut self.seqs[handle];
        if seq.namespace != opened.namespace {
            opened.count(&mut self.counters, &mut self.pool);
            *opened = Opened { namespace: seq.namespace, ..Opened::default() };
        }
        let evictions = self.pool.evictions;
        let Some(block) = self.pool.take_uncounted(seq.namespace) else { return };
        note_evictions(&mut self.counters, &mut self.pool, seq.namespace, evictions);
        seq.blocks.push(block);
        seq.num_cols += 1;
        seq.share.blocks += 1;
        opened.num_blocks += 1;
        // A promise, if any, is kept with this block.
        opened.num_promised += seq.share.promised.min(1);
        seq.share.promised = seq.share.promised.saturating_sub(1);
        if seq.room == 0 {
            (seq.tail, seq.room) = (block, self.size.get() as u32);
        }
        out.slot_mapping[token] = seq.advance(self.size) as i64;
        seq.reserved += 1;
        step.num_changes += usize::from(
            out.write_block(row, handle, seq, block, step.num_changes)
                || out.write_table(row, handle, seq, padding, step.num_changes),
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
        let (padding, handle) = (self.padding(), request.handles[row]);
        let seq = &mut self.seqs[handle];
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
        let ahead = seq.reserved - seq.scheduled;
        out.write_slots(step.num_tokens, seq, num_new, self.size);
        seq.reserved = seq.reserved.max(seq.scheduled + lookahead as u32);
        // Both sides of the cursor moved alike and no block came: nothing that is counted has changed.
        if seq.reserved - seq.scheduled != ahead || plan.tail != Tail::Ready {
            settle(seq, &mut self.counters, &mut self.pool);
        }
        step.num_changes += usize::from(out.write_table(row, handle, seq, padding, step.num_changes));
        step.num_tokens += num_new;
        out.seq_lens[row] = seq.scheduled as i32;
        out.query_start_loc[row + 1] = step.num_tokens as i32;
        if self.publish == Publish::OnSchedule {
            seq.publish_known(seq.num_scheduled().min(seq.prompt_len()), &mut self.pool);
        }
    }

    /// Check the batch. Plain rows are scheduled then and left in `self.single`, the others are left in `self.plan`, their
    /// needs open. Returns how many rows the arrays hold: all, or under `Policy::Fit` the longest prefix.
    fn check_step(
        &mut self,
        request: &StepRequest,
        out: &StepArrays,
        shown: Option<ShownRows>,
    ) -> Result<usize> {
        let rows = request.handles.len();
        request.num_new.check("num_new", rows)?;
        request.lookahead.check("lookahead", rows)?;
        let fits = |argument, got: usize, most: usize, of| match got <= most {
            true => Ok(()),
            false => {
                Err(Error::Value { argument, got: got as i64, expected: format!("at most {most} ({of})") })
            }
        };
        let (max_seqs, max_tokens) = (out.seq_lens.len(), out.slot_mapping.len());
        let may_cut = request.policy == Policy::Fit;
        if !may_cut {
            fits("handles", rows, max_seqs, "sequences of the step")?;
        }
        fits("pad_seqs", request.pad_seqs, max_seqs, "sequences of the step")?;
        fits("pad_tokens", request.pad_tokens, max_tokens, "tokens of the step")?;
        self.next_batch();
        if let Some(shown) = shown {
            self.check_shown(shown)?;
        }
        self.plan.clear();
        // For the largest step of these arrays, so that only the first one allocates.
        self.plan.reserve(rows.max(max_seqs));
        self.single.fit(max_seqs);
        let (mut row, mut num_tokens, mut num_others) = (0, 0, 0);
        loop {
            if self.publish == Publish::OnCommit {
                let num_plain =
                    self.advance_plain_rows(request, row..rows, row - num_others, num_tokens, out);
                (row, num_tokens) = (row + num_plain, num_tokens + num_plain);
            }
            if row == rows {
                break;
            }
            match self.check_row(request, row, out) {
                Ok(tail) => {
                    if tail == Tail::Opens {
                        let position = self.seqs[request.handles[row]].scheduled as i32;
                        self.single.positions[row - num_others] = position;
                    }
                    num_others += usize::from(tail != Tail::Opens);
                    self.plan.push(RowPlan { row, num_new_blocks: 0, tail });
                }
                Err(error) => {
                    self.retreat(request.handles, 0..row);
                    return Err(error);
                }
            }
            num_tokens += request.num_new.at(row);
            row += 1;
        }
        if !may_cut {
            if let Err(error) = fits("sum of num_new", num_tokens, max_tokens, "tokens of the step") {
                self.retreat(request.handles, 0..rows);
                return Err(error);
            }
            return Ok(rows);
        }
        // No plain row lies behind them.
        let mut end = 0;
        let ends = (0..rows.min(max_seqs)).map(|row| {
            end += request.num_new.at(row);
            end
        });
        let most_rows = ends.take_while(|&end| end <= max_tokens).count();
        self.plan.retain(|plan| plan.row < most_rows);
        Ok(most_rows)
    }

    /// Check that the rows of a step are as they were scheduled, and count them as seen in this batch.
    fn check_shown(&mut self, shown: ShownRows) -> Result<()> {
        for (row, (state, &len)) in shown.rows.iter().zip(shown.seq_lens).enumerate() {
            let seq = self.seqs.get_mut(state.handle()).filter(|seq| {
                seq.in_flight.newest().is_some() && seq.scheduled == len as u32 && state.shows(seq)
            });
            let Some(seq) = seq else {
                return Err(Error::StaleRow { row, handle: state.handle() });
            };
            seq.seen = self.batch;
        }
        Ok(())
    }

    /// Schedule the leading `rows` that are plain, the first noted `at` this place of `self.single`; returns how many. A
    /// plain row has one new token, in a block that the sequence may write, it keeps its distance to what is reserved, and
    /// its row shows its table: nothing changes but its cursors, which `retreat` can take back.
    fn advance_plain_rows(
        &mut self,
        request: &StepRequest,
        rows: Range<usize>,
        at: usize,
        num_tokens: usize,
        out: &StepArrays,
    ) -> usize {
        let most = rows.len().min(out.slot_mapping.len().saturating_sub(num_tokens));
        let shown = out.rows.get(rows.start..).unwrap_or_default();
        let shown = &shown[..most.min(shown.len())];
        let first = rows.start;
        let handles = &request.handles[rows];
        let mut single = std::mem::take(&mut self.single);
        let slots = single.slots.get_mut(at..).unwrap_or_default();
        let positions = single.positions.get_mut(at..).unwrap_or_default();
        let to = slots.iter_mut().zip(positions);
        // One loop for the same counts in all rows, one for the others.
        let num_plain = match (request.num_new, request.lookahead) {
            (Counts::All(num_new), Counts::All(lookahead)) => {
                self.advance_plain(handles, shown, to, |_| [num_new as u32, lookahead as u32])
            }
            (num_new, lookahead) => self.advance_plain(handles, shown, to, |at| {
                [num_new.at(first + at) as u32, lookahead.at(first + at) as u32]
            }),
        };
        self.single = single;
        num_plain
    }

    #[inline(never)]
    fn advance_plain<'a>(
        &mut self,
        handles: &[SeqHandle],
        shown: &[RowState],
        to: impl Iterator<Item = (&'a mut i64, &'a mut i32)>,
        counts: impl Fn(usize) -> [u32; 2],
    ) -> usize {
        let (batch, size, seqs) = (self.batch, self.size, &mut self.seqs);
        for (at, ((&handle, shown), (slot, position))) in handles.iter().zip(shown).zip(to).enumerate() {
            let [num_new, lookahead] = counts(at);
            seqs.prefetch(handles.get(at + SEQS_AHEAD));
            let Some(seq) = seqs.get_mut(handle) else { return at };
            let is_plain = num_new == 1
                && lookahead < seq.room
                && seq.seen != batch
                && seq.reserved == seq.scheduled + lookahead
                && seq.in_flight.len() < MAX_IN_FLIGHT
                && shown.handle() == handle
                && shown.shows(seq);
            if !is_plain {
                return at;
            }
            seq.seen = batch;
            *position = seq.scheduled as i32;
            *slot = seq.advance(size) as i64;
            seq.reserved += 1;
        }
        shown.len()
    }

    /// Take back the plain ones of `rows`: those that are not planned.
    #[cold]
    fn retreat(&mut self, handles: &[SeqHandle], rows: Range<usize>) {
        let first = rows.start;
        let mut planned = self.plan.iter().map(|plan| plan.row).skip_while(|&row| row < first).peekable();
        for row in rows {
            if planned.next_if_eq(&row).is_none() {
                self.seqs[handles[row]].retreat();
            }
        }
    }

    /// Check any other row; returns whether it is ready or, being to be planned, said to be writable for now.
    fn check_row(&mut self, request: &StepRequest, row: usize, out: &StepArrays) -> Result<Tail> {
        let handle = request.handles[row];
        let capacity = self.capacity();
        let seq = self.seqs.get_mut(handle).ok_or(Error::StaleHandle(handle))?;
        check_member(seq, handle, self.batch, true)?;
        let (num_new, max_tokens) = (request.num_new.at(row), out.slot_mapping.len());
        let is_ready = num_new > 0
            && num_new + request.lookahead.at(row) <= seq.room as usize
            && num_new <= max_tokens
            && seq.num_cols as usize <= out.max_blocks
            && seq.in_flight.len() < MAX_IN_FLIGHT;
        if is_ready {
            return Ok(Tail::Ready);
        }
        if self.publish == Publish::OnCommit
            && opens_block(seq, num_new, request.lookahead.at(row), self.size)
            && (seq.num_cols as usize) < out.max_blocks
            && row < out.rows.len()
        {
            seq.prefetch_table();
            prefetch(out.block_tables, row * out.max_blocks + seq.num_cols as usize);
            return Ok(Tail::Opens);
        }
        let wrong =
            |argument, got: usize, expected| Err(Error::Row { argument, row, got: got as i64, expected });
        if request.policy == Policy::Fit && num_new > max_tokens {
            return wrong("num_new", num_new, format!("at most {max_tokens} (tokens of the step)"));
        }
        if seq.in_flight.len() == MAX_IN_FLIGHT {
            let expected = format!("a sequence with fewer than {MAX_IN_FLIGHT} steps in flight");
            return wrong("handles", handle.0 as usize, expected);
        }
        let end = seq.num_scheduled() + num_new + request.lookahead.at(row);
        if end > i32::MAX as usize {
            return wrong("num_new", num_new, format!("a sequence of at most {} tokens", i32::MAX));
        }
        let num_cols = seq.num_cols as usize;
        let mut columns = self.size.blocks(end).max(num_cols);
        if columns > capacity {
            // Beyond the capacity the answer is Never, not an error.
            columns = columns.min(capacity + seq.num_holes).max(num_cols);
        }
        if columns > out.max_blocks {
            let columns_of = "columns of block_tables; raise max_blocks_per_seq";
            return wrong(
                "blocks of handles",
                columns,
                format!("at most the {} {columns_of}", out.max_blocks),
            );
        }
        seq.prefetch_table();
        prefetch(out.block_tables, row * out.max_blocks + num_cols);
        Ok(Tail::Writable)
    }

    /// Fill in `self.plan`; returns how many of `most_rows` fit and why the next row does not. Owners that will copy a
    /// shared block have already left it, for the rows that fit.
    fn plan_step(
        &mut self,
        request: &StepRequest,
        most_rows: usize,
        may_copy: bool,
    ) -> (usize, Option<Refusal>) {
        let capacity_blocks = self.capacity();
        let available = self.pool.num_available();
        let mut refusal = (most_rows < request.handles.len()).then_some(Refusal::Later { num_blocks: 0 });
        let (mut need, mut num_planned, mut num_rows) = (0, 0, most_rows);
        for plan in &mut self.plan {
            let num_opened = usize::from(plan.tail == Tail::Opens);
            if plan.tail == Tail::Ready || num_opened > 0 && need < available {
                need += num_opened;
                num_planned += 1;
                if num_opened > 0 {
                    let seq = &self.seqs[request.handles[plan.row]];
                    prefetch(&seq.blocks, (seq.num_cols as usize).saturating_sub(1));
                    self.pool.prefetch_free(need - 1);
                }
                continue;
            }
            let seq = &self.seqs[request.handles[plan.row]];
            let num_new = request.num_new.at(plan.row);
            let columns = self.size.blocks(seq.num_scheduled() + num_new + request.lookahead.at(plan.row));
            plan.num_new_blocks = columns.saturating_sub(seq.num_cols as usize);
            // A window that moves on holds no more than what is not dropped.
            let need_blocks = columns.saturating_sub(seq.num_holes);
            prefetch(&seq.blocks, (seq.num_cols as usize).saturating_sub(1));
            self.pool.prefetch_free(need);
            let written = seq.partial_tail(self.size).filter(|_| num_new > 0);
            plan.tail = match written {
                Some(block) if self.pool.refs(block) > 1 => Tail::CopyShared,
                Some(block) if self.pool.is_published(block) => Tail::Withdraw,
                _ => Tail::Writable,
            };
            if need_blocks > capacity_blocks {
                refusal = Some(Refusal::Never { need_blocks, capacity_blocks });
                num_rows = plan.row;
                break;
            }
            if !may_copy && plan.tail != Tail::Writable {
                refusal = refusal.or(Some(Refusal::Later { num_blocks: 0 }));
                num_rows = plan.row;
                break;
            }
            let with_row = need + plan.num_new_blocks + usize::from(plan.tail == Tail::CopyShared);
            if with_row > available {
                refusal = Some(Refusal::Later { num_blocks: with_row - available });
                if request.policy == Policy::Fit {
                    num_rows = plan.row;
                    break;
                }
            }
            need = with_row;
            num_planned += 1;
            if let (Tail::CopyShared, Some(block)) = (plan.tail, written) {
                self.pool.release(block);
            }
        }
        let planned = &mut self.plan[..num_planned];
        if refusal.is_some() && request.policy == Policy::All {
            for plan in planned.iter().filter(|plan| plan.tail == Tail::CopyShared) {
                let tail = self.seqs[request.handles[plan.row]].partial_tail(self.size);
                tail.into_iter().for_each(|block| self.pool.share(block));
            }
        } else if need < available {
            let published = planned.iter_mut().filter(|plan| plan.tail == Tail::Withdraw);
            published.take(available - need).for_each(|plan| plan.tail = Tail::CopyPublished);
        }
        (num_rows, refusal)
    }
}

/// Whether all that a row needs is one block: it has one token, in a block that it may write already or as the first of
/// the new one, and its reservation fills its table.
fn opens_block(seq: &Sequence, num_new: usize, lookahead: usize, size: BlockSize) -> bool {
    let reserved = seq.num_scheduled() + lookahead;
    num_new == 1
        && (seq.room > 0 || lookahead == 0)
        && seq.num_reserved() == reserved
        && seq.num_cols as usize * size.get() == reserved
        && seq.in_flight.len() < MAX_IN_FLIGHT
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
