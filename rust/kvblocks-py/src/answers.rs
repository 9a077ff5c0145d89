//! What the verbs answer: small frozen classes. Imports the core's answer types.
//!
//! Invariant: a refusal is false, everything else is true, so that `if answer:` reads as it means.

use kvblocks_core::{Admission, Allocation, Cursors, Prompt, Refusal, Scheduled, Stats};
use numpy::PyArray1;
use pyo3::prelude::*;

/// Token ids with their block hashes.
#[pyclass(name = "Prompt", module = "kvblocks._core", frozen)]
pub struct PyPrompt(pub Prompt);

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
    /// The pool's counters.
    PyStats(Stats) as "Stats" is true,
    capacity_blocks: usize,
    free_blocks: usize,
    live_blocks: usize,
    cached_blocks: usize,
    held_blocks: usize,
    logical_blocks: usize,
    num_seqs: usize,
    used_slots: u64,
    allocated_slots: u64,
    peak_live_blocks: usize,
    peak_logical_blocks: usize,
    queried_requests: u64,
    hit_requests: u64,
    queried_tokens: u64,
    hit_tokens: u64,
    readmit_queried_tokens: u64,
    readmit_hit_tokens: u64,
    hash_collisions: u64,
    evicted_blocks: u64,
    copied_blocks: u64,
    preemptions: u64,
    @ internal_fragmentation: f64,
    @ sharing: f64,
);

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
        let Scheduled { num_seqs, num_tokens, num_copies, max_blocks, .. } = self.0;
        let refusal = match self.0.refusal {
            None => "None".to_owned(),
            Some(Refusal::Later { num_blocks }) => PyLater(Later { num_blocks }).__repr__(),
            Some(Refusal::Never { need_blocks, capacity_blocks }) => {
                PyNever(Never { need_blocks, capacity_blocks }).__repr__()
            }
        };
        format!(
            "Scheduled(num_seqs={num_seqs}, num_tokens={num_tokens}, num_copies={num_copies}, \
             max_blocks={max_blocks}, refusal={refusal})"
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
    module.add_class::<PyStats>()
}
