//! The plan of a step: what each of its rows needs, found without changing anything but the cursors of single rows, which
//! go back if the step is refused. Part of `step`.

use std::ops::Range;

use super::{Policy, StepRequest};
use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::SeqHandle;
use crate::manager::{check_member, Counts, Manager, Refusal};
use crate::pipeline::MAX_IN_FLIGHT;
use crate::prefetch::prefetch;
use crate::sequence::Sequence;
use crate::sequences::SEQS_AHEAD;
use crate::step_arrays::{RowState, ShownRows, SingleRows, StepArrays};

/// What a row that is not single needs that its sequence does not have.
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
    /// Check the batch. Single rows are scheduled then and left in `self.single`, the others are left in `self.plan`, their
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
        self.single.start(max_seqs);
        let (mut row, mut num_tokens) = (0, 0);
        loop {
            let num_single = self.advance_single_rows(request, row..rows, num_tokens, out);
            (row, num_tokens) = (row + num_single, num_tokens + num_single);
            if row == rows {
                break;
            }
            match self.check_row(request, row, out) {
                Ok(tail) => self.plan.push(RowPlan { row, num_new_blocks: 0, tail }),
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
        // No single row lies behind them.
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

    /// Schedule the leading `rows` that are single; returns how many. A single row has one new token, keeps its distance
    /// to what is reserved, and its row shows its table, or the beginning of it. If it is plain, in a block that the
    /// sequence may write, nothing changes but its cursors, which `retreat` can take back. Else it is noted as grown: it
    /// needs a block, which may be the one that its token goes into, or its row shows too few.
    fn advance_single_rows(
        &mut self,
        request: &StepRequest,
        rows: Range<usize>,
        num_tokens: usize,
        out: &StepArrays,
    ) -> usize {
        let most = rows.len().min(out.slot_mapping.len().saturating_sub(num_tokens));
        let shown = out.rows.get(rows.start..).unwrap_or_default();
        let shown = &shown[..most.min(shown.len())];
        let first = rows.start;
        // One loop for the same counts in all rows, one for the others.
        match (request.num_new, request.lookahead) {
            (Counts::All(1), Counts::All(lookahead)) => {
                self.advance_single(request.handles, first, shown, out, |_| Some(lookahead as u32))
            }
            (Counts::All(_), Counts::All(_)) => 0,
            (num_new, lookahead) => self.advance_single(request.handles, first, shown, out, |row| {
                (num_new.at(row) == 1).then(|| lookahead.at(row) as u32)
            }),
        }
    }

    /// `lookahead` of a row, None if it has another number of tokens than one.
    #[inline(never)]
    fn advance_single(
        &mut self,
        handles: &[SeqHandle],
        first: usize,
        shown: &[RowState],
        out: &StepArrays,
        lookahead: impl Fn(usize) -> Option<u32>,
    ) -> usize {
        let (batch, mut seqs) = (self.batch, self.seqs.places());
        let SingleRows { slots, positions, grown } = &mut self.single;
        let (place, most) = (first - self.plan.len(), shown.len());
        let (slots, positions) = (&mut slots[place..][..most], &mut positions[place..][..most]);
        let (handles, all) = (&handles[first..][..most], &handles[first..]);
        let mut growth = Growth { grown, out, first, size: self.size };
        for at in 0..most {
            if let Some(&handle) = all.get(at + SEQS_AHEAD) {
                seqs.prefetch(handle);
            }
            let (Some(lookahead), Some(seq)) = (lookahead(first + at), seqs.get_mut(handles[at])) else {
                return at;
            };
            if seq.seen == batch {
                return at;
            }
            let is_plain = seq.ahead == lookahead && seq.has_room_beyond(lookahead) && shown[at].shows(seq);
            if !is_plain && !growth.note(seq, at, lookahead) {
                return at;
            }
            let position = seq.scheduled as i32;
            let Some(slot) = seq.advance() else { return at };
            (slots[at], positions[at]) = (slot, position);
            seq.seen = batch;
        }
        most
    }

    /// Take back the single ones of `rows`: those that are not planned.
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
            && num_new + request.lookahead.at(row) <= seq.room() as usize
            && num_new <= max_tokens
            && seq.num_cols as usize <= out.max_blocks
            && !seq.in_flight.is_full();
        if is_ready {
            return Ok(Tail::Ready);
        }
        let wrong =
            |argument, got: usize, expected| Err(Error::Row { argument, row, got: got as i64, expected });
        if request.policy == Policy::Fit && num_new > max_tokens {
            return wrong("num_new", num_new, format!("at most {max_tokens} (tokens of the step)"));
        }
        if seq.in_flight.is_full() {
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
            columns = columns.min(capacity + seq.num_holes as usize).max(num_cols);
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
        let mut supply = Supply {
            capacity_blocks: self.capacity(),
            available: self.pool.num_available(),
            may_cut: request.policy == Policy::Fit,
            need: 0,
            refusal: (most_rows < request.handles.len()).then_some(Refusal::Later { num_blocks: 0 }),
        };
        let (mut num_planned, mut num_grown) = (0, 0);
        let num_rows = loop {
            let next = self.plan.get(num_planned).copied();
            let end = next.map_or(most_rows, |plan| plan.row);
            if let Some(row) = self.plan_grown(request, &mut num_grown, end, &mut supply) {
                break row;
            }
            let Some(mut plan) = next else { break most_rows };
            if plan.tail != Tail::Ready && !self.plan_row(request, &mut plan, may_copy, &mut supply) {
                break plan.row;
            }
            self.plan[num_planned] = plan;
            num_planned += 1;
        };
        let (need, available, refusal) = (supply.need, supply.available, supply.refusal);
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

    /// Plan the grown rows below row `end`, from the `num_grown`th on; returns the one that does not fit, if any. What
    /// giving them their blocks will need is asked for.
    fn plan_grown(
        &self,
        request: &StepRequest,
        num_grown: &mut usize,
        end: usize,
        supply: &mut Supply,
    ) -> Option<usize> {
        for &row in self.single.grown[*num_grown..].iter().take_while(|&&row| row < end) {
            let seq = &self.seqs[request.handles[row]];
            if seq.is_short(self.size) {
                self.pool.prefetch_free(supply.need);
                // With a block left for it, it does not hold all yet.
                let can_hold = supply.has(1) || supply.can_hold((seq.num_cols + 1 - seq.num_holes) as usize);
                if !can_hold || !supply.give(1) {
                    return Some(row);
                }
            }
            prefetch(&seq.blocks, (seq.num_cols as usize).saturating_sub(1));
            *num_grown += 1;
        }
        None
    }

    /// Plan a row that is not single; returns whether it fits.
    fn plan_row(
        &mut self,
        request: &StepRequest,
        plan: &mut RowPlan,
        may_copy: bool,
        supply: &mut Supply,
    ) -> bool {
        let seq = &self.seqs[request.handles[plan.row]];
        let num_new = request.num_new.at(plan.row);
        let columns = self.size.blocks(seq.num_scheduled() + num_new + request.lookahead.at(plan.row));
        plan.num_new_blocks = columns.saturating_sub(seq.num_cols as usize);
        prefetch(&seq.blocks, (seq.num_cols as usize).saturating_sub(1));
        self.pool.prefetch_free(supply.need);
        let written = seq.partial_tail(self.size).filter(|_| num_new > 0);
        plan.tail = match written {
            Some(block) if self.pool.refs(block) > 1 => Tail::CopyShared,
            Some(block) if self.pool.is_published(block) => Tail::Withdraw,
            _ => Tail::Writable,
        };
        // A window that moves on holds no more than what is not dropped.
        let need_blocks = columns.saturating_sub(seq.num_holes as usize);
        if !supply.can_hold(need_blocks) {
            return false;
        }
        if !may_copy && plan.tail != Tail::Writable {
            supply.refusal = supply.refusal.or(Some(Refusal::Later { num_blocks: 0 }));
            return false;
        }
        if !supply.give(plan.num_new_blocks + usize::from(plan.tail == Tail::CopyShared)) {
            return false;
        }
        if let (Tail::CopyShared, Some(block)) = (plan.tail, written) {
            self.pool.release(block);
        }
        true
    }
}

/// Where rows are noted that have grown, `first` being the first of those that are looked at.
struct Growth<'a, 'b> {
    grown: &'a mut Vec<usize>,
    out: &'a StepArrays<'b>,
    first: usize,
    size: BlockSize,
}

impl Growth<'_, '_> {
    /// Make the row `at` which is not plain ready to advance, and note it: it needs one block and nothing else, or its
    /// table is longer than what its row shows. False if that is not so. What the pool's answer will need is asked for.
    #[cold]
    #[inline(never)]
    fn note(&mut self, seq: &mut Sequence, at: usize, lookahead: u32) -> bool {
        let (row, max_blocks) = (self.first + at, self.out.max_blocks);
        let needs_block = !seq.has_room_beyond(lookahead);
        let num_cols = seq.num_cols as usize + usize::from(needs_block);
        let is_grown = seq.ahead == lookahead
            && self.out.rows[row].begins(seq)
            && num_cols <= max_blocks
            && !seq.in_flight.is_full()
            && (!needs_block || seq.opens_block(lookahead, self.size));
        if is_grown {
            if seq.room() == 0 {
                seq.aim_at_next(self.size);
            }
            self.grown.push(row);
            seq.prefetch_table();
            prefetch(self.out.block_tables, row * max_blocks + num_cols - 1);
        }
        is_grown
    }
}

/// What the pool has for the rows of a step, and what those planned need of it.
struct Supply {
    capacity_blocks: usize,
    available: usize,
    /// Whether the first row that does not fit ends the plan; else it is how many blocks all rows are short of.
    may_cut: bool,
    need: usize,
    refusal: Option<Refusal>,
}

impl Supply {
    /// Whether a sequence can ever have so many blocks; else the step is refused.
    fn can_hold(&mut self, need_blocks: usize) -> bool {
        let capacity_blocks = self.capacity_blocks;
        if need_blocks > capacity_blocks {
            self.refusal = Some(Refusal::Never { need_blocks, capacity_blocks });
        }
        need_blocks <= capacity_blocks
    }

    /// Whether so many blocks are left.
    fn has(&self, num_blocks: usize) -> bool {
        self.need + num_blocks <= self.available
    }

    /// Count blocks for a row; false if the plan ends before it.
    fn give(&mut self, num_blocks: usize) -> bool {
        let need = self.need + num_blocks;
        if need > self.available {
            self.refusal = Some(Refusal::Later { num_blocks: need - self.available });
            if self.may_cut {
                return false;
            }
        }
        self.need = need;
        true
    }
}
