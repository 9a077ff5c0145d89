//! How fast memory can be read, to compare kernels with. Imports `error`, `paged`, `simd` and `threads`.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{wrong_index, Result};
use crate::paged::Paged;
use crate::simd::{Simd, Task};
use crate::threads::for_each;
use crate::Execution;

/// Elements of a unit of work, or of the one block that has more.
const UNIT: usize = 256 << 10;

/// Read every element once with plain vector loads; the sum keeps the loads from being removed. O(elements).
///
/// A tail shorter than eight vectors is left out. The sum depends on the order of the threads.
pub fn read_all(elements: &[f32], execution: Execution) -> f32 {
    read(elements.len().div_ceil(UNIT), execution, |unit| {
        std::iter::once(&elements[unit * UNIT..elements.len().min((unit + 1) * UNIT)])
    })
}

/// The same of blocks of `block_len` elements, in the order in which a table has them: what attention has to read.
///
/// A tail of each block shorter than eight vectors is left out. Err(Index) for an id of no block.
pub fn read_blocks(elements: &[f32], block_len: usize, table: &[i32], execution: Execution) -> Result<f32> {
    let num_blocks = elements.len().checked_div(block_len).unwrap_or(0);
    let paged = Paged::nhd(num_blocks, 1, 1, block_len)?;
    if let Some(row) = paged.wrong_column(table, 0..table.len()) {
        let problem = format!("row {row} is block {}, there are {num_blocks} blocks", table[row]);
        return wrong_index("table", problem);
    }
    let together = (UNIT / block_len.max(1)).max(1);
    Ok(read(table.len().div_ceil(together), execution, |unit| {
        let ids = &table[unit * together..table.len().min((unit + 1) * together)];
        ids.iter().map(|&id| &elements[id as usize * block_len..][..block_len])
    }))
}

/// Read the parts of each unit.
fn read<'a, P: Iterator<Item = &'a [f32]>>(
    num_units: usize,
    execution: Execution,
    parts: impl Fn(usize) -> P + Sync,
) -> f32 {
    let total = AtomicU32::new(0);
    for_each(
        num_units,
        execution.num_threads,
        || (),
        |(), unit| {
            let sum: f32 = parts(unit).map(|part| execution.isa.run(Sum(part))).sum();
            total.fetch_xor(sum.to_bits(), Ordering::Relaxed);
        },
    );
    f32::from_bits(total.into_inner())
}

struct Sum<'a>(&'a [f32]);

impl Task for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); 8];
        for part in self.0.chunks_exact(8 * S::LANES) {
            for (vector, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a part has eight vectors.
                *sum = simd.add(*sum, unsafe { simd.load(part.as_ptr().add(vector * S::LANES)) });
            }
        }
        sums.into_iter().map(|sum| simd.sum(sum)).sum()
    }
}
