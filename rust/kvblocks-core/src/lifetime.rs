//! What happens to a whole sequence: fork, reorder, preempt, free. Imports `manager` and below.
//!
//! Invariant: no reference count touches zero on the way from one owner to the next; of blocks released together the
//! tail is the first to be evicted.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqHandle};
use crate::manager::{settle, Counts, Manager};
use crate::prefix;
use crate::prompt::{Prompt, Tokens};
use crate::release::Owed;
use crate::sequence::{Sequence, Share};

/// Children that one `fork` call may make: a bound on what a wrong count can ask for.
const MAX_CHILDREN: usize = 1 << 20;

/// Tables kept for use by later sequences.
const MAX_SPARE_TABLES: usize = 256;

/// What `free` gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// Blocks that nobody owns any more.
    pub num_blocks: usize,
    /// Blocks that transfers still own: they come back when those end.
    pub num_deferred: usize,
}

impl Manager {
    /// Snapshot each sequence's computed tokens into children that share its blocks, pushed to `children` grouped by
    /// parent. Copies nothing and takes no block; one reference count is touched per shared block. O(blocks).
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
        for (row, &handle) in handles.iter().enumerate() {
            let count = num_children.at(row);
            for _ in 0..count {
                let child = self.snapshot(handle);
                let child = self.seqs.insert(child);
                settle(&mut self.seqs[child], &mut self.counters, &mut self.pool);
                children.push(child);
            }
            self.share_computed(handle, count);
        }
        self.note_peaks();
        Ok(())
    }

    /// Let sequence i continue what sequence `parents[i]` of the batch has computed (beam search): all are replaced at
    /// once, the handles stay. Steps in flight are an error. O(blocks).
    pub fn reorder(&mut self, handles: &[SeqHandle], parents: &[i32]) -> Result<()> {
        self.check_batch(handles, true)?;
        if parents.len() != handles.len() {
            return Err(Error::Length { argument: "parents", got: parents.len(), expected: handles.len() });
        }
        for (row, &parent) in parents.iter().enumerate() {
            if !(0..handles.len() as i32).contains(&parent) {
                let expected = format!("a row of the batch, 0 to {}", handles.len().saturating_sub(1));
                return Err(Error::Row { argument: "parents", row, got: parent.into(), expected });
            }
            if self.seqs[handles[row]].in_flight.len() > 0 {
                let expected = "a sequence with no step in flight: commit first".to_owned();
                return Err(Error::Row { argument: "handles", row, got: handles[row].0, expected });
            }
        }
        // New owners first, then the old ones leave.
        let moves = || parents.iter().enumerate().filter(|&(row, &parent)| row as i32 != parent);
        let mut successors = Vec::with_capacity(handles.len());
        for (_, &parent) in moves() {
            successors.push(self.snapshot(handles[parent as usize]));
            self.share_computed(handles[parent as usize], 1);
        }
        for ((row, _), next) in moves().zip(successors) {
            let mut old = self.seqs[handles[row]].replace(next);
            settle(&mut self.seqs[handles[row]], &mut self.counters, &mut self.pool);
            old.release_all(&mut self.pool);
            self.recycle(old);
        }
        self.note_peaks();
        Ok(())
    }

    /// Give all blocks back and hand out the token histories; the handles stay, waiting for `allocate`. A preempted
    /// sequence hands out its history again. O(tokens).
    pub fn preempt(&mut self, handles: &[SeqHandle]) -> Result<Vec<Prompt>> {
        self.check_batch(handles, false)?;
        let mut prompts = Vec::with_capacity(handles.len());
        for &handle in handles {
            if !self.seqs[handle].is_preempted {
                let history = self.hashed_history(&self.seqs[handle]);
                let seq = &mut self.seqs[handle];
                seq.release_all(&mut self.pool);
                let share = seq.share;
                seq.replace(Sequence { is_preempted: true, share, ..Sequence::new(history, seq.namespace) });
                settle(seq, &mut self.counters, &mut self.pool);
                self.counters.total.preemptions += 1;
                self.pool.namespaces.usage(seq.namespace).preemptions += 1;
            }
            prompts.push(self.preparer.wrap(Arc::clone(&self.seqs[handle].prompt), Some(handle)));
        }
        Ok(prompts)
    }

    /// End sequences. With `missing_ok` stale handles are passed over. O(blocks).
    pub fn free(&mut self, handles: &[SeqHandle], missing_ok: bool) -> Result<Freed> {
        if !missing_ok {
            self.check_batch(handles, false)?;
        }
        let held_before = self.pool.num_held();
        let (mut num_blocks, mut owed) = (0, Owed::default());
        for (row, &handle) in handles.iter().enumerate() {
            let Some(mut seq) = self.seqs.remove(handle) else { continue };
            // Blocks that neighbours have in common, as children of one parent do, are let go of once for all of them.
            let next = handles.get(row + 1).and_then(|&next| self.seqs.get(next));
            let common = next.map_or(0, |next| seq.common_blocks(next, self.size));
            num_blocks += seq.release_all_but(common, &mut owed, &mut self.pool);
            self.recycle(seq);
        }
        Ok(Freed { num_blocks, num_deferred: self.pool.num_held() - held_before })
    }

    /// Blocks that `free` of these sequences alone would give back now, without those that others own or transfers hold.
    /// O(blocks).
    pub fn reclaimable(&mut self, handles: &[SeqHandle]) -> Result<usize> {
        self.sequence_usage(handles).map(|usage| usage.reclaimable_blocks)
    }

    /// Stop counting a sequence that has released its blocks, and keep its table.
    fn recycle(&mut self, mut seq: Sequence) {
        self.counters.total.replace(seq.share, Share::default());
        self.pool.namespaces.usage(seq.namespace).replace(seq.share, Share::default());
        self.pool.namespaces.leave(seq.namespace);
        if self.spare_tables.len() < MAX_SPARE_TABLES {
            seq.blocks.clear();
            self.spare_tables.push(seq.blocks);
        }
    }

    /// Make `times` more owners of the blocks that a sequence has computed. O(blocks), whatever the number.
    fn share_computed(&mut self, handle: SeqHandle, times: usize) {
        let seq = &self.seqs[handle];
        let len = if times == 0 { 0 } else { self.size.blocks(seq.num_computed()) };
        self.pool.share_owned(&seq.blocks[..len], times as u32);
    }

    /// The computed tokens as a sequence of their own: not counted yet, and its blocks still to be shared with it.
    fn snapshot(&mut self, handle: SeqHandle) -> Sequence {
        let mut blocks = self.spare_tables.pop().unwrap_or_default();
        let parent = &mut self.seqs[handle];
        // Its tail may be shared from now on.
        parent.lose_room();
        let computed = parent.num_computed();
        let len = self.size.blocks(computed);
        blocks.reserve(len + len / 4 + 16);
        blocks.extend_from_slice(&parent.blocks[..len]);
        let parent = &self.seqs[handle];
        self.pool.namespaces.join(parent.namespace);
        let mut child = Sequence {
            prompted: parent.prompted,
            blocks,
            num_holes: parent.num_holes,
            num_published: parent.num_published,
            tip: parent.tip,
            unlisted: parent.unlisted,
            ..Sequence::new(Arc::clone(&parent.prompt), parent.namespace)
        };
        child.start_at(computed, computed);
        child.retract(self.size.column(computed), &self.pool);
        child
    }

    /// The history as a prompt: digests known from the prompt and from published blocks are not computed again.
    fn hashed_history(&self, seq: &Sequence) -> Arc<Tokens> {
        if seq.num_known() == seq.prompt.ids.len() && seq.num_known() == seq.prompt_len() {
            return Arc::clone(&seq.prompt);
        }
        let mut known = Vec::new();
        if self.pool.index.is_some() {
            for (column, &block) in seq.blocks.iter().enumerate() {
                let in_prompt = (column + 1) * self.size.get() <= seq.prompt_len();
                if in_prompt {
                    known.push(seq.prompt.hashes[column]);
                } else if column < seq.num_published
                    && block != BlockId::HOLE
                    && self.pool.is_published(block)
                {
                    known.push(prefix::link(&self.pool.blocks, block).digest);
                } else {
                    break;
                }
            }
            known.truncate(seq.num_known() / self.size.get());
        }
        Arc::new(self.preparer.extended(&seq.prompt, seq.history(&self.pool), known))
    }
}
