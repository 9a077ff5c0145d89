//! `StepBuffers`: the caller's NumPy arrays that a step is written into. Imports `answers`, `arrays`, `errors`,
//! `manager`.
//!
//! Invariant: the arrays are kept, so that NumPy refuses to resize them, and shapes are checked once, here. Lock order:
//! the buffers' lock, then the manager's.

use std::sync::{Mutex, PoisonError};

use kvblocks_core::{Policy, RowState, StepArrays, StepRequest};
use numpy::{Element, PyArray1, PyArray2, PyArrayMethods, PyReadwriteArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::answers::PyScheduled;
use crate::arrays::{self, CountArgument, Int};
use crate::errors::to_python;
use crate::manager::PyBlockManager;

/// A step's index arrays, owned by the caller.
#[pyclass(name = "StepBuffers", module = "kvblocks._core", frozen)]
pub struct PyStepBuffers {
    manager: Py<PyBlockManager>,
    block_tables: Py<PyArray2<i32>>,
    slot_mapping: Py<PyArray1<i64>>,
    positions: Py<PyArray1<i32>>,
    seq_lens: Py<PyArray1<i32>>,
    query_start_loc: Py<PyArray1<i32>>,
    copies: Py<PyArray2<i32>>,
    max_blocks: usize,
    rows: Mutex<Vec<RowState>>,
}

fn writable<'py, T: Element, D: numpy::ndarray::Dimension>(
    name: &str,
    array: &Bound<'py, numpy::PyArray<T, D>>,
) -> PyResult<PyReadwriteArray<'py, T, D>> {
    let error = |what: &str| PyValueError::new_err(format!("{name} {what}"));
    if !array.is_c_contiguous() {
        return Err(error("is not C-contiguous"));
    }
    array.try_readwrite().map_err(|_| error("is read-only, or shares memory with another array of the step"))
}

fn expect(name: &str, axis: &str, got: usize, expected: usize) -> PyResult<()> {
    match got == expected {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!("{name} has {got} {axis}, expected {expected}"))),
    }
}

#[pymethods]
impl PyStepBuffers {
    #[new]
    #[allow(clippy::too_many_arguments)] // one array an argument
    fn new(
        manager: Py<PyBlockManager>,
        block_tables: Bound<'_, PyArray2<i32>>,
        slot_mapping: Bound<'_, PyArray1<i64>>,
        positions: Bound<'_, PyArray1<i32>>,
        seq_lens: Bound<'_, PyArray1<i32>>,
        query_start_loc: Bound<'_, PyArray1<i32>>,
        copies: Bound<'_, PyArray2<i32>>,
    ) -> PyResult<Self> {
        let max_seqs = seq_lens.len();
        let [table_rows, max_blocks] = [block_tables.shape()[0], block_tables.shape()[1]];
        expect("block_tables", "rows", table_rows, max_seqs)?;
        expect("positions", "entries", positions.len(), slot_mapping.len())?;
        expect("query_start_loc", "entries", query_start_loc.len(), max_seqs + 1)?;
        expect("copies", "rows", copies.shape()[0], max_seqs)?;
        expect("copies", "columns", copies.shape()[1], 2)?;
        {
            let mut tables = writable("block_tables", &block_tables)?;
            let _others = (
                writable("slot_mapping", &slot_mapping)?,
                writable("positions", &positions)?,
                writable("seq_lens", &seq_lens)?,
                writable("query_start_loc", &query_start_loc)?,
                writable("copies", &copies)?,
            );
            tables.as_array_mut().fill(manager.get().null_block_id());
        }
        Ok(Self {
            manager,
            block_tables: block_tables.unbind(),
            slot_mapping: slot_mapping.unbind(),
            positions: positions.unbind(),
            seq_lens: seq_lens.unbind(),
            query_start_loc: query_start_loc.unbind(),
            copies: copies.unbind(),
            max_blocks,
            rows: Mutex::new(vec![RowState::default(); max_seqs]),
        })
    }

    #[pyo3(signature = (handles, num_new, *, lookahead=None, policy="all", pad_seqs=Int(0), pad_tokens=Int(0)))]
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
    ) -> PyResult<PyScheduled> {
        let handles = arrays::handles(handles)?;
        let num_new = CountArgument::new("num_new", num_new)?;
        let lookahead = match lookahead {
            Some(lookahead) => CountArgument::new("lookahead", lookahead)?,
            None => CountArgument::All(0),
        };
        let request = StepRequest {
            handles: &handles,
            num_new: num_new.get(),
            lookahead: lookahead.get(),
            policy: match policy {
                "all" => Policy::All,
                "fit" => Policy::Fit,
                _ => {
                    return Err(PyValueError::new_err(format!(
                        "policy is {policy:?}, expected \"all\" or \"fit\""
                    )))
                }
            },
            pad_seqs: pad_seqs.size("pad_seqs")?,
            pad_tokens: pad_tokens.size("pad_tokens")?,
        };
        let mut rows = self.rows.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        let mut block_tables = writable("block_tables", self.block_tables.bind(py))?;
        let mut slot_mapping = writable("slot_mapping", self.slot_mapping.bind(py))?;
        let mut positions = writable("positions", self.positions.bind(py))?;
        let mut seq_lens = writable("seq_lens", self.seq_lens.bind(py))?;
        let mut query_start_loc = writable("query_start_loc", self.query_start_loc.bind(py))?;
        let mut copies = writable("copies", self.copies.bind(py))?;
        let mut out = StepArrays {
            block_tables: block_tables.as_slice_mut()?,
            max_blocks: self.max_blocks,
            slot_mapping: slot_mapping.as_slice_mut()?,
            positions: positions.as_slice_mut()?,
            seq_lens: seq_lens.as_slice_mut()?,
            query_start_loc: query_start_loc.as_slice_mut()?,
            copies: copies.as_slice_mut()?,
            rows: &mut rows,
        };
        let scheduled = self.manager.get().lock(py)?.schedule(&request, &mut out).map_err(to_python)?;
        Ok(PyScheduled(scheduled))
    }
}
