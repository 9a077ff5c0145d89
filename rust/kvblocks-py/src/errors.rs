//! Core errors as Python exceptions: the one mapping. Imports the core's error type.
//!
//! Invariant: state errors are `KVBlocksError`s, bad values `ValueError`s, wrong types `TypeError`s, what does
//! not fit into memory `MemoryError`s; nothing else leaves.

use kvblocks_core::Error;
use pyo3::exceptions::{PyException, PyMemoryError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    kvblocks._core,
    KVBlocksError,
    PyException,
    "Base of the errors that are about the state of a manager."
);
pyo3::create_exception!(
    kvblocks._core,
    StaleHandleError,
    KVBlocksError,
    "A sequence handle that was never given out, or whose sequence has been freed."
);
pyo3::create_exception!(
    kvblocks._core,
    PreemptedError,
    KVBlocksError,
    "A verb that needs blocks was called on a preempted sequence."
);
pyo3::create_exception!(
    kvblocks._core,
    ForkedProcessError,
    KVBlocksError,
    "A manager made before fork() was touched in the child process."
);

/// The Python exception of a core error.
pub fn to_python(error: Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::StaleHandle(_) | Error::StalePrompt(_) | Error::StaleTransfer(_) => {
            StaleHandleError::new_err(text)
        }
        Error::Preempted(_) => PreemptedError::new_err(text),
        Error::Memory { .. } => PyMemoryError::new_err(text),
        Error::DuplicateHandle(_)
        | Error::StaleRow { .. }
        | Error::ForeignPrompt
        | Error::Length { .. }
        | Error::Value { .. }
        | Error::Row { .. } => PyValueError::new_err(text),
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("KVBlocksError", py.get_type::<KVBlocksError>())?;
    module.add("StaleHandleError", py.get_type::<StaleHandleError>())?;
    module.add("PreemptedError", py.get_type::<PreemptedError>())?;
    module.add("ForkedProcessError", py.get_type::<ForkedProcessError>())
}
