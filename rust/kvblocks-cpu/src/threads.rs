//! Running independent units of work on several threads. Imports nothing of the crate.
//!
//! Invariant: every unit runs exactly once, and no result depends on which thread runs it. The threads belong to the
//! process that started them: after a fork() the child starts its own, so it never waits for threads that it lacks.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// The threads of one process, besides the ones that call.
struct Pool {
    process: u32,
    threads: rayon::ThreadPool,
}

static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

/// A pool of at least `num_workers` threads in this process; None where the system gives no threads.
fn pool(num_workers: usize) -> Option<&'static Pool> {
    let process = std::process::id();
    let current = POOL.load(Ordering::Acquire);
    // SAFETY: what POOL points to is never freed: others may be using it, and there is one for each process and each
    // growth of the number of threads, no more.
    if let Some(pool) = unsafe { current.as_ref() } {
        if pool.process == process && pool.threads.current_num_threads() >= num_workers {
            return Some(pool);
        }
    }
    let threads = rayon::ThreadPoolBuilder::new()
        .num_threads(num_workers)
        .thread_name(|index| format!("kvblocks-cpu-{index}"))
        .build()
        .ok()?;
    let pool: &'static Pool = Box::leak(Box::new(Pool { process, threads }));
    // If another thread was quicker, both pools work; the last one is kept.
    POOL.store(std::ptr::from_ref(pool).cast_mut(), Ordering::Release);
    Some(pool)
}

/// Run `work(state, unit)` for every unit in 0..num_units on at most `num_threads` threads, the caller's among them.
///
/// `start` makes the state of a thread. Units are taken in order, by whichever thread is free.
pub(crate) fn for_each<W>(
    num_units: usize,
    num_threads: usize,
    start: impl Fn() -> W + Sync,
    work: impl Fn(&mut W, usize) + Sync,
) {
    for_each_ahead(num_units, num_threads, start, |state, unit, _| work(state, unit));
}

/// The same with a third argument: the unit that this thread runs next, None after the last. It is taken when it is asked
/// for, so the later in a unit that is, the better units are shared out.
pub(crate) fn for_each_ahead<W>(
    num_units: usize,
    num_threads: usize,
    start: impl Fn() -> W + Sync,
    work: impl Fn(&mut W, usize, &mut dyn FnMut() -> Option<usize>) + Sync,
) {
    let next = AtomicUsize::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&unit| unit < num_units);
    let run = || {
        let Some(mut unit) = take() else { return };
        let mut state = start();
        loop {
            let mut following = None;
            work(&mut state, unit, &mut || *following.get_or_insert_with(take));
            match following.unwrap_or_else(take) {
                Some(following) => unit = following,
                None => return,
            }
        }
    };
    let num_workers = num_threads.min(num_units).saturating_sub(1);
    let pool = if num_workers == 0 { None } else { pool(num_threads - 1) };
    match pool {
        None => run(),
        Some(pool) => pool.threads.in_place_scope(|scope| {
            for _ in 0..num_workers {
                scope.spawn(|_| run());
            }
            run();
        }),
    }
}

/// A slice whose parts several threads write, no part twice.
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: the parts that `part` gives out do not overlap, so sharing this is like having split the slice.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// # Safety
    /// While the part lives, no other part overlaps it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice, which is borrowed for as long as this lives; the caller's for the aliasing.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Copy elements to where `to` is; the two may overlap.
    ///
    /// # Safety
    /// Nobody writes the source meanwhile, and nobody reads or writes the destination.
    pub(crate) unsafe fn copy_within(&self, from: Range<usize>, to: usize) {
        assert!(from.start <= from.end && from.end <= self.len && to <= self.len - from.len());
        // SAFETY: within the slice, which is borrowed for as long as this lives; the caller's for other threads.
        unsafe { std::ptr::copy(self.start.add(from.start), self.start.add(to), from.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_runs_once() {
        for num_threads in [1, 2, 3, 8] {
            for num_units in [0, 1, 2, 100] {
                // A thread runs the unit that it was told of, if it was, and the last one is told that there is none.
                let start = || None;
                let seen = AtomicUsize::new(0);
                for_each_ahead(num_units, num_threads, start, |told: &mut Option<usize>, unit, following| {
                    assert!(told.is_none_or(|told| told == unit));
                    *told = if unit % 3 == 0 { None } else { following() };
                    assert!(unit % 3 == 0 || *told == following() && told.is_none_or(|told| told > unit));
                    seen.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(seen.into_inner(), num_units);
                let mut counts = vec![0; num_units];
                let parts = Parts::new(&mut counts);
                for_each(
                    num_units,
                    num_threads,
                    || (),
                    |(), unit| {
                        // SAFETY: each unit has a part of its own.
                        let count = unsafe { parts.part(unit..unit + 1) };
                        count[0] += 1;
                    },
                );
                assert!(counts.iter().all(|&count| count == 1));
            }
        }
    }
}
