//! The number formats that a cache or a query may have. Imports nothing of the crate.
//!
//! Invariant: conversion to f32 is exact; conversion from f32 rounds to nearest even and keeps a NaN a NaN.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// `f32`, `f16` or `bf16`.
pub trait Element: Copy + Send + Sync {
    /// Zero.
    const ZERO: Self;

    /// The values of `row` in f32: the row itself, or `scratch` filled from it.
    fn widen<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];

    /// Round the values of `source` into `row` of the same length.
    fn narrow(source: &[f32], row: &mut [Self]);
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    fn widen<'a>(row: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f32] {
        row
    }

    fn narrow(source: &[f32], row: &mut [Self]) {
        row.copy_from_slice(source);
    }
}

macro_rules! half_element {
    ($type:ty) => {
        impl Element for $type {
            const ZERO: Self = <$type>::ZERO;

            fn widen<'a>(row: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
                scratch.resize(row.len(), 0.0);
                row.convert_to_f32_slice(scratch);
                scratch
            }

            fn narrow(source: &[f32], row: &mut [Self]) {
                row.convert_from_f32_slice(source);
            }
        }
    };
}

half_element!(f16);
half_element!(bf16);
