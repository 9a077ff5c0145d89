//! The sequences of a manager, by handle. Imports `ids`, `prefetch`, `prompt`, `sequence`.
//!
//! An arena of our own, since a decode step is mostly a walk over it: the handle stands in the first cache line of the
//! sequence, next to the cursors that the step reads anyway.
//! Invariant: a handle is good while the place that it names holds it. A vacant place holds the generation that comes next
//! and the index of another place, so nobody's handle is good there.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use crate::ids::SeqHandle;
use crate::prefetch::prefetch;
use crate::prompt::Tokens;
use crate::sequence::Sequence;

/// Rows to look ahead in a batch: memory that is far away takes as long as some 20 rows.
pub(crate) const SEQS_AHEAD: usize = 16;

/// Sequences by handle.
pub(crate) struct Sequences {
    places: Vec<Sequence>,
    vacant: Vec<u32>,
    /// The prompt of vacant places.
    no_tokens: Arc<Tokens>,
}

impl Sequences {
    pub fn new(no_tokens: Tokens) -> Self {
        Self { places: Vec::new(), vacant: Vec::new(), no_tokens: Arc::new(no_tokens) }
    }

    pub fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// Take a place. O(1).
    pub fn insert(&mut self, mut seq: Sequence) -> SeqHandle {
        match self.vacant.pop() {
            Some(index) => {
                let place = &mut self.places[index as usize];
                seq.handle = SeqHandle::new(index, place.handle.generation());
                *place = seq;
                place.handle
            }
            None => {
                let handle = SeqHandle::new(self.places.len() as u32, 1);
                seq.handle = handle;
                self.places.push(seq);
                handle
            }
        }
    }

    /// Leave the place; what was there is the caller's. O(1).
    pub fn remove(&mut self, handle: SeqHandle) -> Option<Sequence> {
        self.get(handle)?;
        let no_tokens = Arc::clone(&self.no_tokens);
        let place = &mut self.places[handle.index()];
        let next = handle.generation() % (SeqHandle::NUM_GENERATIONS - 1) + 1;
        let next = SeqHandle::new(!handle.index() as u32, next);
        let vacated = Sequence { handle: next, ..Sequence::new(no_tokens, 0) };
        let seq = std::mem::replace(place, vacated);
        self.vacant.push(handle.index() as u32);
        Some(seq)
    }

    /// For a walk over the rows of a batch.
    #[inline]
    pub fn places(&mut self) -> Places<'_> {
        Places(&mut self.places)
    }

    #[inline]
    pub fn get(&self, handle: SeqHandle) -> Option<&Sequence> {
        self.places.get(handle.index()).filter(|seq| seq.handle == handle)
    }

    #[inline]
    pub fn get_mut(&mut self, handle: SeqHandle) -> Option<&mut Sequence> {
        self.places.get_mut(handle.index()).filter(|seq| seq.handle == handle)
    }

    pub fn iter(&self) -> impl Iterator<Item = (SeqHandle, &Sequence)> {
        let taken = self.places.iter().enumerate().filter(|(index, seq)| seq.handle.index() == *index);
        taken.map(|(_, seq)| (seq.handle, seq))
    }

    pub fn values(&self) -> impl Iterator<Item = &Sequence> {
        self.iter().map(|(_, seq)| seq)
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        let taken = self.places.iter_mut().enumerate().filter(|(index, seq)| seq.handle.index() == *index);
        taken.map(|(_, seq)| seq)
    }
}

/// The sequences while none comes or goes.
pub(crate) struct Places<'a>(&'a mut [Sequence]);

impl Places<'_> {
    /// Ask for the sequence of a later row.
    #[inline]
    pub fn prefetch(&self, handle: SeqHandle) {
        prefetch(self.0, handle.index());
    }

    #[inline]
    pub fn get_mut(&mut self, handle: SeqHandle) -> Option<&mut Sequence> {
        self.0.get_mut(handle.index()).filter(|seq| seq.handle == handle)
    }
}

/// By a handle that has been checked.
impl Index<SeqHandle> for Sequences {
    type Output = Sequence;

    #[inline]
    fn index(&self, handle: SeqHandle) -> &Sequence {
        &self.places[handle.index()]
    }
}

impl IndexMut<SeqHandle> for Sequences {
    #[inline]
    fn index_mut(&mut self, handle: SeqHandle) -> &mut Sequence {
        &mut self.places[handle.index()]
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::keys::Keys;
    use crate::prompt::Preparer;

    #[test]
    fn a_freed_sequence_does_not_keep_its_prompt() {
        let preparer = Preparer::new(None, 4);
        let mut seqs = Sequences::new(preparer.tokens(Cow::default(), Keys::default()).unwrap());
        let prompt = Arc::new(preparer.tokens(vec![1, 2, 3].into(), Keys::default()).unwrap());
        let handle = seqs.insert(Sequence::new(Arc::clone(&prompt), 0));
        assert_eq!(Arc::strong_count(&prompt), 2);
        drop(seqs.remove(handle));
        assert_eq!(Arc::strong_count(&prompt), 1);
        assert!(seqs.get(handle).is_none());
        let next = seqs.insert(Sequence::new(prompt, 0));
        assert_eq!((next.index(), next.generation()), (handle.index(), handle.generation() + 1));
    }
}
