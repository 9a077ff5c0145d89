//! Commit: scheduled tokens become computed ones, full blocks become findable. Imports `manager` and below.
//!
//! Invariant: only blocks wholly below `num_computed` are published; a token that was scheduled and not accepted is
//! never visible to anybody.

use crate::error::{Error, Result};
use crate::ids::SeqHandle;
use crate::manager::{Counts, Manager};
use crate::pool::Pool;
use crate::table::Sequence;

impl Manager {
    /// Accept the first `counts` tokens of the oldest step in flight of each sequence.
    ///
    /// `ids` holds, flat and in row order, the ids of accepted tokens that are not known yet. The rest of the step is
    /// rolled back and the blocks it had added are returned; that is an error while a later step is in flight, whose
    /// positions it would move. O(accepted tokens).
    pub fn commit(&mut self, handles: &[SeqHandle], counts: Counts, ids: &[u32]) -> Result<()> {
        self.check_batch(handles, true)?;
        counts.check("counts", handles.len())?;
        let mut num_unknown = 0;
        for (row, handle) in handles.iter().enumerate() {
            let seq = &self.seqs[handle.key()];
            let count = counts.at(row);
            let step = seq.in_flight.front().map_or(0, |step| step.num_new);
            if count > step || seq.in_flight.is_empty() {
                let expected = match seq.in_flight.is_empty() {
                    true => "a step in flight: schedule comes first".to_owned(),
                    false => format!("at most the {step} tokens of its oldest step"),
                };
                return Err(Error::Row { argument: "counts", row, got: count as i64, expected });
            }
            if count < step && seq.in_flight.len() > 1 {
                let expected = format!("all {step} tokens, since a later step is in flight");
                return Err(Error::Row { argument: "counts", row, got: count as i64, expected });
            }
            num_unknown += (seq.num_computed + count).saturating_sub(seq.num_known());
        }
        if ids.len() != num_unknown {
            return Err(Error::Length { argument: "tokens", got: ids.len(), expected: num_unknown });
        }
        let mut rest = ids;
        for (row, handle) in handles.iter().enumerate() {
            let seq = &mut self.seqs[handle.key()];
            let count = counts.at(row);
            let (own, others) = rest.split_at((seq.num_computed + count).saturating_sub(seq.num_known()));
            rest = others;
            accept(seq, &mut self.pool, count, own);
            publish_full(seq, &mut self.pool);
            self.num_logical -= roll_back(seq, &mut self.pool);
        }
        Ok(())
    }
}

/// Store the ids of the next `count` tokens, the prompt's first, then `ids`.
fn accept(seq: &mut Sequence, pool: &mut Pool, count: usize, ids: &[u32]) {
    let end = seq.num_computed + count;
    let from_prompt = seq.num_computed..end.min(seq.num_known());
    let mut at = seq.num_computed;
    for mut ids in [seq.prompt.ids.get(from_prompt).unwrap_or_default(), ids] {
        while !ids.is_empty() {
            let (block, offset) = (seq.blocks[at / pool.block_size], at % pool.block_size);
            let (now, later) = ids.split_at(ids.len().min(pool.block_size - offset));
            pool.tokens.write(block, offset, now);
            pool.raise_fill(block, offset + now.len());
            at += now.len();
            ids = later;
        }
    }
    seq.num_computed = end;
}

fn publish_full(seq: &mut Sequence, pool: &mut Pool) {
    if pool.index.is_none() {
        return;
    }
    for i in seq.num_published..seq.num_computed / pool.block_size {
        let in_prompt = (i + 1) * pool.block_size <= seq.prompt_len;
        let hash = in_prompt.then(|| seq.prompt.hashes.get(i).copied()).flatten();
        if let Some(link) = pool.publish(seq.blocks[i], seq.tip, hash) {
            seq.tip = link;
            seq.num_published = i + 1;
        }
    }
}

/// Retire the oldest step; what it scheduled beyond `num_computed` was rejected. Returns the blocks dropped.
fn roll_back(seq: &mut Sequence, pool: &mut Pool) -> usize {
    let Some(step) = seq.in_flight.pop_front() else {
        return 0;
    };
    if !seq.in_flight.is_empty() || seq.num_scheduled == seq.num_computed {
        return 0;
    }
    seq.num_scheduled = seq.num_computed;
    seq.num_reserved = step.reserved_before.max(seq.num_computed).min(seq.num_reserved);
    seq.shrink(seq.num_reserved.div_ceil(pool.block_size), pool).0
}
