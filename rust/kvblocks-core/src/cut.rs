//! Taking tokens out of a sequence: truncate its end, drop blocks from its middle; and the slots that an accepted branch
//! of a draft tree moves to. Imports `manager` and below.
//!
//! Invariant: positions never shift: a dropped block leaves a hole, and a truncation keeps what is before it.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqHandle};
use crate::manager::{settle, Counts, Manager};
use crate::pool::Pool;
use crate::sequence::Sequence;

/// What `truncate` does with blocks beyond the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spare {
    /// Release them.
    Free,
    /// Keep in the table those that are private and hold nothing published.
    Keep,
}

/// What `drop_range` took out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// First token position of the blocks dropped.
    pub start: usize,
    /// Position after their last token; equal to `start` if none was.
    pub end: usize,
    /// Blocks that nobody owns any more.
    pub num_blocks: usize,
}

impl Manager {
    /// Cut each sequence to its first `lengths` tokens; returns the blocks left without an owner. O(blocks released).
    pub fn truncate(&mut self, handles: &[SeqHandle], lengths: Counts, spare: Spare) -> Result<usize> {
        self.check_batch(handles, true)?;
        lengths.check("lengths", handles.len())?;
        for (row, &handle) in handles.iter().enumerate() {
            let seq = &self.seqs[handle];
            let length = lengths.at(row);
            let most = seq.num_known().max(seq.num_scheduled());
            let least = if seq.in_flight.len() == 0 { 0 } else { seq.num_scheduled() };
            if length > most || length < least {
                let expected = match length > most {
                    true => format!("at most its {most} tokens"),
                    false => format!("at least {least}: a step is in flight, commit it first"),
                };
                return Err(Error::Row { argument: "lengths", row, got: length as i64, expected });
            }
            seq.check_cut(row, length, self.size)?;
        }
        let mut orphaned = 0;
        for (row, &handle) in handles.iter().enumerate() {
            let length = lengths.at(row);
            let seq = &mut self.seqs[handle];
            orphaned += seq.cut(length, spare, &mut self.pool);
            if length < seq.prompt.ids.len() && !seq.prompt.keys.media.is_empty() {
                // The media that begin beyond the cut must not mark what is computed there next.
                seq.prompt = Arc::new(self.preparer.cut(&seq.prompt, length));
            }
            settle(seq, &mut self.counters, &mut self.pool);
        }
        Ok(orphaned)
    }

    /// Take the blocks that lie wholly within `start..end` and are computed out of a sequence (a sliding window moved
    /// on): its positions and its number of tokens stay, its table gets holes. With `unpublish` those that nobody else
    /// owns cannot be found any more. O(blocks of the table).
    pub fn drop_range(
        &mut self,
        handle: SeqHandle,
        start: usize,
        end: usize,
        unpublish: bool,
    ) -> Result<Dropped> {
        self.check_batch(&[handle], true)?;
        let seq = &mut self.seqs[handle];
        if start > end || end > seq.num_known() {
            let expected = format!("start <= end <= {}, the tokens of the sequence", seq.num_known());
            return Err(Error::Value { argument: "end of the range", got: end as i64, expected });
        }
        let (first, last) = (self.size.blocks(start), self.size.column(end.min(seq.num_computed())));
        if first >= last {
            return Ok(Dropped::default());
        }
        if last * self.size.get() > seq.prompt_len() {
            // The ids beside the blocks go with them: keep all of them in the prompt.
            let ids = seq.history(&self.pool);
            seq.prompted = ids.len() as u32;
            seq.prompt = Arc::new(self.preparer.extended(&seq.prompt, ids, Vec::new()));
        }
        let mut num_blocks = 0;
        for column in (first..last).rev() {
            let block = std::mem::replace(&mut seq.blocks[column], BlockId::HOLE);
            if block != BlockId::HOLE {
                seq.num_holes += 1;
                let orphaned = self.pool.release(block);
                num_blocks += usize::from(orphaned);
                if orphaned && unpublish && self.pool.is_published(block) {
                    self.pool.withdraw(block);
                }
            }
        }
        seq.touch(first);
        settle(seq, &mut self.counters, &mut self.pool);
        Ok(Dropped { start: first * self.size.get(), end: last * self.size.get(), num_blocks })
    }

    /// The slots to copy, (source, destination), so that the accepted tokens of a draft tree stand in a row: `accepted`
    /// holds, flat by `counts`, their increasing indices within the oldest step of each sequence. Commit as many tokens
    /// then. Changes nothing. O(accepted).
    pub fn move_slots(
        &mut self,
        handles: &[SeqHandle],
        counts: Counts,
        accepted: &[i32],
        slots: &mut Vec<[i64; 2]>,
    ) -> Result<()> {
        self.check_batch(handles, true)?;
        counts.check("counts", handles.len())?;
        let total: usize = (0..handles.len()).map(|row| counts.at(row)).sum();
        if accepted.len() != total {
            return Err(Error::Length { argument: "accepted", got: accepted.len(), expected: total });
        }
        let mut rest = accepted;
        for (row, &handle) in handles.iter().enumerate() {
            let seq = &self.seqs[handle];
            let step = seq.in_flight.oldest().map_or(0, |step| step.num_new as i32);
            let own = rest.split_off(..counts.at(row)).unwrap_or_default();
            let mut least = 0;
            for (i, &index) in own.iter().enumerate() {
                if !(least..step).contains(&index) {
                    let expected =
                        format!("indices of row {row} increasing within its step of {step} tokens");
                    return Err(Error::Row { argument: "accepted", row: i, got: index.into(), expected });
                }
                least = index + 1;
            }
        }
        let mut rest = accepted;
        for (row, &handle) in handles.iter().enumerate() {
            let seq = &self.seqs[handle];
            let slot = |position: usize| {
                let block = seq.blocks[self.size.column(position)];
                (block.index() * self.size.get() + self.size.offset(position)) as i64
            };
            let own = rest.split_off(..counts.at(row)).unwrap_or_default();
            for (i, &index) in own.iter().enumerate().filter(|&(i, &index)| i as i32 != index) {
                slots.push([slot(seq.num_computed() + index as usize), slot(seq.num_computed() + i)]);
            }
        }
        Ok(())
    }
}

impl Sequence {
    /// Cut to `length` tokens; returns the blocks left without an owner.
    fn cut(&mut self, length: usize, spare: Spare, pool: &mut Pool) -> usize {
        let size = pool.block_size;
        let kept = size.blocks(length.min(self.num_reserved()));
        let orphaned = match spare {
            Spare::Free => self.shrink(kept, pool),
            Spare::Keep => self.drop_owned_elsewhere(kept, pool),
        };
        self.lose_room();
        let reserved = match spare {
            Spare::Free => length,
            Spare::Keep => self.blocks.len() * size.get(),
        };
        self.prompted = self.prompted.min(length as u32);
        self.computed = self.computed.min(length as u32);
        let reserved = self.num_reserved().min(reserved);
        self.move_to(self.num_scheduled().min(length), reserved);
        if let Some(&tail) = self.blocks.get(size.column(self.num_computed())) {
            if tail != BlockId::HOLE && pool.is_private(tail) {
                pool.lower_fill(tail, size.offset(self.num_computed()));
            }
        }
        self.retract(size.column(self.num_scheduled()), pool);
        orphaned
    }

    /// Release the blocks from column `len` on that are shared or published; the others hold nothing that anyone needs
    /// and move up. Returns the blocks left without an owner.
    fn drop_owned_elsewhere(&mut self, len: usize, pool: &mut Pool) -> usize {
        let len = len.min(self.blocks.len());
        let beyond = self.blocks.split_off(len);
        self.touch(len);
        let mut orphaned = 0;
        let mut spares: Vec<BlockId> = Vec::new();
        for block in beyond.into_iter().rev() {
            if block == BlockId::HOLE {
                self.num_holes -= 1;
            } else if pool.is_private(block) {
                pool.lower_fill(block, 0);
                spares.push(block);
            } else {
                orphaned += usize::from(pool.release(block));
            }
        }
        self.blocks.extend(spares.into_iter().rev());
        orphaned
    }
}
