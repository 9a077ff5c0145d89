//! What the tensors of a call say of themselves, all at once. Imports nothing of the crate.
//!
//! A library tells in C what its tensors are: the table of functions behind `__dlpack_c_exchange_api__` (DLPack 1.2,
//! dlpack.h). Asked in Python, attribute by attribute, five tensors cost more than all else of a call.
//! Invariant: nothing is kept of a tensor; its numbers are read while the caller holds it and the interpreter.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::slice;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyList, PyTuple, PyType};

/// Bytes of the widest access of a kernel: two addresses that are as far from a multiple of it are alike.
const ALIGNMENT: u64 = 16;

/// `DLPackExchangeAPI`, of which only the function below is called.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    managed_allocator: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    tensor_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    current_work_stream: *const c_void,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: [i32; 2],
    num_axes: i32,
    dtype: [u8; 4],
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Addresses and signature of tensors, None among them; see `_core.pyi`.
#[pyfunction]
fn look_at_tensors<'py>(
    api: &Bound<'py, PyCapsule>,
    kind: &Bound<'py, PyType>,
    tensors: &Bound<'py, PyTuple>,
) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyBytes>)> {
    let py = api.py();
    // SAFETY: the name says what the pointer is to, and the table lives as long as the process.
    let table = unsafe {
        ffi::PyCapsule_GetPointer(api.as_ptr(), c"dlpack_exchange_api".as_ptr())
            .cast::<ExchangeApi>()
            .as_ref()
    }
    .ok_or_else(|| PyErr::fetch(py))?;
    let (1, Some(tensor_of)) = (table.major, table.tensor_from_object) else {
        return Err(PyValueError::new_err("the exchange API is not of DLPack 1"));
    };
    let mut signature = Vec::with_capacity(512);
    let mut addresses = Vec::with_capacity(tensors.len());
    for each in tensors.iter_borrowed() {
        if each.is_none() {
            addresses.push(0);
            signature.push(0);
            continue;
        }
        if !each.get_type().is(kind) {
            return Err(PyTypeError::new_err("expected tensors of one type"));
        }
        let mut seen = Tensor {
            data: null_mut(),
            device: [0; 2],
            num_axes: 0,
            dtype: [0; 4],
            shape: null_mut(),
            strides: null_mut(),
            byte_offset: 0,
        };
        // SAFETY: the object is of the type that the table was found on, and `seen` is a tensor to be filled.
        if unsafe { tensor_of(each.as_ptr().cast(), &raw mut seen) } != 0 {
            return Err(PyErr::fetch(py));
        }
        let address = seen.data as u64 + seen.byte_offset;
        addresses.push(address);
        signature.push(1);
        signature.push((address % ALIGNMENT) as u8);
        signature.extend(seen.dtype);
        for number in [seen.device[0], seen.device[1], seen.num_axes] {
            signature.extend(number.to_ne_bytes());
        }
        for numbers in [seen.shape, seen.strides] {
            if seen.num_axes > 0 && !numbers.is_null() {
                // SAFETY: both have as many numbers as there are axes, and live as long as the tensor.
                let numbers = unsafe { slice::from_raw_parts(numbers, seen.num_axes as usize) };
                signature.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
            }
        }
    }
    Ok((PyList::new(py, addresses)?, PyBytes::new(py, &signature)))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(look_at_tensors, module)?)
}
