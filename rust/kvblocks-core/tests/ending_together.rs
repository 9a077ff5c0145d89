//! Sequences that end in one call leave what they would leave one after the other: same counters, same cached content,
//! same blocks handed out next. `free` lets go of what neighbours share once for all of them, which nobody may see.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use kvblocks_core::{
    AdmissionOptions, Algorithm, BlockHasher, BlockId, Config, Counts, Keys, Manager, Policy, Publish,
    RowState, SeqHandle, StepArrays, StepRequest,
};
use proptest::prelude::*;

const MAX_BLOCKS: usize = 16;

/// Let some tokens of a sequence be scheduled, the arrays thrown away.
fn schedule(manager: &mut Manager, handle: SeqHandle, num_new: i32) {
    let (mut slots, mut int32) = (vec![0; 64], vec![vec![0; 64]; 6]);
    let mut rows = [RowState::default()];
    let [tables, positions, lens, starts, copies, changes] = &mut int32[..] else { unreachable!() };
    let mut arrays = StepArrays {
        block_tables: &mut tables[..MAX_BLOCKS],
        max_blocks: MAX_BLOCKS,
        slot_mapping: &mut slots,
        positions,
        seq_lens: &mut lens[..1],
        query_start_loc: &mut starts[..2],
        copies,
        changes,
        rows: &mut rows,
    };
    let request = StepRequest {
        handles: &[handle],
        num_new: Counts::All(num_new),
        lookahead: Counts::All(0),
        policy: Policy::All,
        pad_seqs: 0,
        pad_tokens: 0,
    };
    manager.schedule(&request, &mut arrays).unwrap();
}

/// A family of sequences with blocks in common: (of which parent, tokens of its own, whether they are committed).
fn family(publish: Publish, members: &[(usize, i32, bool)]) -> (Manager, Vec<SeqHandle>) {
    let hasher = BlockHasher { algorithm: Algorithm::Xxh3, seed: 1 };
    let mut manager = Manager::new(Config { publish, ..Config::new(200, 2, Some(hasher)) }).unwrap();
    let prompt = manager.preparer().prepare((0..9).collect::<Vec<_>>(), Keys::default()).unwrap();
    let mut handles = Vec::new();
    for &(parent, own, is_committed) in members {
        let parent = (parent % 4 > 0).then(|| handles.get(parent % handles.len().max(1)).copied()).flatten();
        let handle = match parent {
            Some(parent) => {
                let mut children = Vec::new();
                manager.fork(&[parent], Counts::All(1), &mut children).unwrap();
                children[0]
            }
            None => manager.allocate(&prompt, AdmissionOptions::default()).unwrap().unwrap().handle,
        };
        handles.push(handle);
        let cursors = manager.cursors(handle).unwrap();
        let left = (cursors.num_tokens - cursors.num_scheduled) as i32;
        schedule(&mut manager, handle, left + own);
        if is_committed {
            let ids: Vec<u32> = (0..own as u32).collect();
            manager.commit(&[handle], Counts::All(left + own), &ids).unwrap();
        }
    }
    (manager, handles)
}

/// Tables of what is admitted next: what is cached, and which blocks come in which order.
fn next_tables(manager: &mut Manager) -> Vec<(usize, Vec<BlockId>)> {
    let tables = (0..20u32).map(|number| {
        let ids: Vec<u32> = (0..9).chain((0..8).map(|i| i * (number % 3) + number / 3)).collect();
        let prompt = manager.preparer().prepare(ids, Keys::default()).unwrap();
        let answer = manager.allocate(&prompt, AdmissionOptions::default()).unwrap().unwrap();
        (answer.num_cached_tokens, manager.block_table(answer.handle).unwrap().to_vec())
    });
    tables.collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn is_as_ending_one_after_the_other(
        on_schedule in any::<bool>(),
        members in prop::collection::vec((any::<usize>(), 0..6i32, prop::bool::weighted(0.7)), 1..8),
        order in Just((0..8).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let publish = if on_schedule { Publish::OnSchedule } else { Publish::OnCommit };
        let [(mut together, handles), (mut singly, same)] = [family(publish, &members), family(publish, &members)];
        prop_assert_eq!(&handles, &same);
        let ending: Vec<_> = order.iter().filter_map(|&at| handles.get(at).copied()).collect();
        let freed = together.free(&ending, false).unwrap();
        let one_by_one: usize =
            ending.iter().map(|&handle| singly.free(&[handle], false).unwrap().num_blocks).sum();
        prop_assert_eq!(freed.num_blocks, one_by_one);
        prop_assert_eq!(together.stats(), singly.stats());
        prop_assert_eq!(together.check_integrity(), Vec::<String>::new());
        prop_assert_eq!(next_tables(&mut together), next_tables(&mut singly));
    }
}
