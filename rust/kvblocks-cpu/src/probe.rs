//! How fast memory can be read, to compare kernels with. Imports `simd` and `threads`.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::simd::{Simd, Task};
use crate::threads::for_each;
use crate::Execution;

/// Elements of a unit of work.
const UNIT: usize = 256 << 10;

/// Read every element once with plain vector loads; the sum keeps the loads from being removed. O(elements).
///
/// A tail shorter than eight vectors is left out. The sum depends on the order of the threads.
pub fn read_all(elements: &[f32], execution: Execution) -> f32 {
    let total = AtomicU32::new(0);
    for_each(
        elements.len().div_ceil(UNIT),
        execution.num_threads,
        || (),
        |(), unit| {
            let part = &elements[unit * UNIT..elements.len().min((unit + 1) * UNIT)];
            let sum = execution.isa.run(Sum(part));
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
