//! Tells a forked child from its parent. Imports nothing of the crate.
//!
//! Invariant: the generation changes in every child made by `os.fork`, before user code runs there. A counter bumped by
//! the interpreter's own hook costs a load per call, where asking for the process id costs a system call.

use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Generation of this process.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

#[pyfunction]
fn _after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Ask the interpreter to call us in forked children; where it has no fork there is nothing to tell apart.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let hook = wrap_pyfunction!(_after_fork_in_child, module)?;
    let os = module.py().import("os")?;
    if os.hasattr("register_at_fork")? {
        let options = PyDict::new(module.py());
        options.set_item("after_in_child", hook)?;
        os.call_method("register_at_fork", (), Some(&options))?;
    }
    Ok(())
}
