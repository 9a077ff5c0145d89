//! The integrity check: every counter, list and index recomputed from the block tables. Imports `manager` and below.
//!
//! Invariant: it shares no arithmetic with the verbs, so that it can disagree with them.

use std::collections::{HashMap, HashSet};

use crate::ids::BlockId;
use crate::manager::{Manager, Publish};
use crate::sequence::Sequence;
use crate::usage::Usage;

/// Collects violations.
struct Report(Vec<String>);

impl Report {
    fn expect(&mut self, holds: bool, violation: impl FnOnce() -> String) {
        if !holds {
            self.0.push(violation());
        }
    }

    fn equal<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, kept: T, recomputed: T) {
        self.expect(kept == recomputed, || format!("{what} is {kept:?}, recomputed {recomputed:?}"));
    }
}

impl Manager {
    /// Violations of the manager's invariants, empty when sound. O(num_blocks + table entries), for tests and debugging.
    pub fn check_integrity(&self) -> Vec<String> {
        let mut report = Report(Vec::new());
        let mut owners: HashMap<BlockId, u32> = HashMap::new();
        for (key, seq) in self.seqs.iter() {
            seq.owned_blocks().for_each(|block| *owners.entry(block).or_default() += 1);
            self.check_sequence(&format!("sequence {:#x}", key.0), seq, &mut report);
        }
        let mut holds: HashMap<BlockId, u32> = HashMap::new();
        for transfer in self.transfers.values() {
            for &block in &transfer.blocks {
                *holds.entry(block).or_default() += 1;
            }
        }
        report.equal("blocks held by transfers", &self.pool.holds, &holds);
        self.check_blocks(&owners, &holds, &mut report);
        self.check_index(&mut report);
        self.check_sums(&owners, &mut report);
        report.0
    }

    fn check_sequence(&self, name: &str, seq: &Sequence, report: &mut Report) {
        let (size, cursors) = (self.size.get(), seq.cursors());
        report.expect(
            seq.num_computed() <= seq.num_scheduled() && seq.num_scheduled() <= seq.num_reserved(),
            || format!("{name}: cursors out of order: {cursors:?}"),
        );
        report.equal(&format!("{name}: table length"), seq.blocks.len(), seq.num_reserved().div_ceil(size));
        let named: Vec<_> = seq.blocks.iter().filter(|&&block| block != BlockId::HOLE).collect();
        let distinct: HashSet<_> = named.iter().collect();
        report.equal(&format!("{name}: distinct blocks"), distinct.len(), named.len());
        let in_flight: usize = seq.in_flight.iter().map(|step| step.num_new as usize).sum();
        report.equal(
            &format!("{name}: tokens in flight"),
            seq.num_scheduled() - seq.num_computed(),
            in_flight,
        );
        let full = if self.pool.index.is_some() { seq.num_computed() / size } else { 0 };
        let most = if self.publish == Publish::OnSchedule { seq.num_scheduled() / size } else { full };
        let published = seq.num_published;
        report.expect(seq.unlisted || (full <= published && published <= most), || {
            format!("{name}: {published} blocks published, expected {full} to {most}")
        });
        for (column, &block) in seq.blocks.iter().enumerate().filter(|(_, &block)| block != BlockId::HOLE) {
            let listed = seq.unlisted || column >= published || self.pool.is_published(block);
            report.expect(listed, || format!("{name}: column {column} is not published"));
            let computed = seq.num_computed().saturating_sub(column * size).min(size);
            report.expect(self.pool.fill(block) >= computed, || {
                format!(
                    "{name}: column {column} holds {computed} tokens, its mark is {}",
                    self.pool.fill(block)
                )
            });
        }
        let (column, offset) = (seq.num_scheduled() / size, seq.num_scheduled() % size);
        if seq.room() > 0 {
            report.equal(&format!("{name}: room"), seq.room() as usize, size - offset);
            report.expect(seq.scheduled >= seq.prompted, || format!("{name}: room for the prompt"));
            report.equal(&format!("{name}: tail"), seq.tail, seq.blocks[column]);
            let writable = offset == 0 || self.pool.is_private(seq.blocks[column]);
            report.expect(writable, || format!("{name}: room in {:?}, which others own", seq.blocks[column]));
        }
        let mut position = seq.num_computed();
        for step in seq.in_flight.iter() {
            if step.block != BlockId::HOLE {
                report.equal(&format!("{name}: block in flight"), step.block, seq.blocks[position / size]);
                report.equal(&format!("{name}: tokens in flight there"), step.num_new, 1);
            }
            position += step.num_new as usize;
        }
        report
            .expect(!seq.is_preempted || seq.blocks.is_empty(), || format!("{name}: preempted with blocks"));
        report.equal(&format!("{name}: columns"), seq.num_cols as usize, seq.blocks.len());
        report.equal(&format!("{name}: share"), seq.share, seq.share_now(self.size));
    }

    fn check_blocks(
        &self,
        owners: &HashMap<BlockId, u32>,
        holds: &HashMap<BlockId, u32>,
        report: &mut Report,
    ) {
        let (pool, size) = (&self.pool, self.size.get());
        let queued: Vec<_> = pool.list.queued(&pool.blocks).collect();
        let (cached, queued_free): (Vec<_>, Vec<_>) =
            queued.iter().partition(|&&block| pool.is_published(block));
        let free: Vec<_> = pool.list.unqueued().chain(queued_free).collect();
        let held = holds.keys().filter(|block| !owners.contains_key(block)).count();
        report.equal("queued blocks", pool.list.num_queued() as usize, queued.len());
        report.equal("free blocks", pool.num_free(), free.len());
        report.equal("cached blocks", pool.num_cached(), cached.len());
        report.equal("live blocks", pool.num_live(), owners.len());
        report.equal("held blocks", pool.num_held(), held);
        let total = free.len() + owners.len() + cached.len() + held;
        report.equal("free + live + cached + held", total, self.capacity());
        let (free, cached): (HashSet<_>, HashSet<_>) =
            (free.into_iter().collect(), cached.into_iter().collect());
        let mut used_slots = 0;
        for block in pool.ids() {
            let sequences = owners.get(&block).copied().unwrap_or(0);
            let transfers = holds.get(&block).copied().unwrap_or(0);
            report.equal(&format!("{block:?}: references"), pool.refs(block), sequences + transfers);
            let states = [free.contains(&block), sequences + transfers > 0, cached.contains(&block)];
            report.equal(&format!("{block:?}: states"), states.iter().filter(|&&state| state).count(), 1);
            report.equal(&format!("{block:?}: free bit"), pool.list.is_marked_free(block), states[0]);
            let fill = pool.fill(block);
            report.expect(fill <= size, || format!("{block:?}: mark {fill} exceeds the block size {size}"));
            let full = fill == size || !pool.is_published(block);
            report.expect(full, || format!("{block:?}: published with a mark of {fill}"));
            report
                .expect(!pool.is_published(block) || !states[0], || format!("{block:?}: free and published"));
            if sequences > 0 {
                used_slots += fill as u64;
            }
        }
        report.equal("used slots", pool.used_slots(), used_slots);
        let inside = owners.keys().chain(holds.keys()).all(|block| pool.holds_id(*block));
        report.expect(inside, || "a table names a block outside the pool".into());
    }

    fn check_index(&self, report: &mut Report) {
        let Some(index) = &self.pool.index else { return };
        let listed: Vec<_> = index.iter().collect();
        let distinct: HashSet<_> = listed.iter().copied().collect();
        report.equal("distinct index entries", distinct.len(), listed.len());
        let published: HashSet<_> = self.pool.ids().filter(|&block| self.pool.is_published(block)).collect();
        report.expect(published == distinct, || {
            format!(
                "index entries and published blocks differ: {:?}",
                published.symmetric_difference(&distinct)
            )
        });
        let mut contents = HashMap::new();
        for &block in &published {
            let record = &self.pool.blocks[block];
            let key = (record.parent(), self.pool.blocks.tokens(block), self.pool.blocks.extras.get(&block));
            let content = record.content();
            report.equal(&format!("{block:?}: content id"), *contents.entry(key).or_insert(content), content);
        }
        report.equal("contents", index.num_entries(), contents.len());
        let extras = self.pool.blocks.extras.keys().all(|block| published.contains(block));
        report.expect(extras, || "extra keys of a block that is not published".into());
    }

    fn check_sums(&self, owners: &HashMap<BlockId, u32>, report: &mut Report) {
        let total = &self.counters.total;
        let (now, peak) = (self.pool.num_live(), total.peak_live_blocks);
        report.expect(now <= peak, || format!("{now} blocks are live, the peak is {peak}"));
        let (now, peak) = (total.logical_blocks, total.peak_logical_blocks);
        report.expect(now <= peak, || format!("tables name {now} blocks, the peak is {peak}"));
        let mut sum = [0; 8];
        for (index, _, refs, usage) in self.pool.namespaces.iter() {
            let mut expected = Usage::default();
            for seq in self.seqs.values().filter(|seq| seq.namespace == index) {
                expected.num_seqs += 1;
                expected.logical_blocks += seq.share.blocks as usize;
                expected.promised_blocks += seq.share.promised as usize;
                expected.reserved_slots += seq.share.ahead as usize;
            }
            let mut published = 0;
            for block in self.pool.ids().filter(|&block| self.pool.blocks[block].namespace == index) {
                let (is_published, is_owned) = (self.pool.is_published(block), self.pool.refs(block) > 0);
                published += usize::from(is_published);
                if owners.contains_key(&block) {
                    expected.live_blocks += 1;
                    expected.used_slots += self.pool.fill(block) as u64;
                } else if is_owned {
                    expected.held_blocks += 1;
                } else {
                    expected.cached_blocks += usize::from(is_published);
                }
            }
            let always = usize::from(index == 0);
            let members = expected.num_seqs + published + expected.held_blocks + always;
            report.equal(&format!("namespace {index}: references"), refs, members);
            report.equal(&format!("namespace {index}: usage"), gauges(usage), gauges(&expected));
            let peaks = (usage.peak_live_blocks, usage.peak_logical_blocks);
            report.expect(peaks.0 >= usage.live_blocks && peaks.1 >= usage.logical_blocks, || {
                format!("namespace {index}: peaks {peaks:?} are below {usage:?}")
            });
            sum.iter_mut().zip(gauges(usage)).for_each(|(sum, own)| *sum += own);
        }
        report.equal("usage of all namespaces", sum, gauges(&self.stats()));
    }
}

/// What is in use now.
fn gauges(usage: &Usage) -> [u64; 8] {
    let blocks = [
        usage.live_blocks,
        usage.cached_blocks,
        usage.held_blocks,
        usage.logical_blocks,
        usage.promised_blocks,
        usage.num_seqs,
        usage.reserved_slots,
    ];
    let [live, cached, held, logical, promised, seqs, reserved] = blocks.map(|count| count as u64);
    [live, cached, held, logical, promised, seqs, reserved, usage.used_slots]
}
