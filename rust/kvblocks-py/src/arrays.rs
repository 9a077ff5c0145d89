//! Python arguments as Rust slices: handles, counts, token ids, integers. Imports `errors` through PyO3 only.
//!
//! Invariant: an array of the wrong dtype or rank is a TypeError that names the argument; a number out of range is a
//! ValueError; nothing is cast silently. Lists and other sequences are converted, which costs a copy.

use kvblocks_core::{Counts, SeqHandle};
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// An integer argument; one beyond int64 is clamped, so that the range check that follows names it.
pub struct Int(pub i64);

impl<'a, 'py> FromPyObject<'a, 'py> for Int {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<i64>() {
            Ok(value) => Ok(Self(value)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                Ok(Self(if object.lt(0)? { i64::MIN } else { i64::MAX }))
            }
            Err(error) => Err(error),
        }
    }
}

impl Int {
    /// The integer as a size.
    pub fn size(self, argument: &str) -> PyResult<usize> {
        usize::try_from(self.0)
            .map_err(|_| PyValueError::new_err(format!("{argument} is {}, expected 0 or more", self.0)))
    }
}

/// `handles`: int64 array [n], a sequence of ints, or one int.
pub fn handles(object: &Bound<'_, PyAny>) -> PyResult<Vec<SeqHandle>> {
    if let Ok(Int(one)) = object.extract() {
        return Ok(vec![SeqHandle(one)]);
    }
    Ok(integers::<i64>("handles", "int64", object)?.into_iter().map(SeqHandle).collect())
}

/// Counts of a batch: int32 array [n], a sequence of ints, or one int for all rows.
pub enum CountArgument {
    All(i32),
    Each(Vec<i32>),
}

impl CountArgument {
    pub fn new(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match object.extract() {
            Ok(Int(one)) => narrow(argument, one).map(Self::All),
            Err(_) => integers::<i32>(argument, "int32", object).map(Self::Each),
        }
    }

    pub fn get(&self) -> Counts<'_> {
        match self {
            Self::All(count) => Counts::All(*count),
            Self::Each(counts) => Counts::Each(counts),
        }
    }
}

/// `tokens`: int32, int64 or uint32 array [n], or a sequence of ints, each in 0..2**32.
pub fn tokens(object: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(array) = object.cast::<PyArray1<i32>>() {
        checked_ids(&copied(array)?)
    } else if let Ok(array) = object.cast::<PyArray1<u32>>() {
        copied(array)
    } else {
        checked_ids(&integers::<i64>("tokens", "int32 or int64", object)?)
    }
}

fn checked_ids<T: Copy + TryInto<u32> + std::fmt::Display>(ids: &[T]) -> PyResult<Vec<u32>> {
    let wrong = ids.iter().position(|&id| id.try_into().is_err());
    match wrong {
        Some(at) => {
            Err(PyValueError::new_err(format!("tokens[{at}] is {}, expected an id in 0..2**32", ids[at])))
        }
        None => Ok(ids.iter().filter_map(|&id| id.try_into().ok()).collect()),
    }
}

/// An array [n] of exactly this dtype, or a sequence of ints that fit into it, as a vector.
fn integers<T: Element + Copy + TryFrom<i64>>(
    argument: &str,
    dtype: &str,
    object: &Bound<'_, PyAny>,
) -> PyResult<Vec<T>> {
    if let Ok(array) = object.cast::<PyArray1<T>>() {
        return copied(array);
    }
    if let Ok(array) = object.cast::<PyUntypedArray>() {
        return Err(PyTypeError::new_err(format!(
            "{argument} is a {} array of rank {}, expected {dtype} of rank 1",
            array.dtype(),
            array.ndim()
        )));
    }
    let wrong_type = |_| {
        let found = object.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        PyTypeError::new_err(format!(
            "{argument} is a {found}, expected a {dtype} array or a sequence of ints"
        ))
    };
    let items = object.try_iter().map_err(wrong_type)?;
    items.map(|item| narrow(argument, item?.extract::<Int>().map_err(wrong_type)?.0)).collect()
}

fn copied<T: Element + Copy>(array: &Bound<'_, PyArray1<T>>) -> PyResult<Vec<T>> {
    let array = array.try_readonly()?;
    Ok(match array.as_slice() {
        Ok(slice) => slice.to_vec(),
        Err(_) => array.as_array().iter().copied().collect(),
    })
}

fn narrow<T: TryFrom<i64>>(argument: &str, value: i64) -> PyResult<T> {
    T::try_from(value).map_err(|_| {
        let bits = 8 * std::mem::size_of::<T>();
        PyValueError::new_err(format!("{argument} holds {value}, which is beyond int{bits}"))
    })
}
