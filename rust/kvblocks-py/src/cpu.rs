//! The kernels of kvblocks-cpu as functions over flat arrays. Imports the crate's types; no logic of its own.
//!
//! Arrays are 1-D and contiguous; 16-bit elements come as uint16 bits with the dtype's name beside them. K and V carry
//! their geometry: (block, token, head strides, num_blocks, block_size, num_heads, head_dim), in elements. Each call
//! says how it runs: (instruction set, number of threads).
//! Invariant: the interpreter is released while a kernel runs; an error of the kernel is a ValueError.

use kvblocks_cpu::half::slice::HalfBitsSliceExt;
use kvblocks_cpu::{
    Batch, Cache, CacheMut, E4m3, E5m2, Elements, ElementsMut, Execution, Groups, GroupsMut, Isa, Losses,
    Options, Output, Paged, Queries, Scaling, ScalingMut, Storage, Tail,
};
use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

type Any<'py> = Bound<'py, PyAny>;
type Geometry = [usize; 7];
type Made<'py, T> = Bound<'py, PyArray1<T>>;
type ReadI32<'py> = PyReadonlyArray1<'py, i32>;
type ReadF32<'py> = PyReadonlyArray1<'py, f32>;

/// An array that is read, by the name of its dtype.
enum Read<'py> {
    F32(PyReadonlyArray1<'py, f32>),
    F16(PyReadonlyArray1<'py, u16>),
    Bf16(PyReadonlyArray1<'py, u16>),
    E4m3(PyReadonlyArray1<'py, u8>),
    E5m2(PyReadonlyArray1<'py, u8>),
    I8(PyReadonlyArray1<'py, i8>),
    Packed(PyReadonlyArray1<'py, u8>),
}

impl<'py> Read<'py> {
    fn new(array: &Any<'py>, dtype: &str) -> PyResult<Self> {
        match dtype {
            "float32" => Ok(Self::F32(array.extract()?)),
            "float16" => Ok(Self::F16(array.extract()?)),
            "bfloat16" => Ok(Self::Bf16(array.extract()?)),
            "fp8_e4m3" => Ok(Self::E4m3(array.extract()?)),
            "fp8_e5m2" => Ok(Self::E5m2(array.extract()?)),
            "int8" => Ok(Self::I8(array.extract()?)),
            "packed" => Ok(Self::Packed(array.extract()?)),
            other => Err(unknown_dtype(other)),
        }
    }

    fn elements(&self) -> PyResult<Elements<'_>> {
        Ok(match self {
            Self::F32(array) => Elements::F32(array.as_slice()?),
            Self::F16(array) => Elements::F16(array.as_slice()?.reinterpret_cast()),
            Self::Bf16(array) => Elements::Bf16(array.as_slice()?.reinterpret_cast()),
            Self::E4m3(array) => Elements::E4m3(E4m3::from_bytes(array.as_slice()?)),
            Self::E5m2(array) => Elements::E5m2(E5m2::from_bytes(array.as_slice()?)),
            Self::I8(array) => Elements::I8(array.as_slice()?),
            Self::Packed(array) => Elements::Packed(array.as_slice()?),
        })
    }
}

/// An array that is written, by the name of its dtype.
enum Write<'py> {
    F32(PyReadwriteArray1<'py, f32>),
    F16(PyReadwriteArray1<'py, u16>),
    Bf16(PyReadwriteArray1<'py, u16>),
    E4m3(PyReadwriteArray1<'py, u8>),
    E5m2(PyReadwriteArray1<'py, u8>),
    I8(PyReadwriteArray1<'py, i8>),
    Packed(PyReadwriteArray1<'py, u8>),
}

impl<'py> Write<'py> {
    fn new(array: &Any<'py>, dtype: &str) -> PyResult<Self> {
        match dtype {
            "float32" => Ok(Self::F32(array.extract()?)),
            "float16" => Ok(Self::F16(array.extract()?)),
            "bfloat16" => Ok(Self::Bf16(array.extract()?)),
            "fp8_e4m3" => Ok(Self::E4m3(array.extract()?)),
            "fp8_e5m2" => Ok(Self::E5m2(array.extract()?)),
            "int8" => Ok(Self::I8(array.extract()?)),
            "packed" => Ok(Self::Packed(array.extract()?)),
            other => Err(unknown_dtype(other)),
        }
    }

    fn elements(&mut self) -> PyResult<ElementsMut<'_>> {
        Ok(match self {
            Self::F32(array) => ElementsMut::F32(array.as_slice_mut()?),
            Self::F16(array) => ElementsMut::F16(array.as_slice_mut()?.reinterpret_cast_mut()),
            Self::Bf16(array) => ElementsMut::Bf16(array.as_slice_mut()?.reinterpret_cast_mut()),
            Self::E4m3(array) => ElementsMut::E4m3(E4m3::from_bytes_mut(array.as_slice_mut()?)),
            Self::E5m2(array) => ElementsMut::E5m2(E5m2::from_bytes_mut(array.as_slice_mut()?)),
            Self::I8(array) => ElementsMut::I8(array.as_slice_mut()?),
            Self::Packed(array) => ElementsMut::Packed(array.as_slice_mut()?),
        })
    }
}

/// The scales of K or V: who shares one, scales, zeros, size of a group, bits of a code.
type Scales<'py> = Option<(String, Any<'py>, Option<Any<'py>>, usize, usize)>;

/// Scales that are read.
enum ReadScales<'py> {
    None,
    Float(String, PyReadonlyArray1<'py, f32>),
    Groups(bool, [PyReadonlyArray1<'py, u16>; 2], usize, usize),
}

impl<'py> ReadScales<'py> {
    fn new(scales: &Scales<'py>) -> PyResult<Self> {
        let Some((scaling, scale, zero, size, bits)) = scales else { return Ok(Self::None) };
        match zero {
            None => Ok(Self::Float(scaling.clone(), scale.extract()?)),
            Some(zero) => {
                Ok(Self::Groups(scaling == "token_group", [scale.extract()?, zero.extract()?], *size, *bits))
            }
        }
    }

    fn scaling(&self) -> PyResult<Scaling<'_>> {
        match self {
            Self::None => Ok(Scaling::None),
            Self::Float(name, scale) => match name.as_str() {
                "head" => Ok(Scaling::Head(scale.as_slice()?)),
                "channel" => Ok(Scaling::Channel(scale.as_slice()?)),
                "token_head" => Ok(Scaling::TokenHead(scale.as_slice()?)),
                other => Err(unknown_scaling(other)),
            },
            Self::Groups(by_token, [scale, zero], size, bits) => {
                let (scale, zero) =
                    (scale.as_slice()?.reinterpret_cast(), zero.as_slice()?.reinterpret_cast());
                let groups = Groups { size: *size, bits: *bits, scale, zero };
                Ok(if *by_token { Scaling::TokenGroup(groups) } else { Scaling::Group(groups) })
            }
        }
    }
}

/// Scales that a write takes, or makes.
enum WriteScales<'py> {
    None,
    Given(String, PyReadonlyArray1<'py, f32>),
    Made(PyReadwriteArray1<'py, f32>),
    Groups(bool, [PyReadwriteArray1<'py, u16>; 2], usize, usize),
}

impl<'py> WriteScales<'py> {
    fn new(scales: &Scales<'py>) -> PyResult<Self> {
        let Some((scaling, scale, zero, size, bits)) = scales else { return Ok(Self::None) };
        Ok(match (scaling.as_str(), zero) {
            (_, Some(zero)) => {
                Self::Groups(scaling == "token_group", [scale.extract()?, zero.extract()?], *size, *bits)
            }
            ("made", None) => Self::Made(scale.extract()?),
            _ => Self::Given(scaling.clone(), scale.extract()?),
        })
    }

    fn scaling(&mut self) -> PyResult<ScalingMut<'_>> {
        match self {
            Self::None => Ok(ScalingMut::None),
            Self::Made(scale) => Ok(ScalingMut::Made(scale.as_slice_mut()?)),
            Self::Given(name, scale) => match name.as_str() {
                "head" => Ok(ScalingMut::Head(scale.as_slice()?)),
                "channel" => Ok(ScalingMut::Channel(scale.as_slice()?)),
                "token_head" => Ok(ScalingMut::TokenHead(scale.as_slice()?)),
                other => Err(unknown_scaling(other)),
            },
            Self::Groups(of_tokens, [scale, zero], size, bits) => {
                let (scale, zero) = (
                    scale.as_slice_mut()?.reinterpret_cast_mut(),
                    zero.as_slice_mut()?.reinterpret_cast_mut(),
                );
                let groups = GroupsMut { size: *size, bits: *bits, scale, zero };
                Ok(if *of_tokens { ScalingMut::TokenGroup(groups) } else { ScalingMut::Group(groups) })
            }
        }
    }
}

fn unknown_scaling(name: &str) -> PyErr {
    PyValueError::new_err(format!("scaling is {name:?}, which this kernel does not know"))
}

fn unknown_dtype(name: &str) -> PyErr {
    PyValueError::new_err(format!("dtype is {name:?}, expected a cache dtype"))
}

fn paged(geometry: Geometry) -> Paged {
    let [block_stride, token_stride, head_stride, num_blocks, block_size, num_heads, head_dim] = geometry;
    Paged { block_stride, token_stride, head_stride, num_blocks, block_size, num_heads, head_dim }
}

fn execution((isa, num_threads): (&str, usize)) -> PyResult<Execution> {
    let isa = Isa::named(isa).ok_or_else(|| {
        PyValueError::new_err(format!("simd is {isa:?}: this processor has {}", cpu_simd().join(", ")))
    })?;
    Ok(Execution { isa, num_threads: num_threads.max(1) })
}

fn to_python(error: kvblocks_cpu::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The instruction sets that there are kernels for and that this processor has, the widest first.
#[pyfunction]
fn cpu_simd() -> Vec<&'static str> {
    Isa::NAMES.into_iter().filter(|name| Isa::named(name).is_some()).collect()
}

/// Store rows in K or V: cache (array, dtype, geometry), rows (array, dtype). With `losses`, by head: the largest finite
/// magnitudes, and how many values no code reaches.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // the interpreter's calling convention has no structs
fn cpu_write<'py>(
    py: Python<'py>,
    cache: (Any<'py>, String, Geometry),
    scales: Scales<'py>,
    rows: (Any<'py>, String),
    slots: PyReadonlyArray1<'py, i64>,
    losses: bool,
    how: (String, usize),
) -> PyResult<Option<(Made<'py, f32>, Made<'py, i64>)>> {
    let (paged, how) = (paged(cache.2), execution((&how.0, how.1))?);
    let (mut data, rows) = (Write::new(&cache.0, &cache.1)?, Read::new(&rows.0, &rows.1)?);
    let mut scales = WriteScales::new(&scales)?;
    let cache = CacheMut { data: data.elements()?, paged, scaling: scales.scaling()? };
    let (rows, slots) = (rows.elements()?, slots.as_slice()?);
    let mut losses = losses.then(Losses::default);
    py.detach(|| kvblocks_cpu::write(cache, rows, slots, losses.as_mut(), how)).map_err(to_python)?;
    Ok(losses.map(|Losses { amax, num_clipped }| (amax.into_pyarray(py), num_clipped.into_pyarray(py))))
}

/// The largest finite magnitude in each column of rows (array, dtype) of so many columns.
#[pyfunction]
fn cpu_amax<'py>(
    py: Python<'py>,
    rows: (Any<'py>, String),
    num_columns: usize,
    how: (String, usize),
) -> PyResult<Made<'py, f32>> {
    let how = execution((&how.0, how.1))?;
    let rows = Read::new(&rows.0, &rows.1)?;
    let rows = rows.elements()?;
    let amax = py.detach(|| kvblocks_cpu::amax_of_columns(rows, num_columns, how)).map_err(to_python)?;
    Ok(amax.into_pyarray(py))
}

/// K or V of a layer: (array, dtype, geometry), scales.
type Part<'py> = ((Any<'py>, String, Geometry), Scales<'py>);

/// Attention of q (array, dtype, heads) over K and V, and over a tail (k, v, dtype, starts) that is not in them yet.
///
/// batch: (tables, columns, lengths, query starts); options: (scale, window, soft cap, sinks, slopes);
/// output: (out, lse).
#[pyfunction]
#[allow(clippy::too_many_arguments)] // the interpreter's calling convention has no structs
fn cpu_attend(
    py: Python<'_>,
    q: (Any<'_>, String, usize),
    k: Part<'_>,
    v: Part<'_>,
    tail: Option<(Any<'_>, Any<'_>, String, ReadI32<'_>)>,
    batch: (ReadI32<'_>, usize, ReadI32<'_>, ReadI32<'_>),
    options: (f32, Option<usize>, Option<f32>, Option<ReadF32<'_>>, Option<ReadF32<'_>>),
    output: (Any<'_>, Option<PyReadwriteArray1<'_, f32>>),
    how: (String, usize),
) -> PyResult<()> {
    let how = execution((&how.0, how.1))?;
    let (q, q_dtype, num_q_heads) = q;
    let batch = Batch {
        block_tables: batch.0.as_slice()?,
        max_blocks: batch.1,
        seq_lens: batch.2.as_slice()?,
        query_start_loc: batch.3.as_slice()?,
    };
    let options = Options {
        scale: options.0,
        window: options.1,
        soft_cap: options.2,
        sinks: options.3.as_ref().map(|array| array.as_slice()).transpose()?,
        alibi_slopes: options.4.as_ref().map(|array| array.as_slice()).transpose()?,
    };
    let (mut out, mut lse) = (Write::new(&output.0, &q_dtype)?, output.1);
    let lse = lse.as_mut().map(|array| array.as_slice_mut()).transpose()?;
    let output = Output { out: out.elements()?, lse };
    let q = Read::new(&q, &q_dtype)?;
    let queries = Queries { data: q.elements()?, num_heads: num_q_heads };
    let (k_array, v_array) = (Read::new(&k.0 .0, &k.0 .1)?, Read::new(&v.0 .0, &v.0 .1)?);
    let (k_scales, v_scales) = (ReadScales::new(&k.1)?, ReadScales::new(&v.1)?);
    let tail = match &tail {
        None => None,
        Some((k, v, dtype, starts)) => Some((Read::new(k, dtype)?, Read::new(v, dtype)?, starts)),
    };
    let storage = Storage {
        k: Cache { data: k_array.elements()?, paged: paged(k.0 .2), scaling: k_scales.scaling()? },
        v: Cache { data: v_array.elements()?, paged: paged(v.0 .2), scaling: v_scales.scaling()? },
        tail: match &tail {
            None => None,
            Some((k, v, starts)) => {
                Some(Tail { k: k.elements()?, v: v.elements()?, start_loc: starts.as_slice()? })
            }
        },
    };
    py.detach(|| kvblocks_cpu::attend(queries, storage, batch, options, output, how)).map_err(to_python)
}

/// Copy blocks of K or V of one layer, cache (array, dtype, geometry); copies: (src, dst) pairs, flat.
#[pyfunction]
fn cpu_copy_blocks(
    py: Python<'_>,
    cache: (Any<'_>, String, Geometry),
    copies: ReadI32<'_>,
    how: (String, usize),
) -> PyResult<()> {
    let (paged, how) = (paged(cache.2), execution((&how.0, how.1))?);
    let mut cache = Write::new(&cache.0, &cache.1)?;
    let (cache, copies) = (cache.elements()?, copies.as_slice()?.as_chunks().0);
    py.detach(|| kvblocks_cpu::copy_blocks(cache, &paged, copies, how)).map_err(to_python)
}

/// The first seq_len tokens of a sequence, from K or V, into out.
#[pyfunction]
fn cpu_gather(
    py: Python<'_>,
    cache: Part<'_>,
    block_table: ReadI32<'_>,
    seq_len: usize,
    mut out: PyReadwriteArray1<'_, f32>,
    how: (String, usize),
) -> PyResult<()> {
    let how = execution((&how.0, how.1))?;
    let ((array, dtype, geometry), scales) = cache;
    let (array, scales) = (Read::new(&array, &dtype)?, ReadScales::new(&scales)?);
    let cache = Cache { data: array.elements()?, paged: paged(geometry), scaling: scales.scaling()? };
    let (table, out) = (block_table.as_slice()?, out.as_slice_mut()?);
    py.detach(|| kvblocks_cpu::gather(cache, table, seq_len, out, how)).map_err(to_python)
}

/// Merge the states a and b, each (out, lse), into output (out, lse).
#[pyfunction]
fn cpu_merge_states(
    py: Python<'_>,
    a: (Any<'_>, ReadF32<'_>),
    b: (Any<'_>, ReadF32<'_>),
    dtype: &str,
    head_dim: usize,
    output: (Any<'_>, PyReadwriteArray1<'_, f32>),
    how: (String, usize),
) -> PyResult<()> {
    let how = execution((&how.0, how.1))?;
    let (out_a, out_b) = (Read::new(&a.0, dtype)?, Read::new(&b.0, dtype)?);
    let (a, b) = ((out_a.elements()?, a.1.as_slice()?), (out_b.elements()?, b.1.as_slice()?));
    let (mut out, mut lse) = (Write::new(&output.0, dtype)?, output.1);
    let (out, lse) = (out.elements()?, lse.as_slice_mut()?);
    py.detach(|| kvblocks_cpu::merge_states(a, b, head_dim, out, lse, how)).map_err(to_python)
}

/// Read every element once, as a measure of what memory gives; returns a number without meaning.
#[pyfunction]
fn cpu_read_all(py: Python<'_>, elements: ReadF32<'_>, how: (String, usize)) -> PyResult<f32> {
    let (elements, how) = (elements.as_slice()?, execution((&how.0, how.1))?);
    Ok(py.detach(|| kvblocks_cpu::read_all(elements, how)))
}

/// The same of the blocks of `block_len` elements that a table names, in its order.
#[pyfunction]
fn cpu_read_blocks(
    py: Python<'_>,
    elements: ReadF32<'_>,
    block_len: usize,
    table: ReadI32<'_>,
    how: (String, usize),
) -> PyResult<f32> {
    let (elements, table, how) = (elements.as_slice()?, table.as_slice()?, execution((&how.0, how.1))?);
    py.detach(|| kvblocks_cpu::read_blocks(elements, block_len, table, how)).map_err(to_python)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cpu_simd, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_read_all, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_read_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_amax, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_write, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_attend, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_copy_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_gather, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_merge_states, module)?)
}
