//! Field reports P040 and P042: with a hasher that gives everything the same digest, collisions cost misses and nothing
//! else. Each test bears its number.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

use kvblocks_core::{
    AdmissionOptions, Algorithm, BlockHasher, Config, Counts, KeyValue, Keys, Manager, Media, Policy, Prompt,
    Refusal, RowState, SeqHandle, StepArrays, StepRequest,
};

const BLOCK_SIZE: usize = 4;
const MAX_TOKENS: usize = 64;

/// A manager whose blocks all have one digest.
fn manager(capacity: usize) -> Manager {
    let hasher = BlockHasher { algorithm: Algorithm::Degenerate, seed: 0 };
    Manager::new(Config::new(capacity + 1, BLOCK_SIZE, Some(hasher))).unwrap()
}

fn prompt(manager: &Manager, ids: &[u32], keys: Keys) -> Prompt {
    manager.preparer().prepare(ids.to_vec(), keys).unwrap()
}

/// Admit a prompt and compute all of it; returns its handle and the tokens that it found cached.
fn serve(manager: &mut Manager, prompt: &Prompt) -> (SeqHandle, usize) {
    let admitted = manager.allocate(prompt, AdmissionOptions::default()).unwrap().unwrap();
    let (handles, num_new) = ([admitted.handle], admitted.num_new_tokens as i32);
    let mut rows = [RowState::default()];
    let mut out = StepArrays {
        block_tables: &mut [0; 32],
        max_blocks: 32,
        slot_mapping: &mut [0; MAX_TOKENS],
        positions: &mut [0; MAX_TOKENS],
        seq_lens: &mut [0],
        query_start_loc: &mut [0; 2],
        copies: &mut [0; 2],
        changes: &mut [0; 3],
        rows: &mut rows,
    };
    let request = StepRequest {
        handles: &handles,
        num_new: Counts::All(num_new),
        lookahead: Counts::All(0),
        policy: Policy::All,
        pad_seqs: 0,
        pad_tokens: 0,
    };
    assert_eq!(manager.schedule(&request, &mut out).unwrap().refusal, None);
    manager.commit(&handles, Counts::All(num_new), &[]).unwrap();
    (admitted.handle, admitted.num_cached_tokens)
}

/// Leave a prompt's blocks in the cache.
fn cache(manager: &mut Manager, ids: &[u32], keys: Keys) {
    let prompt = prompt(manager, ids, keys);
    let (handle, _) = serve(manager, &prompt);
    manager.free(&[handle], false).unwrap();
}

fn hits(manager: &mut Manager, ids: &[u32], keys: Keys) -> usize {
    let prompt = prompt(manager, ids, keys);
    manager.match_prefix(&prompt, false).unwrap()
}

#[test]
fn p040_a_collision_is_a_miss_and_is_counted() {
    let mut manager = manager(8);
    cache(&mut manager, &[1, 2, 3, 4], Keys::default());
    let other = prompt(&manager, &[5, 6, 7, 8, 9], Keys::default());
    assert_eq!(other.hashes()[0], prompt(&manager, &[1, 2, 3, 4], Keys::default()).hashes()[0]);
    assert_eq!(manager.match_prefix(&other, false).unwrap(), 0);
    assert_eq!(manager.stats().collided_blocks, 0); // a question leaves no trace
    let (_, cached) = serve(&mut manager, &other);
    assert_eq!(cached, 0);
    let stats = manager.stats();
    assert_eq!((stats.collided_requests, stats.collided_blocks, stats.collided_tokens), (1, 1, 4));
    assert_eq!(manager.check_integrity(), Vec::<String>::new());
}

#[test]
fn p040_a_refused_admission_counts_no_collision() {
    let mut manager = manager(3);
    cache(&mut manager, &[1, 2, 3, 4], Keys::default());
    let running = prompt(&manager, &[20, 21, 22, 23, 24], Keys::default());
    serve(&mut manager, &running);
    let before = manager.stats();
    let refused = prompt(&manager, &[5, 6, 7, 8, 9], Keys::default());
    let answer = manager.allocate(&refused, AdmissionOptions::default()).unwrap();
    assert_eq!(answer.unwrap_err(), Refusal::Later { num_blocks: 1 });
    assert_eq!(manager.stats(), before);
}

#[test]
fn p042_a_collision_in_the_second_block_leaves_a_hit_of_one() {
    let mut manager = manager(8);
    cache(&mut manager, &[1, 2, 3, 4, 5, 6, 7, 8], Keys::default());
    assert_eq!(hits(&mut manager, &[1, 2, 3, 4, 5, 6, 7, 8, 0], Keys::default()), 8);
    assert_eq!(hits(&mut manager, &[1, 2, 3, 4, 5, 6, 7, 9, 0], Keys::default()), 4);
    // The same tokens after other ones are other content.
    assert_eq!(hits(&mut manager, &[9, 2, 3, 4, 5, 6, 7, 8, 0], Keys::default()), 0);
    assert_eq!(hits(&mut manager, &[5, 6, 7, 8, 0], Keys::default()), 0);
}

#[test]
fn p042_keys_are_compared_too() {
    let salt = |text: &str| Keys { salt: Some(KeyValue::Text(text.into())), ..Keys::default() };
    let media = |digest: u8| Keys {
        media: vec![Media::new(KeyValue::Bytes(vec![digest; 32]), 0, 4)],
        ..Keys::default()
    };
    let mut manager = manager(8);
    let (stored, asked) = ([7, 7, 7, 7], [7, 7, 7, 7, 0]);
    cache(&mut manager, &stored, salt("a"));
    cache(&mut manager, &stored, media(1));
    for (keys, expected) in
        [(salt("a"), 4), (media(1), 4), (salt("b"), 0), (media(2), 0), (Keys::default(), 0)]
    {
        assert_eq!(hits(&mut manager, &asked, keys), expected);
    }
}

#[test]
fn p042_an_eviction_takes_the_evicted_block_out_and_no_other() {
    let mut manager = manager(6);
    let stored: Vec<Vec<u32>> = (0..6).map(|n| vec![10 * n; BLOCK_SIZE]).collect();
    for ids in &stored {
        cache(&mut manager, ids, Keys::default());
    }
    for taken in 0..stored.len() {
        for (n, ids) in stored.iter().enumerate() {
            let asked: Vec<u32> = ids.iter().copied().chain([1]).collect();
            let expected = if n < taken { 0 } else { BLOCK_SIZE };
            assert_eq!(hits(&mut manager, &asked, Keys::default()), expected);
        }
        let fresh = prompt(&manager, &[1000 + taken as u32], Keys::default());
        manager.allocate(&fresh, AdmissionOptions::default()).unwrap().unwrap();
        assert_eq!(manager.check_integrity(), Vec::<String>::new());
    }
    assert_eq!(manager.stats().evicted_blocks, 6);
}
