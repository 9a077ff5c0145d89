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
//! Nothing here knows tensors, devices or Python; there is no `unsafe` but two hints about memory, no
//! interior mutability and no clock. Block ids depend on the order of calls only, so that equal calls on two managers
//! give equal tables.
//!
//! **The trap**: block ids are reused. A table read earlier is a snapshot; hold a handle, not a block id.
//!
//! Imports flow one way: `ids, hash -> free_list, buckets, prompt -> prefix -> pool -> manager` and, on top of it,
//! one file a verb group: `admission`, `step`, `commit`, `lifetime`, then `stats` and `check`.

#![deny(unsafe_code)]

mod admission;
mod block_size;
mod blocks;
mod buckets;
mod check;
mod commit;
mod cut;
mod error;
mod free_list;
mod hash;
mod ids;
mod keys;
mod lifetime;
mod manager;
mod memory;
mod namespaces;
mod pipeline;
mod pool;
mod prefetch;
mod prefix;
mod prompt;
mod release;
mod sequence;
mod sequences;
mod stats;
mod step;
mod step_arrays;
mod transfer;
mod usage;
mod words;

pub use admission::{Admission, AdmissionOptions, Allocation};
pub use cut::{Dropped, Spare};
pub use error::{Error, Result};
pub use free_list::Reuse;
pub use hash::{Algorithm, BlockHasher, Digest};
pub use ids::{BlockId, SeqHandle, TransferHandle};
pub use keys::{KeyValue, Keys, Media};
pub use lifetime::Freed;
pub use manager::{Config, Counts, FullHit, Manager, Publish, Refusal};
pub use prompt::{Preparer, Prompt};
pub use sequence::Cursors;
pub use stats::{Fragmentation, Sample, Stats};
pub use step::{Policy, Scheduled, StepRequest};
pub use step_arrays::{RowState, StepArrays};
pub use transfer::{Outcome, Pending};
pub use usage::{SequenceUsage, Usage};
