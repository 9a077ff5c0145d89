//! CPU kernels over a paged KV cache: store tokens, attend over block tables, copy and gather blocks.
//!
//! # Key types
//! * [`Paged`] is the geometry of K or V of one layer: sizes, and strides that make NHD and HND the same thing.
//! * [`Cache`] is that geometry with its [`Elements`]: `f32`, `half::f16` or `half::bf16`.
//! * [`Queries`] come with the index arrays of a step, [`Batch`], and the optional parts of attention, [`Options`].
//! * [`Execution`] says with which instructions, an [`Isa`], and on how many threads a kernel runs.
//!
//! # Usage
//! [`copy_blocks`] a step's copies, [`write()`] K and V at their slots (rounded where the cache has another element
//! type), then [`attend`]. [`gather`] and [`merge_states`] serve tests, transfers and split contexts.
//!
//! # Cost and limits
//! Sums are float32 inside, with a running (online) softmax, and so are products but where [`attend`] says. `attend` is
//! O(queries * visible keys * query heads * head dim); keys outside the window are never touched, and neither are slots
//! beyond a sequence's length, whatever they hold. The number of threads never changes a bit of a result; the instruction
//! set may.
//!
//! **The trap**: a block that is both copied from and copied to, or copied to twice, is not refused here: copies are
//! made in order. The Python layer checks that.
//!
//! Imports flow one way: `error, simd, threads -> code, math -> paged -> write, attend, copy, merge`. No input panics:
//! lengths, ids and products of sizes are checked at the entry, before anything is written. `unsafe` is what intrinsics,
//! unchecked addresses in inner loops and threads that share an output need; each block says why it is sound.

#![deny(clippy::undocumented_unsafe_blocks)]

mod attend;
mod code;
mod copy;
mod error;
mod groups;
mod math;
mod merge;
mod paged;
mod probe;
mod scaling;
mod simd;
mod threads;
mod write;

pub use attend::{attend, Batch, Options, Output, Queries, Storage, Tail};
pub use code::{E4m3, E5m2, Elements, ElementsMut};
pub use copy::{copy_blocks, gather};
pub use error::{Error, Result};
pub use groups::Groups;
/// The crate of the 16-bit element types, so that callers agree on its version.
pub use half;
pub use merge::merge_states;
pub use paged::{Cache, Paged};
pub use probe::{read_all, read_blocks};
pub use scaling::Scaling;
pub use simd::Isa;
pub use write::{amax_of_columns, write, CacheMut, GroupsMut, Losses, ScalingMut};

/// How a kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Execution {
    /// With which instructions.
    pub isa: Isa,
    /// On how many threads, the caller's included; at least 1.
    pub num_threads: usize,
}
