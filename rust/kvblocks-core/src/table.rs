//! One sequence: its cursors, its block table, its steps in flight. Imports `ids`, `prefix`, `prompt`.
//!
//! Invariants (all in tokens): `num_computed <= num_scheduled <= num_reserved`, and the table holds exactly
//! `ceil(num_reserved / block_size)` blocks. Ids of computed tokens stand in their blocks, later ones in the prompt.
//! Blocks `0..num_published` have been offered to the prefix cache. `epoch` changes whenever an existing column does.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::ids::BlockId;
use crate::prefix::Link;
use crate::prompt::Tokens;

/// Lengths of a sequence, in tokens but `num_blocks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursors {
    /// Tokens whose ids are known.
    pub num_tokens: usize,
    /// Tokens whose K/V has been computed and committed.
    pub num_computed: usize,
    /// Tokens handed to a step so far.
    pub num_scheduled: usize,
    /// Tokens that the block table has slots for by agreement.
    pub num_reserved: usize,
    /// Length of the block table.
    pub num_blocks: usize,
    /// It holds no blocks and waits to be resumed.
    pub is_preempted: bool,
}

/// A step that was scheduled and not yet committed.
#[derive(Clone, Copy)]
pub(crate) struct InFlight {
    pub num_new: usize,
    /// `num_reserved` before the step, to which a rejection returns.
    pub reserved_before: usize,
}

pub(crate) struct Sequence {
    pub prompt: Arc<Tokens>,
    /// Leading tokens of `prompt` that belong to this sequence; a truncation lowers it.
    pub prompt_len: usize,
    pub blocks: Vec<BlockId>,
    pub num_computed: usize,
    pub num_scheduled: usize,
    pub num_reserved: usize,
    pub num_published: usize,
    /// Chain value of block `num_published - 1`.
    pub tip: Link,
    pub in_flight: VecDeque<InFlight>,
    pub epoch: u64,
    pub is_preempted: bool,
    /// Number of the batch call that saw this sequence last, to find duplicates.
    pub seen: u64,
}

impl Sequence {
    pub fn new(prompt: Arc<Tokens>) -> Self {
        Self {
            prompt_len: prompt.ids.len(),
            prompt,
            blocks: Vec::new(),
            num_computed: 0,
            num_scheduled: 0,
            num_reserved: 0,
            num_published: 0,
            tip: Link::ROOT,
            in_flight: VecDeque::new(),
            epoch: 0,
            is_preempted: false,
            seen: 0,
        }
    }

    pub fn num_known(&self) -> usize {
        self.num_computed.max(self.prompt_len)
    }

    /// The block that the next scheduled token shares with earlier ones; None if it opens a block.
    pub fn partial_tail(&self, block_size: usize) -> Option<BlockId> {
        let col = self.num_scheduled / block_size;
        (!self.num_scheduled.is_multiple_of(block_size)).then(|| self.blocks.get(col).copied()).flatten()
    }

    pub fn cursors(&self) -> Cursors {
        Cursors {
            num_tokens: self.num_known(),
            num_computed: self.num_computed,
            num_scheduled: self.num_scheduled,
            num_reserved: self.num_reserved,
            num_blocks: self.blocks.len(),
            is_preempted: self.is_preempted,
        }
    }
}
