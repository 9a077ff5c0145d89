//! The integrity check: every counter, list and index recomputed from the block tables. Imports `manager` and below.
//!
//! Invariant: it shares no arithmetic with the verbs, so that it can disagree with them.

use std::collections::{HashMap, HashSet};

use crate::free_list::List;
use crate::ids::{BlockId, SeqHandle};
use crate::manager::Manager;

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
        for (key, seq) in &self.seqs {
            for &block in &seq.blocks {
                *owners.entry(block).or_default() += 1;
            }
            let name = format!("sequence {:#x}", SeqHandle::of(key).0);
            let cursors = seq.cursors();
            report.expect(
                seq.num_computed <= seq.num_scheduled && seq.num_scheduled <= seq.num_reserved,
                || format!("{name}: cursors out of order: {cursors:?}"),
            );
            let columns = seq.num_reserved.div_ceil(self.pool.block_size);
            report.equal(&format!("{name}: table length"), seq.blocks.len(), columns);
            let distinct: HashSet<_> = seq.blocks.iter().collect();
            report.equal(&format!("{name}: distinct blocks"), distinct.len(), seq.blocks.len());
            let in_flight: usize = seq.in_flight.iter().map(|step| step.num_new).sum();
            report.equal(
                &format!("{name}: tokens in flight"),
                seq.num_scheduled - seq.num_computed,
                in_flight,
            );
            let full = seq.num_computed / self.pool.block_size;
            let published = if self.pool.index.is_some() { full } else { 0 };
            report.equal(&format!("{name}: published blocks"), seq.num_published, published);
            for (i, &block) in seq.blocks.iter().take(published).enumerate() {
                report
                    .expect(self.pool.is_published(block), || format!("{name}: column {i} is not published"));
            }
            for (i, &block) in seq.blocks.iter().enumerate() {
                let computed =
                    seq.num_computed.saturating_sub(i * self.pool.block_size).min(self.pool.block_size);
                report.expect(self.pool.fill(block) as usize >= computed, || {
                    format!(
                        "{name}: column {i} holds {computed} tokens, its block's mark is {}",
                        self.pool.fill(block)
                    )
                });
            }
            report.expect(!seq.is_preempted || seq.blocks.is_empty(), || {
                format!("{name}: preempted with blocks")
            });
        }
        self.check_blocks(&owners, &mut report);
        self.check_index(&mut report);
        report.0
    }

    fn check_blocks(&self, owners: &HashMap<BlockId, u32>, report: &mut Report) {
        let pool = &self.pool;
        let free: Vec<_> = pool.lists.iter(List::Free).chain(pool.lists.fresh().map(BlockId)).collect();
        let cached: Vec<_> = pool.lists.iter(List::Cached).collect();
        report.equal("free blocks", pool.lists.num_free() as usize, free.len());
        report.equal("cached blocks", pool.lists.num_cached() as usize, cached.len());
        report.equal("live blocks", pool.num_live() as usize, owners.len());
        report.equal("free + live + cached", free.len() + owners.len() + cached.len(), self.capacity());
        report.equal(
            "logical blocks",
            self.num_logical,
            self.seqs.values().map(|seq| seq.blocks.len()).sum(),
        );
        let (free, cached): (HashSet<_>, HashSet<_>) =
            (free.into_iter().collect(), cached.into_iter().collect());
        let mut used_slots = 0;
        for block in pool.ids() {
            let refs = owners.get(&block).copied().unwrap_or(0);
            report.equal(&format!("{block:?}: references"), pool.refs(block), refs);
            let states = [free.contains(&block), refs > 0, cached.contains(&block)];
            report.equal(&format!("{block:?}: states"), states.iter().filter(|&&state| state).count(), 1);
            let (fill, size) = (pool.fill(block) as usize, pool.block_size);
            report.expect(fill <= size, || format!("{block:?}: mark {fill} exceeds the block size {size}"));
            report.expect(states[1] || fill == if states[2] { size } else { 0 }, || {
                format!("{block:?}: mark {fill} of a block without owner, states {states:?}")
            });
            report
                .expect(!pool.is_published(block) || !states[0], || format!("{block:?}: free and published"));
            report.expect(pool.is_published(block) || !states[2], || {
                format!("{block:?}: cached, not published")
            });
            report.expect(!pool.is_published(block) || fill == size, || {
                format!("{block:?}: published, not full")
            });
            if refs > 0 {
                used_slots += fill as u64;
            }
        }
        report.equal("used slots", pool.used_slots(), used_slots);
        report.expect(owners.keys().all(|block| pool.holds(*block)), || {
            "a table names a block outside the pool".into()
        });
    }

    fn check_index(&self, report: &mut Report) {
        let Some(index) = &self.pool.index else { return };
        let listed: Vec<_> = index.iter().collect();
        let distinct: HashSet<_> = listed.iter().copied().collect();
        report.equal("distinct index entries", distinct.len(), listed.len());
        let published: HashSet<_> = self.pool.ids().filter(|&block| index.is_published(block)).collect();
        report.expect(published == distinct, || {
            format!(
                "index entries and published blocks differ: {:?}",
                published.symmetric_difference(&distinct)
            )
        });
        let mut contents = HashMap::new();
        for &block in &published {
            let key = (index.parent(block), self.pool.tokens.of(block));
            let content = index.link(block).content;
            report.equal(&format!("{block:?}: content id"), *contents.entry(key).or_insert(content), content);
        }
    }
}
