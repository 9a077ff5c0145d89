//! `StepBuffers`: the caller's NumPy arrays that steps are written into. Imports `answers`, `arrays`, `errors`,
//! `manager`, `memory`.
//!
//! Invariant: the arrays are kept, so that NumPy refuses to resize them. All arrays of a step stand in one: one to check
//! here, and for all but the block tables, which come last, one copy to a device. Lock order: the buffers' lock, then the
//! manager's.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use kvblocks_core::{Policy, RowState, Scheduled, StepArrays, StepRequest};
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyDict, PyTuple};

use crate::answers::PyScheduled;
use crate::arrays::{word, CountArgument, Handles, Int};
use crate::errors::to_python;
use crate::manager::PyBlockManager;
use crate::memory::items_mut;

/// Where each array stands in the memory of a step, in elements of its own type: `slot_mapping` (int64) comes first, then
/// the int32 arrays, each from an 8-byte boundary.
#[derive(Clone, Copy)]
struct Layout {
    max_seqs: usize,
    max_tokens: usize,
    max_blocks: usize,
}

impl Layout {
    fn new(max_seqs: Int, max_tokens: Int, max_blocks: Int) -> PyResult<Self> {
        let size = |argument: &str, size: Int| match size.size(argument)? {
            size if size > i32::MAX as usize => Err(PyValueError::new_err(format!(
                "{argument} is {size}, expected at most {}, what an int32 array can name",
                i32::MAX
            ))),
            size => Ok(size),
        };
        Ok(Self {
            max_seqs: size("max_seqs", max_seqs)?,
            max_tokens: size("max_tokens", max_tokens)?,
            max_blocks: size("max_blocks_per_seq", max_blocks)?,
        })
    }

    /// Names and lengths of the int32 arrays.
    fn int32_arrays(&self) -> [(&'static str, usize); 6] {
        [
            ("positions", self.max_tokens),
            ("seq_lens", self.max_seqs),
            ("query_start_loc", self.max_seqs + 1),
            ("copies", 2 * self.max_seqs),
            ("changes", 3 * self.max_seqs),
            ("block_tables", self.max_seqs.saturating_mul(self.max_blocks)),
        ]
    }

    /// Their places, counted from the end of `slot_mapping`.
    fn int32_ranges(&self) -> [Range<usize>; 6] {
        let mut at = 0usize;
        self.int32_arrays().map(|(_, len)| {
            let start = at;
            at = start.saturating_add(len).saturating_add(len % 2);
            start..start.saturating_add(len)
        })
    }

    /// Length of the memory, as int64.
    fn num_words(&self) -> usize {
        let int32 = self.int32_ranges()[5].end;
        self.max_tokens.saturating_add(int32.div_ceil(2))
    }
}

/// The index arrays of steps, owned by the caller: a ring of them, each used in turn.
#[pyclass(name = "StepBuffers", module = "kvblocks._core", frozen, subclass)]
pub struct PyStepBuffers(OnceLock<Buffers>);

struct Buffers {
    manager: Py<PyBlockManager>,
    layout: Layout,
    memory: Vec<Py<PyArray1<i64>>>,
    ring: Mutex<Ring>,
}

/// What the arrays hold.
struct Ring {
    /// Which of them the last step was written into.
    current: usize,
    held: Vec<Held>,
}

struct Held {
    rows: Vec<RowState>,
    step: Scheduled,
    pad_seqs: usize,
    pad_tokens: usize,
}

fn int64_array(object: &Bound<'_, PyAny>) -> PyResult<Py<PyArray1<i64>>> {
    let wrong = |_| PyTypeError::new_err("memory holds an item that is no int64 array of rank 1");
    object.cast::<PyArray1<i64>>().map(|array| array.clone().unbind()).map_err(wrong)
}

/// Refuse memory that a step cannot be written into; its shape may have changed since it was seen last.
fn check_memory(array: &Bound<'_, PyArray1<i64>>, num_words: usize) -> PyResult<()> {
    let error = |what: &str| PyValueError::new_err(format!("memory {what}"));
    if !array.is_c_contiguous() || !array.data().is_aligned() {
        return Err(error("is not C-contiguous, or not aligned to 8 bytes"));
    }
    if array.len() != num_words {
        return Err(error(&format!("has {} entries, expected {num_words}", array.len())));
    }
    Ok(())
}

impl PyStepBuffers {
    fn buffers(&self) -> PyResult<&Buffers> {
        self.0.get().ok_or_else(|| PyRuntimeError::new_err("__init__ of the step was not called"))
    }

    fn with_held<T>(&self, py: Python<'_>, read: impl FnOnce(&Held) -> T) -> PyResult<T> {
        let buffers = self.buffers()?;
        buffers.manager.get().check_process()?;
        let ring = buffers.lock(py);
        Ok(read(&ring.held[ring.current]))
    }
}

impl Buffers {
    fn lock<'a>(&'a self, py: Python<'_>) -> MutexGuard<'a, Ring> {
        self.ring.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyStepBuffers {
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(_args: &Bound<'_, PyTuple>, _kwargs: Option<&Bound<'_, PyDict>>) -> Self {
        Self(OnceLock::new())
    }

    fn __init__(
        &self,
        py: Python<'_>,
        manager: Py<PyBlockManager>,
        memory: Vec<Bound<'_, PyAny>>,
        max_seqs: Int,
        max_tokens: Int,
        max_blocks_per_seq: Int,
    ) -> PyResult<()> {
        manager.get().check_process()?;
        let twice = || PyRuntimeError::new_err("__init__ of the step was called twice");
        if self.0.get().is_some() {
            // Before the tables that the step shows are written over.
            return Err(twice());
        }
        let memory: Vec<_> = memory.iter().map(int64_array).collect::<PyResult<_>>()?;
        let layout = Layout::new(max_seqs, max_tokens, max_blocks_per_seq)?;
        if memory.is_empty() {
            return Err(PyValueError::new_err("memory is empty, expected one array or more"));
        }
        // All are borrowed before one is written to: no two may share memory.
        let arrays = memory.iter().map(|array| {
            check_memory(array.bind(py), layout.num_words())?;
            array.bind(py).try_readwrite().map_err(|_| {
                PyValueError::new_err("memory is read-only, or shares memory with an array in use")
            })
        });
        let mut arrays: Vec<_> = arrays.collect::<PyResult<_>>()?;
        for array in &mut arrays {
            let rest: &mut [i32] = bytemuck::cast_slice_mut(&mut array.as_slice_mut()?[layout.max_tokens..]);
            rest[layout.int32_ranges()[5].clone()].fill(manager.get().null_block_id());
        }
        drop(arrays);
        let nothing = |_| {
            let mut rows = Vec::new();
            rows.try_reserve_exact(layout.max_seqs).map_err(|_| {
                PyMemoryError::new_err(format!("max_seqs is {}: no memory for so many rows", layout.max_seqs))
            })?;
            rows.resize(layout.max_seqs, RowState::default());
            Ok(Held { rows, step: Scheduled::default(), pad_seqs: 0, pad_tokens: 0 })
        };
        let held: Vec<_> = memory.iter().map(nothing).collect::<PyResult<_>>()?;
        let ring = Mutex::new(Ring { current: held.len() - 1, held });
        let buffers = Buffers { manager, layout, memory, ring };
        self.0.set(buffers).map_err(|_| twice())
    }

    #[staticmethod]
    fn layout<'py>(
        py: Python<'py>,
        max_seqs: Int,
        max_tokens: Int,
        max_blocks_per_seq: Int,
    ) -> PyResult<Bound<'py, PyDict>> {
        let layout = Layout::new(max_seqs, max_tokens, max_blocks_per_seq)?;
        let places = PyDict::new(py);
        places.set_item("num_words", layout.num_words())?;
        places.set_item("slot_mapping", (0, 8 * layout.max_tokens))?;
        for ((name, _), range) in layout.int32_arrays().iter().zip(layout.int32_ranges()) {
            let byte = |word: usize| word.saturating_mul(4).saturating_add(8 * layout.max_tokens);
            places.set_item(name, (byte(range.start), byte(range.end)))?;
        }
        Ok(places)
    }

    #[getter]
    fn current(&self, py: Python<'_>) -> PyResult<usize> {
        let buffers = self.buffers()?;
        buffers.manager.get().check_process()?;
        Ok(buffers.lock(py).current)
    }

    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<usize> {
        self.with_held(py, |held| held.step.num_seqs.max(held.pad_seqs))
    }

    #[getter]
    fn num_tokens(&self, py: Python<'_>) -> PyResult<usize> {
        self.with_held(py, |held| held.step.num_tokens.max(held.pad_tokens))
    }

    #[getter]
    fn num_cols(&self, py: Python<'_>) -> PyResult<usize> {
        self.with_held(py, |held| held.step.max_blocks)
    }

    #[getter]
    fn num_copies(&self, py: Python<'_>) -> PyResult<usize> {
        self.with_held(py, |held| held.step.num_copies)
    }

    #[getter]
    fn num_changes(&self, py: Python<'_>) -> PyResult<usize> {
        self.with_held(py, |held| held.step.num_changes)
    }

    #[pyo3(
        signature = (
            handles, num_new, *, lookahead=None, policy="all", pad_seqs=Int(0), pad_tokens=Int(0), append=false,
        ),
        text_signature = "($self, handles, num_new, *, lookahead=0, policy='all', pad_seqs=0, pad_tokens=0, \
                          append=False)"
    )]
    #[allow(clippy::too_many_arguments)] // a step is described by that many things
    fn schedule(
        &self,
        py: Python<'_>,
        handles: &Bound<'_, PyAny>,
        num_new: &Bound<'_, PyAny>,
        lookahead: Option<&Bound<'_, PyAny>>,
        policy: &str,
        pad_seqs: Int,
        pad_tokens: Int,
        append: bool,
    ) -> PyResult<PyScheduled> {
        let handles = Handles::new(handles)?;
        let num_new = CountArgument::new("num_new", num_new)?;
        let lookahead = CountArgument::or("lookahead", lookahead, 0)?;
        let request = StepRequest {
            handles: handles.get(),
            num_new: num_new.get(),
            lookahead: lookahead.get(),
            policy: word("policy", policy, &[("all", Policy::All), ("fit", Policy::Fit)])?,
            pad_seqs: pad_seqs.size("pad_seqs")?,
            pad_tokens: pad_tokens.size("pad_tokens")?,
        };
        let Buffers { manager, layout, memory, .. } = self.buffers()?;
        // Before any lock: in a forked child both may be held for ever.
        manager.get().check_process()?;
        let mut ring = self.buffers()?.lock(py);
        let mut manager = manager.get().lock(py)?;
        let Ring { current, held } = &mut *ring;
        // A step of its own goes into the arrays that have not been written for longest.
        let at = if append { *current } else { (*current + 1) % held.len() };
        let Held { rows, step, pad_seqs, pad_tokens } = &mut held[at];
        // Not before: while a lock is waited for, another thread may use the array.
        let mut memory = memory[at].bind(py).clone();
        check_memory(&memory, layout.num_words())?;
        let read_only = || PyValueError::new_err("memory is read-only");
        let memory = items_mut(&mut memory).ok_or_else(read_only)?;
        let (slot_mapping, rest) = memory.split_at_mut(layout.max_tokens);
        let rest: &mut [i32] = bytemuck::cast_slice_mut(rest);
        let overlap = |_| PyValueError::new_err("memory has the wrong length");
        let [positions, seq_lens, query_start_loc, copies, changes, block_tables] =
            rest.get_disjoint_mut(layout.int32_ranges()).map_err(overlap)?;
        let mut out = StepArrays {
            block_tables,
            max_blocks: layout.max_blocks,
            slot_mapping,
            positions,
            seq_lens,
            query_start_loc,
            copies,
            changes,
            rows,
        };
        if append && *pad_seqs > step.num_seqs {
            return Err(PyValueError::new_err("append finds a padded step: pad it in its last call"));
        }
        let scheduled = match append {
            true => manager.append(&request, &mut out, step),
            false => manager.schedule(&request, &mut out),
        };
        let scheduled = scheduled.map_err(to_python)?;
        if scheduled.refusal.is_none() || request.policy == Policy::Fit {
            (*step, *pad_seqs, *pad_tokens) = (scheduled, request.pad_seqs, request.pad_tokens);
            *current = at;
        }
        Ok(PyScheduled(scheduled))
    }
}
