//! What can be wrong with a call. Imports `ids`.
//!
//! Invariant: an error is misuse and leaves the manager unchanged. Expected refusals (no room) are values, not errors.

use crate::ids::{explain, SeqHandle, TransferHandle};

/// Result of a verb.
pub type Result<T> = std::result::Result<T, Error>;

/// Misuse of a verb, with the numbers that show it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The handle was never given out, or its sequence has been freed.
    #[error("handle {:#x} names no sequence: {}", .0.0, explain(.0.0, false))]
    StaleHandle(SeqHandle),
    /// The prompt came from a preemption whose sequence has been freed or resumed since.
    #[error("the prompt continues sequence {:#x}, which was freed or resumed since its preemption", .0.0)]
    StalePrompt(SeqHandle),
    /// The transfer was never begun, or has ended.
    #[error("handle {:#x} names no transfer: {}", .0.0, explain(.0.0, true))]
    StaleTransfer(TransferHandle),
    /// The sequence holds no blocks: only `allocate` of its prompt, `preempt` and `free` apply.
    #[error("sequence {:#x} is preempted: allocate the prompt that preempt handed out to resume it", .0.0)]
    Preempted(SeqHandle),
    /// The same sequence stands twice in one batch.
    #[error("handles names sequence {:#x} more than once", .0.0)]
    DuplicateHandle(SeqHandle),
    /// A row of the step that rows are appended to is not in flight as the step shows it.
    #[error(
        "append finds row {row} of the step, sequence {:#x}, freed, preempted, committed, taken back or with other \
         blocks since: schedule the step anew",
        handle.0
    )]
    StaleRow {
        /// Row of the step.
        row: usize,
        /// Its sequence when it was scheduled.
        handle: SeqHandle,
    },
    /// The prompt was prepared by another manager.
    #[error("the prompt was prepared by another block manager: prepare it with this one")]
    ForeignPrompt,
    /// An array has the wrong number of entries.
    #[error("{argument} has {got} entries, expected {expected}")]
    Length {
        /// Name of the argument.
        argument: &'static str,
        /// Entries found.
        got: usize,
        /// Entries needed.
        expected: usize,
    },
    /// A value lies outside its range.
    #[error("{argument} is {got}, expected {expected}")]
    Value {
        /// Name of the argument.
        argument: &'static str,
        /// The value found.
        got: i64,
        /// The range, in words.
        expected: String,
    },
    /// The memory for an answer cannot be had.
    #[error("{argument} has {got} entries: no memory for what follows from them, {bytes} bytes")]
    Memory {
        /// Name of the argument.
        argument: &'static str,
        /// Its entries.
        got: usize,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A value of one row of a batch lies outside its range.
    #[error("{argument}[{row}] is {got}, expected {expected}")]
    Row {
        /// Name of the argument.
        argument: &'static str,
        /// Row of the batch.
        row: usize,
        /// The value found.
        got: i64,
        /// The range, in words.
        expected: String,
    },
}
