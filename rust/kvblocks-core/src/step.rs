//! The step: the next tokens of a batch, their slots and the index arrays of one forward pass. Imports `manager` and
//! below.
//!
//! Invariant: plan, then apply. The plan counts blocks exactly (each copy-on-write included, in row order, so that the
//! last owner of a shared block writes in place); applying it cannot fail. Copies must run before the step's writes;
//! a source is owned by others or goes last in line for eviction, so it is never a destination of the same step.
//!
//! Nearly all rows of a decode step need nothing from the pool: their next slots lie in a block that they alone own.
//! Such a row is known by its sequence's `room` and is not planned; only the others are looked at twice.

use crate::block_size::BlockSize;
use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqHandle};
use crate::manager::{check_member, settle, Counts, Manager, Publish, Refusal};
use crate::pool::Pool;
use crate::sequence::{InFlight, Sequence, MAX_IN_FLIGHT};
use crate::stats::note_evictions;

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

/// What stands in a row of `block_tables`, so that an unchanged prefix is not written again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowState {
    handle: SeqHandle,
    epoch: u32,
    num_cols: u32,
}

/// The caller's index arrays. `rows` belongs to `block_tables`: default values where a row holds only padding.
pub struct StepArrays<'a> {
    /// int32 `[max_seqs, max_blocks]`, rows `max_blocks` apart.
    pub block_tables: &'a mut [i32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
    /// int64 `[max_tokens]`.
    pub slot_mapping: &'a mut [i64],
    /// int32 `[max_tokens]`.
    pub positions: &'a mut [i32],
    /// int32 `[max_seqs]`.
    pub seq_lens: &'a mut [i32],
    /// int32 `[max_seqs + 1]`.
    pub query_start_loc: &'a mut [i32],
    /// int32 `[max_seqs, 2]`: source, destination.
    pub copies: &'a mut [i32],
    /// int32 `[max_seqs, 3]`: row, first column, columns of `block_tables` that the step changed.
    pub changes: &'a mut [i32],
    /// `[max_seqs]`.
    pub rows: &'a mut [RowState],
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

/// What a row needs that its sequence does not have.
#[derive(Clone, Copy)]
pub(crate) struct RowPlan {
    row: usize,
    num_new_blocks: usize,
    tail: Tail,
}

/// How a row gets to write into the block that its next token shares with earlier ones.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tail {
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
    /// Schedule the next tokens of a batch and fill the index arrays of the step.
    ///
    /// Errors: lengths, stale, duplicate or preempted handles, negative counts, a batch (under `Policy::Fit` a row) larger
    /// than the arrays, too many steps in flight. A refusal under `Policy::All` leaves manager and arrays unchanged. O(rows + tokens + changed
    /// columns).
    pub fn schedule(&mut self, request: &StepRequest, out: &mut StepArrays) -> Result<Scheduled> {
        let most_rows = self.check_step(request, out)?;
        let (num_seqs, refusal) = self.plan_step(request, most_rows);
        if refusal.is_some() && request.policy == Policy::All {
            return Ok(Scheduled { refusal, ..Scheduled::default() });
        }
        let padding = self.padding();
        let mut step = Scheduled { num_seqs, refusal, ..Scheduled::default() };
        let mut planned = self.plan.iter().peekable();
        out.query_start_loc[0] = 0;
        for (row, &handle) in request.handles[..num_seqs].iter().enumerate() {
            let seq = &mut self.seqs[handle];
            let num_new = request.num_new.at(row);
            let plan = planned.next_if(|plan| plan.row == row);
            let is_planned = plan.is_some();
            if let Some(plan) = plan {
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
                match num_new {
                    // The tail is made writable when something is written.
                    0 => seq.room = 0,
                    _ => seq.aim(self.size),
                }
            }
            let start = seq.num_scheduled;
            let reserved_before = seq.num_reserved;
            seq.in_flight.push(InFlight { num_new: num_new as u32, reserved_before: reserved_before as u32 });
            out.write_slots(step.num_tokens, seq, num_new, self.size);
            if !self.pool.holds.is_empty() {
                // A transfer may own what comes next: ask the pool each time.
                seq.room = 0;
            }
            seq.num_reserved = seq.num_reserved.max(start + num_new + request.lookahead.at(row));
            // Both sides of the cursor moved alike and no block came: nothing that is counted has changed.
            if seq.num_reserved - seq.num_scheduled != reserved_before - start || is_planned {
                settle(seq, &mut self.counters, &mut self.pool);
            }
            step.max_blocks = step.max_blocks.max(seq.num_cols as usize);
            step.num_changes += usize::from(out.write_table(row, handle, seq, padding, step.num_changes));
            step.num_tokens += num_new;
            out.seq_lens[row] = seq.num_scheduled as i32;
            out.query_start_loc[row + 1] = step.num_tokens as i32;
            if self.publish == Publish::OnSchedule {
                seq.publish_known(seq.num_scheduled.min(seq.prompt_len), &mut self.pool);
            }
        }
        self.counters.total.copied_blocks += step.num_copies as u64;
        out.pad(&mut step, request, padding);
        self.note_peaks();
        self.note_step();
        Ok(step)
    }

    /// Check the batch, and leave the rows that need something of the pool in `self.plan`, their needs open. Returns how
    /// many rows the arrays hold: all, or under `Policy::Fit` the longest prefix.
    fn check_step(&mut self, request: &StepRequest, out: &StepArrays) -> Result<usize> {
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
        self.plan.clear();
        // For the largest step of these arrays, so that only the first one allocates.
        self.plan.reserve(max_seqs);
        let (mut num_tokens, mut most_rows) = (0, rows.min(max_seqs));
        for (row, &handle) in request.handles.iter().enumerate() {
            let seq = self.seqs.get_mut(handle).ok_or(Error::StaleHandle(handle))?;
            check_member(seq, handle, self.batch, true)?;
            let (num_new, lookahead) = (request.num_new.at(row), request.lookahead.at(row));
            if may_cut && num_new > max_tokens {
                let expected = format!("at most {max_tokens} (tokens of the step)");
                return Err(Error::Row { argument: "num_new", row, got: num_new as i64, expected });
            }
            num_tokens += num_new;
            if num_tokens > max_tokens {
                most_rows = most_rows.min(row);
            }
            if seq.in_flight.len() == MAX_IN_FLIGHT {
                let expected = format!("a sequence with fewer than {MAX_IN_FLIGHT} steps in flight");
                return Err(Error::Row { argument: "handles", row, got: handle.0, expected });
            }
            let mut columns = seq.num_cols as usize;
            if num_new + lookahead > seq.room as usize {
                let end = seq.num_scheduled + num_new + lookahead;
                // Beyond the capacity the answer is Never, not an error.
                columns = columns.max(self.size.blocks(end).min(self.pool.capacity() + seq.num_holes));
                if end > i32::MAX as usize {
                    let expected = format!("a sequence of at most {} tokens", i32::MAX);
                    return Err(Error::Row { argument: "num_new", row, got: num_new as i64, expected });
                }
                if row < most_rows {
                    self.plan.push(RowPlan { row, num_new_blocks: 0, tail: Tail::Writable });
                }
            }
            if columns > out.max_blocks {
                let columns_of = "columns of block_tables; raise max_blocks_per_seq";
                let expected = format!("at most the {} {columns_of}", out.max_blocks);
                return Err(Error::Row { argument: "blocks of handles", row, got: columns as i64, expected });
            }
        }
        if !may_cut {
            fits("sum of num_new", num_tokens, max_tokens, "tokens of the step")?;
        }
        Ok(most_rows)
    }

    /// Fill in `self.plan`; returns how many of `most_rows` fit and why the next row does not. Owners that will copy a
    /// shared block have already left it, for the rows that fit.
    fn plan_step(&mut self, request: &StepRequest, most_rows: usize) -> (usize, Option<Refusal>) {
        let capacity_blocks = self.capacity();
        let available = self.pool.num_available();
        let mut refusal = (most_rows < request.handles.len()).then_some(Refusal::Later { num_blocks: 0 });
        let (mut need, mut num_planned, mut num_rows) = (0, 0, most_rows);
        for plan in &mut self.plan {
            let seq = &self.seqs[request.handles[plan.row]];
            let num_new = request.num_new.at(plan.row);
            let columns = self.size.blocks(seq.num_scheduled + num_new + request.lookahead.at(plan.row));
            plan.num_new_blocks = columns.saturating_sub(seq.blocks.len());
            // A window that moves on holds no more than what is not dropped.
            let need_blocks = columns.saturating_sub(seq.num_holes);
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
        self.plan.truncate(num_planned);
        if refusal.is_some() && request.policy == Policy::All {
            for plan in self.plan.iter().filter(|plan| plan.tail == Tail::CopyShared) {
                let tail = self.seqs[request.handles[plan.row]].partial_tail(self.size);
                tail.into_iter().for_each(|block| self.pool.share(block));
            }
        } else if need < available {
            let published = self.plan.iter_mut().filter(|plan| plan.tail == Tail::Withdraw);
            published.take(available - need).for_each(|plan| plan.tail = Tail::CopyPublished);
        }
        (num_rows, refusal)
    }
}

/// Let `seq` write into its partly filled tail block; returns the copy to make.
fn make_tail_writable(seq: &mut Sequence, pool: &mut Pool, tail: Tail) -> Option<(BlockId, BlockId)> {
    if tail == Tail::Writable {
        return None;
    }
    let column = pool.block_size.column(seq.num_scheduled);
    let block = seq.blocks[column];
    let fill = pool.block_size.within(seq.num_computed, column);
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

impl StepArrays<'_> {
    /// Bring a row up to date, from the first column that may differ; returns whether one did, noted as change number
    /// `at`.
    #[inline]
    fn write_table(
        &mut self,
        row: usize,
        handle: SeqHandle,
        seq: &Sequence,
        padding: i32,
        at: usize,
    ) -> bool {
        let state = self.rows[row];
        if state.handle == handle && state.epoch == seq.epoch && state.num_cols == seq.num_cols {
            return false;
        }
        let shown = state.num_cols as usize;
        let known = match seq.epoch.wrapping_sub(state.epoch) {
            _ if state.handle != handle => 0,
            0 => shown,
            1 => shown.min(seq.changed_col),
            _ => 0,
        };
        let known = known.min(seq.blocks.len());
        let table = &mut self.block_tables[row * self.max_blocks..][..self.max_blocks];
        for (to, block) in table[known..].iter_mut().zip(&seq.blocks[known..]) {
            *to = block.export(padding);
        }
        if let Some(stale) = table.get_mut(seq.blocks.len()..shown) {
            stale.fill(padding);
        }
        self.rows[row] = RowState { handle, epoch: seq.epoch, num_cols: seq.num_cols };
        self.note_change(at, row, known, seq.blocks.len().max(shown))
    }

    fn note_change(&mut self, at: usize, row: usize, from: usize, to: usize) -> bool {
        if from < to {
            self.changes[3 * at..3 * at + 3].copy_from_slice(&[row as i32, from as i32, (to - from) as i32]);
        }
        from < to
    }

    /// Write slots and positions of the next `num_new` tokens and move the sequence on.
    #[inline]
    fn write_slots(&mut self, at: usize, seq: &mut Sequence, num_new: usize, size: BlockSize) {
        let mut start = seq.num_scheduled;
        if num_new == 1 {
            self.slot_mapping[at] = seq.next_slot as i64;
            self.positions[at] = start as i32;
            seq.num_scheduled += 1;
            seq.room -= 1;
            seq.next_slot += 1;
            seq.left_in_block -= 1;
            if seq.left_in_block == 0 {
                seq.aim(size);
            }
            return;
        }
        for (i, position) in self.positions[at..at + num_new].iter_mut().enumerate() {
            *position = (start + i) as i32;
        }
        let mut slots = &mut self.slot_mapping[at..at + num_new];
        while !slots.is_empty() {
            let offset = size.offset(start);
            let (now, later) = slots.split_at_mut(slots.len().min(size.get() - offset));
            let first = (seq.blocks[size.column(start)].index() * size.get() + offset) as i64;
            for (i, slot) in now.iter_mut().enumerate() {
                *slot = first + i as i64;
            }
            start += now.len();
            slots = later;
        }
        seq.num_scheduled = start;
        if num_new > 0 {
            seq.aim(size);
        }
    }

    fn pad(&mut self, step: &mut Scheduled, request: &StepRequest, padding: i32) {
        for row in step.num_seqs..request.pad_seqs {
            let state = std::mem::take(&mut self.rows[row]);
            self.block_tables[row * self.max_blocks..][..state.num_cols as usize].fill(padding);
            step.num_changes +=
                usize::from(self.note_change(step.num_changes, row, 0, state.num_cols as usize));
            self.seq_lens[row] = 0;
            self.query_start_loc[row + 1] = step.num_tokens as i32;
        }
        if let Some(rest) = self.slot_mapping.get_mut(step.num_tokens..request.pad_tokens) {
            rest.fill(-1);
            self.positions[step.num_tokens..request.pad_tokens].fill(0);
        }
    }
}
