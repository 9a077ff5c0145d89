//! Commit: scheduled tokens become computed ones, full blocks become findable. Imports `manager` and below.
//!
//! Invariant: a token that was scheduled and not accepted is never visible to anybody. Only blocks wholly below
//! `num_computed` are published; under `Publish::OnSchedule` those wholly below `num_scheduled` whose ids are known.

use crate::error::{Error, Result};
use crate::hash::Digest;
use crate::ids::{BlockId, SeqHandle};
use crate::manager::{settle, Counts, Manager};
use crate::pool::{Pool, AHEAD};
use crate::prefix;
use crate::sequence::{InFlight, Sequence};
use crate::sequences::SEQS_AHEAD;

impl Manager {
    /// Accept the first `counts` tokens of the oldest step in flight of each sequence.
    ///
    /// `ids` holds, flat and in row order, the ids of the accepted tokens that are not known yet, or those of all accepted
    /// tokens; ids that are known must be the same. The rest of the step is rolled back and the blocks it had added are returned; that is an error while a later step is in flight, whose
    /// positions it would move. O(accepted tokens).
    pub fn commit(&mut self, handles: &[SeqHandle], counts: Counts, ids: &[u32]) -> Result<()> {
        counts.check("counts", handles.len())?;
        self.next_batch();
        let (mut num_unknown, mut num_accepted) = (0, 0);
        let mut row = 0;
        loop {
            let num_plain = match counts {
                Counts::All(count) => self.check_plain_rows(&handles[row..], |_| count),
                Counts::Each(counts) => self.check_plain_rows(&handles[row..], |at| counts[row + at]),
            };
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
                Some(step) if count == step.num_new as usize => {
                    self.pool.prefetch_token(step.block, seq.computed);
                    if self.size.offset(seq.num_computed()) + count >= self.size.get() {
                        seq.prefetch_tip();
                    }
                }
                _ => check_partial(seq, &self.pool, row, handle, count)?,
            }
            num_unknown += (seq.num_computed() + count).saturating_sub(seq.num_known());
            num_accepted += count;
            row += 1;
        }
        let all_given = ids.len() == num_accepted && num_accepted > num_unknown;
        if all_given {
            self.check_known(handles, counts, ids)?;
        } else if ids.len() != num_unknown {
            return Err(Error::Length { argument: "tokens", got: ids.len(), expected: num_unknown });
        }
        let (mut row, mut rest) = (0, ids);
        loop {
            let num_plain = match counts {
                Counts::All(count) => self.accept_plain_rows(&handles[row..], |_| count, rest),
                Counts::Each(counts) => self.accept_plain_rows(&handles[row..], |at| counts[row + at], rest),
            };
            (row, rest) = (row + num_plain, &rest[num_plain..]);
            self.publish_filled();
            let Some(&handle) = handles.get(row) else { break };
            let seq = &mut self.seqs[handle];
            let count = counts.at(row);
            let unknown = (seq.num_computed() + count).saturating_sub(seq.num_known());
            let (own, others) = rest.split_at(if all_given { count } else { unknown });
            (row, rest) = (row + 1, others);
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

    /// Check the leading rows that are plain; returns how many. Asks for what accepting them reads and writes.
    #[inline(never)]
    fn check_plain_rows(&mut self, handles: &[SeqHandle], counts: impl Fn(usize) -> i32) -> usize {
        let (batch, size, seqs) = (self.batch, self.size, &mut self.seqs);
        for (at, &handle) in handles.iter().enumerate() {
            seqs.prefetch(handles.get(at + SEQS_AHEAD));
            let Some(seq) = seqs.get_mut(handle) else { return at };
            let Some(step) = seq.in_flight.oldest() else { return at };
            if seq.seen == batch || !seq.is_plain(step, counts(at)) {
                return at;
            }
            seq.seen = batch;
            self.pool.prefetch_token(step.block, seq.computed);
            if size.offset(seq.num_computed()) + 1 == size.get() {
                seq.prefetch_tip();
            }
        }
        handles.len()
    }

    /// Accept the leading rows that are plain, given what follows of the ids; returns how many. A plain row has one token,
    /// whose block is at hand and whose id was not known. Those that fill their block are left in `self.filled`.
    #[inline(never)]
    fn accept_plain_rows(
        &mut self,
        handles: &[SeqHandle],
        counts: impl Fn(usize) -> i32,
        ids: &[u32],
    ) -> usize {
        // Slots written, of neighbours in the same namespace.
        let (mut written, mut namespace, mut num_plain) = (0, 0, 0);
        for (&handle, &id) in handles.iter().zip(ids) {
            let seq = &mut self.seqs[handle];
            let Some(step) = seq.in_flight.oldest() else { break };
            let offset = self.size.offset(seq.num_computed());
            if self.merge || !seq.is_plain(step, counts(num_plain)) {
                break;
            }
            if seq.namespace != namespace {
                self.pool.count_written(std::mem::take(&mut written), namespace);
                namespace = seq.namespace;
            }
            written += self.pool.store_one(step.block, offset, id);
            seq.computed += 1;
            seq.in_flight.pop_oldest();
            num_plain += 1;
            if offset + 1 == self.size.get() {
                self.filled.push((handle, Digest::default()));
            }
        }
        self.pool.count_written(written, namespace);
        num_plain
    }

    /// Publish the blocks that plain rows have filled: all digests first, and what they lead to is asked for.
    fn publish_filled(&mut self) {
        for (handle, digest) in &mut self.filled {
            let seq = &self.seqs[*handle];
            if let (true, Some(index)) =
                (seq.may_publish(seq.num_published + 1, &self.pool), &self.pool.index)
            {
                let column = seq.num_published;
                *digest = self.pool.digest(seq.blocks[column], &seq.tip, seq.prompt.extra(column));
                index.prefetch(prefix::fragment(digest));
            }
        }
        for (handle, digest) in self.filled.drain(..) {
            let seq = &mut self.seqs[handle];
            seq.keep_room_to_grow();
            if seq.may_publish(seq.num_published + 1, &self.pool) {
                seq.publish_until(seq.num_published + 1, Some(&digest), &mut self.pool);
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
        let mut at = 0;
        for (row, &handle) in handles.iter().enumerate() {
            let seq = &self.seqs[handle];
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

/// Return to `scheduled` tokens and to the reservation before `step`.
fn roll_back(seq: &mut Sequence, pool: &mut Pool, scheduled: usize, step: InFlight) {
    let size = pool.block_size;
    let full = size.column(scheduled);
    // Published when scheduled: computed by nobody now, and hit by nobody.
    seq.withdraw_from(full, pool);
    for column in full..seq.num_published {
        pool.lower_fill(seq.blocks[column], size.within(seq.num_computed(), column));
    }
    seq.retract(full, pool);
    seq.scheduled = scheduled as u32;
    seq.reserved = step.reserved_before.max(seq.scheduled).min(seq.reserved);
    seq.shrink(size.blocks(seq.num_reserved()), pool);
    seq.room = 0;
    let tail = seq.blocks.get(size.column(scheduled));
    if tail.is_some_and(|&tail| tail != BlockId::HOLE && pool.is_private(tail)) {
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
    /// Whether the oldest step puts one token, whose id is to be given, into a block at hand.
    #[inline]
    fn is_plain(&self, step: InFlight, count: i32) -> bool {
        count == 1 && step.block != BlockId::HOLE && self.computed >= self.prompted
    }

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
            self.publish_until(full, None, pool);
        }
    }

    /// Publish the blocks that the first `len` tokens fill, whose ids the prompt knows, before they are computed.
    pub(crate) fn publish_known(&mut self, len: usize, pool: &mut Pool) {
        let size = pool.block_size;
        let full = size.column(len);
        if self.may_publish(full, pool) {
            let from = self.num_published.max(size.column(self.num_computed())) * size.get();
            pool.store(&self.blocks, self.namespace, from, &self.prompt.ids[from..full * size.get()]);
            self.publish_until(full, None, pool);
        }
    }

    /// Whether there is something to publish below column `full`, and a cache to publish it in.
    #[inline]
    fn may_publish(&self, full: usize, pool: &Pool) -> bool {
        self.num_published < full && pool.index.is_some() && !self.unlisted
    }

    /// Publish up to column `full`; `digest` is that of the next block, if it is at hand.
    fn publish_until(&mut self, full: usize, digest: Option<&Digest>, pool: &mut Pool) {
        let size = pool.block_size.get();
        pool.namespaces.add_refs(self.namespace, full - self.num_published);
        for column in self.num_published..full {
            let in_prompt = (column + 1) * size <= self.prompt_len();
            let digest = if in_prompt { self.prompt.hashes.get(column) } else { digest };
            let block = self.blocks[column];
            if let (Some(ahead), Some(index)) = (self.prompt.hashes.get(column + AHEAD), &pool.index) {
                index.prefetch(prefix::fragment(ahead));
            }
            if let Some(&ahead) = self.blocks.get(column + AHEAD) {
                pool.blocks.prefetch(ahead);
            }
            let Some(link) = pool.publish(block, &self.tip, digest, self.prompt.extra(column)) else {
                return;
            };
            self.tip = link;
            self.num_published = column + 1;
        }
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
        let room = self.room;
        self.touch(column);
        // The next slot lies beyond the merged block.
        self.room = room;
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
