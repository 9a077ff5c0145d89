//! CPU kernels over a paged KV cache: store tokens, attend over block tables, copy and gather blocks.
//!
//! # Key types
//! * [`Paged`] is the geometry of K or V of one layer: sizes, and strides that make NHD and HND the same thing.
//! * [`Cache`] is that geometry with its elements; [`Element`] is `f32`, `half::f16` or `half::bf16`.
//! * [`Batch`] holds the index arrays of a step, [`Options`] the optional parts of attention.
//!
//! # Usage
//! [`copy_blocks`] a step's copies, [`write()`] K and V at their slots (or [`write_converted`] from another
//! element type), then [`attend`]. [`gather`] and [`merge_states`] serve tests, transfers and split contexts.
//!
//! # Cost and limits
//! Everything is float32 inside, with a running (online) softmax; one thread, no SIMD intrinsics, no `unsafe`.
//! `attend` is O(queries * visible keys * query heads * head dim); keys outside the window are never touched, and
//! neither are slots beyond a sequence's length, whatever they hold.
//!
//! **The trap**: slots named twice in a mapping, or a block that is both copied from and copied to, are not
//! refused here: the last one wins. The Python layer checks both.
//!
//! Imports flow one way: `error, element -> paged -> write, attend, copy, merge`. No input panics: lengths, ids and
//! products of sizes are checked at the entry, before anything is written.

#![forbid(unsafe_code)]

mod attend;
mod copy;
mod element;
mod error;
mod merge;
mod paged;
mod write;

pub use attend::{attend, Batch, Options, Output};
pub use copy::{copy_blocks, gather};
pub use element::Element;
pub use error::{Error, Result};
/// The crate of the 16-bit element types, so that callers agree on its version.
pub use half;
pub use merge::merge_states;
pub use paged::{Cache, Paged};
pub use write::{write, write_converted};
