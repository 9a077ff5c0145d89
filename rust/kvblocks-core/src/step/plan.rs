//! The plan of a step: what each of its rows needs, found without changing anything but the cursors of plain rows, which
//! go back if the step is refused. Part of `step`.

use std::ops::Range;

use super::{Policy, StepRequest};
use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::SeqHandle;
use crate::manager::{check_member, Counts, Manager, Publish, Refusal};
use crate::prefetch::prefetch;
use crate::sequence::{Sequence, MAX_IN_FLIGHT};
use crate::sequences::SEQS_AHEAD;
use crate::step_arrays::{RowState, ShownRows, StepArrays};

/// What a row that is not plain needs that its sequence does not have.
#[derive(Clone, Copy)]
pub(crate) struct RowPlan {
    pub row: usize,
    pub num_new_blocks: usize,
    pub tail: Tail,
}

/// How a row gets to write into the block that its next token shares with earlier ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tail {
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

impl Manager {
    /// Check the batch. Plain rows are scheduled then and left in `self.single`, the others are left in `self.plan`, their
    /// needs open. Returns how many rows the arrays hold: all, or under `Policy::Fit` the longest prefix.
    pub(super) fn check_step(
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
    pub(super) fn retreat(&mut self, handles: &[SeqHandle], rows: Range<usize>) {
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
    pub(super) fn plan_step(
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
