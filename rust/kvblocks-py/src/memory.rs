//! The memory of NumPy arrays as slices, and memory for copies of them. Imports nothing of the crate.
//!
//! NumPy's Rust bindings can note borrows in a table, at 40 to 60 ns an array, so that Rust code finds others that borrow
//! the same array. Here nothing depends on it: a slice lives only from one point of a call at which the interpreter could
//! be let go of to the next, so no two of them meet. Code that writes to the array without the interpreter (a ufunc in
//! another thread, a device) was never in that table. All that it can do is tear numbers: lengths are those of the array,
//! and what the core relies on (handles, counts, indices) is checked in a copy. Of token ids any value is good to the core.
//! Those of a prompt are hashed while they are copied, so the digests of a torn one may be of other ids than it holds: then
//! it finds less, and nothing of others, since what a digest finds is compared.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Deref;

use bytemuck::Pod;
use numpy::npyffi::{_PyArray_GET_ITEM_DATA, NPY_ARRAY_WRITEABLE};
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// The items of an array, if it is contiguous and aligned: to be read, or copied, before the interpreter is let go of.
pub fn items<'a, T: Element>(array: &'a Bound<'_, PyArray1<T>>) -> Option<&'a [T]> {
    // SAFETY: see the head of the file; the array owns its memory as long as we own a reference to it.
    unsafe { array.as_slice().ok() }
}

/// As `items`, to be written; None for a read-only array too.
pub fn items_mut<'a, T: Element>(array: &'a mut Bound<'_, PyArray1<T>>) -> Option<&'a mut [T]> {
    // SAFETY: as for `items`; the flags are those of an array that we own a reference to.
    unsafe {
        let flags = (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags;
        if flags & NPY_ARRAY_WRITEABLE == 0 {
            return None;
        }
        array.as_slice_mut().ok()
    }
}

/// Copies that a thread keeps for the next calls, and how long they may be, in words: more than a batch needs is let go of.
const MAX_SPARE: usize = 8;
const MAX_SPARE_WORDS: usize = 1 << 16;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u64>>> = const { RefCell::new(Vec::new()) };
}

/// A copy of numbers of at most 8 bytes each, in memory that the thread uses again: a step allocates nothing for its
/// arguments.
pub struct Copied<T> {
    words: Vec<u64>,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Pod> Copied<T> {
    /// Copy `items`; a MemoryError that names the argument if there is no room. O(items).
    pub fn new(argument: &str, items: &[T]) -> PyResult<Self> {
        let mut words = SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten().unwrap_or_default();
        let num_words = size_of_val(items).div_ceil(size_of::<u64>());
        if words.len() < num_words {
            words.try_reserve_exact(num_words - words.len()).map_err(|_| no_memory(argument, items.len()))?;
            words.resize(num_words, 0);
        }
        bytemuck::cast_slice_mut(&mut words)[..items.len()].copy_from_slice(items);
        Ok(Self { words, len: items.len(), kind: PhantomData })
    }
}

impl<T: Pod> Deref for Copied<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl<T> Drop for Copied<T> {
    fn drop(&mut self) {
        let words = std::mem::take(&mut self.words);
        // No thread-local memory is left where a thread ends: then the copy goes as any other.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MAX_SPARE && words.len() <= MAX_SPARE_WORDS {
                spare.push(words);
            }
        });
    }
}

/// There is no room for a copy of so many entries.
pub fn no_memory(argument: &str, len: usize) -> PyErr {
    PyMemoryError::new_err(format!("{argument} has {len} entries: no memory for a copy"))
}
