//! Python arguments as Rust slices: handles, counts, token ids, integers, keys. Imports `memory`.
//!
//! Invariant: an array of the wrong dtype or rank is a TypeError that names the argument; a number out of range is a
//! ValueError; nothing is cast silently. Handles, counts and indices are copied: what the core has checked, another thread
//! or a device may still write to. Token ids of contiguous arrays, `array.array`s among them, are read where they are;
//! lists and other sequences are converted.

use bytemuck::{Pod, TransparentWrapper};
use kvblocks_core::{Counts, KeyValue, Keys, Media, SeqHandle};
use numpy::{Element, PyArray1, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList, PyString};

use crate::memory::{items, no_memory, Copied};

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

/// A seed: any unsigned integer of 64 bits.
pub fn seed(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract() {
        Ok(seed) => Ok(seed),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Err(PyValueError::new_err(format!("seed is {value}, expected an int from 0 to 2**64 - 1")))
        }
        Err(error) => Err(error),
    }
}

/// A size that may be left out.
pub fn optional_size(argument: &str, value: Option<Int>) -> PyResult<Option<usize>> {
    value.map(|value| value.size(argument)).transpose()
}

/// One of a few words, as what it stands for.
pub fn word<T: Copy>(argument: &str, value: &str, choices: &[(&str, T)]) -> PyResult<T> {
    match choices.iter().find(|(name, _)| *name == value) {
        Some((_, choice)) => Ok(*choice),
        None => {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
            Err(PyValueError::new_err(format!("{argument} is {value:?}, expected {}", names.join(" or "))))
        }
    }
}

/// An `array.array` as a NumPy array over its memory, so that it is read where it is; anything else as it is.
fn viewed<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let class = object.get_type();
    if class.name()? == "array" && class.module()? == "array" {
        return object.py().import("numpy")?.call_method1("asarray", (object,));
    }
    Ok(object.clone())
}

/// Numbers of one type: the caller's array where it is contiguous, else a copy.
pub enum Numbers<'py, T: Element> {
    Borrowed(Bound<'py, PyArray1<T>>),
    Owned(Vec<T>),
}

impl<'py, T: Element + Pod + TryFrom<i64>> Numbers<'py, T> {
    /// An array [n] of exactly this dtype, or a sequence of ints that fit into it.
    pub fn new(argument: &str, dtype: &str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = object.cast::<PyArray1<T>>() {
            return match items(array) {
                Some(_) => Ok(Self::Borrowed(array.clone())),
                None => copied(argument, array.try_readonly()?.as_array().iter().copied()).map(Self::Owned),
            };
        }
        if let Ok(array) = object.cast::<PyUntypedArray>() {
            return Err(PyTypeError::new_err(format!(
                "{argument} is {} array of rank {}, expected {dtype} of rank 1",
                with_article(&array.dtype().to_string()),
                array.ndim()
            )));
        }
        if let Ok(array) = viewed(object)?.cast::<PyArray1<T>>() {
            return Ok(Self::Borrowed(array.clone()));
        }
        let wrong = |name: String, object: &Bound<'py, PyAny>, expected: &str| {
            let found = object.get_type().name().map(|name| name.to_string()).unwrap_or_default();
            PyTypeError::new_err(format!("{name} is {}, expected {expected}", with_article(&found)))
        };
        let items = match object.try_iter() {
            // Of a str every item would be one.
            Ok(items) if !object.is_instance_of::<PyString>() => items,
            _ => {
                let expected = format!("{} array or a sequence of ints", with_article(dtype));
                return Err(wrong(argument.to_owned(), object, &expected));
            }
        };
        let items = items.enumerate().map(|(at, item)| {
            let item = item?;
            match item.extract::<Int>() {
                Ok(Int(number)) => narrow(argument, number),
                Err(error) if error.is_instance_of::<PyTypeError>(item.py()) => {
                    Err(wrong(format!("{argument}[{at}]"), &item, "an int"))
                }
                Err(error) => Err(error),
            }
        });
        items.collect::<PyResult<_>>().map(Self::Owned)
    }

    /// As `new`, as a copy: the core relies on what it has checked.
    pub fn copied(argument: &str, dtype: &str, object: &Bound<'py, PyAny>) -> PyResult<Copied<T>> {
        Copied::new(argument, Self::new(argument, dtype, object)?.get())
    }

    /// The numbers where they stand, to be used before the interpreter is let go of; see `memory`.
    pub fn get(&self) -> &[T] {
        match self {
            // Contiguous, unless somebody has given it another shape since.
            Self::Borrowed(array) => items(array).unwrap_or_default(),
            Self::Owned(numbers) => numbers,
        }
    }
}

/// The items of an array, whose length is the caller's, as a copy: a MemoryError where there is no room for it.
pub fn copied<T>(argument: &str, items: impl ExactSizeIterator<Item = T>) -> PyResult<Vec<T>> {
    let (len, mut copy) = (items.len(), Vec::new());
    copy.try_reserve_exact(len).map_err(|_| no_memory(argument, len))?;
    copy.extend(items);
    Ok(copy)
}

/// One number where an argument may be that or an array; None for anything else.
fn single(object: &Bound<'_, PyAny>) -> Option<i64> {
    // Asked in the order of what is common: other numbers, such as NumPy's scalars, come last.
    let may_be = object.is_instance_of::<PyInt>() || !object.is_instance_of::<PyUntypedArray>();
    if may_be {
        object.extract().ok().map(|Int(one)| one)
    } else {
        None
    }
}

/// `handles`: int64 array [n], a sequence of ints, or one int.
pub enum Handles {
    One([i64; 1]),
    Many(Copied<i64>),
}

impl Handles {
    pub fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match single(object) {
            Some(one) => Ok(Self::One([one])),
            None => Numbers::copied("handles", "int64", object).map(Self::Many),
        }
    }

    pub fn get(&self) -> &[SeqHandle] {
        SeqHandle::wrap_slice(match self {
            Self::One(one) => one,
            Self::Many(handles) => handles,
        })
    }
}

/// Counts of a batch: int32 array [n], a sequence of ints, or one int for all rows.
pub enum CountArgument {
    All(i32),
    Each(Copied<i32>),
}

impl CountArgument {
    pub fn new(argument: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match single(object) {
            Some(one) => narrow(argument, one).map(Self::All),
            None => Numbers::copied(argument, "int32", object).map(Self::Each),
        }
    }

    /// The default where the argument was left out.
    pub fn or(argument: &str, object: Option<&Bound<'_, PyAny>>, default: i32) -> PyResult<Self> {
        object.map_or(Ok(Self::All(default)), |object| Self::new(argument, object))
    }

    pub fn get(&self) -> Counts<'_> {
        match self {
            Self::All(count) => Counts::All(*count),
            Self::Each(counts) => Counts::Each(counts),
        }
    }
}

/// `tokens`: int32, int64 or uint32 array [n], or a sequence of ints, each in 0..2**32.
pub enum TokenIds<'py> {
    Int32(Numbers<'py, i32>),
    Uint32(Numbers<'py, u32>),
    Owned(Vec<u32>),
}

impl<'py> TokenIds<'py> {
    pub fn new(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let ids = Self::unchecked(object)?;
        ids.check(ids.get())?;
        Ok(ids)
    }

    /// As `new`, for a caller who hands what `get` has given, or a copy, to `check`: it may be cheaper to look at later.
    pub fn unchecked(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(ids) = Self::borrowed(object)? {
            return Ok(ids);
        }
        let is_seen = object.is_instance_of::<PyList>() || object.is_instance_of::<PyUntypedArray>();
        if let Some(ids) = if is_seen { None } else { Self::borrowed(&viewed(object)?)? } {
            return Ok(ids);
        }
        let ids = Numbers::<i64>::new("tokens", "int32 or int64", object)?;
        // One pass that the compiler turns into vector instructions; the exact place matters to an error only.
        match ids.get().iter().fold(0, |all, &id| all | id >> 32) {
            0 => copied("tokens", ids.get().iter().map(|&id| id as u32)).map(Self::Owned),
            _ => checked_ids(ids.get()).map(Self::Owned),
        }
    }

    /// The ids of an array of 4 bytes each; None for anything else.
    fn borrowed(object: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        Ok(if object.cast::<PyArray1<i32>>().is_ok() {
            Some(Self::Int32(Numbers::new("tokens", "int32", object)?))
        } else if object.cast::<PyArray1<u32>>().is_ok() {
            Some(Self::Uint32(Numbers::new("tokens", "uint32", object)?))
        } else {
            None
        })
    }

    /// Refuse ids that are negative where they come from.
    pub fn check(&self, ids: &[u32]) -> PyResult<()> {
        let may_be_negative = matches!(self, Self::Int32(_));
        if may_be_negative && ids.iter().fold(0, |all, &id| all | id) > i32::MAX as u32 {
            checked_ids::<i32>(bytemuck::cast_slice(ids))?;
        }
        Ok(())
    }

    /// The ids where they stand, to be read while the interpreter is held: another thread may write to the array.
    pub fn get(&self) -> &[u32] {
        match self {
            // A negative one is refused by `check`.
            Self::Int32(ids) => bytemuck::cast_slice(ids.get()),
            Self::Uint32(ids) => ids.get(),
            Self::Owned(ids) => ids,
        }
    }

    /// The ids as the caller's own, copied if need be.
    pub fn into_vec(self) -> PyResult<Vec<u32>> {
        match self {
            Self::Owned(ids) => Ok(ids),
            borrowed => copied("tokens", borrowed.get().iter().copied()),
        }
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

fn narrow<T: TryFrom<i64>>(argument: &str, value: i64) -> PyResult<T> {
    T::try_from(value).map_err(|_| {
        let bits = 8 * std::mem::size_of::<T>();
        PyValueError::new_err(format!("{argument} holds {value}, which is beyond int{bits}"))
    })
}

/// The keys of a request: adapter and salt each a str, bytes, int or bool; media a sequence of (digest, start, length).
pub fn keys(
    adapter: Option<&Bound<'_, PyAny>>,
    salt: Option<&Bound<'_, PyAny>>,
    media: Option<&Bound<'_, PyAny>>,
) -> PyResult<Keys> {
    let mut keys = Keys {
        adapter: adapter.map(|value| key_value("adapter", value)).transpose()?,
        salt: salt.map(|value| key_value("salt", value)).transpose()?,
        media: Vec::new(),
    };
    if let Some(media) = media {
        let wrong = |_| PyTypeError::new_err("media holds an item that is no (digest, start, length)");
        for item in media.try_iter()? {
            let (digest, start, len): (Bound<'_, PyAny>, Int, Int) = item?.extract().map_err(wrong)?;
            let digest = key_value("media digest", &digest)?;
            keys.media.push(Media::new(digest, start.size("media start")?, len.size("media length")?));
        }
    }
    Ok(keys)
}

fn key_value(argument: &str, value: &Bound<'_, PyAny>) -> PyResult<KeyValue> {
    if value.is_instance_of::<PyBool>() {
        Ok(KeyValue::Bool(value.extract()?))
    } else if value.is_instance_of::<PyString>() {
        Ok(KeyValue::Text(value.extract().map_err(|_| {
            PyValueError::new_err(format!(
                "{argument} holds lone surrogates, expected text that UTF-8 can encode"
            ))
        })?))
    } else if value.is_instance_of::<PyBytes>() {
        Ok(KeyValue::Bytes(value.extract()?))
    } else if value.is_instance_of::<PyInt>() {
        value.extract().map(KeyValue::Int).map_err(|_| {
            PyValueError::new_err(format!(
                "{argument} is an int beyond int64, expected one within, a str or bytes"
            ))
        })
    } else {
        let found = value.get_type().name()?;
        let found = with_article(&found.to_string());
        Err(PyTypeError::new_err(format!("{argument} is {found}, expected a str, bytes, int or bool")))
    }
}

/// "an int32", "a float64", "a uint32".
fn with_article(name: &str) -> String {
    let article = if name.starts_with(['a', 'e', 'i', 'o']) { "an" } else { "a" };
    format!("{article} {name}")
}
