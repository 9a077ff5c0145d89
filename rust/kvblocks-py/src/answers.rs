//! What the verbs answer: small frozen classes. Imports `memory` and the core's answer types.
//!
//! Invariant: a refusal is false, everything else is true, so that `if answer:` reads as it means.

use kvblocks_core::{
    Admission, Algorithm, Allocation, Cursors, Digest, Dropped, Fragmentation, Freed, Prompt, Refusal,
    Scheduled, SequenceUsage, Stats, Usage,
};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use pyo3::prelude::*;

use crate::memory::no_memory;

/// Token ids with their block hashes.
#[pyclass(name = "Prompt", module = "kvblocks._core", frozen)]
pub struct PyPrompt(pub Prompt, pub Algorithm);

#[pymethods]
impl PyPrompt {
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.len()
    }

    #[getter]
    fn handle(&self) -> Option<i64> {
        self.0.handle().map(|handle| handle.0)
    }

    #[getter]
    fn tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        int64_array(py, self.0.ids())
    }

    #[getter]
    fn block_hashes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray2<u8>>> {
        digests(py, self.0.hashes(), self.1)
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        let handle = self.handle().map_or("None".to_owned(), |handle| handle.to_string());
        format!("Prompt(num_tokens={}, handle={handle})", self.0.len())
    }
}

/// Token ids as an int64 array.
pub fn int64_array<'py>(py: Python<'py>, ids: &[u32]) -> Bound<'py, PyArray1<i64>> {
    PyArray1::from_iter(py, ids.iter().map(|&id| i64::from(id)))
}

/// Digests as a uint8 array [n, bytes of a digest].
pub fn digests<'py>(
    py: Python<'py>,
    digests: &[Digest],
    algorithm: Algorithm,
) -> PyResult<Bound<'py, PyArray2<u8>>> {
    let width = algorithm.num_bytes();
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(width * digests.len()).map_err(|_| no_memory("digests", digests.len()))?;
    for digest in digests {
        bytes.extend_from_slice(&digest.low.to_le_bytes());
        bytes.extend_from_slice(&digest.high.to_le_bytes()[..width - 16]);
    }
    PyArray1::from_vec(py, bytes).reshape([digests.len(), width])
}

/// A frozen class around a plain struct: its fields (and methods marked @) readable, its truth fixed, equal by value.
macro_rules! answer {
    ($(#[$doc:meta])* $class:ident($inner:ty) as $name:literal is $truth:literal,
     $($field:ident: $type:ty,)* $(@ $derived:ident: $derived_type:ty,)*) => {
        $(#[$doc])*
        #[pyclass(name = $name, module = "kvblocks._core", frozen, eq)]
        #[derive(Clone, PartialEq)]
        pub struct $class(pub $inner);

        #[pymethods]
        impl $class {
            $(
                #[getter]
                fn $field(&self) -> $type {
                    self.0.$field
                }
            )*

            $(
                #[getter]
                fn $derived(&self) -> $derived_type {
                    self.0.$derived()
                }
            )*

            fn __bool__(&self) -> bool {
                $truth
            }

            fn __repr__(&self) -> String {
                let fields = [$(format!("{}={:?}", stringify!($field), self.0.$field)),*];
                format!("{}({})", $name, fields.join(", ")).replace("true", "True").replace("false", "False")
            }
        }
    };
}

answer!(
    /// What `allocate` would do.
    PyOk(Admission) as "Ok" is true,
    num_cached_tokens: usize,
    num_new_blocks: usize,
);

/// An admitted sequence, its handle as Python sees it.
#[derive(Clone, PartialEq)]
pub struct Allocated {
    handle: i64,
    num_cached_tokens: usize,
    num_new_tokens: usize,
}

answer!(
    /// An admitted sequence.
    PyAllocated(Allocated) as "Allocated" is true,
    handle: i64,
    num_cached_tokens: usize,
    num_new_tokens: usize,
);

/// Blocks short.
#[derive(Clone, PartialEq)]
pub struct Later {
    num_blocks: usize,
}

answer!(
    /// Not now.
    PyLater(Later) as "Later" is false,
    num_blocks: usize,
);

/// Blocks needed and there.
#[derive(Clone, PartialEq)]
pub struct Never {
    need_blocks: usize,
    capacity_blocks: usize,
}

answer!(
    /// Not even in an empty pool.
    PyNever(Never) as "Never" is false,
    need_blocks: usize,
    capacity_blocks: usize,
);

answer!(
    /// A sequence's cursors.
    PySequence(Cursors) as "Sequence" is true,
    num_tokens: usize,
    num_computed: usize,
    num_scheduled: usize,
    num_reserved: usize,
    num_blocks: usize,
    is_preempted: bool,
);

answer!(
    /// What `free` gave back.
    PyFreed(Freed) as "Freed" is true,
    num_blocks: usize,
    num_deferred: usize,
);

answer!(
    /// What `drop_range` took out.
    PyDropped(Dropped) as "Dropped" is true,
    start: usize,
    end: usize,
    num_blocks: usize,
);

/// An answer that holds a `Usage`, after `$own` fields.
macro_rules! usage_answer {
    ($(#[$doc:meta])* $class:ident($inner:ty) as $name:literal, $($own:ident: $type:ty,)*) => {
        answer!(
            $(#[$doc])*
            $class($inner) as $name is true,
            $($own: $type,)*
            live_blocks: usize,
            cached_blocks: usize,
            held_blocks: usize,
            logical_blocks: usize,
            promised_blocks: usize,
            num_seqs: usize,
            used_slots: u64,
            allocated_slots: u64,
            reserved_slots: usize,
            peak_live_blocks: usize,
            peak_logical_blocks: usize,
            queried_requests: u64,
            queried_blocks: u64,
            queried_tokens: u64,
            hit_requests: u64,
            hit_blocks: u64,
            hit_tokens: u64,
            readmit_requests: u64,
            readmit_queried_blocks: u64,
            readmit_queried_tokens: u64,
            readmit_hit_requests: u64,
            readmit_hit_blocks: u64,
            readmit_hit_tokens: u64,
            collided_requests: u64,
            collided_blocks: u64,
            collided_tokens: u64,
            evicting_requests: u64,
            evicted_blocks: u64,
            evicted_tokens: u64,
            copied_blocks: u64,
            preemptions: u64,
            @ reclaimable_blocks: usize,
            @ internal_fragmentation: f64,
            @ sharing: f64,
        );
    };
}

usage_answer!(
    /// What a namespace uses.
    PyUsage(Usage) as "Usage",
);

answer!(
    /// What a group of sequences uses.
    PySequenceUsage(SequenceUsage) as "SequenceUsage" is true,
    live_blocks: usize,
    shared_blocks: usize,
    reclaimable_blocks: usize,
    logical_blocks: usize,
    used_slots: u64,
    allocated_slots: u64,
    reserved_slots: usize,
    @ private_blocks: usize,
    @ internal_fragmentation: f64,
    @ sharing: f64,
);

usage_answer!(
    /// The pool's counters: its usage, and what only the pool as a whole has.
    PyStats(Stats) as "Stats",
    capacity_blocks: usize,
    free_blocks: usize,
    num_transfers: usize,
    num_steps: u64,
    completed_transfers: u64,
    failed_transfers: u64,
    cancelled_transfers: u64,
);

/// Where the free blocks lie.
#[pyclass(name = "Fragmentation", module = "kvblocks._core", frozen, eq)]
#[derive(Clone, PartialEq)]
pub struct PyFragmentation(pub Fragmentation);

#[pymethods]
impl PyFragmentation {
    #[getter]
    fn free_blocks(&self) -> usize {
        self.0.free_blocks
    }

    #[getter]
    fn num_runs(&self) -> usize {
        self.0.num_runs
    }

    #[getter]
    fn longest_run_blocks(&self) -> usize {
        self.0.longest_run_blocks
    }

    #[getter]
    fn run_histogram<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_iter(py, self.0.run_histogram.iter().map(|&runs| runs as i64))
    }

    fn __repr__(&self) -> String {
        let Fragmentation { free_blocks, num_runs, longest_run_blocks, run_histogram } = &self.0;
        format!(
            "Fragmentation(free_blocks={free_blocks}, num_runs={num_runs}, \
             longest_run_blocks={longest_run_blocks}, run_histogram={run_histogram:?})"
        )
    }
}

/// What a step holds.
#[pyclass(name = "Scheduled", module = "kvblocks._core", frozen)]
pub struct PyScheduled(pub Scheduled);

#[pymethods]
impl PyScheduled {
    #[getter]
    fn num_seqs(&self) -> usize {
        self.0.num_seqs
    }

    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.num_tokens
    }

    #[getter]
    fn num_copies(&self) -> usize {
        self.0.num_copies
    }

    #[getter]
    fn num_changes(&self) -> usize {
        self.0.num_changes
    }

    #[getter]
    fn max_blocks(&self) -> usize {
        self.0.max_blocks
    }

    #[getter]
    fn refusal(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.0.refusal.map(|refused| refusal(py, refused)).transpose()
    }

    fn __bool__(&self) -> bool {
        self.0.refusal.is_none()
    }

    fn __repr__(&self) -> String {
        let Scheduled { num_seqs, num_tokens, num_copies, num_changes, max_blocks, .. } = self.0;
        let refusal = match self.0.refusal {
            None => "None".to_owned(),
            Some(Refusal::Later { num_blocks }) => PyLater(Later { num_blocks }).__repr__(),
            Some(Refusal::Never { need_blocks, capacity_blocks }) => {
                PyNever(Never { need_blocks, capacity_blocks }).__repr__()
            }
        };
        format!(
            "Scheduled(num_seqs={num_seqs}, num_tokens={num_tokens}, num_copies={num_copies}, \
             num_changes={num_changes}, max_blocks={max_blocks}, refusal={refusal})"
        )
    }
}

/// Python's `Later` or `Never`.
fn refusal(py: Python<'_>, refusal: Refusal) -> PyResult<Py<PyAny>> {
    Ok(match refusal {
        Refusal::Later { num_blocks } => Py::new(py, PyLater(Later { num_blocks }))?.into_any(),
        Refusal::Never { need_blocks, capacity_blocks } => {
            Py::new(py, PyNever(Never { need_blocks, capacity_blocks }))?.into_any()
        }
    })
}

/// Python's answer to `can_allocate`.
pub fn admission(py: Python<'_>, answer: Result<Admission, Refusal>) -> PyResult<Py<PyAny>> {
    match answer {
        Ok(admission) => Ok(Py::new(py, PyOk(admission))?.into_any()),
        Err(refused) => refusal(py, refused),
    }
}

/// Python's answer to `allocate`.
pub fn allocation(py: Python<'_>, answer: Result<Allocation, Refusal>) -> PyResult<Py<PyAny>> {
    match answer {
        Ok(Allocation { handle, num_cached_tokens, num_new_tokens }) => {
            let allocated = Allocated { handle: handle.0, num_cached_tokens, num_new_tokens };
            Ok(Py::new(py, PyAllocated(allocated))?.into_any())
        }
        Err(refused) => refusal(py, refused),
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPrompt>()?;
    module.add_class::<PyOk>()?;
    module.add_class::<PyAllocated>()?;
    module.add_class::<PyLater>()?;
    module.add_class::<PyNever>()?;
    module.add_class::<PyScheduled>()?;
    module.add_class::<PySequence>()?;
    module.add_class::<PyFreed>()?;
    module.add_class::<PyDropped>()?;
    module.add_class::<PyUsage>()?;
    module.add_class::<PySequenceUsage>()?;
    module.add_class::<PyFragmentation>()?;
    module.add_class::<PyStats>()
}
