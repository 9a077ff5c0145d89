//! `BlockManager`: the core's manager behind one lock. Imports `answers`, `arrays`, `errors`, `process`.
//!
//! Invariant: no logic here. A call converts its arguments, takes the lock, calls the core and converts the answer. The
//! interpreter is never held while waiting for the lock, and no Python code runs while it is held.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvblocks_core::{
    AdmissionOptions, Algorithm, BlockHasher, Config, FullHit, Manager, Outcome, Preparer, Publish, Reuse,
    SeqHandle, Spare, TransferHandle,
};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::answers::{
    self, PyDropped, PyFragmentation, PyFreed, PyPrompt, PySequence, PySequenceUsage, PyStats, PyUsage,
};
use crate::arrays::{self, optional_size, word, CountArgument, Handles, Int, Numbers, TokenIds};
use crate::errors::{to_python, ForkedProcessError};
use crate::process;

const ALGORITHMS: [(&str, Algorithm); 2] = [("xxh3", Algorithm::Xxh3), ("sha256", Algorithm::Sha256)];

/// The block manager of one paged KV cache.
#[pyclass(name = "BlockManager", module = "kvblocks._core", frozen)]
pub struct PyBlockManager {
    manager: Mutex<Manager>,
    /// Outside the lock: hashing a long prompt keeps nobody waiting.
    preparer: Preparer,
    hasher: BlockHasher,
    num_blocks: usize,
    block_size: usize,
    capacity: usize,
    padding: i32,
    generation: u32,
}

impl PyBlockManager {
    /// An error in a forked child, whose copy of the lock may never be released.
    pub fn check_process(&self) -> PyResult<()> {
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

    /// A call that may take long, with the interpreter released.
    fn detached<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&mut Manager) -> T + Send) -> PyResult<T> {
        self.check_process()?;
        Ok(py.detach(|| call(&mut self.manager.lock().unwrap_or_else(PoisonError::into_inner))))
    }

    fn end_transfer(&self, py: Python<'_>, transfer: Int, outcome: Outcome) -> PyResult<usize> {
        self.lock(py)?.end_transfer(TransferHandle(transfer.0), outcome).map_err(to_python)
    }
}

fn admission_options(
    reserve: Option<Int>,
    use_cache: bool,
    recompute_last_hit: bool,
    max_tokens: Option<Int>,
    max_resident_blocks: Option<Int>,
) -> PyResult<AdmissionOptions> {
    if let Some(Int(0)) = max_resident_blocks {
        return Err(PyValueError::new_err("max_resident_blocks is 0, expected 1 or more"));
    }
    Ok(AdmissionOptions {
        reserve: optional_size("reserve", reserve)?,
        use_cache,
        recompute_last_hit,
        max_tokens: optional_size("max_tokens", max_tokens)?,
        max_resident_blocks: optional_size("max_resident_blocks", max_resident_blocks)?,
    })
}

/// A seed that differs from process to process and from manager to manager.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

#[pymethods]
impl PyBlockManager {
    #[new]
    #[pyo3(
        signature = (
            num_blocks, block_size, *, enable_prefix_cache=true, watermark_blocks=Int(0), null_block=true, seed=None,
            algorithm="xxh3", full_hit="block", publish="commit", merge=false, reuse="last_freed",
            series_every=Int(0), series_len=Int(1024),
        ),
        text_signature = "(num_blocks, block_size, *, enable_prefix_cache=True, watermark_blocks=0, null_block=True, \
                          seed=None, algorithm='xxh3', full_hit='block', publish='commit', merge=False, \
                          reuse='last_freed', series_every=0, series_len=1024)"
    )]
    #[allow(clippy::too_many_arguments)] // options, by name
    fn new(
        num_blocks: Int,
        block_size: Int,
        enable_prefix_cache: bool,
        watermark_blocks: Int,
        null_block: bool,
        seed: Option<&Bound<'_, PyAny>>,
        algorithm: &str,
        full_hit: &str,
        publish: &str,
        merge: bool,
        reuse: &str,
        series_every: Int,
        series_len: Int,
    ) -> PyResult<Self> {
        let seed = seed.map_or_else(|| Ok(random_seed()), arrays::seed)?;
        let hasher = BlockHasher { algorithm: word("algorithm", algorithm, &ALGORITHMS)?, seed };
        let config = Config {
            num_blocks: num_blocks.size("num_blocks")?,
            block_size: block_size.size("block_size")?,
            hasher: enable_prefix_cache.then_some(hasher),
            watermark_blocks: watermark_blocks.size("watermark_blocks")?,
            null_block,
            full_hit: word(
                "full_hit",
                full_hit,
                &[("block", FullHit::WholeBlock), ("token", FullHit::Token)],
            )?,
            publish: word(
                "publish",
                publish,
                &[("commit", Publish::OnCommit), ("schedule", Publish::OnSchedule)],
            )?,
            merge,
            reuse: word(
                "reuse",
                reuse,
                &[("last_freed", Reuse::LastFreed), ("first_freed", Reuse::FirstFreed)],
            )?,
            series_every: series_every.size("series_every")?,
            series_len: series_len.size("series_len")?,
        };
        let (num_blocks, block_size) = (config.num_blocks, config.block_size);
        let manager = Manager::new(config).map_err(to_python)?;
        Ok(Self {
            preparer: manager.preparer().clone(),
            hasher,
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

    #[getter]
    fn seed(&self) -> u64 {
        self.hasher.seed
    }

    #[pyo3(signature = (tokens, *, adapter=None, salt=None, media=None))]
    fn prepare(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        adapter: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
        media: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyPrompt> {
        self.check_process()?;
        let tokens = TokenIds::unchecked(tokens)?;
        let keys = arrays::keys(adapter, salt, media)?;
        let prompt = if is_brief(self.hasher.algorithm, tokens.get().len()) {
            self.preparer.prepare(tokens.get(), keys)
        } else {
            let ids = arrays::copied("tokens", tokens.get().iter().copied())?;
            py.detach(|| self.preparer.prepare(ids, keys))
        };
        let prompt = prompt.map_err(to_python)?;
        tokens.check(prompt.ids())?;
        Ok(PyPrompt(prompt, self.hasher.algorithm))
    }

    #[pyo3(signature = (prompt, *, recompute_last_hit=false))]
    fn match_prefix(&self, py: Python<'_>, prompt: &PyPrompt, recompute_last_hit: bool) -> PyResult<usize> {
        self.lock(py)?.match_prefix(&prompt.0, recompute_last_hit).map_err(to_python)
    }

    #[pyo3(signature = (
        prompt, reserve=None, *, use_cache=true, recompute_last_hit=false, max_tokens=None, max_resident_blocks=None,
    ))]
    #[allow(clippy::too_many_arguments)] // options, by name
    fn can_allocate(
        &self,
        py: Python<'_>,
        prompt: &PyPrompt,
        reserve: Option<Int>,
        use_cache: bool,
        recompute_last_hit: bool,
        max_tokens: Option<Int>,
        max_resident_blocks: Option<Int>,
    ) -> PyResult<Py<PyAny>> {
        let options =
            admission_options(reserve, use_cache, recompute_last_hit, max_tokens, max_resident_blocks)?;
        let answer = self.lock(py)?.can_allocate(&prompt.0, options).map_err(to_python)?;
        answers::admission(py, answer)
    }

    #[pyo3(signature = (
        prompt, reserve=None, *, use_cache=true, recompute_last_hit=false, max_tokens=None, max_resident_blocks=None,
    ))]
    #[allow(clippy::too_many_arguments)] // options, by name
    fn allocate(
        &self,
        py: Python<'_>,
        prompt: &PyPrompt,
        reserve: Option<Int>,
        use_cache: bool,
        recompute_last_hit: bool,
        max_tokens: Option<Int>,
        max_resident_blocks: Option<Int>,
    ) -> PyResult<Py<PyAny>> {
        let options =
            admission_options(reserve, use_cache, recompute_last_hit, max_tokens, max_resident_blocks)?;
        let answer = self.lock(py)?.allocate(&prompt.0, options).map_err(to_python)?;
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
        let handles = Handles::new(handles)?;
        let counts = CountArgument::new("counts", counts)?;
        let tokens = tokens.map(TokenIds::unchecked).transpose()?;
        let mut manager = self.lock(py)?;
        // Not before: while the lock is waited for, another thread may write to the array.
        let ids = tokens.as_ref().map_or(&[][..], TokenIds::get);
        tokens.as_ref().map_or(Ok(()), |tokens| tokens.check(ids))?;
        manager.commit(handles.get(), counts.get(), ids).map_err(to_python)
    }

    fn abort_step(&self, py: Python<'_>, handles: &Bound<'_, PyAny>) -> PyResult<()> {
        let handles = Handles::new(handles)?;
        self.lock(py)?.abort_step(handles.get()).map_err(to_python)
    }

    #[pyo3(signature = (handles, num_children=None), text_signature = "($self, handles, num_children=1)")]
    fn fork<'py>(
        &self,
        py: Python<'py>,
        handles: &Bound<'py, PyAny>,
        num_children: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let handles = Handles::new(handles)?;
        let counts = CountArgument::or("num_children", num_children, 1)?;
        let mut children = Vec::new();
        self.lock(py)?.fork(handles.get(), counts.get(), &mut children).map_err(to_python)?;
        Ok(PyArray1::from_iter(py, children.iter().map(|child| child.0)))
    }

    fn reorder(
        &self,
        py: Python<'_>,
        handles: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let handles = Handles::new(handles)?;
        let parents = Numbers::copied("parents", "int32", parents)?;
        self.lock(py)?.reorder(handles.get(), &parents).map_err(to_python)
    }

    #[pyo3(signature = (handles, lengths, *, spare="free"))]
    fn truncate(
        &self,
        py: Python<'_>,
        handles: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
        spare: &str,
    ) -> PyResult<usize> {
        let spare = word("spare", spare, &[("free", Spare::Free), ("keep", Spare::Keep)])?;
        let handles = Handles::new(handles)?;
        let lengths = CountArgument::new("lengths", lengths)?;
        self.lock(py)?.truncate(handles.get(), lengths.get(), spare).map_err(to_python)
    }

    #[pyo3(signature = (handle, start, end, *, unpublish=false))]
    fn drop_range(
        &self,
        py: Python<'_>,
        handle: Int,
        start: Int,
        end: Int,
        unpublish: bool,
    ) -> PyResult<PyDropped> {
        let (start, end) = (start.size("start")?, end.size("end")?);
        let dropped = self.lock(py)?.drop_range(SeqHandle(handle.0), start, end, unpublish);
        dropped.map(PyDropped).map_err(to_python)
    }

    fn move_slots<'py>(
        &self,
        py: Python<'py>,
        handles: &Bound<'py, PyAny>,
        counts: &Bound<'py, PyAny>,
        accepted: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let handles = Handles::new(handles)?;
        let counts = CountArgument::new("counts", counts)?;
        let accepted = Numbers::copied("accepted", "int32", accepted)?;
        let mut slots = Vec::new();
        self.lock(py)?.move_slots(handles.get(), counts.get(), &accepted, &mut slots).map_err(to_python)?;
        PyArray1::from_iter(py, slots.iter().flatten().copied()).reshape([slots.len(), 2])
    }

    fn set_max_tokens(
        &self,
        py: Python<'_>,
        handles: &Bound<'_, PyAny>,
        max_tokens: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let handles = Handles::new(handles)?;
        let max_tokens = CountArgument::new("max_tokens", max_tokens)?;
        self.lock(py)?.set_max_tokens(handles.get(), max_tokens.get()).map_err(to_python)
    }

    fn preempt(&self, py: Python<'_>, handles: &Bound<'_, PyAny>) -> PyResult<Vec<PyPrompt>> {
        let handles = Handles::new(handles)?;
        let prompts = self.lock(py)?.preempt(handles.get()).map_err(to_python)?;
        Ok(prompts.into_iter().map(|prompt| PyPrompt(prompt, self.hasher.algorithm)).collect())
    }

    #[pyo3(signature = (handles, *, missing_ok=false))]
    fn free(&self, py: Python<'_>, handles: &Bound<'_, PyAny>, missing_ok: bool) -> PyResult<PyFreed> {
        let handles = Handles::new(handles)?;
        self.lock(py)?.free(handles.get(), missing_ok).map(PyFreed).map_err(to_python)
    }

    fn reclaimable(&self, py: Python<'_>, handles: &Bound<'_, PyAny>) -> PyResult<usize> {
        let handles = Handles::new(handles)?;
        self.lock(py)?.reclaimable(handles.get()).map_err(to_python)
    }

    fn sequence_usage(&self, py: Python<'_>, handles: &Bound<'_, PyAny>) -> PyResult<PySequenceUsage> {
        let handles = Handles::new(handles)?;
        self.lock(py)?.sequence_usage(handles.get()).map(PySequenceUsage).map_err(to_python)
    }

    #[pyo3(signature = (handle, start=None, end=None))]
    fn begin_transfer(
        &self,
        py: Python<'_>,
        handle: Int,
        start: Option<Int>,
        end: Option<Int>,
    ) -> PyResult<i64> {
        let handle = SeqHandle(handle.0);
        let (start, end) = (optional_size("start", start)?.unwrap_or(0), optional_size("end", end)?);
        let mut manager = self.lock(py)?;
        let end = match end {
            Some(end) => end,
            None => manager.cursors(handle).map_err(to_python)?.num_blocks,
        };
        manager.begin_transfer(handle, start, end).map(|transfer| transfer.0).map_err(to_python)
    }

    fn complete_transfer(&self, py: Python<'_>, transfer: Int) -> PyResult<usize> {
        self.end_transfer(py, transfer, Outcome::Complete)
    }

    fn fail_transfer(&self, py: Python<'_>, transfer: Int) -> PyResult<usize> {
        self.end_transfer(py, transfer, Outcome::Failed)
    }

    fn cancel_transfer(&self, py: Python<'_>, transfer: Int) -> PyResult<usize> {
        self.end_transfer(py, transfer, Outcome::Cancelled)
    }

    fn pending_transfers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let pending = self.lock(py)?.pending_transfers();
        let rows = pending.iter().flat_map(|one| [one.handle.0, one.num_blocks as i64, one.age_steps as i64]);
        PyArray1::from_iter(py, rows).reshape([pending.len(), 3])
    }

    fn sequence(&self, py: Python<'_>, handle: Int) -> PyResult<PySequence> {
        self.lock(py)?.cursors(SeqHandle(handle.0)).map(PySequence).map_err(to_python)
    }

    fn block_table<'py>(&self, py: Python<'py>, handle: Int) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let blocks = self.lock(py)?.block_table(SeqHandle(handle.0)).map_err(to_python)?.to_vec();
        Ok(PyArray1::from_iter(py, blocks.iter().map(|block| block.export(self.padding))))
    }

    fn tokens<'py>(&self, py: Python<'py>, handle: Int) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let ids = self.lock(py)?.tokens(SeqHandle(handle.0)).map_err(to_python)?;
        Ok(answers::int64_array(py, &ids))
    }

    fn stats(&self, py: Python<'_>) -> PyResult<PyStats> {
        Ok(PyStats(self.lock(py)?.stats()))
    }

    #[pyo3(signature = (*, adapter=None, salt=None))]
    fn namespace_usage(
        &self,
        py: Python<'_>,
        adapter: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<PyUsage> {
        let keys = arrays::keys(adapter, salt, None)?;
        self.lock(py)?.namespace_usage(&keys).map(PyUsage).map_err(to_python)
    }

    fn fragmentation(&self, py: Python<'_>) -> PyResult<PyFragmentation> {
        Ok(PyFragmentation(self.lock(py)?.fragmentation()))
    }

    fn series<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<i64>>> {
        let samples: Vec<_> = self.lock(py)?.series().copied().collect();
        let values = samples.iter().flatten().map(|&value| value as i64);
        PyArray1::from_iter(py, values).reshape([samples.len(), 7])
    }

    fn reset_peaks(&self, py: Python<'_>) -> PyResult<()> {
        self.lock(py)?.reset_peaks();
        Ok(())
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> PyResult<usize> {
        self.detached(py, Manager::reset_prefix_cache)
    }

    #[pyo3(signature = (*, adapter=None, salt=None))]
    fn drop_namespace(
        &self,
        py: Python<'_>,
        adapter: Option<&Bound<'_, PyAny>>,
        salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let keys = arrays::keys(adapter, salt, None)?;
        self.detached(py, |manager| manager.drop_namespace(&keys))?.map_err(to_python)
    }

    fn check_integrity(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.detached(py, |manager| manager.check_integrity())
    }
}

/// Whether hashing takes less than some 30 microseconds: to let go of the interpreter asks for a copy first, and for
/// waiting to have it back.
fn is_brief(algorithm: Algorithm, num_tokens: usize) -> bool {
    match algorithm {
        Algorithm::Sha256 => num_tokens <= 4096,
        _ => num_tokens <= 65_536,
    }
}

/// The digests that a manager with this seed gives the full blocks of a prompt.
#[pyfunction]
#[pyo3(signature = (
    tokens, block_size, *, seed, algorithm="xxh3", parent=None, adapter=None, salt=None, media=None
))]
#[allow(clippy::too_many_arguments)] // options, by name
pub fn block_hashes<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    block_size: Int,
    seed: &Bound<'py, PyAny>,
    algorithm: &str,
    parent: Option<&[u8]>,
    adapter: Option<&Bound<'py, PyAny>>,
    salt: Option<&Bound<'py, PyAny>>,
    media: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyArray2<u8>>> {
    let ids = TokenIds::new(tokens)?;
    let keys = arrays::keys(adapter, salt, media)?;
    let hasher =
        BlockHasher { algorithm: word("algorithm", algorithm, &ALGORITHMS)?, seed: arrays::seed(seed)? };
    let block_size = block_size.size("block_size")?;
    let digests = if is_brief(hasher.algorithm, ids.get().len()) {
        hasher.chain(ids.get(), &keys, parent, block_size)
    } else {
        // With a copy that nobody else can write to.
        let ids = ids.into_vec()?;
        py.detach(|| hasher.chain(&ids, &keys, parent, block_size))
    };
    answers::digests(py, &digests.map_err(to_python)?, hasher.algorithm)
}
