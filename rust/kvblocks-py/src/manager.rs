//! `BlockManager`: the core's manager behind one lock. Imports `answers`, `arrays`, `errors`, `process`.
//!
//! Invariant: no logic here. A call converts its arguments, takes the lock, calls the core and converts the answer. The
//! interpreter is never held while waiting for the lock, and no Python code runs while it is held.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvblocks_core::{BlockHasher, Config, Manager, Preparer, SeqHandle, Spare};
use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::answers::{self, PyPrompt, PySequence, PyStats};
use crate::arrays::{self, CountArgument, Int};
use crate::errors::{to_python, ForkedProcessError};
use crate::process;

/// The block manager of one paged KV cache.
#[pyclass(name = "BlockManager", module = "kvblocks._core", frozen)]
pub struct PyBlockManager {
    manager: Mutex<Manager>,
    /// Outside the lock: hashing a long prompt keeps nobody waiting.
    preparer: Preparer,
    num_blocks: usize,
    block_size: usize,
    capacity: usize,
    padding: i32,
    generation: u32,
}

impl PyBlockManager {
    /// An error in a forked child, whose copy of the lock may never be released.
    fn check_process(&self) -> PyResult<()> {
        if process::generation() == self.generation {
            return Ok(());
        }
        Err(ForkedProcessError::new_err(
            "this BlockManager was made before fork(): make one in the child process",
        ))
    }

    /// The core's manager, locked.
    pub fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Manager>> {
        self.check_process()?;
        // The core checks before it changes, so a panic there (a bug) leaves a state that is still worth reporting on.
        Ok(self.manager.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner))
    }
}

fn reserve_size(reserve: Option<Int>) -> PyResult<Option<usize>> {
    reserve.map(|reserve| reserve.size("reserve")).transpose()
}

/// A seed that differs from process to process and from manager to manager.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

#[pymethods]
impl PyBlockManager {
    #[new]
    #[pyo3(signature = (num_blocks, block_size, *, enable_prefix_cache=true, watermark_blocks=Int(0), null_block=true, seed=None))]
    fn new(
        num_blocks: Int,
        block_size: Int,
        enable_prefix_cache: bool,
        watermark_blocks: Int,
        null_block: bool,
        seed: Option<Int>,
    ) -> PyResult<Self> {
        let seed = match seed {
            Some(seed) => seed.size("seed")? as u64,
            None => random_seed(),
        };
        let config = Config {
            num_blocks: num_blocks.size("num_blocks")?,
            block_size: block_size.size("block_size")?,
            hasher: enable_prefix_cache.then(|| BlockHasher::new(seed)),
            watermark_blocks: watermark_blocks.size("watermark_blocks")?,
            null_block,
        };
        let (num_blocks, block_size) = (config.num_blocks, config.block_size);
        let manager = Manager::new(config).map_err(to_python)?;
        Ok(Self {
            preparer: manager.preparer().clone(),
            num_blocks,
            block_size,
            capacity: manager.capacity(),
            padding: manager.padding(),
            generation: process::generation(),
            manager: Mutex::new(manager),
        })
    }

    #[getter]
    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    #[getter]
    fn block_size(&self) -> usize {
        self.block_size
    }

    #[getter]
    fn capacity_blocks(&self) -> usize {
        self.capacity
    }

    #[getter]
    pub fn null_block_id(&self) -> i32 {
        self.padding
    }

    fn prepare(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<PyPrompt> {
        let ids = arrays::tokens(tokens)?;
        Ok(PyPrompt(py.detach(|| self.preparer.prepare(ids))))
    }

    fn match_prefix(&self, py: Python<'_>, prompt: &PyPrompt) -> PyResult<usize> {
        self.lock(py)?.match_prefix(&prompt.0).map_err(to_python)
    }

    #[pyo3(signature = (prompt, reserve=None))]
    fn can_allocate(&self, py: Python<'_>, prompt: &PyPrompt, reserve: Option<Int>) -> PyResult<Py<PyAny>> {
        let reserve = reserve_size(reserve)?;
        let answer = self.lock(py)?.can_allocate(&prompt.0, reserve).map_err(to_python)?;
        answers::admission(py, answer)
    }

    #[pyo3(signature = (prompt, reserve=None, *, use_cache=true))]
    fn allocate(
        &self,
        py: Python<'_>,
        prompt: &PyPrompt,
        reserve: Option<Int>,
        use_cache: bool,
    ) -> PyResult<Py<PyAny>> {
        let reserve = reserve_size(reserve)?;
        let answer = self.lock(py)?.allocate(&prompt.0, reserve, use_cache).map_err(to_python)?;
        answers::allocation(py, answer)
    }

    #[pyo3(signature = (handles, counts, tokens=None))]
    fn commit(
        &self,
        py: Python<'_>,
        handles: &Bound<'_, PyAny>,
        counts: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let handles = arrays::handles(handles)?;
        let counts = CountArgument::new("counts", counts)?;
        let ids = tokens.map(arrays::tokens).transpose()?.unwrap_or_default();
        self.lock(py)?.commit(&handles, counts.get(), &ids).map_err(to_python)
    }

    #[pyo3(signature = (handles, num_children=None))]
    fn fork<'py>(
        &self,
        py: Python<'py>,
        handles: &Bound<'_, PyAny>,
        num_children: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let handles = arrays::handles(handles)?;
        let counts = match num_children {
            Some(counts) => CountArgument::new("num_children", counts)?,
            None => CountArgument::All(1),
        };
        let mut children = Vec::new();
        self.lock(py)?.fork(&handles, counts.get(), &mut children).map_err(to_python)?;
        Ok(PyArray1::from_iter(py, children.iter().map(|child| child.0)))
    }

    #[pyo3(signature = (handles, lengths, *, spare="free"))]
    fn truncate(
        &self,
        py: Python<'_>,
        handles: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        spare: &str,
    ) -> PyResult<usize> {
        let spare = match spare {
            "free" => Spare::Free,
            "keep" => Spare::Keep,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "spare is {spare:?}, expected \"free\" or \"keep\""
                )))
            }
        };
        let handles = arrays::handles(handles)?;
        let lengths = CountArgument::new("lengths", lengths)?;
        self.lock(py)?.truncate(&handles, lengths.get(), spare).map_err(to_python)
    }

    fn preempt(&self, py: Python<'_>, handles: &Bound<'_, PyAny>) -> PyResult<Vec<PyPrompt>> {
        let handles = arrays::handles(handles)?;
        let prompts = self.lock(py)?.preempt(&handles).map_err(to_python)?;
        Ok(prompts.into_iter().map(PyPrompt).collect())
    }

    #[pyo3(signature = (handles, *, missing_ok=false))]
    fn free(&self, py: Python<'_>, handles: &Bound<'_, PyAny>, missing_ok: bool) -> PyResult<usize> {
        let handles = arrays::handles(handles)?;
        self.lock(py)?.free(&handles, missing_ok).map_err(to_python)
    }

    fn sequence(&self, py: Python<'_>, handle: Int) -> PyResult<PySequence> {
        self.lock(py)?.cursors(SeqHandle(handle.0)).map(PySequence).map_err(to_python)
    }

    fn block_table<'py>(&self, py: Python<'py>, handle: Int) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = self.lock(py)?.block_table(SeqHandle(handle.0)).map_err(to_python)?.to_vec();
        Ok(PyArray1::from_iter(py, blocks.iter().map(|block| block.0 as i32)))
    }

    fn tokens<'py>(&self, py: Python<'py>, handle: Int) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let ids = self.lock(py)?.tokens(SeqHandle(handle.0)).map_err(to_python)?;
        Ok(answers::int64_array(py, &ids))
    }

    fn stats(&self, py: Python<'_>) -> PyResult<PyStats> {
        Ok(PyStats(self.lock(py)?.stats()))
    }

    fn reset_peaks(&self, py: Python<'_>) -> PyResult<()> {
        self.lock(py)?.reset_peaks();
        Ok(())
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.reset_prefix_cache())
    }

    fn check_integrity(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.check_process()?;
        let check = || self.manager.lock().unwrap_or_else(PoisonError::into_inner).check_integrity();
        Ok(py.detach(check))
    }
}
