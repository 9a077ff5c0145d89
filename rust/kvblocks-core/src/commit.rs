//! Commit: scheduled tokens become computed ones, full blocks become findable. Imports `manager` and below.
//!
//! Invariant: a token that was scheduled and not accepted is never visible to anybody. Only blocks wholly below
//! `num_computed` are published; under `Publish::OnSchedule` those wholly below `num_scheduled` whose ids are known.

use crate::error::{Error, Result};
use crate::hash::Digest;
use crate::ids::{BlockId, SeqHandle};
use crate::manager::{settle, Counts, Manager};
use crate::pipeline::InFlight;
use crate::pool::Pool;
use crate::prefetch::AHEAD;
use crate::sequence::Sequence;
use crate::sequences::SEQS_AHEAD;

/// Scratch of a commit: what becomes of its rows.
#[derive(Default)]
pub(crate) struct CommitRows {
    /// Where the ids of the plain rows go, once nothing can be refused any more: block and position.
    slots: Vec<(BlockId, u32)>,
    num_plain: usize,
    /// The other rows, in order.
    others: Vec<usize>,
    /// Of plain rows in a row, those that fill their block.
    filled: Vec<u32>,
    digests: Vec<Digest>,
}

impl CommitRows {
    fn start(&mut self, rows: usize) {
        if self.slots.len() < rows {
            self.slots.resize(rows, (BlockId::HOLE, 0));
            self.filled.resize(rows, 0);
        }
        self.others.clear();
        self.num_plain = 0;
    }
}

impl Manager {
    /// Accept the first `counts` tokens of the oldest step in flight of each sequence.
    ///
    /// `ids` holds, flat and in row order, the ids of the accepted tokens that are not known yet, or those of all accepted
    /// tokens; ids that are known must be the same. The rest of the step is rolled back and the blocks it had added are
    /// returned; that is an error while a later step is in flight, whose positions it would move. O(accepted tokens).
    pub fn commit(&mut self, handles: &[SeqHandle], counts: Counts, ids: &[u32]) -> Result<()> {
        counts.check("counts", handles.len())?;
        self.next_batch();
        let all_given = match self.check_commit(handles, counts, ids) {
            Ok(all_given) => all_given,
            Err(error) => {
                self.take_plain_rows_back(handles);
                return Err(error);
            }
        };
        let (mut row, mut num_others, mut rest) = (0, 0, ids);
        loop {
            // Plain rows up to the next other one, then that.
            let other = self.commit.others.get(num_others).copied();
            let end = other.unwrap_or(handles.len());
            let (own, others) = rest.split_at(end - row);
            let CommitRows { slots, filled, .. } = &mut self.commit;
            let num_filled = self.pool.store_each(&slots[row - num_others..end - num_others], own, filled);
            self.publish_filled(&handles[row..end], row - num_others, num_filled);
            let Some(row_of_other) = other else { break };
            let seq = &mut self.seqs[handles[row_of_other]];
            let count = counts.at(row_of_other);
            let unknown = (seq.num_computed() + count).saturating_sub(seq.num_known());
            let (own, others) = others.split_at(if all_given { count } else { unknown });
            (row, num_others, rest) = (end + 1, num_others + 1, others);
            let Some(step) = seq.in_flight.pop_oldest() else { continue };
            accept(seq, &mut self.pool, count, &own[own.len() - unknown..]);
            if !seq.retired.is_empty() {
                release_retired(seq, &mut self.pool, |steps| steps - 1);
            }
            if self.size.offset(seq.num_computed()) < count {
                // It has filled a block.
                seq.publish_full(&mut self.pool);
                seq.keep_room_to_grow();
            }
            if count < step.num_new as usize {
                roll_back(seq, &mut self.pool, seq.num_computed(), step);
                settle(seq, &mut self.counters, &mut self.pool);
            }
        }
        if self.merge {
            self.merge_filled(handles, counts);
        }
        // A merge may revive a cached block before the steps in flight let go of the one it replaces.
        self.note_peaks();
        Ok(())
    }

    /// Check the batch. Plain rows are accepted then, but for their ids, and left in `self.commit`, as are the numbers of
    /// the others. Returns whether ids are given that are known.
    fn check_commit(&mut self, handles: &[SeqHandle], counts: Counts, ids: &[u32]) -> Result<bool> {
        self.commit.start(handles.len());
        let (mut row, mut num_unknown, mut num_accepted) = (0, 0, 0);
        loop {
            let num_plain = match counts {
                Counts::All(1) => self.accept_plain_rows(handles, row, |_| 1),
                Counts::All(_) => 0,
                Counts::Each(counts) => self.accept_plain_rows(handles, row, |row| counts[row]),
            };
            self.commit.num_plain += num_plain;
            (num_unknown, num_accepted) = (num_unknown + num_plain, num_accepted + num_plain);
            row += num_plain;
            let Some(&handle) = handles.get(row) else { break };
            let seq = self.seqs.get_mut(handle).ok_or(Error::StaleHandle(handle))?;
            if seq.seen == self.batch {
                return Err(Error::DuplicateHandle(handle));
            }
            seq.seen = self.batch;
            let count = counts.at(row);
            match seq.in_flight.oldest() {
                Some(step) if count == step.num_new as usize => {}
                _ => check_partial(seq, &self.pool, row, handle, count)?,
            }
            num_unknown += (seq.num_computed() + count).saturating_sub(seq.num_known());
            num_accepted += count;
            self.commit.others.push(row);
            row += 1;
        }
        let all_given = ids.len() == num_accepted && num_accepted > num_unknown;
        if all_given {
            self.check_known(handles, counts, ids)?;
        } else if ids.len() != num_unknown {
            return Err(Error::Length { argument: "tokens", got: ids.len(), expected: num_unknown });
        }
        Ok(all_given)
    }

    /// Accept the rows from `row` on that are plain; returns how many. A plain row has one token, whose block is at hand,
    /// so that its id was not known: nothing changes but its cursors, which `take_plain_rows_back` can take back. What
    /// writing its id and publishing its block will need is asked for.
    #[inline(never)]
    fn accept_plain_rows(
        &mut self,
        handles: &[SeqHandle],
        row: usize,
        counts: impl Fn(usize) -> i32,
    ) -> usize {
        if self.merge {
            return 0;
        }
        let (batch, mut seqs) = (self.batch, self.seqs.places());
        let CommitRows { slots, others, .. } = &mut self.commit;
        let handles = &handles[row..];
        let slots = &mut slots[row - others.len()..][..handles.len()];
        for at in 0..handles.len() {
            if let Some(&handle) = handles.get(at + SEQS_AHEAD) {
                seqs.prefetch(handle);
            }
            let Some(seq) = seqs.get_mut(handles[at]) else { return at };
            if seq.seen == batch || counts(row + at) != 1 {
                return at;
            }
            let Some(block) = seq.in_flight.pop_placed() else { return at };
            seq.seen = batch;
            slots[at] = (block, seq.computed);
            seq.computed += 1;
        }
        handles.len()
    }

    /// Take back what `accept_plain_rows` has done.
    #[cold]
    fn take_plain_rows_back(&mut self, handles: &[SeqHandle]) {
        let CommitRows { others, num_plain, .. } = &self.commit;
        let mut others = others.iter().copied().peekable();
        for (row, &handle) in handles[..num_plain + others.len()].iter().enumerate() {
            if others.next_if_eq(&row).is_none() {
                let seq = &mut self.seqs[handle];
                seq.computed -= 1;
                seq.in_flight.push_back_oldest();
            }
        }
    }

    /// Publish the blocks that `num_filled` of some plain rows in a row have filled, the first of which is the `first`th:
    /// all digests first, and what they lead to is asked for.
    fn publish_filled(&mut self, handles: &[SeqHandle], first: usize, num_filled: usize) {
        let CommitRows { slots, filled, digests, .. } = &mut self.commit;
        let filled = &filled[..num_filled];
        digests.clear();
        if self.pool.index.is_some() {
            for (at, &row) in filled.iter().enumerate() {
                if let Some(&ahead) = filled.get(at + AHEAD) {
                    self.seqs[handles[ahead as usize]].prefetch_tip();
                }
                let (seq, (block, _)) = (&self.seqs[handles[row as usize]], slots[first + row as usize]);
                let digest = self.pool.digest(block, &seq.tip, seq.extra(seq.num_published));
                self.pool.prefetch_publication(block, &digest);
                digests.push(digest);
            }
        }
        for (at, &row) in filled.iter().enumerate() {
            let seq = &mut self.seqs[handles[row as usize]];
            seq.keep_room_to_grow();
            if let (Some(digest), false) = (digests.get(at), seq.unlisted) {
                seq.publish_next(slots[first + row as usize].0, digest, &mut self.pool);
            }
        }
    }

    /// Merge the blocks that the accepted tokens filled. After all rows: a block that one row has filled may be the twin
    /// of one that another row, which comes later, has published when scheduled and takes back now.
    fn merge_filled(&mut self, handles: &[SeqHandle], counts: Counts) {
        for (row, &handle) in handles.iter().enumerate() {
            let seq = &mut self.seqs[handle];
            let count = counts.at(row);
            if self.size.offset(seq.num_computed()) < count {
                seq.merge_computed(seq.num_computed() - count, &mut self.pool);
            }
        }
    }

    /// Compare the ids that are known with those given for all accepted tokens.
    fn check_known(&self, handles: &[SeqHandle], counts: Counts, ids: &[u32]) -> Result<()> {
        let (mut at, mut next) = (0, 0);
        for &row in &self.commit.others {
            // Of the plain rows before it none is known.
            at += row - next;
            next = row + 1;
            let seq = &self.seqs[handles[row]];
            let count = counts.at(row);
            let end = (seq.num_computed() + count).min(seq.num_known());
            let known = seq.prompt.ids.get(seq.num_computed()..end).unwrap_or_default();
            if let Some(wrong) = known.iter().zip(&ids[at..at + count]).position(|(known, id)| known != id) {
                let expected = format!("{}, the known id of that token", known[wrong]);
                let got = i64::from(ids[at + wrong]);
                return Err(Error::Row { argument: "tokens", row: at + wrong, got, expected });
            }
            at += count;
        }
        Ok(())
    }

    /// Take back the newest step of each sequence, as if it had not been scheduled; it must not have run. O(its blocks).
    pub fn abort_step(&mut self, handles: &[SeqHandle]) -> Result<()> {
        self.check_batch(handles, true)?;
        for (row, &handle) in handles.iter().enumerate() {
            let seq = &self.seqs[handle];
            let Some(step) = seq.in_flight.newest() else {
                let expected = "a sequence with a step in flight".to_owned();
                return Err(Error::Row { argument: "handles", row, got: handle.0, expected });
            };
            check_unused(seq, &self.pool, row, handle, seq.num_scheduled() - step.num_new as usize)?;
        }
        for &handle in handles {
            let seq = &mut self.seqs[handle];
            if let Some(step) = seq.in_flight.pop_newest() {
                let scheduled = seq.num_scheduled() - step.num_new as usize;
                roll_back(seq, &mut self.pool, scheduled, step);
                // The steps that merged blocks wait for are the ones that are left.
                let left = seq.in_flight.len();
                release_retired(seq, &mut self.pool, |steps| steps.min(left));
                settle(seq, &mut self.counters, &mut self.pool);
            }
        }
        Ok(())
    }
}

/// Refuse a count that is not that of the oldest step, unless the rest of the step can be rolled back.
#[cold]
fn check_partial(seq: &Sequence, pool: &Pool, row: usize, handle: SeqHandle, count: usize) -> Result<()> {
    match seq.in_flight.oldest() {
        _ if seq.is_preempted => Err(Error::Preempted(handle)),
        Some(step) if count < step.num_new as usize && seq.in_flight.len() == 1 => {
            check_unused(seq, pool, row, handle, seq.num_computed() + count)
        }
        step => Err(wrong_count(row, count, step)),
    }
}

/// Refuse to take back blocks, published when scheduled, that others have hit: what those have would be wrong.
fn check_unused(seq: &Sequence, pool: &Pool, row: usize, handle: SeqHandle, scheduled: usize) -> Result<()> {
    let mut taken_back = pool.block_size.column(scheduled)..seq.num_published;
    if taken_back.all(|column| pool.refs(seq.blocks[column]) == 1) {
        return Ok(());
    }
    let expected =
        "a sequence whose scheduled blocks nobody has hit: free or preempt those that have".to_owned();
    Err(Error::Row { argument: "handles", row, got: handle.0, expected })
}

fn wrong_count(row: usize, count: usize, step: Option<InFlight>) -> Error {
    let expected = match step {
        None => "a step in flight: schedule comes first".to_owned(),
        Some(step) if count > step.num_new as usize => {
            format!("at most the {} tokens of its oldest step", step.num_new)
        }
        Some(step) => format!("all {} tokens, since a later step is in flight", step.num_new),
    };
    Error::Row { argument: "counts", row, got: count as i64, expected }
}

/// Store the ids of the next `count` tokens, the prompt's first, then `ids`.
#[inline]
fn accept(seq: &mut Sequence, pool: &mut Pool, count: usize, ids: &[u32]) {
    let end = seq.num_computed() + count;
    let from_prompt = seq.prompt.ids.get(seq.num_computed()..end.min(seq.prompt_len())).unwrap_or_default();
    pool.store(&seq.blocks, seq.namespace, seq.num_computed(), from_prompt);
    pool.store(&seq.blocks, seq.namespace, end - ids.len(), ids);
    seq.computed = end as u32;
}

/// Return to `scheduled` tokens and to the reservation before `step`, the newest one.
fn roll_back(seq: &mut Sequence, pool: &mut Pool, scheduled: usize, step: InFlight) {
    let size = pool.block_size;
    let full = size.column(scheduled);
    // Published when scheduled: computed by nobody now, and hit by nobody.
    seq.withdraw_from(full, pool);
    for column in full..seq.num_published {
        pool.lower_fill(seq.blocks[column], size.within(seq.num_computed(), column));
    }
    seq.retract(full, pool);
    let reserved_before = seq.num_scheduled() - step.num_new as usize + step.ahead_before as usize;
    seq.move_to(scheduled, reserved_before.max(scheduled).min(seq.num_reserved()));
    seq.shrink(size.blocks(seq.num_reserved()), pool);
    seq.lose_room();
    let tail = seq.blocks.get(size.column(scheduled));
    if tail.is_none_or(|&tail| tail != BlockId::HOLE && pool.is_private(tail)) {
        seq.aim(size);
    }
}

/// Release merged blocks that no step in flight reads any more, `left` of the steps that each waited for being left.
fn release_retired(seq: &mut Sequence, pool: &mut Pool, left: impl Fn(usize) -> usize) {
    seq.retired.retain_mut(|(block, steps)| {
        *steps = left(*steps);
        if *steps == 0 {
            pool.release(*block);
        }
        *steps > 0
    });
}

impl Sequence {
    /// Room in the table for the next blocks, so that scheduling never allocates.
    fn keep_room_to_grow(&mut self) {
        if self.blocks.capacity() - self.blocks.len() < 4 {
            self.blocks.reserve(self.blocks.len() / 4 + 16);
        }
    }

    /// Publish the blocks that the computed tokens fill.
    #[inline]
    pub(crate) fn publish_full(&mut self, pool: &mut Pool) {
        let full = pool.block_size.column(self.num_computed());
        if self.may_publish(full, pool) {
            self.publish_until(full, pool);
        }
    }

    /// Publish the blocks that the first `len` tokens fill, whose ids the prompt knows, before they are computed.
    pub(crate) fn publish_known(&mut self, len: usize, pool: &mut Pool) {
        let size = pool.block_size;
        let full = size.column(len);
        if self.may_publish(full, pool) {
            let from = self.num_published.max(size.column(self.num_computed())) * size.get();
            pool.store(&self.blocks, self.namespace, from, &self.prompt.ids[from..full * size.get()]);
            self.publish_until(full, pool);
        }
    }

    /// Whether there is something to publish below column `full`, and a cache to publish it in.
    #[inline]
    fn may_publish(&self, full: usize, pool: &Pool) -> bool {
        self.num_published < full && pool.index.is_some() && !self.unlisted
    }

    /// Publish the next block, which no part of the prompt fills.
    #[inline]
    fn publish_next(&mut self, block: BlockId, digest: &Digest, pool: &mut Pool) {
        pool.namespaces.add_refs(self.namespace, 1);
        let extra = self.extra(self.num_published).cloned();
        self.tip = pool.publish(block, digest, self.tip, extra.as_ref());
        self.num_published += 1;
    }

    /// Publish up to column `full`.
    fn publish_until(&mut self, full: usize, pool: &mut Pool) {
        let from = self.num_published;
        pool.namespaces.add_refs(self.namespace, full - from);
        let in_prompt = pool.block_size.column(self.prompt_len()).min(full);
        let known = self.prompt.hashes.get(from..in_prompt).unwrap_or_default();
        self.tip = pool.publish_many(&self.blocks[..full], from, known, self.tip, &self.prompt);
        self.num_published = full;
    }

    /// Merge the published blocks that were filled since there were `before` computed tokens.
    fn merge_computed(&mut self, before: usize, pool: &mut Pool) {
        let full = pool.block_size.column(self.num_computed()).min(self.num_published);
        for column in pool.block_size.column(before)..full {
            if let Some(older) = pool.older_twin(self.blocks[column]) {
                self.merge_into(older, column, pool);
            }
        }
    }

    /// Use `older`, which holds the same, in place of the block in `column`.
    fn merge_into(&mut self, older: BlockId, column: usize, pool: &mut Pool) {
        let block = self.blocks[column];
        pool.share(older);
        pool.namespaces.touch(self.namespace);
        self.blocks[column] = older;
        self.touch_below_tail(column);
        if pool.refs(block) == 1 {
            pool.withdraw(block);
        }
        match self.in_flight.len() {
            0 => {
                pool.release(block);
            }
            steps => self.retired.push((block, steps)),
        }
    }
}
