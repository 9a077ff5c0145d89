//! The step allocates nothing: a counting allocator watches decode steps, chunks of prefill, copy-on-write and look-ahead
//! on a warm manager. It counts per thread, since the test harness has threads of its own.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvblocks_core::{
    AdmissionOptions, Algorithm, BlockHasher, Config, Counts, Keys, Manager, Policy, RowState, SeqHandle,
    StepArrays, StepRequest,
};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MAX_SEQS: usize = 32;
const MAX_BLOCKS: usize = 128;
const MAX_TOKENS: usize = 2048;

struct Buffers {
    int32: Vec<i32>,
    slot_mapping: Vec<i64>,
    rows: Vec<RowState>,
}

impl Buffers {
    fn new() -> Self {
        let int32 = vec![0; MAX_SEQS * MAX_BLOCKS + MAX_TOKENS + 7 * MAX_SEQS + 1];
        Self { int32, slot_mapping: vec![-1; MAX_TOKENS], rows: vec![RowState::default(); MAX_SEQS] }
    }

    fn arrays(&mut self) -> StepArrays<'_> {
        let (block_tables, rest) = self.int32.split_at_mut(MAX_SEQS * MAX_BLOCKS);
        let (positions, rest) = rest.split_at_mut(MAX_TOKENS);
        let (seq_lens, rest) = rest.split_at_mut(MAX_SEQS);
        let (query_start_loc, rest) = rest.split_at_mut(MAX_SEQS + 1);
        let (copies, changes) = rest.split_at_mut(2 * MAX_SEQS);
        StepArrays {
            block_tables,
            max_blocks: MAX_BLOCKS,
            slot_mapping: &mut self.slot_mapping,
            positions,
            seq_lens,
            query_start_loc,
            copies,
            changes,
            rows: &mut self.rows,
        }
    }
}

/// Schedule, and return how many allocations that took.
fn schedule(
    manager: &mut Manager,
    buffers: &mut Buffers,
    handles: &[SeqHandle],
    num_new: i32,
    lookahead: i32,
) -> usize {
    let request = StepRequest {
        handles,
        num_new: Counts::All(num_new),
        lookahead: Counts::All(lookahead),
        policy: Policy::All,
        pad_seqs: MAX_SEQS,
        pad_tokens: MAX_TOKENS,
    };
    let mut arrays = buffers.arrays();
    let before = ALLOCATIONS.with(Cell::get);
    let step = manager.schedule(&request, &mut arrays).unwrap();
    let after = ALLOCATIONS.with(Cell::get);
    assert_eq!(step.refusal, None);
    after - before
}

#[test]
fn a_warm_step_allocates_nothing() {
    let hasher = BlockHasher { algorithm: Algorithm::Xxh3, seed: 1 };
    let config = Config { series_every: 2, series_len: 16, ..Config::new(2048, 16, Some(hasher)) };
    let mut manager = Manager::new(config).unwrap();
    let mut buffers = Buffers::new();
    let mut handles = Vec::new();
    for i in 0..16u32 {
        let prompt = manager
            .preparer()
            .prepare((0..100 + i).map(|t| t * i).collect::<Vec<_>>(), Keys::default())
            .unwrap();
        handles.push(manager.allocate(&prompt, AdmissionOptions::default()).unwrap().unwrap().handle);
    }
    // The first step sizes the scratch space.
    schedule(&mut manager, &mut buffers, &handles, 50, 0);
    manager.commit(&handles, Counts::All(50), &[]).unwrap();
    let mut allocations = schedule(&mut manager, &mut buffers, &handles, 50, 4);
    manager.commit(&handles, Counts::All(50), &[]).unwrap();
    for step in 0..200 {
        if step == 61 {
            let mut children = Vec::new();
            manager.fork(&handles[..8], Counts::All(2), &mut children).unwrap();
            handles.append(&mut children);
        }
        let rows = handles.len().min(MAX_SEQS);
        allocations += schedule(&mut manager, &mut buffers, &handles[..rows], 1, step % 3);
        let known: usize = handles[..rows]
            .iter()
            .map(|&handle| manager.cursors(handle).unwrap())
            .filter(|cursors| cursors.num_computed < cursors.num_tokens)
            .count();
        manager.commit(&handles[..rows], Counts::All(1), &vec![step as u32; rows - known]).unwrap();
    }
    assert!(manager.stats().copied_blocks > 0, "no copy-on-write was seen");
    assert!(ALLOCATIONS.with(Cell::get) > 0, "the allocator counts nothing");
    assert_eq!(allocations, 0);
}
