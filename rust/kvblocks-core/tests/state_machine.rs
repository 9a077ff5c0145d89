//! Random walks over all verbs, the manager against the naive model. After every call: the same answer, the same
//! counters, a clean integrity check, and *content*: a simulated storage receives each step's copies and writes, where
//! the K/V of a token stands for its whole prefix, and every sequence must read its own history back.

#![allow(clippy::unwrap_used)] // in a test a panic is the report

mod naive;

use std::collections::HashMap;

use kvblocks_core::{
    AdmissionOptions, Algorithm, BlockHasher, BlockId, Config, Counts, Error, Freed, FullHit, KeyValue, Keys,
    Manager, Outcome, Policy, Prompt, Publish, Reuse, RowState, Scheduled, SeqHandle, Spare, StepArrays,
    StepRequest, TransferHandle, Usage,
};
use naive::{Ask, Behind, Naive, Name, Seq};
use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};

const MAX_SEQS: usize = 8;
const MAX_TOKENS: usize = 64;
const MAX_BLOCKS: usize = 40;

#[derive(Clone, Debug)]
enum Call {
    Allocate {
        tokens: Vec<u32>,
        options: Options,
    },
    /// (sequence, tokens, look-ahead, ids of unknown tokens) a row.
    Schedule {
        rows: Vec<(usize, usize, usize, Vec<u32>)>,
        fit: bool,
        layout: Layout,
    },
    Commit {
        rows: Vec<(usize, usize)>,
    },
    /// Compute one prompt several times at once, none hitting the other, and commit them in another order; of each some
    /// last tokens are not accepted.
    Twins {
        tokens: Vec<u32>,
        rows: Vec<(usize, Vec<u32>)>,
        order: Vec<usize>,
    },
    /// Schedule and commit the rest of the known tokens and `extra` more.
    Advance {
        seq: usize,
        extra: usize,
        ids: Vec<u32>,
    },
    Abort {
        seqs: Vec<usize>,
    },
    Fork {
        seqs: Vec<usize>,
        num_children: usize,
    },
    Reorder {
        seqs: Vec<usize>,
        parents: Vec<usize>,
    },
    Truncate {
        seq: usize,
        length: usize,
        keep: bool,
    },
    DropRange {
        seq: usize,
        start: usize,
        len: usize,
        unpublish: bool,
    },
    Preempt {
        seqs: Vec<usize>,
    },
    Resume {
        seq: usize,
        options: Options,
    },
    Free {
        seqs: Vec<usize>,
    },
    BeginTransfer {
        seq: usize,
        start: usize,
        len: usize,
    },
    EndTransfer {
        transfer: usize,
    },
    SetMaxTokens {
        seq: usize,
        most: usize,
    },
    Stale {
        verb: usize,
    },
    DropNamespace {
        namespace: u32,
    },
    ResetCache,
}

/// How rows are put into the step's arrays.
#[derive(Clone, Copy, Debug)]
struct Layout {
    is_padded: bool,
    /// To the rows that stand there, unless those are padded.
    is_appended: bool,
}

/// How a prompt is admitted.
#[derive(Clone, Copy, Debug)]
struct Options {
    reserve: Option<usize>,
    use_cache: bool,
    recompute_last: bool,
    max_tokens: Option<usize>,
    max_resident: Option<usize>,
    namespace: u32,
}

impl Options {
    const DEFAULT: Self = Self {
        reserve: None,
        use_cache: true,
        recompute_last: false,
        max_tokens: None,
        max_resident: None,
        namespace: 0,
    };

    fn strategy() -> impl Strategy<Value = Options> {
        (
            prop::option::of(0..24usize),
            prop::bool::weighted(0.9),
            prop::bool::weighted(0.1),
            prop::option::weighted(0.2, 0..24usize),
            prop::option::weighted(0.2, 1..8usize),
            prop_oneof![5 => Just(0u32), 1 => 1..3u32],
        )
            .prop_map(|(reserve, use_cache, recompute_last, max_tokens, max_resident, namespace)| {
                Options { reserve, use_cache, recompute_last, max_tokens, max_resident, namespace }
            })
    }

    fn core(self) -> AdmissionOptions {
        AdmissionOptions {
            reserve: self.reserve,
            use_cache: self.use_cache,
            recompute_last_hit: self.recompute_last,
            max_tokens: self.max_tokens,
            max_resident_blocks: self.max_resident,
        }
    }

    fn ask(self, num_tokens: usize) -> Ask {
        Ask {
            reserve: self.reserve.unwrap_or(num_tokens),
            use_cache: self.use_cache,
            recompute_last: self.recompute_last,
            max_tokens: self.max_tokens,
            max_resident: self.max_resident,
            namespace: self.namespace,
        }
    }
}

fn keys(namespace: u32) -> Keys {
    let salt = (namespace > 0).then(|| KeyValue::Int(namespace.into()));
    Keys { salt, ..Keys::default() }
}

/// The model, and the call that it is about to make on the manager.
#[derive(Clone, Debug)]
struct Reference {
    naive: Naive,
    degenerate_hash: bool,
    null_block: bool,
}

impl Reference {
    /// Distinct live sequences named by arbitrary numbers.
    fn pick(&self, picks: impl IntoIterator<Item = usize>) -> Vec<Name> {
        let names: Vec<Name> = self.naive.seqs.keys().copied().collect();
        let mut picked = Vec::new();
        for pick in picks {
            if let Some(&name) = names.get(pick % names.len().max(1)) {
                if !picked.contains(&name) {
                    picked.push(name);
                }
            }
        }
        picked
    }
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    // Few stems and a binary alphabet, so that prefixes are shared, diverge and collide.
    (0..3u32, 0..16usize, prop::collection::vec(0..2u32, 0..6))
        .prop_map(|(stem, len, tail)| (0..len as u32).map(|i| i * stem % 5).chain(tail).collect())
}

impl ReferenceStateMachine for Reference {
    type State = Reference;
    type Transition = Call;

    fn init_state() -> BoxedStrategy<Reference> {
        (
            (2..16usize, 1..5usize, 0..3usize),
            (any::<bool>(), any::<bool>(), prop::bool::weighted(0.85)),
            (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
            (prop_oneof![Just(MAX_TOKENS), 8..20usize], prop_oneof![Just(MAX_SEQS), 1..4usize]),
        )
            .prop_map(
                |(
                    (capacity, block_size, watermark),
                    (degenerate_hash, null_block, caching),
                    (token_hits, on_schedule, merge, first_freed),
                    (max_tokens, max_seqs),
                )| {
                    let mut naive = Naive::new(capacity, block_size, watermark.min(capacity), caching);
                    naive.full_hit = if token_hits { FullHit::Token } else { FullHit::WholeBlock };
                    naive.publish = if on_schedule { Publish::OnSchedule } else { Publish::OnCommit };
                    naive.merge = merge;
                    (naive.max_tokens, naive.max_seqs) = (max_tokens, max_seqs);
                    naive.reuse = if first_freed { Reuse::FirstFreed } else { Reuse::LastFreed };
                    Reference { naive, degenerate_hash, null_block }
                },
            )
            .boxed()
    }

    fn transitions(_: &Reference) -> BoxedStrategy<Call> {
        let seqs = || prop::collection::vec(any::<usize>(), 1..4);
        let ids = || prop::collection::vec(0..2u32, 1..4);
        prop_oneof![
            5 => (tokens(), Options::strategy()).prop_map(|(tokens, options)| Call::Allocate { tokens, options }),
            8 => (prop::collection::vec((any::<usize>(), 0..9usize, 0..3usize, ids()), 1..5), any::<[bool; 3]>())
                .prop_map(|(rows, [fit, is_padded, is_appended])| Call::Schedule {
                    rows,
                    fit,
                    layout: Layout { is_padded, is_appended },
                }),
            8 => prop::collection::vec((any::<usize>(), 0..10usize), 1..4).prop_map(|rows| Call::Commit { rows }),
            3 => (tokens(), prop::collection::vec((prop_oneof![2 => Just(0), 1 => 1..10usize], ids()), 2..5))
                .prop_flat_map(|(tokens, rows)| {
                    let order = Just((0..rows.len()).collect()).prop_shuffle();
                    (Just(tokens), Just(rows), order)
                })
                .prop_map(|(tokens, rows, order)| Call::Twins { tokens, rows, order }),
            8 => (any::<usize>(), 0..6usize, ids()).prop_map(|(seq, extra, ids)| Call::Advance { seq, extra, ids }),
            2 => (seqs(), 0..3usize).prop_map(|(seqs, num_children)| Call::Fork { seqs, num_children }),
            4 => (any::<usize>(), 0..24usize, any::<bool>())
                .prop_map(|(seq, length, keep)| Call::Truncate { seq, length, keep }),
            1 => seqs().prop_map(|seqs| Call::Preempt { seqs }),
            2 => (any::<usize>(), Options::strategy()).prop_map(|(seq, options)| Call::Resume { seq, options }),
            2 => seqs().prop_map(|seqs| Call::Abort { seqs }),
            2 => (seqs(), seqs()).prop_map(|(seqs, parents)| Call::Reorder { seqs, parents }),
            2 => (any::<usize>(), 0..12usize, 0..12usize, any::<bool>())
                .prop_map(|(seq, start, len, unpublish)| Call::DropRange { seq, start, len, unpublish }),
            1 => (any::<usize>(), 0..4usize, 0..4usize)
                .prop_map(|(seq, start, len)| Call::BeginTransfer { seq, start, len }),
            2 => any::<usize>().prop_map(|transfer| Call::EndTransfer { transfer }),
            1 => (any::<usize>(), 0..24usize).prop_map(|(seq, most)| Call::SetMaxTokens { seq, most }),
            1 => (1..3u32).prop_map(|namespace| Call::DropNamespace { namespace }),
            4 => seqs().prop_map(|seqs| Call::Free { seqs }),
            1 => (0..12usize).prop_map(|verb| Call::Stale { verb }),
            1 => Just(Call::ResetCache),
        ]
        .boxed()
    }

    fn apply(state: Reference, _: &Call) -> Reference {
        // The model moves together with the manager, in `apply` of the test below, where answers are compared.
        state
    }
}

struct Test {
    reference: Reference,
    manager: Manager,
    handles: HashMap<Name, SeqHandle>,
    /// Prompts handed out by preemptions.
    histories: HashMap<Name, Prompt>,
    /// slot -> the token prefix whose last K/V stands there.
    storage: HashMap<i64, Vec<u32>>,
    step: Buffers,
    /// The other buffers of a ring of two: its rows show what the tables were a step ago.
    spare: Buffers,
    /// What `step` holds.
    held: Scheduled,
    held_rows: Vec<(Name, SeqHandle, Seq)>,
    /// A truncate or drop_range came since.
    was_cut: bool,
    is_padded: bool,
    freed: Vec<SeqHandle>,
    transfers: HashMap<u32, TransferHandle>,
}

struct Buffers {
    block_tables: Vec<i32>,
    slot_mapping: Vec<i64>,
    positions: Vec<i32>,
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    copies: Vec<i32>,
    changes: Vec<i32>,
    rows: Vec<RowState>,
}

impl Buffers {
    fn new(padding: i32, max_seqs: usize, max_tokens: usize) -> Self {
        Self {
            block_tables: vec![padding; max_seqs * MAX_BLOCKS],
            slot_mapping: vec![-1; max_tokens],
            positions: vec![0; max_tokens],
            seq_lens: vec![0; max_seqs],
            query_start_loc: vec![0; max_seqs + 1],
            copies: vec![0; 2 * max_seqs],
            changes: vec![0; 3 * max_seqs],
            rows: vec![RowState::default(); max_seqs],
        }
    }

    fn arrays(&mut self) -> StepArrays<'_> {
        StepArrays {
            block_tables: &mut self.block_tables,
            max_blocks: MAX_BLOCKS,
            slot_mapping: &mut self.slot_mapping,
            positions: &mut self.positions,
            seq_lens: &mut self.seq_lens,
            query_start_loc: &mut self.query_start_loc,
            copies: &mut self.copies,
            changes: &mut self.changes,
            rows: &mut self.rows,
        }
    }
}

/// As one count, where all are the same.
fn counts_of(each: &[i32]) -> Counts<'_> {
    match each {
        [first, rest @ ..] if rest.iter().all(|count| count == first) => Counts::All(*first),
        _ => Counts::Each(each),
    }
}

impl Test {
    fn naive(&mut self) -> &mut Naive {
        &mut self.reference.naive
    }

    fn handle(&self, name: Name) -> SeqHandle {
        self.handles[&name]
    }

    fn slot(&self, handle: SeqHandle, position: usize) -> i64 {
        let block_size = self.manager.block_size();
        let table = self.manager.block_table(handle).unwrap();
        (table[position / block_size].index() * block_size + position % block_size) as i64
    }

    fn allocate(&mut self, prompt: &Prompt, options: Options, resumes: Option<Name>) {
        let tokens = prompt.ids().to_vec();
        let ask = options.ask(tokens.len());
        let found = self.manager.match_prefix(prompt, options.recompute_last).unwrap();
        assert_eq!(found, self.reference.naive.cached_tokens(&tokens, Ask { use_cache: true, ..ask }));
        let expected = self.naive().can_allocate(&tokens, ask, resumes);
        let could = self.manager.can_allocate(prompt, options.core()).unwrap();
        assert_eq!(could.map(|ok| (ok.num_cached_tokens, ok.num_new_blocks)), expected);
        let expected = self.naive().allocate(&tokens, ask, resumes);
        let answer = self.manager.allocate(prompt, options.core()).unwrap();
        assert_eq!(answer.map(|got| got.num_cached_tokens), expected.map(|(_, cached)| cached));
        if let (Ok(answer), Ok((name, cached))) = (answer, expected) {
            assert_eq!(answer.num_new_tokens, tokens.len() - cached);
            let before = self.handles.insert(name, answer.handle);
            assert!(resumes.is_none() || before == Some(answer.handle));
            self.histories.remove(&name);
        }
    }

    fn schedule(&mut self, rows: &[(usize, usize, usize, Vec<u32>)], fit: bool, layout: Layout) {
        let mut batch: Vec<(Name, usize, usize, Vec<u32>)> = Vec::new();
        for (pick, num_new, lookahead, ids) in rows {
            for name in self.reference.pick([*pick]) {
                let seq = &self.naive().seqs[&name];
                if !seq.preempted && seq.in_flight.len() < 8 && batch.iter().all(|row| row.0 != name) {
                    batch.push((name, *num_new, *lookahead, ids.clone()));
                }
            }
        }
        self.schedule_batch(batch, fit, layout);
    }

    fn schedule_batch(&mut self, batch: Vec<(Name, usize, usize, Vec<u32>)>, fit: bool, layout: Layout) {
        let handles: Vec<_> = batch.iter().map(|row| self.handle(row.0)).collect();
        let num_new: Vec<_> = batch.iter().map(|row| row.1 as i32).collect();
        let lookahead: Vec<_> = batch.iter().map(|row| row.2 as i32).collect();
        let request = StepRequest {
            handles: &handles,
            num_new: counts_of(&num_new),
            lookahead: counts_of(&lookahead),
            policy: if fit { Policy::Fit } else { Policy::All },
            pad_seqs: if layout.is_padded { self.reference.naive.max_seqs } else { 0 },
            pad_tokens: if layout.is_padded { self.reference.naive.max_tokens } else { 0 },
        };
        let held = match layout.is_appended && !self.is_padded {
            true => self.held,
            false => Scheduled::default(),
        };
        let behind = Behind {
            num_seqs: held.num_seqs,
            num_tokens: held.num_tokens,
            is_appended: layout.is_appended && !self.is_padded,
        };
        let is_stale = behind.is_appended && !self.holds_step_beside(&batch);
        if !behind.is_appended {
            self.turn();
        }
        let shown = self.step.block_tables.clone();
        let result = match behind.is_appended {
            true => self.manager.append(&request, &mut self.step.arrays(), &held),
            false => self.manager.schedule(&request, &mut self.step.arrays()),
        };
        if is_stale || self.reference.naive.schedule_error(&batch, fit, behind) {
            result.unwrap_err();
            if !behind.is_appended {
                self.turn();
            }
            return;
        }
        if matches!(result, Err(Error::StaleRow { .. })) {
            // Cut or dropped since, to the same table: refused too.
            assert!(behind.is_appended && self.was_cut);
            return;
        }
        let starts: Vec<_> = batch.iter().map(|row| self.reference.naive.seqs[&row.0].scheduled).collect();
        let (expected_rows, expected_refusal) = self.reference.naive.schedule(&batch, fit, behind);
        let mut step = result.unwrap();
        assert_eq!((step.num_seqs, step.refusal), (held.num_seqs + expected_rows, expected_refusal));
        self.check_changes(shown, held.num_changes..step.num_changes);
        if step.refusal.is_some() && !fit {
            assert_eq!(Scheduled { refusal: None, ..step }, Scheduled { refusal: None, ..held });
            if !behind.is_appended {
                self.turn();
            }
            return;
        }
        (self.held, self.is_padded) = (step, layout.is_padded);
        self.was_cut &= behind.is_appended;
        self.held_rows.truncate(held.num_seqs);
        let naive = &self.reference.naive;
        let rows = batch.iter().zip(&handles).take(expected_rows);
        self.held_rows.extend(rows.map(|(row, &handle)| (row.0, handle, naive.seqs[&row.0].clone())));
        if behind.is_appended {
            assert_eq!(step.num_copies, held.num_copies);
            step.num_copies = 0; // made already
        }
        self.run_step(&handles[..expected_rows], &batch, &starts, &held, &step);
        let rows = step.num_seqs;
        if layout.is_padded {
            let (starts, lens) = (&self.step.query_start_loc[rows..], &self.step.seq_lens[rows..]);
            assert!(starts.iter().all(|&start| start as usize == step.num_tokens));
            assert!(lens.iter().all(|&len| len == 0));
            assert!(self.step.slot_mapping[step.num_tokens..].iter().all(|&slot| slot == -1));
            let padding = &self.step.block_tables[rows * MAX_BLOCKS..];
            assert!(padding.iter().all(|&block| block == self.manager.padding()));
        }
    }

    /// Go to the other buffers of the ring, or back.
    fn turn(&mut self) {
        std::mem::swap(&mut self.step, &mut self.spare);
    }

    /// Whether the rows of the step are in flight as it shows them, and none of them is in the batch.
    fn holds_step_beside(&self, batch: &[(Name, usize, usize, Vec<u32>)]) -> bool {
        self.held_rows.iter().all(|(name, handle, shown)| {
            let seq = self.reference.naive.seqs.get(name).filter(|_| self.handles.get(name) == Some(handle));
            seq.is_some_and(|seq| {
                !seq.in_flight.is_empty() && seq.scheduled == shown.scheduled && seq.table == shown.table
            }) && batch.iter().all(|row| row.0 != *name)
        })
    }

    /// Whoever applies the changes to an old copy of the tables gets the new ones.
    fn check_changes(&self, mut shown: Vec<i32>, added: std::ops::Range<usize>) {
        for change in self.step.changes[3 * added.start..3 * added.end].chunks(3) {
            let [row, first, columns] = [change[0] as usize, change[1] as usize, change[2] as usize];
            assert!(columns > 0);
            let range = row * MAX_BLOCKS + first..row * MAX_BLOCKS + first + columns;
            shown[range.clone()].copy_from_slice(&self.step.block_tables[range]);
        }
        assert_eq!(shown, self.step.block_tables);
    }

    /// Check the index arrays, then do with them what an engine would.
    fn run_step(
        &mut self,
        handles: &[SeqHandle],
        batch: &[(Name, usize, usize, Vec<u32>)],
        starts: &[usize],
        held: &Scheduled,
        step: &Scheduled,
    ) {
        let pairs: Vec<(i32, i32)> =
            self.step.copies[..2 * step.num_copies].chunks(2).map(|pair| (pair[0], pair[1])).collect();
        for (i, &(src, dst)) in pairs.iter().enumerate() {
            assert!(pairs.iter().all(|&(other, _)| other != dst), "{dst} is source and destination");
            assert!(pairs[..i].iter().all(|&(_, other)| other != dst), "{dst} is written twice");
            for offset in 0..self.manager.block_size() as i64 {
                let slot = |block: i32| i64::from(block) * self.manager.block_size() as i64 + offset;
                match self.storage.get(&slot(src)).cloned() {
                    Some(content) => self.storage.insert(slot(dst), content),
                    None => self.storage.remove(&slot(dst)),
                };
            }
        }
        let mut at = held.num_tokens;
        for (i, &handle) in handles.iter().enumerate() {
            let row = held.num_seqs + i;
            let seq = self.reference.naive.seqs[&batch[i].0].clone();
            let table = self.manager.block_table(handle).unwrap();
            let table: Vec<i32> = table.iter().map(|block| block.export(self.manager.padding())).collect();
            let written = &self.step.block_tables[row * MAX_BLOCKS..][..MAX_BLOCKS];
            assert_eq!(&written[..table.len()], &table[..]);
            assert!(written[table.len()..].iter().all(|&block| block == self.manager.padding()));
            let named = self.manager.block_table(handle).unwrap();
            assert!(
                !self.reference.null_block || !named.contains(&BlockId(0)),
                "the null block was handed out"
            );
            assert_eq!(self.step.seq_lens[row] as usize, seq.scheduled);
            assert_eq!(self.step.query_start_loc[row] as usize, at);
            for position in starts[i]..seq.scheduled {
                assert_eq!(self.step.positions[at] as usize, position);
                assert_eq!(self.step.slot_mapping[at], self.slot(handle, position));
                self.storage.insert(self.step.slot_mapping[at], seq.tokens[..=position].to_vec());
                at += 1;
            }
        }
        assert_eq!((at, self.step.query_start_loc[step.num_seqs] as usize), (step.num_tokens, at));
    }

    fn commit(&mut self, rows: &[(usize, usize)]) {
        let mut batch: Vec<(Name, usize)> = Vec::new();
        for &(pick, count) in rows {
            for name in self.reference.pick([pick]) {
                if batch.iter().all(|row| row.0 != name) {
                    // Mostly the whole step, since a wrong count in one row refuses the batch.
                    let step = self.naive().seqs[&name].in_flight.first().map_or(0, |step| step.0);
                    batch.push((name, if count > 6 { count } else { step.saturating_sub(count / 3) }));
                }
            }
        }
        self.commit_batch(batch);
    }

    fn commit_batch(&mut self, batch: Vec<(Name, usize)>) {
        let handles: Vec<_> = batch.iter().map(|row| self.handle(row.0)).collect();
        let counts: Vec<_> = batch.iter().map(|row| row.1 as i32).collect();
        if batch.iter().any(|&(name, count)| self.reference.naive.commit_error(name, count)) {
            self.manager.commit(&handles, Counts::Each(&counts), &[]).unwrap_err();
            return;
        }
        let ids: Vec<u32> =
            batch.iter().flat_map(|&(name, count)| self.reference.naive.unknown_ids(name, count)).collect();
        let all: Vec<u32> =
            batch.iter().flat_map(|&(name, count)| self.naive().accepted_ids(name, count)).collect();
        let superfluous = vec![0; all.len() + 1];
        self.manager.commit(&handles, Counts::Each(&counts), &superfluous).unwrap_err();
        // Either form will do: the unknown ids, or all of them.
        let ids = if counts.len() % 2 == 0 { all } else { ids };
        for &(name, count) in &batch {
            self.naive().commit(name, count);
        }
        for &(name, count) in &batch {
            self.naive().merge_filled(name, count);
        }
        self.naive().note_peak();
        self.manager.commit(&handles, counts_of(&counts), &ids).unwrap();
    }

    fn advance(&mut self, name: Name, extra: usize, ids: Vec<u32>) {
        let seq = &self.naive().seqs[&name];
        if !seq.preempted && seq.in_flight.is_empty() {
            let num_new = seq.known() - seq.scheduled + extra;
            let layout = Layout { is_padded: num_new.is_multiple_of(2), is_appended: false };
            self.schedule_batch(vec![(name, num_new, 0, ids)], false, layout);
            if !self.naive().seqs[&name].in_flight.is_empty() {
                self.commit_batch(vec![(name, num_new)]);
            }
        }
    }

    fn twins(&mut self, tokens: &[u32], rows: &[(usize, Vec<u32>)], order: &[usize]) {
        let prompt = self.manager.preparer().prepare(tokens, Keys::default()).unwrap();
        let known: Vec<Name> = self.naive().seqs.keys().copied().collect();
        for _ in rows {
            self.allocate(&prompt, Options { use_cache: false, ..Options::DEFAULT }, None);
        }
        let twins: Vec<Name> =
            self.naive().seqs.keys().copied().filter(|name| !known.contains(name)).collect();
        // A token more than is known, of some the same.
        let batch: Vec<_> =
            twins.iter().zip(rows).map(|(&name, row)| (name, tokens.len() + 1, 0, row.1.clone())).collect();
        self.schedule_batch(batch, true, Layout { is_padded: false, is_appended: false });
        let counts = order.iter().filter_map(|&row| {
            let name = *twins.get(row)?;
            let step = self.reference.naive.seqs[&name].in_flight.first()?.0;
            Some((name, step.saturating_sub(rows[row].0)))
        });
        let counts = counts.collect();
        self.commit_batch(counts);
    }

    fn fork(&mut self, names: &[Name], num_children: usize) {
        let handles: Vec<_> = names.iter().map(|&name| self.handle(name)).collect();
        let mut children = Vec::new();
        let counts = Counts::All(num_children as i32);
        if names.iter().any(|name| self.reference.naive.seqs[name].preempted) {
            self.manager.fork(&handles, counts, &mut children).unwrap_err();
            assert!(children.is_empty());
            return;
        }
        self.manager.fork(&handles, counts, &mut children).unwrap();
        assert_eq!(children.len(), names.len() * num_children);
        for (i, child) in children.into_iter().enumerate() {
            let name = self.naive().fork(names[i / num_children]);
            self.handles.insert(name, child);
        }
    }

    fn stale(&mut self, verb: usize) {
        let Some(&handle) = self.freed.last() else { return };
        let (manager, one) = (&mut self.manager, [handle]);
        let error = match verb {
            0 => manager.commit(&one, Counts::All(0), &[]).unwrap_err(),
            1 => manager.fork(&one, Counts::All(1), &mut Vec::new()).unwrap_err(),
            2 => manager.truncate(&one, Counts::All(0), Spare::Free).unwrap_err(),
            3 => manager.preempt(&one).map(|_| ()).unwrap_err(),
            4 => manager.free(&one, false).unwrap_err(),
            5 => manager.cursors(handle).unwrap_err(),
            6 => manager.abort_step(&one).unwrap_err(),
            7 => manager.reorder(&one, &[0]).unwrap_err(),
            8 => manager.drop_range(handle, 0, 0, false).unwrap_err(),
            9 => manager.begin_transfer(handle, 0, 0).unwrap_err(),
            10 => manager.set_max_tokens(&one, Counts::All(1)).unwrap_err(),
            _ => {
                assert_eq!(manager.free(&one, true), Ok(Freed::default()));
                return;
            }
        };
        assert_eq!(error, kvblocks_core::Error::StaleHandle(handle));
    }

    fn check(&mut self) {
        assert_eq!(self.manager.check_integrity(), Vec::<String>::new());
        let (naive, stats) = (&self.reference.naive, self.manager.stats());
        assert_eq!((stats.capacity_blocks, stats.free_blocks), (naive.capacity, naive.num_free()));
        assert_eq!(self.manager.fragmentation().free_blocks, naive.num_free());
        let expected = naive.gauges();
        assert_eq!((gauges(&stats), tally(&stats)), (naive::sum(&expected), naive.tally));
        let total = stats.free_blocks + stats.live_blocks + stats.cached_blocks + stats.held_blocks;
        assert_eq!(total, naive.capacity);
        let size = naive.block_size as u64;
        assert_eq!(stats.allocated_slots, stats.live_blocks as u64 * size);
        assert_eq!(stats.evicted_tokens, stats.evicted_blocks * size);
        for (namespace, expected) in (0..).zip(expected.into_iter().zip(naive.tallies)) {
            let usage = self.manager.namespace_usage(&keys(namespace)).unwrap();
            assert_eq!((gauges(&usage), tally(&usage)), expected, "namespace {namespace}");
        }
        let names: Vec<_> = naive.seqs.keys().copied().collect();
        for group in [&names[..names.len().min(1)], &names[names.len() / 2..], &names] {
            let handles: Vec<_> = group.iter().map(|name| self.handles[name]).collect();
            let usage = self.manager.sequence_usage(&handles).unwrap();
            let blocks = [usage.live_blocks, usage.shared_blocks, usage.reclaimable_blocks];
            let rest = [usage.logical_blocks, usage.used_slots as usize, usage.reserved_slots];
            let found: Vec<_> = blocks.into_iter().chain(rest).collect();
            assert_eq!(found, naive.group_usage(group));
        }
        for (name, seq) in &naive.seqs {
            let handle = self.handles[name];
            let cursors = self.manager.cursors(handle).unwrap();
            assert_eq!(
                (cursors.num_tokens, cursors.num_computed, cursors.num_scheduled, cursors.num_reserved),
                (seq.known(), seq.computed, seq.scheduled, seq.reserved)
            );
            assert_eq!(cursors.is_preempted, seq.preempted);
            assert_eq!(self.manager.tokens(handle).unwrap(), seq.tokens[..seq.known()]);
            let seen: Vec<_> =
                (0..seq.scheduled).filter(|p| seq.table[p / naive.block_size] != naive::HOLE).collect();
            for position in seen {
                let stored = self.storage.get(&self.slot(handle, position));
                assert_eq!(
                    stored.map(|prefix| &prefix[..]),
                    Some(&seq.tokens[..=position]),
                    "K/V of another"
                );
            }
        }
    }
}

/// A snapshot's current use, as the model has it.
fn gauges(usage: &Usage) -> naive::Gauges {
    [
        usage.live_blocks,
        usage.cached_blocks,
        usage.held_blocks,
        usage.logical_blocks,
        usage.promised_blocks,
        usage.num_seqs,
        usage.used_slots as usize,
        usage.reserved_slots,
    ]
}

/// A snapshot's totals and peaks, as the model has them.
fn tally(usage: &Usage) -> naive::Tally {
    naive::Tally {
        queried: [usage.queried_requests, usage.queried_blocks, usage.queried_tokens],
        hit: [usage.hit_requests, usage.hit_blocks, usage.hit_tokens],
        readmit_queried: [usage.readmit_requests, usage.readmit_queried_blocks, usage.readmit_queried_tokens],
        readmit_hit: [usage.readmit_hit_requests, usage.readmit_hit_blocks, usage.readmit_hit_tokens],
        evicting: usage.evicting_requests,
        evicted: usage.evicted_blocks,
        copied: usage.copied_blocks,
        preemptions: usage.preemptions,
        peak_live: usage.peak_live_blocks,
        peak_logical: usage.peak_logical_blocks,
    }
}

impl StateMachineTest for Test {
    type SystemUnderTest = Test;
    type Reference = Reference;

    fn init_test(reference: &Reference) -> Test {
        let naive = &reference.naive;
        let algorithm = match reference.degenerate_hash {
            true => Algorithm::Degenerate,
            false if reference.null_block => Algorithm::Xxh3,
            false => Algorithm::Sha256,
        };
        let hasher = naive.caching.then_some(BlockHasher { algorithm, seed: 1 });
        let manager = Manager::new(Config {
            watermark_blocks: naive.watermark,
            null_block: reference.null_block,
            full_hit: naive.full_hit,
            publish: naive.publish,
            merge: naive.merge,
            reuse: naive.reuse,
            ..Config::new(naive.capacity + usize::from(reference.null_block), naive.block_size, hasher)
        })
        .unwrap();
        Test {
            step: Buffers::new(manager.padding(), naive.max_seqs, naive.max_tokens),
            spare: Buffers::new(manager.padding(), naive.max_seqs, naive.max_tokens),
            reference: reference.clone(),
            manager,
            handles: HashMap::new(),
            histories: HashMap::new(),
            storage: HashMap::new(),
            held: Scheduled::default(),
            held_rows: Vec::new(),
            was_cut: false,
            is_padded: false,
            freed: Vec::new(),
            transfers: HashMap::new(),
        }
    }

    fn apply(mut test: Test, _: &Reference, call: Call) -> Test {
        test.was_cut |= matches!(call, Call::Truncate { .. } | Call::DropRange { .. } | Call::Reorder { .. });
        match call {
            Call::Allocate { tokens, options } => {
                let prompt = test.manager.preparer().prepare(tokens, keys(options.namespace)).unwrap();
                test.allocate(&prompt, options, None);
            }
            Call::Schedule { rows, fit, layout } => test.schedule(&rows, fit, layout),
            Call::Commit { rows } => test.commit(&rows),
            Call::Advance { seq, extra, ids } => {
                for name in test.reference.pick([seq]) {
                    test.advance(name, extra, ids.clone());
                }
            }
            Call::Twins { tokens, rows, order } => test.twins(&tokens, &rows, &order),
            Call::Fork { seqs, num_children } => {
                let names = test.reference.pick(seqs);
                test.fork(&names, num_children);
            }
            Call::Truncate { seq, length, keep } => {
                for name in test.reference.pick([seq]) {
                    let spare = if keep { Spare::Keep } else { Spare::Free };
                    let handle = test.handle(name);
                    let answer = test.manager.truncate(&[handle], Counts::All(length as i32), spare);
                    match test.reference.naive.truncate_error(name, length) {
                        true => assert!(answer.is_err()),
                        false => assert_eq!(answer, Ok(test.naive().truncate(name, length, spare))),
                    }
                }
            }
            Call::Preempt { seqs } => {
                let names = test.reference.pick(seqs);
                let handles: Vec<_> = names.iter().map(|&name| test.handle(name)).collect();
                let prompts = test.manager.preempt(&handles).unwrap();
                for (name, prompt) in names.into_iter().zip(prompts) {
                    assert_eq!(prompt.ids(), test.naive().preempt(name));
                    assert_eq!(prompt.handle(), Some(test.handle(name)));
                    test.histories.insert(name, prompt);
                }
            }
            Call::Abort { seqs } => {
                let names = test.reference.pick(seqs);
                let handles: Vec<_> = names.iter().map(|&name| test.handle(name)).collect();
                if names.iter().any(|&name| test.reference.naive.abort_error(name)) {
                    test.manager.abort_step(&handles).unwrap_err();
                } else {
                    names.iter().for_each(|&name| test.naive().abort(name));
                    test.manager.abort_step(&handles).unwrap();
                }
            }
            Call::Reorder { seqs, parents } => {
                let names = test.reference.pick(seqs);
                let handles: Vec<_> = names.iter().map(|&name| test.handle(name)).collect();
                let parents: Vec<_> =
                    (0..names.len()).map(|row| parents[row % parents.len()] % names.len()).collect();
                let rows: Vec<_> = parents.iter().map(|&parent| parent as i32).collect();
                let busy = |name| {
                    let seq: &naive::Seq = &test.reference.naive.seqs[name];
                    seq.preempted || !seq.in_flight.is_empty()
                };
                if names.iter().any(busy) {
                    test.manager.reorder(&handles, &rows).unwrap_err();
                } else {
                    test.naive().reorder(&names, &parents);
                    test.manager.reorder(&handles, &rows).unwrap();
                }
            }
            Call::DropRange { seq, start, len, unpublish } => {
                for name in test.reference.pick([seq]) {
                    let handle = test.handle(name);
                    let answer = test.manager.drop_range(handle, start, start + len, unpublish);
                    let seq = &test.reference.naive.seqs[&name];
                    if seq.preempted || start + len > seq.known() {
                        answer.unwrap_err();
                    } else {
                        let expected = test.naive().drop_range(name, start, start + len, unpublish);
                        let answer = answer.unwrap();
                        assert_eq!((answer.start, answer.end, answer.num_blocks), expected);
                    }
                }
            }
            Call::BeginTransfer { seq, start, len } => {
                for name in test.reference.pick([seq]) {
                    let handle = test.handle(name);
                    let answer = test.manager.begin_transfer(handle, start, start + len);
                    let seq = &test.reference.naive.seqs[&name];
                    if seq.preempted || start + len > seq.table.len() {
                        answer.unwrap_err();
                    } else {
                        let transfer = test.naive().begin_transfer(name, start, start + len);
                        test.transfers.insert(transfer, answer.unwrap());
                    }
                }
            }
            Call::EndTransfer { transfer } => {
                let names: Vec<_> = test.naive().transfers.keys().copied().collect();
                if let Some(&name) = names.get(transfer % names.len().max(1)) {
                    let handle = test.transfers[&name];
                    let expected = test.naive().end_transfer(name);
                    assert_eq!(test.manager.end_transfer(handle, Outcome::Complete), Ok(expected));
                    test.manager.end_transfer(handle, Outcome::Failed).unwrap_err();
                }
            }
            Call::SetMaxTokens { seq, most } => {
                for name in test.reference.pick([seq]) {
                    let handle = test.handle(name);
                    let answer = test.manager.set_max_tokens(&[handle], Counts::All(most as i32));
                    let is_bounded = test.naive().seqs[&name].max_resident.is_none();
                    if is_bounded && most > test.naive().capacity * test.naive().block_size {
                        answer.unwrap_err();
                    } else {
                        answer.unwrap();
                        test.naive().seqs.get_mut(&name).unwrap().max_tokens = Some(most);
                    }
                }
            }
            Call::DropNamespace { namespace } => {
                let expected = test.naive().drop_namespace(namespace);
                assert_eq!(test.manager.drop_namespace(&keys(namespace)), Ok(expected));
            }
            Call::Resume { seq, options } => {
                for name in test.reference.pick([seq]) {
                    if let Some(prompt) = test.histories.get(&name).cloned() {
                        let namespace = test.reference.naive.seqs[&name].namespace;
                        let options = Options { namespace, ..options };
                        test.allocate(&prompt, options, Some(name));
                        if !test.histories.contains_key(&name) {
                            test.manager.allocate(&prompt, options.core()).unwrap_err();
                        }
                    }
                }
            }
            Call::Free { seqs } => {
                let names = test.reference.pick(seqs);
                let handles: Vec<_> = names.iter().map(|&name| test.handle(name)).collect();
                let expected: Vec<_> = names.iter().map(|&name| test.naive().free(name)).collect();
                let freed = test.manager.free(&handles, false).unwrap();
                assert_eq!(freed.num_blocks, expected.iter().map(|freed| freed.0).sum::<usize>());
                assert_eq!(freed.num_deferred, expected.iter().map(|freed| freed.1).sum::<usize>());
                for name in names {
                    test.freed.extend(test.handles.remove(&name));
                    if let Some(prompt) = test.histories.remove(&name) {
                        test.manager.can_allocate(&prompt, AdmissionOptions::default()).unwrap_err();
                    }
                }
            }
            Call::Stale { verb } => test.stale(verb),
            Call::ResetCache => {
                let dropped = test.naive().reset_prefix_cache();
                assert_eq!(test.manager.reset_prefix_cache(), dropped);
            }
        }
        test.check();
        test
    }

    fn check_invariants(_: &Test, _: &Reference) {}

    fn teardown(mut test: Test, _: Reference) {
        let handles: Vec<_> = test.handles.values().copied().collect();
        test.manager.free(&handles, false).unwrap();
        for transfer in test.transfers.values() {
            // Most have ended already.
            let _ = test.manager.end_transfer(*transfer, Outcome::Cancelled);
        }
        let stats = test.manager.stats();
        assert_eq!((stats.live_blocks, stats.logical_blocks, stats.used_slots), (0, 0, 0));
        assert_eq!((stats.held_blocks, stats.num_transfers), (0, 0));
        assert_eq!(stats.free_blocks + stats.cached_blocks, test.reference.naive.capacity);
        assert_eq!(test.manager.check_integrity(), Vec::<String>::new());
    }
}

proptest_state_machine::prop_state_machine! {
    #![proptest_config(ProptestConfig { cases: 2500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn manager_agrees_with_the_naive_model(sequential 1..100 => Test);
}

/// Rows take their blocks and publish one after the other: the first publishes a twin of a cached block which the second
/// one takes, so that the content lives on in the twin, and the block after it is found.
#[test]
fn a_twin_of_the_same_step_keeps_an_evicted_content_alive() {
    let mut naive = Naive::new(13, 1, 2, true);
    naive.publish = Publish::OnSchedule;
    (naive.max_tokens, naive.max_seqs) = (MAX_TOKENS, 2);
    let reference = Reference { naive, degenerate_hash: true, null_block: true };
    let options = Options { use_cache: false, ..Options::DEFAULT };
    let calls = [
        // Seven blocks of zeros. A transfer holds the second one, the others are cached, the first one is evicted last.
        Call::Allocate { tokens: vec![0; 6], options },
        Call::Advance { seq: 0, extra: 1, ids: vec![0] },
        Call::BeginTransfer { seq: 0, start: 1, len: 1 },
        Call::Free { seqs: vec![0] },
        // Somebody else takes four of the six free ones, and two sequences all but the last two cached ones.
        Call::Allocate { tokens: vec![1, 0, 0, 0], options },
        // Both need one more: the second row's is the cached first block.
        Call::Twins { tokens: vec![0, 1, 0], rows: vec![(0, vec![1]), (0, vec![1])], order: vec![0, 1] },
    ];
    let mut test = Test::init_test(&reference);
    for call in calls {
        test = Test::apply(test, &reference, call);
    }
    let zeros = test.manager.preparer().prepare(vec![0; 20], Keys::default()).unwrap();
    assert_eq!(test.manager.match_prefix(&zeros, false), Ok(2));
    assert_eq!(test.reference.naive.cached_tokens(zeros.ids(), Options::DEFAULT.ask(20)), 2);
}
