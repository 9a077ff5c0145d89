//! What happens to a sequence beside its steps: fork, truncate, preempt, free. Imports `manager` and below.
//!
//! Invariant: blocks are released from the tail, so that of two blocks released together the one that fewer prompts can
//! share is evicted first.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::SeqHandle;
use crate::manager::{Counts, Manager};
use crate::pool::Pool;
use crate::prefix::Link;
use crate::prompt::{Prompt, Tokens};
use crate::table::Sequence;

/// Children that one `fork` call may make: a bound on what a wrong count can ask for.
const MAX_CHILDREN: usize = 1 << 20;

/// What `truncate` does with blocks beyond the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spare {
    /// Release them.
    Free,
    /// Keep in the table those that are private and hold nothing published.
    Keep,
}

impl Manager {
    /// Snapshot each sequence's computed tokens into children that share its blocks, pushed to `children` grouped by
    /// parent. Copies nothing and takes no block. O(blocks).
    pub fn fork(
        &mut self,
        handles: &[SeqHandle],
        num_children: Counts,
        children: &mut Vec<SeqHandle>,
    ) -> Result<()> {
        self.check_batch(handles, true)?;
        num_children.check("num_children", handles.len())?;
        let total: usize = (0..handles.len()).map(|row| num_children.at(row)).sum();
        if total > MAX_CHILDREN {
            let expected = format!("at most {MAX_CHILDREN} children in one call");
            return Err(Error::Value { argument: "sum of num_children", got: total as i64, expected });
        }
        for (row, handle) in handles.iter().enumerate() {
            for _ in 0..num_children.at(row) {
                let child = self.seqs[handle.key()].snapshot(self.pool.block_size);
                for &block in &child.blocks {
                    self.pool.share(block);
                }
                self.num_logical += child.blocks.len();
                children.push(SeqHandle::of(self.seqs.insert(child)));
            }
        }
        self.note_peaks();
        Ok(())
    }

    /// Cut each sequence to its first `lengths` tokens; returns the blocks left without an owner. O(blocks released).
    pub fn truncate(&mut self, handles: &[SeqHandle], lengths: Counts, spare: Spare) -> Result<usize> {
        self.check_batch(handles, true)?;
        lengths.check("lengths", handles.len())?;
        for (row, handle) in handles.iter().enumerate() {
            let seq = &self.seqs[handle.key()];
            let length = lengths.at(row);
            let most = seq.num_known().max(seq.num_scheduled);
            let least = if seq.in_flight.is_empty() { 0 } else { seq.num_scheduled };
            if length > most || length < least {
                let expected = match length > most {
                    true => format!("at most its {most} tokens"),
                    false => format!("at least {least}: a step is in flight, commit it first"),
                };
                return Err(Error::Row { argument: "lengths", row, got: length as i64, expected });
            }
        }
        let mut orphaned = 0;
        for (row, handle) in handles.iter().enumerate() {
            let (dropped, last_owned) = self.seqs[handle.key()].cut(lengths.at(row), spare, &mut self.pool);
            self.num_logical -= dropped;
            orphaned += last_owned;
        }
        Ok(orphaned)
    }

    /// Give all blocks back and hand out the token histories; the handles stay, waiting for `allocate`. A preempted
    /// sequence hands out its history again. O(tokens).
    pub fn preempt(&mut self, handles: &[SeqHandle]) -> Result<Vec<Prompt>> {
        self.check_batch(handles, false)?;
        let mut prompts = Vec::with_capacity(handles.len());
        for handle in handles {
            let key = handle.key();
            if !self.seqs[key].is_preempted {
                let history = self.hashed_history(&self.seqs[key]);
                let seq = &mut self.seqs[key];
                self.num_logical -= seq.shrink(0, &mut self.pool).0;
                *seq = Sequence { is_preempted: true, epoch: seq.epoch, ..Sequence::new(history) };
                self.counters.preemptions += 1;
            }
            prompts.push(self.preparer.wrap(Arc::clone(&self.seqs[key].prompt), Some(key)));
        }
        Ok(prompts)
    }

    /// End sequences; returns the blocks left without an owner. With `missing_ok` stale handles are passed over.
    /// O(blocks).
    pub fn free(&mut self, handles: &[SeqHandle], missing_ok: bool) -> Result<usize> {
        if !missing_ok {
            self.check_batch(handles, false)?;
        }
        let mut orphaned = 0;
        for handle in handles {
            if let Some(mut seq) = self.seqs.remove(handle.key()) {
                let (dropped, last_owned) = seq.shrink(0, &mut self.pool);
                self.num_logical -= dropped;
                orphaned += last_owned;
            }
        }
        Ok(orphaned)
    }

    /// The history as a prompt: hashes known from the prompt and from published blocks are not computed again.
    fn hashed_history(&self, seq: &Sequence) -> Arc<Tokens> {
        if seq.num_known() == seq.prompt.ids.len() && seq.num_known() == seq.prompt_len {
            return Arc::clone(&seq.prompt);
        }
        let ids = self.history(seq);
        let Some(index) = &self.pool.index else {
            return Arc::new(Tokens { ids, hashes: Vec::new() });
        };
        let block_size = self.pool.block_size;
        let mut hashes = Vec::with_capacity(ids.len() / block_size);
        let mut parent = 0;
        for (i, tokens) in ids.chunks_exact(block_size).enumerate() {
            parent = if i < seq.num_published {
                index.link(seq.blocks[i]).hash
            } else if (i + 1) * block_size <= seq.prompt_len {
                seq.prompt.hashes[i]
            } else {
                self.pool.hasher.block(parent, tokens)
            };
            hashes.push(parent);
        }
        Arc::new(Tokens { ids, hashes })
    }
}

impl Sequence {
    /// Release the blocks from column `len` on, tail first; returns (blocks dropped, those left without an owner).
    pub(crate) fn shrink(&mut self, len: usize, pool: &mut Pool) -> (usize, usize) {
        if len >= self.blocks.len() {
            return (0, 0);
        }
        self.epoch += 1;
        let dropped = self.blocks.drain(len..).rev();
        (dropped.len(), dropped.filter(|&block| pool.release(block)).count())
    }

    /// The computed tokens as a sequence of their own, to which the caller adds its references.
    fn snapshot(&self, block_size: usize) -> Self {
        Self {
            prompt_len: self.prompt_len,
            blocks: self.blocks[..self.num_computed.div_ceil(block_size)].to_vec(),
            num_computed: self.num_computed,
            num_scheduled: self.num_computed,
            num_reserved: self.num_computed,
            num_published: self.num_published,
            tip: self.tip,
            ..Self::new(Arc::clone(&self.prompt))
        }
    }

    /// Cut to `length` tokens; returns what `shrink` does.
    fn cut(&mut self, length: usize, spare: Spare, pool: &mut Pool) -> (usize, usize) {
        let block_size = pool.block_size;
        let kept = length.min(self.num_reserved).div_ceil(block_size);
        let result = match spare {
            Spare::Free => self.shrink(kept, pool),
            Spare::Keep => self.drop_owned_elsewhere(kept, pool),
        };
        self.prompt_len = self.prompt_len.min(length);
        self.num_computed = self.num_computed.min(length);
        self.num_scheduled = self.num_scheduled.min(length);
        self.num_reserved = match spare {
            Spare::Free => self.num_reserved.min(length),
            Spare::Keep => self.num_reserved.min(self.blocks.len() * block_size),
        };
        if let Some(&tail) = self.blocks.get(self.num_computed / block_size) {
            if pool.refs(tail) == 1 && !pool.is_published(tail) {
                pool.lower_fill(tail, self.num_computed % block_size);
            }
        }
        if self.num_published > self.num_computed / block_size {
            self.num_published = self.num_computed / block_size;
            self.tip = match (self.num_published.checked_sub(1), &pool.index) {
                (Some(last), Some(index)) => index.link(self.blocks[last]),
                _ => Link::ROOT,
            };
        }
        result
    }

    /// Release the blocks from column `len` on that are shared or published; the others hold nothing that anyone needs
    /// and move up.
    fn drop_owned_elsewhere(&mut self, len: usize, pool: &mut Pool) -> (usize, usize) {
        let len = len.min(self.blocks.len());
        let beyond = self.blocks.split_off(len);
        let (mut spares, mut orphaned, total) = (Vec::new(), 0, beyond.len());
        for block in beyond.into_iter().rev() {
            if pool.refs(block) == 1 && !pool.is_published(block) {
                pool.lower_fill(block, 0);
                spares.push(block);
            } else {
                orphaned += usize::from(pool.release(block));
            }
        }
        spares.reverse();
        self.epoch += 1;
        self.blocks.append(&mut spares);
        (total - (self.blocks.len() - len), orphaned)
    }
}
