//! Words of 4 bytes that begin at a cache line. Imports `memory`.
//!
//! Invariant: the memory is asked for once, as zero pages, and does not move. Large allocations begin 16 bytes behind a page,
//! so that what fills a cache line, such as the ids of 16 tokens, would always lie in two.

use std::ops::{Deref, DerefMut};

use crate::memory::zeroed;

/// Bytes of a cache line.
const LINE: usize = 64;

pub(crate) struct Words {
    memory: Vec<u32>,
    start: usize,
}

impl Words {
    /// At least `len` zeros; None if the memory cannot be had.
    pub fn new(len: usize) -> Option<Self> {
        let spare = LINE / size_of::<u32>() - 1;
        let memory: Vec<u32> = zeroed(len.checked_add(spare)?)?;
        let start = memory.as_ptr().align_offset(LINE).min(spare);
        Some(Self { memory, start })
    }
}

impl Deref for Words {
    type Target = [u32];

    #[inline]
    fn deref(&self) -> &[u32] {
        &self.memory[self.start..]
    }
}

impl DerefMut for Words {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u32] {
        &mut self.memory[self.start..]
    }
}
