//! The blocks that no sequence uses: recycled ids, and cached blocks in order of last use. Imports `ids`.
//!
//! Invariant: a block is in at most one of the two lists, so one pair of link arrays serves both. Ids that were never
//! used are a counter, not list entries: a new pool touches no memory.

use crate::ids::BlockId;

const NIL: u32 = u32::MAX;

/// Ends and length of one doubly linked list.
#[derive(Clone, Copy)]
struct Ends {
    head: u32,
    tail: u32,
    len: u32,
}

const EMPTY: Ends = Ends { head: NIL, tail: NIL, len: 0 };

/// Which list a block is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// Blocks without content worth keeping, last in first out.
    Free = 0,
    /// Published blocks without an owner, least recently used first.
    Cached = 1,
}

/// Both lists, and the ids never used so far.
pub(crate) struct FreeList {
    prev: Vec<u32>,
    next: Vec<u32>,
    ends: [Ends; 2],
    fresh: u32,
    limit: u32,
}

impl FreeList {
    /// Ids `first..limit`, all fresh. Touches no memory: the link arrays are zero pages until used.
    pub fn new(first: u32, limit: u32) -> Self {
        let links = || vec![0; limit as usize];
        Self { prev: links(), next: links(), ends: [EMPTY; 2], fresh: first, limit }
    }

    /// Blocks in the free list, fresh ones included. O(1).
    pub fn num_free(&self) -> u32 {
        self.ends[List::Free as usize].len + (self.limit - self.fresh)
    }

    /// Blocks in the cached list. O(1).
    pub fn num_cached(&self) -> u32 {
        self.ends[List::Cached as usize].len
    }

    /// Recycle `block`: it will be the next one taken. O(1).
    pub fn push_free(&mut self, block: BlockId) {
        let head = self.ends[List::Free as usize].head;
        self.link(List::Free, NIL, block.0, head);
    }

    /// Keep `block` as the most recently used cached block. O(1).
    pub fn push_cached(&mut self, block: BlockId) {
        let tail = self.ends[List::Cached as usize].tail;
        self.link(List::Cached, tail, block.0, NIL);
    }

    /// A block without content: recycled, else fresh. O(1).
    pub fn pop_free(&mut self) -> Option<BlockId> {
        self.pop(List::Free).or_else(|| {
            (self.fresh < self.limit).then(|| {
                self.fresh += 1;
                BlockId(self.fresh - 1)
            })
        })
    }

    /// The least recently used cached block. O(1).
    pub fn pop_cached(&mut self) -> Option<BlockId> {
        self.pop(List::Cached)
    }

    /// Take `block` out of the cached list, wherever it stands. O(1).
    pub fn unlink_cached(&mut self, block: BlockId) {
        let (prev, next) = (self.prev[block.index()], self.next[block.index()]);
        self.set_next(List::Cached, prev, next);
        self.set_prev(List::Cached, next, prev);
        self.ends[List::Cached as usize].len -= 1;
    }

    /// The ids of one list, in order; for checks.
    pub fn iter(&self, list: List) -> impl Iterator<Item = BlockId> + '_ {
        let head = self.ends[list as usize].head;
        std::iter::successors((head != NIL).then_some(head), |&at| {
            Some(self.next[at as usize]).filter(|&next| next != NIL)
        })
        .map(BlockId)
    }

    /// Ids never used so far; for checks.
    pub fn fresh(&self) -> std::ops::Range<u32> {
        self.fresh..self.limit
    }

    fn pop(&mut self, list: List) -> Option<BlockId> {
        let head = self.ends[list as usize].head;
        if head == NIL {
            return None;
        }
        let next = self.next[head as usize];
        self.set_next(list, NIL, next);
        self.set_prev(list, next, NIL);
        self.ends[list as usize].len -= 1;
        Some(BlockId(head))
    }

    fn link(&mut self, list: List, prev: u32, at: u32, next: u32) {
        self.prev[at as usize] = prev;
        self.next[at as usize] = next;
        self.set_next(list, prev, at);
        self.set_prev(list, next, at);
        self.ends[list as usize].len += 1;
    }

    fn set_next(&mut self, list: List, at: u32, next: u32) {
        match at {
            NIL => self.ends[list as usize].head = next,
            at => self.next[at as usize] = next,
        }
    }

    fn set_prev(&mut self, list: List, at: u32, prev: u32) {
        match at {
            NIL => self.ends[list as usize].tail = prev,
            at => self.prev[at as usize] = prev,
        }
    }
}
