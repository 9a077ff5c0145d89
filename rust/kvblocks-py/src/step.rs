//! `StepBuffers`: the caller's NumPy arrays that a step is written into. Imports `answers`, `arrays`, `errors`,
//! `manager`.
//!
//! Invariant: the arrays are kept, so that NumPy refuses to resize them, and shapes are checked once, here. All but the
//! block tables stand in one packed array: one borrow here, one copy to a device. Lock order: the buffers' lock, then
//! the manager's.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kvblocks_core::{Policy, RowState, Scheduled, StepArrays, StepRequest};
use numpy::{Element, PyArray1, PyArray2, PyArrayMethods, PyReadwriteArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;

use crate::answers::PyScheduled;
use crate::arrays::{word, CountArgument, Handles, Int};
use crate::errors::to_python;
use crate::manager::PyBlockManager;

/// Where each array stands in the packed one, in elements of its own type: `slot_mapping` (int64) comes first, then the
/// int32 arrays, each from an 8-byte boundary.
struct Layout {
    max_seqs: usize,
    max_tokens: usize,
}

impl Layout {
    /// Names and lengths of the int32 arrays.
    fn int32_arrays(&self) -> [(&'static str, usize); 5] {
        [
            ("positions", self.max_tokens),
            ("seq_lens", self.max_seqs),
            ("query_start_loc", self.max_seqs + 1),
            ("copies", 2 * self.max_seqs),
            ("changes", 3 * self.max_seqs),
        ]
    }

    /// Their places, counted from the end of `slot_mapping`.
    fn int32_ranges(&self) -> [Range<usize>; 5] {
        let mut at = 0;
        self.int32_arrays().map(|(_, len)| {
            let start = at;
            at += len.next_multiple_of(2);
            start..start + len
        })
    }

    /// Length of the packed int64 array.
    fn num_words(&self) -> usize {
        let int32: usize = self.int32_arrays().iter().map(|(_, len)| len.next_multiple_of(2)).sum();
        self.max_tokens + int32 / 2
    }
}

/// A step's index arrays, owned by the caller.
#[pyclass(name = "StepBuffers", module = "kvblocks._core", frozen)]
pub struct PyStepBuffers {
    manager: Py<PyBlockManager>,
    block_tables: Py<PyArray2<i32>>,
    packed: Py<PyArray1<i64>>,
    layout: Layout,
    max_blocks: usize,
    held: Mutex<Held>,
}

/// What the arrays hold.
struct Held {
    rows: Vec<RowState>,
    step: Scheduled,
    is_padded: bool,
}

fn writable<'py, T: Element, D: numpy::ndarray::Dimension>(
    name: &str,
    array: &Bound<'py, numpy::PyArray<T, D>>,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    let error = |what: &str| PyValueError::new_err(format!("{name} {what}"));
    if !array.is_c_contiguous() {
        return Err(error("is not C-contiguous"));
    }
    array.try_readwrite().map_err(|_| error("is read-only, or shares memory with the step's other array"))
}

#[pymethods]
impl PyStepBuffers {
    #[new]
    fn new(
        manager: Py<PyBlockManager>,
        block_tables: Bound<'_, PyArray2<i32>>,
        packed: Bound<'_, PyArray1<i64>>,
        max_tokens: Int,
    ) -> PyResult<Self> {
        manager.get().check_process()?;
        let [max_seqs, max_blocks] = [block_tables.shape()[0], block_tables.shape()[1]];
        let layout = Layout { max_seqs, max_tokens: max_tokens.size("max_tokens")?.min(packed.len()) };
        if packed.len() != layout.num_words() {
            let (got, expected) = (packed.len(), layout.num_words());
            return Err(PyValueError::new_err(format!("packed has {got} entries, expected {expected}")));
        }
        {
            let mut tables = writable("block_tables", &block_tables)?;
            let _packed = writable("packed", &packed)?;
            tables.as_array_mut().fill(manager.get().null_block_id());
        }
        Ok(Self {
            manager,
            block_tables: block_tables.unbind(),
            packed: packed.unbind(),
            layout,
            max_blocks,
            held: Mutex::new(Held {
                rows: vec![RowState::default(); max_seqs],
                step: Scheduled::default(),
                is_padded: false,
            }),
        })
    }

    #[staticmethod]
    fn layout<'py>(py: Python<'py>, max_seqs: Int, max_tokens: Int) -> PyResult<Bound<'py, PyDict>> {
        let layout = Layout {
            max_seqs: max_seqs.size("max_seqs")?.min(i32::MAX as usize),
            max_tokens: max_tokens.size("max_tokens")?.min(i32::MAX as usize),
        };
        let places = PyDict::new(py);
        places.set_item("num_words", layout.num_words())?;
        places.set_item("slot_mapping", (0, 8 * layout.max_tokens))?;
        for ((name, _), range) in layout.int32_arrays().iter().zip(layout.int32_ranges()) {
            let start = 8 * layout.max_tokens;
            places.set_item(name, (start + 4 * range.start, start + 4 * range.end))?;
        }
        Ok(places)
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
        // Before any lock: in a forked child both may be held for ever.
        self.manager.get().check_process()?;
        let mut held = self.held.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        let Held { rows, step, is_padded } = &mut *held;
        let mut block_tables = writable("block_tables", self.block_tables.bind(py))?;
        let mut packed = writable("packed", self.packed.bind(py))?;
        if packed.len() != self.layout.num_words() || block_tables.shape() != [rows.len(), self.max_blocks] {
            return Err(PyValueError::new_err("the step's arrays were resized since it was made"));
        }
        let (slot_mapping, rest) = packed.as_slice_mut()?.split_at_mut(self.layout.max_tokens);
        let rest: &mut [i32] = bytemuck::cast_slice_mut(rest);
        let overlap = |_| PyValueError::new_err("packed has the wrong length");
        let [positions, seq_lens, query_start_loc, copies, changes] =
            rest.get_disjoint_mut(self.layout.int32_ranges()).map_err(overlap)?;
        let mut out = StepArrays {
            block_tables: block_tables.as_slice_mut()?,
            max_blocks: self.max_blocks,
            slot_mapping,
            positions,
            seq_lens,
            query_start_loc,
            copies,
            changes,
            rows,
        };
        if append && *is_padded {
            return Err(PyValueError::new_err("append finds a padded step: pad it in its last call"));
        }
        let mut manager = self.manager.get().lock(py)?;
        let scheduled = match append {
            true => manager.append(&request, &mut out, step),
            false => manager.schedule(&request, &mut out),
        };
        let scheduled = scheduled.map_err(to_python)?;
        if scheduled.refusal.is_none() || request.policy == Policy::Fit {
            *step = scheduled;
            *is_padded = request.pad_seqs > scheduled.num_seqs;
        }
        Ok(PyScheduled(scheduled))
    }
}
