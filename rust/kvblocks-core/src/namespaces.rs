//! Namespaces: who may share with whom, and what is counted for each. Imports `usage`.
//!
//! Invariant: a namespace is known while a sequence, a published block or a held one belongs to it; when none does it is
//! *idle*, and its totals are kept until `MAX_IDLE` others have become idle after it. So the table is bounded by the pool
//! and that number. Index 0 is the default one, always known.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::usage::Usage;

/// Idle namespaces that are remembered, at about 400 bytes each.
const MAX_IDLE: usize = 4096;

#[derive(Default)]
struct Entry {
    /// None for a vacant place.
    keys: Option<Arc<[u8]>>,
    /// Sequences, published blocks and held blocks.
    refs: usize,
    usage: Usage,
    /// Its peaks may have grown since they were noted.
    is_touched: bool,
    /// It stands among the idle ones, perhaps in use again.
    is_queued: bool,
    /// It has become idle again while it stood there.
    is_recent: bool,
}

/// The known namespaces.
pub(crate) struct Namespaces {
    by_keys: HashMap<Arc<[u8]>, u32>,
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    touched: Vec<u32>,
    idle: VecDeque<u32>,
}

impl Namespaces {
    pub fn new() -> Self {
        let mut namespaces = Self {
            by_keys: HashMap::new(),
            entries: Vec::new(),
            vacant: Vec::new(),
            touched: Vec::with_capacity(1),
            idle: VecDeque::new(),
        };
        // The one that nobody enters for ever keeps it known.
        namespaces.learn(Arc::new([]));
        namespaces.add_refs(0, 1);
        namespaces
    }

    /// Index of a known namespace. O(length of the keys).
    pub fn find(&self, keys: &[u8]) -> Option<u32> {
        if keys.is_empty() {
            return Some(0);
        }
        self.by_keys.get(keys).copied()
    }

    /// Index of a namespace for one more sequence, made known if need be.
    pub fn enter(&mut self, keys: &Arc<[u8]>) -> u32 {
        let index = self.find(keys).unwrap_or_else(|| self.learn(Arc::clone(keys)));
        self.join(index);
        index
    }

    fn learn(&mut self, keys: Arc<[u8]>) -> u32 {
        let entry = Entry { keys: Some(Arc::clone(&keys)), ..Entry::default() };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                // So that no step has to make room.
                self.touched.reserve(self.entries.len() - self.touched.len());
                self.entries.len() as u32 - 1
            }
        };
        self.by_keys.insert(keys, index);
        index
    }

    /// One more sequence of a known namespace.
    pub fn join(&mut self, index: u32) {
        self.usage(index).num_seqs += 1;
        self.add_refs(index, 1);
    }

    /// A sequence of the namespace ends.
    pub fn leave(&mut self, index: u32) {
        self.usage(index).num_seqs -= 1;
        self.drop_ref(index);
    }

    #[inline]
    pub fn add_refs(&mut self, index: u32, count: usize) {
        self.entries[index as usize].refs += count;
    }

    #[inline]
    pub fn drop_ref(&mut self, index: u32) {
        self.drop_refs(index, 1);
    }

    #[inline]
    pub fn drop_refs(&mut self, index: u32, count: usize) {
        let entry = &mut self.entries[index as usize];
        entry.refs -= count;
        if entry.refs == 0 {
            self.retire(index);
        }
    }

    /// Remember an idle namespace, and forget the one that has been idle longest if there are too many. O(1) amortised.
    #[cold]
    fn retire(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        if entry.is_queued {
            entry.is_recent = true;
            return;
        }
        entry.is_queued = true;
        self.idle.push_back(index);
        while self.idle.len() > MAX_IDLE {
            let Some(oldest) = self.idle.pop_front() else { return };
            let entry = &mut self.entries[oldest as usize];
            if entry.refs == 0 && std::mem::take(&mut entry.is_recent) {
                self.idle.push_back(oldest);
            } else if entry.refs == 0 {
                self.by_keys.remove(&entry.keys.take().unwrap_or_default());
                self.vacant.push(oldest);
            } else {
                (entry.is_queued, entry.is_recent) = (false, false);
            }
        }
    }

    #[inline]
    pub fn usage(&mut self, index: u32) -> &mut Usage {
        &mut self.entries[index as usize].usage
    }

    /// As `usage`, for a change after which the peaks are to be noted.
    #[inline]
    pub fn touch(&mut self, index: u32) -> &mut Usage {
        let entry = &mut self.entries[index as usize];
        if !entry.is_touched {
            entry.is_touched = true;
            self.touched.push(index);
        }
        &mut entry.usage
    }

    /// Note the peaks of the namespaces that have been touched. O(1) each.
    #[inline]
    pub fn note_peaks(&mut self) {
        for index in self.touched.drain(..) {
            let entry = &mut self.entries[index as usize];
            entry.is_touched = false;
            entry.usage.note_peaks();
        }
    }

    /// Start all peaks afresh. O(namespaces).
    pub fn reset_peaks(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.usage.reset_peaks());
    }

    /// Index, keys, references and usage of each known namespace.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Arc<[u8]>, usize, &Usage)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| {
            entry.keys.as_ref().map(|keys| (index as u32, keys, entry.refs, &entry.usage))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(number: usize) -> Arc<[u8]> {
        number.to_le_bytes().into()
    }

    fn is_known(namespaces: &Namespaces, number: usize) -> bool {
        namespaces.find(&keys(number)).is_some()
    }

    fn visit(namespaces: &mut Namespaces, number: usize) {
        let index = namespaces.enter(&keys(number));
        namespaces.leave(index);
    }

    #[test]
    fn of_idle_namespaces_the_last_ones_are_remembered() {
        let mut namespaces = Namespaces::new();
        let used = namespaces.enter(&keys(0));
        (1..=MAX_IDLE).for_each(|number| visit(&mut namespaces, number));
        visit(&mut namespaces, 1); // again: it goes to the end
        visit(&mut namespaces, MAX_IDLE + 1);
        assert!(is_known(&namespaces, 1) && !is_known(&namespaces, 2) && is_known(&namespaces, 3));
        (0..3 * MAX_IDLE).for_each(|number| visit(&mut namespaces, MAX_IDLE + 2 + number));
        assert!(is_known(&namespaces, 0) && !is_known(&namespaces, 1));
        assert_eq!(namespaces.iter().count(), 2 + MAX_IDLE);
        assert_eq!(namespaces.entries.len(), 3 + MAX_IDLE);
        namespaces.leave(used);
        assert_eq!(namespaces.find(&keys(0)), Some(used));
    }
}
