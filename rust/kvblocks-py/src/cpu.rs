//! The kernels of kvblocks-cpu as functions over flat arrays. Imports the crate's types; no logic of its own.
//!
//! Arrays are 1-D and contiguous; 16-bit elements come as uint16 bits with the dtype's name beside them. K and V carry
//! their geometry: (block, token, head strides, num_blocks, block_size, num_heads, head_dim), in elements.
//! Invariant: the interpreter is released while a kernel runs; an error of the kernel is a ValueError.

use kvblocks_cpu::half::slice::HalfBitsSliceExt;
use kvblocks_cpu::half::{bf16, f16};
use kvblocks_cpu::{Batch, Cache, Element, Options, Output, Paged};
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// An element type and the array elements that carry it.
trait Carried: Element {
    type Bits: numpy::Element + Copy;
    fn elements(bits: &[Self::Bits]) -> &[Self];
    fn elements_mut(bits: &mut [Self::Bits]) -> &mut [Self];
}

impl Carried for f32 {
    type Bits = f32;

    fn elements(bits: &[f32]) -> &[f32] {
        bits
    }

    fn elements_mut(bits: &mut [f32]) -> &mut [f32] {
        bits
    }
}

macro_rules! carried_by_u16 {
    ($type:ty) => {
        impl Carried for $type {
            type Bits = u16;

            fn elements(bits: &[u16]) -> &[Self] {
                bits.reinterpret_cast()
            }

            fn elements_mut(bits: &mut [u16]) -> &mut [Self] {
                bits.reinterpret_cast_mut()
            }
        }
    };
}

carried_by_u16!(f16);
carried_by_u16!(bf16);

/// Run a body with `$type` standing for the dtype of that name.
macro_rules! with_dtype {
    ($name:expr, $type:ident => $body:expr) => {
        match $name {
            "float32" => {
                type $type = f32;
                $body
            }
            "float16" => {
                type $type = f16;
                $body
            }
            "bfloat16" => {
                type $type = bf16;
                $body
            }
            other => Err(PyValueError::new_err(format!("dtype is {other:?}, expected a cache dtype"))),
        }
    };
}

type Any<'py> = Bound<'py, PyAny>;
type Geometry = [usize; 7];
type ReadI32<'py> = PyReadonlyArray1<'py, i32>;
type ReadF32<'py> = PyReadonlyArray1<'py, f32>;

fn paged(geometry: Geometry) -> Paged {
    let [block_stride, token_stride, head_stride, num_blocks, block_size, num_heads, head_dim] = geometry;
    Paged { block_stride, token_stride, head_stride, num_blocks, block_size, num_heads, head_dim }
}

fn to_python(error: kvblocks_cpu::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn read<'py, T: Carried>(array: &Any<'py>) -> PyResult<PyReadonlyArray1<'py, T::Bits>> {
    array.extract()
}

fn read_write<'py, T: Carried>(array: &Any<'py>) -> PyResult<PyReadwriteArray1<'py, T::Bits>> {
    array.extract()
}

/// Store rows of one dtype in K or V of another.
#[pyfunction]
fn cpu_write(
    py: Python<'_>,
    cache: &Any<'_>,
    dtype: &str,
    geometry: Geometry,
    rows: &Any<'_>,
    rows_dtype: &str,
    slots: PyReadonlyArray1<'_, i64>,
) -> PyResult<()> {
    let (paged, slots) = (paged(geometry), slots.as_slice()?);
    with_dtype!(dtype, T => {
        let mut cache = read_write::<T>(cache)?;
        let cache = T::elements_mut(cache.as_slice_mut()?);
        if rows_dtype == dtype {
            let rows = read::<T>(rows)?;
            let rows = T::elements(rows.as_slice()?);
            py.detach(|| kvblocks_cpu::write(cache, &paged, rows, slots)).map_err(to_python)
        } else {
            with_dtype!(rows_dtype, S => {
                let rows = read::<S>(rows)?;
                let rows = S::elements(rows.as_slice()?);
                py.detach(|| kvblocks_cpu::write_converted(cache, &paged, rows, slots)).map_err(to_python)
            })
        }
    })
}

/// Attention of q (array, dtype, heads) over cache (dtype, (k, geometry), (v, geometry)).
///
/// batch: (tables, columns, lengths, query starts); options: (scale, window, soft cap, sinks, slopes);
/// output: (out, lse).
#[pyfunction]
fn cpu_attend(
    py: Python<'_>,
    q: (Any<'_>, String, usize),
    cache: (String, (Any<'_>, Geometry), (Any<'_>, Geometry)),
    batch: (ReadI32<'_>, usize, ReadI32<'_>, ReadI32<'_>),
    options: (f32, Option<usize>, Option<f32>, Option<ReadF32<'_>>, Option<ReadF32<'_>>),
    output: (Any<'_>, Option<PyReadwriteArray1<'_, f32>>),
) -> PyResult<()> {
    let (q, q_dtype, num_q_heads) = q;
    let (dtype, k, v) = cache;
    let (out, mut lse) = output;
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
    let lse = lse.as_mut().map(|array| array.as_slice_mut()).transpose()?;
    with_dtype!(q_dtype.as_str(), Q => with_dtype!(dtype.as_str(), T => {
        let (q, mut out) = (read::<Q>(&q)?, read_write::<Q>(&out)?);
        let (q, out) = (Q::elements(q.as_slice()?), Q::elements_mut(out.as_slice_mut()?));
        let (k_array, v_array) = (read::<T>(&k.0)?, read::<T>(&v.0)?);
        let k = Cache { data: T::elements(k_array.as_slice()?), paged: paged(k.1) };
        let v = Cache { data: T::elements(v_array.as_slice()?), paged: paged(v.1) };
        py.detach(|| kvblocks_cpu::attend(q, num_q_heads, k, v, batch, options, Output { out, lse }))
            .map_err(to_python)
    }))
}

/// Copy blocks of K or V of one layer; copies: (src, dst) pairs, flat.
#[pyfunction]
fn cpu_copy_blocks(
    py: Python<'_>,
    cache: &Any<'_>,
    dtype: &str,
    geometry: Geometry,
    copies: ReadI32<'_>,
) -> PyResult<()> {
    let (paged, copies) = (paged(geometry), copies.as_slice()?.as_chunks().0);
    with_dtype!(dtype, T => {
        let mut cache = read_write::<T>(cache)?;
        let cache = T::elements_mut(cache.as_slice_mut()?);
        py.detach(|| kvblocks_cpu::copy_blocks(cache, &paged, copies)).map_err(to_python)
    })
}

/// The first seq_len tokens of a sequence, from K or V, into out.
#[pyfunction]
fn cpu_gather(
    py: Python<'_>,
    cache: &Any<'_>,
    dtype: &str,
    geometry: Geometry,
    block_table: ReadI32<'_>,
    seq_len: usize,
    mut out: PyReadwriteArray1<'_, f32>,
) -> PyResult<()> {
    let (table, out) = (block_table.as_slice()?, out.as_slice_mut()?);
    with_dtype!(dtype, T => {
        let cache = read::<T>(cache)?;
        let cache = Cache { data: T::elements(cache.as_slice()?), paged: paged(geometry) };
        py.detach(|| kvblocks_cpu::gather(cache, table, seq_len, out)).map_err(to_python)
    })
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
) -> PyResult<()> {
    let (lse_a, lse_b) = (a.1.as_slice()?, b.1.as_slice()?);
    let (out, mut lse) = output;
    let lse = lse.as_slice_mut()?;
    with_dtype!(dtype, T => {
        let (a, b, mut out) = (read::<T>(&a.0)?, read::<T>(&b.0)?, read_write::<T>(&out)?);
        let (a, b) = ((T::elements(a.as_slice()?), lse_a), (T::elements(b.as_slice()?), lse_b));
        let out = T::elements_mut(out.as_slice_mut()?);
        py.detach(|| kvblocks_cpu::merge_states(a, b, head_dim, out, lse)).map_err(to_python)
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cpu_write, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_attend, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_copy_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_gather, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_merge_states, module)?)
}
