//! Transfers: blocks that a copy in flight reads or fills, which must outlive the sequence they belong to. Imports
//! `manager` and below.
//!
//! Invariant: a transfer owns references of its own from `begin` to its end, whatever happens to the sequence. Its
//! handle is never given out again, so that ending it twice is an error and never frees another's blocks.

use crate::error::{Error, Result};
use crate::ids::{BlockId, SeqHandle, TransferHandle};
use crate::manager::Manager;

/// Blocks in the hands of a copy.
pub(crate) struct Transfer {
    pub blocks: Vec<BlockId>,
    /// The step counter when it began.
    pub begun_at: u64,
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All bytes have arrived.
    Complete,
    /// It broke off.
    Failed,
    /// It was called off.
    Cancelled,
}

/// A transfer that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// Names the transfer.
    pub handle: TransferHandle,
    /// Blocks that it owns.
    pub num_blocks: usize,
    /// Steps scheduled since it began.
    pub age_steps: u64,
}

impl Manager {
    /// Let a transfer own the blocks of columns `start..end` of a sequence's table, to read or to fill them. While it
    /// does, a write into a partly filled one copies first, so end a load before its blocks are scheduled. O(blocks).
    pub fn begin_transfer(&mut self, handle: SeqHandle, start: usize, end: usize) -> Result<TransferHandle> {
        self.check_batch(&[handle], true)?;
        let seq = &mut self.seqs[handle];
        let most = seq.blocks.len();
        if start > end || end > most {
            let expected = format!("start <= end <= {most}, the columns of the block table");
            return Err(Error::Value { argument: "end of the columns", got: end as i64, expected });
        }
        seq.lose_room();
        let blocks: Vec<_> = seq.blocks[start..end].iter().copied().filter(|&b| b != BlockId::HOLE).collect();
        for &block in &blocks {
            self.pool.hold(block);
        }
        let handle = self.next_transfer;
        self.next_transfer.0 += 1;
        self.transfers.insert(handle, Transfer { blocks, begun_at: self.counters.steps });
        Ok(handle)
    }

    /// End a transfer; returns the blocks that nobody owns any more. O(blocks).
    pub fn end_transfer(&mut self, handle: TransferHandle, outcome: Outcome) -> Result<usize> {
        let transfer = self.transfers.remove(&handle).ok_or(Error::StaleTransfer(handle))?;
        match outcome {
            Outcome::Complete => self.counters.completed_transfers += 1,
            Outcome::Failed => self.counters.failed_transfers += 1,
            Outcome::Cancelled => self.counters.cancelled_transfers += 1,
        }
        Ok(transfer.blocks.into_iter().rev().filter(|&block| self.pool.unhold(block)).count())
    }

    /// The transfers that have not ended, oldest handles first. O(transfers).
    pub fn pending_transfers(&self) -> Vec<Pending> {
        let pending = self.transfers.iter().map(|(&handle, transfer)| Pending {
            handle,
            num_blocks: transfer.blocks.len(),
            age_steps: self.counters.steps - transfer.begun_at,
        });
        pending.collect()
    }
}
