//! The index arrays of a step, as the caller owns them, and what is written into each row. Imports `block_size`, `ids`,
//! `pipeline`, `sequence`.
//!
//! Invariant: a row of `block_tables` shows what its `RowState` says, so that only what differs is written.

use bytemuck::TransparentWrapper;

use crate::block_size::BlockSize;
use crate::ids::{BlockId, SeqHandle};
use crate::pipeline::InFlight;
use crate::sequence::Sequence;
use crate::step::{Scheduled, StepRequest};

/// What stands in a row of `block_tables`, so that an unchanged prefix is not written again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RowState {
    handle: SeqHandle,
    epoch: u32,
    num_cols: u32,
}

impl RowState {
    /// Of the sequence.
    #[inline]
    pub(crate) fn handle(self) -> SeqHandle {
        self.handle
    }

    fn of(seq: &Sequence) -> Self {
        Self { handle: seq.handle, epoch: seq.epoch, num_cols: seq.num_cols }
    }

    /// Whether the row shows the table of this sequence as it is now.
    #[inline]
    pub(crate) fn shows(self, seq: &Sequence) -> bool {
        let version = |epoch: u32, num_cols: u32| u64::from(num_cols) << 32 | u64::from(epoch);
        // One comparison of 8 bytes.
        self.handle == seq.handle && version(self.epoch, self.num_cols) == version(seq.epoch, seq.num_cols)
    }

    /// Whether the row shows the table of this sequence, or leading columns of it.
    #[inline]
    pub(crate) fn begins(self, seq: &Sequence) -> bool {
        self.handle == seq.handle && self.epoch == seq.epoch
    }
}

/// The rows of a step that the arrays hold.
#[derive(Clone, Copy)]
pub(crate) struct ShownRows<'a> {
    pub rows: &'a [RowState],
    pub seq_lens: &'a [i32],
}

/// Scratch of a step: its single rows, those of one token that change nothing but cursors, and open a block at most.
/// Kept until no row of the step can be refused any more.
#[derive(Default)]
pub(crate) struct SingleRows {
    /// What the arrays are to hold, in order.
    pub slots: Vec<i64>,
    pub positions: Vec<i32>,
    /// Those of them that need a block, or whose tables the arrays show in part.
    pub grown: Vec<usize>,
}

impl SingleRows {
    /// Begin a step, with room for so many rows.
    pub fn start(&mut self, max_seqs: usize) {
        if self.slots.len() < max_seqs {
            self.slots.resize(max_seqs, 0);
            self.positions.resize(max_seqs, 0);
        }
        self.grown.clear();
        self.grown.reserve(max_seqs);
    }
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

impl StepArrays<'_> {
    /// Write `slots.len()` rows from `row` on, of one token each; `at` tokens come before them.
    #[inline]
    pub(crate) fn write_single_rows(&mut self, row: usize, at: usize, slots: &[i64], positions: &[i32]) {
        let len = slots.len();
        self.slot_mapping[at..at + len].copy_from_slice(slots);
        self.positions[at..at + len].copy_from_slice(positions);
        let lens = self.seq_lens[row..row + len].iter_mut().zip(positions);
        lens.for_each(|(to, position)| *to = position + 1);
        let starts = self.query_start_loc[row + 1..=row + len].iter_mut().zip(at as i32 + 1..);
        starts.for_each(|(to, start)| *to = start);
    }

    /// Show the last block of a table whose row shows all others; returns whether it does, noted as change number `at`.
    #[inline]
    pub(crate) fn write_block(&mut self, row: usize, seq: &Sequence, at: usize) -> bool {
        let (state, column) = (&mut self.rows[row], seq.num_cols.wrapping_sub(1));
        let Some(block) = seq.blocks.last().filter(|_| state.num_cols == column && state.begins(seq)) else {
            return false;
        };
        state.num_cols = seq.num_cols;
        self.block_tables[row * self.max_blocks + column as usize] = block.0 as i32;
        self.changes[3 * at..3 * at + 3].copy_from_slice(&[row as i32, column as i32, 1]);
        true
    }

    /// Longest table of the leading rows.
    pub(crate) fn longest_table(&self, num_rows: usize) -> usize {
        self.rows[..num_rows].iter().map(|row| row.num_cols).max().unwrap_or(0) as usize
    }

    /// Bring a row up to date, from the first column that may differ; returns whether one did, noted as change number
    /// `at`.
    #[inline]
    pub(crate) fn write_table(&mut self, row: usize, seq: &Sequence, padding: i32, at: usize) -> bool {
        let state = self.rows[row];
        if state.shows(seq) {
            return false;
        }
        let shown = state.num_cols as usize;
        let known = match seq.epoch.wrapping_sub(state.epoch) {
            _ if state.handle != seq.handle => 0,
            0 => shown,
            1 => shown.min(seq.changed_col),
            _ => 0,
        };
        let known = known.min(seq.blocks.len());
        let table = &mut self.block_tables[row * self.max_blocks..][..self.max_blocks];
        match (&mut table[known..], &seq.blocks[known..]) {
            (to, blocks) if seq.num_holes == 0 => {
                to[..blocks.len()].copy_from_slice(bytemuck::cast_slice(BlockId::peel_slice(blocks)));
            }
            (to, blocks) => to.iter_mut().zip(blocks).for_each(|(to, block)| *to = block.export(padding)),
        }
        if let Some(stale) = table.get_mut(seq.blocks.len()..shown) {
            stale.fill(padding);
        }
        self.rows[row] = RowState::of(seq);
        self.note_change(at, row, known, seq.blocks.len().max(shown))
    }

    fn note_change(&mut self, at: usize, row: usize, from: usize, to: usize) -> bool {
        if from < to {
            self.changes[3 * at..3 * at + 3].copy_from_slice(&[row as i32, from as i32, (to - from) as i32]);
        }
        from < to
    }

    /// Write slots and positions of the next `num_new` tokens and move the sequence on, to at least so many slots reserved
    /// beyond them: a step more is in flight.
    #[inline]
    pub(crate) fn write_slots(
        &mut self,
        at: usize,
        seq: &mut Sequence,
        num_new: usize,
        lookahead: usize,
        size: BlockSize,
    ) {
        let reserved = seq.num_reserved().max(seq.num_scheduled() + num_new + lookahead);
        if num_new == 1 && seq.room() > 0 {
            self.positions[at] = seq.scheduled as i32;
            if let Some(slot) = seq.advance() {
                self.slot_mapping[at] = slot;
            }
            seq.move_to(seq.num_scheduled(), reserved);
            return;
        }
        let step = InFlight { num_new: num_new as u32, ahead_before: seq.ahead, block: BlockId::HOLE };
        seq.in_flight.push(step);
        let mut start = seq.num_scheduled();
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
        seq.move_to(start, reserved);
        if num_new > 0 {
            seq.aim(size);
        }
    }

    /// The rows of a step that the arrays hold, and what is left of the arrays behind it; there are no copies behind it.
    pub(crate) fn split(&mut self, step: &Scheduled) -> (ShownRows<'_>, StepArrays<'_>) {
        let (rows, rows_behind) = self.rows.split_at_mut(step.num_seqs);
        let (seq_lens, lens_behind) = self.seq_lens.split_at_mut(step.num_seqs);
        let behind = StepArrays {
            block_tables: &mut self.block_tables[step.num_seqs * self.max_blocks..],
            max_blocks: self.max_blocks,
            slot_mapping: &mut self.slot_mapping[step.num_tokens..],
            positions: &mut self.positions[step.num_tokens..],
            seq_lens: lens_behind,
            query_start_loc: &mut self.query_start_loc[step.num_seqs..],
            copies: &mut [],
            changes: &mut self.changes[3 * step.num_changes..],
            rows: rows_behind,
        };
        (ShownRows { rows, seq_lens }, behind)
    }

    /// Count what was scheduled behind a step from the beginning of that step.
    pub(crate) fn join(&mut self, step: &Scheduled, more: &Scheduled, pad_seqs: usize) {
        let starts = &mut self.query_start_loc[step.num_seqs..][..=more.num_seqs.max(pad_seqs)];
        starts.iter_mut().for_each(|start| *start += step.num_tokens as i32);
        let changes = self.changes[3 * step.num_changes..].chunks_exact_mut(3).take(more.num_changes);
        changes.for_each(|change| change[0] += step.num_seqs as i32);
    }

    pub(crate) fn pad(&mut self, step: &mut Scheduled, request: &StepRequest, padding: i32) {
        for row in step.num_seqs..request.pad_seqs {
            let state = std::mem::take(&mut self.rows[row]);
            self.block_tables[row * self.max_blocks..][..state.num_cols as usize].fill(padding);
            step.num_changes +=
                usize::from(self.note_change(step.num_changes, row, 0, state.num_cols as usize));
            self.seq_lens[row] = 0;
            self.query_start_loc[row + 1] = step.num_tokens as i32;
        }
        if step.num_tokens < request.pad_tokens {
            self.slot_mapping[step.num_tokens..request.pad_tokens].fill(-1);
            self.positions[step.num_tokens..request.pad_tokens].fill(0);
        }
    }
}
