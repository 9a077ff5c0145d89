//! The module `kvblocks._core`: the Rust crates as Python classes.
//!
//! Every class is frozen; what changes stands behind one lock. `arrays` and `memory` turn arguments into slices, `answers` results
//! into objects, `errors` core errors into exceptions; `manager`, `step` and `cpu` hold no logic of their own.

use pyo3::prelude::*;

mod answers;
mod arrays;
mod cpu;
mod errors;
mod manager;
mod memory;
mod process;
mod step;
mod tensors;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    answers::register(module)?;
    module.add_class::<manager::PyBlockManager>()?;
    module.add_class::<step::PyStepBuffers>()?;
    module.add_function(wrap_pyfunction!(manager::block_hashes, module)?)?;
    cpu::register(module)?;
    tensors::register(module)?;
    process::register(module)
}
