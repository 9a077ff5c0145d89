//! The step: the next tokens of a batch, their slots and the index arrays of one forward pass. Imports `manager` and
//! below.
//!
//! Invariant: plan, then apply. The plan counts blocks exactly (each copy-on-write included, in row order, so that the
//! last owner of a shared block writes in place); applying it cannot fail. Copies must run before the step's writes;
//! a source is owned by others or goes last in line for eviction, so it is never a destination of the same step.

use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqHandle, SeqKey};
use crate::manager::{Counts, Manager, Refusal};
use crate::pool::Pool;
use crate::table::{InFlight, Sequence};

/// What to do with a batch that does not fit as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Schedule nothing.
    All,
    /// Schedule the longest prefix that fits.
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
    key: SeqKey,
    epoch: u64,
    num_cols: usize,
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
    /// Longest block table of the step.
    pub max_blocks: usize,
    /// Why row `num_seqs` was not scheduled.
    pub refusal: Option<Refusal>,
}

/// What one row needs.
#[derive(Clone, Copy)]
pub(crate) struct RowPlan {
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
    /// Errors: lengths, stale, duplicate or preempted handles, negative counts, a batch larger than the arrays. A
    /// refusal under `Policy::All` leaves manager and arrays unchanged. O(rows + tokens + changed columns).
    pub fn schedule(&mut self, request: &StepRequest, out: &mut StepArrays) -> Result<Scheduled> {
        self.check_batch(request.handles, true)?;
        self.check_step(request, out)?;
        let (num_seqs, refusal) = self.plan_step(request);
        if refusal.is_some() && request.policy == Policy::All {
            return Ok(Scheduled { refusal, ..Scheduled::default() });
        }
        let mut step = Scheduled { num_seqs, refusal, ..Scheduled::default() };
        let padding = self.padding();
        out.query_start_loc[0] = 0;
        for (row, handle) in request.handles[..num_seqs].iter().enumerate() {
            let key = handle.key();
            let (plan, num_new) = (self.plan[row], request.num_new.at(row));
            let seq = &mut self.seqs[key];
            let start = seq.num_scheduled;
            if let Some((src, dst)) = make_tail_writable(seq, &mut self.pool, plan.tail) {
                out.copies[2 * step.num_copies] = src.0 as i32;
                out.copies[2 * step.num_copies + 1] = dst.0 as i32;
                step.num_copies += 1;
                if plan.tail == Tail::CopyPublished {
                    // Cached now, behind all that was available: this step takes no more than that.
                    self.pool.release(src);
                }
            }
            seq.blocks.extend((0..plan.num_new_blocks).map_while(|_| self.pool.take()));
            seq.in_flight.push_back(InFlight { num_new, reserved_before: seq.num_reserved });
            seq.num_scheduled += num_new;
            seq.num_reserved = seq.num_reserved.max(seq.num_scheduled + request.lookahead.at(row));
            self.num_logical += plan.num_new_blocks;
            step.max_blocks = step.max_blocks.max(seq.blocks.len());
            out.write_table(row, key, seq, padding);
            out.write_slots(step.num_tokens, seq, start, self.pool.block_size);
            step.num_tokens += num_new;
            out.seq_lens[row] = seq.num_scheduled as i32;
            out.query_start_loc[row + 1] = step.num_tokens as i32;
        }
        self.counters.copied_blocks += step.num_copies as u64;
        out.pad(&step, request, padding);
        self.note_peaks();
        Ok(step)
    }

    fn check_step(&self, request: &StepRequest, out: &StepArrays) -> Result<()> {
        let rows = request.handles.len();
        request.num_new.check("num_new", rows)?;
        request.lookahead.check("lookahead", rows)?;
        let fits = |argument, got: usize, most: usize, of| match got <= most {
            true => Ok(()),
            false => {
                Err(Error::Value { argument, got: got as i64, expected: format!("at most {most} ({of})") })
            }
        };
        fits("handles", rows, out.seq_lens.len(), "sequences of the step")?;
        fits("pad_seqs", request.pad_seqs, out.seq_lens.len(), "sequences of the step")?;
        fits("pad_tokens", request.pad_tokens, out.slot_mapping.len(), "tokens of the step")?;
        let num_tokens: usize = (0..rows).map(|row| request.num_new.at(row)).sum();
        fits("sum of num_new", num_tokens, out.slot_mapping.len(), "tokens of the step")?;
        for (row, handle) in request.handles.iter().enumerate() {
            let seq = &self.seqs[handle.key()];
            let end = seq.num_scheduled + request.num_new.at(row) + request.lookahead.at(row);
            let blocks = seq.blocks.len().max(end.div_ceil(self.pool.block_size));
            // Beyond the capacity the answer is Never, not an error.
            if blocks.min(self.capacity()) > out.max_blocks || end > i32::MAX as usize {
                let expected = format!("at most the {} columns of block_tables", out.max_blocks);
                return Err(Error::Row { argument: "blocks of handles", row, got: blocks as i64, expected });
            }
        }
        Ok(())
    }

    /// Leave each row's needs in `self.plan`; returns how many rows fit and why the next does not. Owners that will
    /// copy a shared block have already left it, for the rows that fit.
    fn plan_step(&mut self, request: &StepRequest) -> (usize, Option<Refusal>) {
        let capacity_blocks = self.capacity();
        let available = self.pool.num_available() as usize;
        let block_size = self.pool.block_size;
        let mut refusal = None;
        let mut need = 0;
        self.plan.clear();
        for (row, handle) in request.handles.iter().enumerate() {
            let seq = &self.seqs[handle.key()];
            let num_new = request.num_new.at(row);
            let need_blocks = (seq.num_scheduled + num_new + request.lookahead.at(row)).div_ceil(block_size);
            let num_new_blocks = need_blocks.saturating_sub(seq.blocks.len());
            let written = seq.partial_tail(block_size).filter(|_| num_new > 0);
            let tail = match written {
                Some(block) if self.pool.refs(block) > 1 => Tail::CopyShared,
                Some(block) if self.pool.is_published(block) => Tail::Withdraw,
                _ => Tail::Writable,
            };
            if need_blocks > capacity_blocks {
                refusal = Some(Refusal::Never { need_blocks, capacity_blocks });
                break;
            }
            let with_row = need + num_new_blocks + usize::from(tail == Tail::CopyShared);
            if with_row > available {
                refusal = Some(Refusal::Later { num_blocks: with_row - available });
                if request.policy == Policy::Fit {
                    break;
                }
            }
            need = with_row;
            if let (Tail::CopyShared, Some(block)) = (tail, written) {
                self.pool.release(block);
            }
            self.plan.push(RowPlan { num_new_blocks, tail });
        }
        if refusal.is_some() && request.policy == Policy::All {
            let planned = request.handles.iter().zip(&self.plan);
            for (handle, _) in planned.filter(|(_, plan)| plan.tail == Tail::CopyShared) {
                let tail = self.seqs[handle.key()].partial_tail(block_size);
                tail.into_iter().for_each(|block| self.pool.restore(block));
            }
        } else {
            let published = self.plan.iter_mut().filter(|plan| plan.tail == Tail::Withdraw);
            published.take(available - need).for_each(|plan| plan.tail = Tail::CopyPublished);
        }
        (self.plan.len(), refusal)
    }
}

/// Let `seq` write into its partly filled tail block; returns the copy to make.
fn make_tail_writable(seq: &mut Sequence, pool: &mut Pool, tail: Tail) -> Option<(BlockId, BlockId)> {
    if tail == Tail::Writable {
        return None;
    }
    let block = seq.partial_tail(pool.block_size)?;
    let col = seq.num_scheduled / pool.block_size;
    let fill = seq.num_computed.saturating_sub(col * pool.block_size).min(pool.block_size);
    if tail == Tail::Withdraw {
        pool.withdraw(block);
        pool.lower_fill(block, fill);
        return None;
    }
    let dst = pool.take()?;
    pool.tokens.copy(block, dst, fill);
    pool.raise_fill(dst, fill);
    seq.blocks[col] = dst;
    seq.epoch += 1;
    Some((block, dst))
}

impl StepArrays<'_> {
    /// Bring a row up to date: all of it, or the columns added since the row last held this sequence.
    fn write_table(&mut self, row: usize, key: SeqKey, seq: &Sequence, padding: i32) {
        let state = self.rows[row];
        let known = if state.key == key && state.epoch == seq.epoch { state.num_cols } else { 0 };
        let table = &mut self.block_tables[row * self.max_blocks..][..self.max_blocks];
        for (to, block) in table[known..].iter_mut().zip(&seq.blocks[known..]) {
            *to = block.0 as i32;
        }
        if let Some(stale) = table.get_mut(seq.blocks.len()..state.num_cols) {
            stale.fill(padding);
        }
        self.rows[row] = RowState { key, epoch: seq.epoch, num_cols: seq.blocks.len() };
    }

    fn write_slots(&mut self, at: usize, seq: &Sequence, start: usize, block_size: usize) {
        let len = seq.num_scheduled - start;
        let slots = &mut self.slot_mapping[at..at + len];
        for (i, slot) in slots.iter_mut().enumerate() {
            let position = start + i;
            let block = seq.blocks[position / block_size];
            *slot = (block.index() * block_size + position % block_size) as i64;
        }
        for (i, position) in self.positions[at..at + len].iter_mut().enumerate() {
            *position = (start + i) as i32;
        }
    }

    fn pad(&mut self, step: &Scheduled, request: &StepRequest, padding: i32) {
        for row in step.num_seqs..request.pad_seqs {
            let state = std::mem::take(&mut self.rows[row]);
            self.block_tables[row * self.max_blocks..][..state.num_cols].fill(padding);
            self.seq_lens[row] = 0;
            self.query_start_loc[row + 1] = step.num_tokens as i32;
        }
        if let Some(rest) = self.slot_mapping.get_mut(step.num_tokens..request.pad_tokens) {
            rest.fill(-1);
            self.positions[step.num_tokens..request.pad_tokens].fill(0);
        }
    }
}
