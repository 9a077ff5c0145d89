//! The block allocator of kvblocks: which block holds which tokens of which sequence.
//!
//! # Key types
//! * [`Manager`] owns the block ids of one paged KV cache. Every verb goes through it.
//! * [`Prompt`] is a list of token ids hashed once; [`SeqHandle`] names a live sequence and goes stale with it.
//! * [`StepArrays`] are the caller's index arrays that [`Manager::schedule`] fills, one call for a whole batch.
//!
//! # Usage
//! 1. [`Preparer::prepare`] a prompt, 2. [`Manager::allocate`] it (cached prefix pinned, blocks reserved),
//! 3. [`Manager::schedule`] its next tokens, run the model, 4. [`Manager::commit`] what was computed, and again from
//!    3; [`Manager::fork`], [`Manager::truncate`] and [`Manager::preempt`] on the way, 5. [`Manager::free`].
//!
//! # Cost and limits
//! Costs are per block or per token touched, never per pool: no verb scans it, but [`Manager::check_integrity`].
//! Nothing here knows tensors, devices or Python; there is no `unsafe`, no interior mutability and no clock. Block
//! ids depend on the order of calls only, so that equal calls on two managers give equal tables.
//!
//! **The trap**: block ids are reused. A table read earlier is a snapshot; hold a handle, not a block id.
//!
//! Imports flow one way: `ids, hash -> free_list, prefix, prompt -> pool, table -> manager` and, on top of it,
//! one file a verb group: `admission`, `step`, `commit`, `lifetime`, then `stats` and `check`.

#![forbid(unsafe_code)]

mod admission;
mod check;
mod commit;
mod error;
mod free_list;
mod hash;
mod ids;
mod lifetime;
mod manager;
mod pool;
mod prefix;
mod prompt;
mod stats;
mod step;
mod table;

pub use admission::{Admission, Allocation};
pub use error::{Error, Result};
pub use hash::BlockHasher;
pub use ids::{BlockId, SeqHandle};
pub use lifetime::Spare;
pub use manager::{Config, Counts, Manager, Refusal};
pub use prompt::{Preparer, Prompt};
pub use stats::Stats;
pub use step::{Policy, RowState, Scheduled, StepArrays, StepRequest};
pub use table::Cursors;
