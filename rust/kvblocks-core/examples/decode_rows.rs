//! What a row of a decode step costs the core, without Python: one that is plain, one that opens a block, one that fills one.
//!
//! All sequences are of whole blocks, so that every 16th step all rows open a block, the step before it all fill one, and
//! in the others all are plain. The rows of an engine are mixed: there the branch predictor misses each that is not plain.
//!
//! decode_rows NUM_SEQS SAMPLES: prints ns per row; per step the median of the samples, then that of the steps.

use std::error::Error;
use std::time::Instant;

use kvblocks_core::{
    AdmissionOptions, Algorithm, BlockHasher, Config, Counts, Keys, Manager, Policy, RowState, SeqHandle,
    StepArrays, StepRequest,
};

const SIZE: usize = 16;
const STEPS: usize = 4 * SIZE;
const MAX_BLOCKS: usize = 2048;
const MAX_TOKENS: usize = 4096;

/// The index arrays of a step.
struct Arrays {
    block_tables: Vec<i32>,
    slot_mapping: Vec<i64>,
    positions: Vec<i32>,
    seq_lens: Vec<i32>,
    query_start_loc: Vec<i32>,
    copies: Vec<i32>,
    changes: Vec<i32>,
    rows: Vec<RowState>,
}

impl Arrays {
    fn new(n: usize) -> Self {
        Self {
            block_tables: vec![0; n * MAX_BLOCKS],
            slot_mapping: vec![0; MAX_TOKENS],
            positions: vec![0; MAX_TOKENS],
            seq_lens: vec![0; n],
            query_start_loc: vec![0; n + 1],
            copies: vec![0; 2 * n],
            changes: vec![0; 3 * n],
            rows: vec![RowState::default(); n],
        }
    }

    fn schedule(
        &mut self,
        manager: &mut Manager,
        handles: &[SeqHandle],
        num_new: usize,
    ) -> Result<(), Box<dyn Error>> {
        let request = StepRequest {
            handles,
            num_new: Counts::All(num_new as i32),
            lookahead: Counts::All(0),
            policy: Policy::All,
            pad_seqs: 0,
            pad_tokens: 0,
        };
        let mut out = StepArrays {
            block_tables: &mut self.block_tables,
            max_blocks: MAX_BLOCKS,
            slot_mapping: &mut self.slot_mapping,
            positions: &mut self.positions,
            seq_lens: &mut self.seq_lens,
            query_start_loc: &mut self.query_start_loc,
            copies: &mut self.copies,
            changes: &mut self.changes,
            rows: &mut self.rows,
        };
        match manager.schedule(&request, &mut out)?.refusal {
            None => Ok(()),
            Some(refusal) => Err(format!("{refusal:?}").into()),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<usize> =
        std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let [n, samples] = arguments[..] else { return Err("decode_rows NUM_SEQS SAMPLES".into()) };
    let hasher = BlockHasher { algorithm: Algorithm::Xxh3, seed: 0 };
    let mut manager = Manager::new(Config::new(256 * n, SIZE, Some(hasher)))?;
    let mut arrays = Arrays::new(n);
    // Any ids will do, as long as no two prompts share a block.
    let ids = |seq: usize, len: usize| (0..len).map(|at| (at * n + seq) as u32).collect::<Vec<_>>();
    let prompts = (0..n).map(|seq| {
        let len = (64 + seq * 37 % 188) * SIZE;
        manager.preparer().prepare(ids(seq, len), Keys::default())
    });
    let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
    let sampled = ids(n - 1, n);
    let mut laps = [vec![Vec::new(); STEPS], vec![Vec::new(); STEPS]];
    for _ in 0..samples {
        let mut handles = Vec::new();
        for prompt in &prompts {
            let answer = manager.allocate(prompt, AdmissionOptions::default())?;
            let admitted = answer.map_err(|refusal| format!("{refusal:?}"))?;
            arrays.schedule(&mut manager, &[admitted.handle], admitted.num_new_tokens)?;
            manager.commit(&[admitted.handle], Counts::All(admitted.num_new_tokens as i32), &[])?;
            handles.push(admitted.handle);
        }
        arrays.schedule(&mut manager, &handles, 0)?;
        manager.commit(&handles, Counts::All(0), &[])?;
        for step in 0..STEPS {
            let start = Instant::now();
            arrays.schedule(&mut manager, &handles, 1)?;
            let scheduled = Instant::now();
            manager.commit(&handles, Counts::All(1), &sampled)?;
            let times = [scheduled - start, scheduled.elapsed()];
            laps.iter_mut()
                .zip(times)
                .for_each(|(laps, time)| laps[step].push(time.as_nanos() as f64 / n as f64));
        }
        manager.free(&handles, false)?;
        manager.reset_prefix_cache();
    }
    let [schedule, commit] = laps.map(|laps| laps.into_iter().map(median).collect::<Vec<_>>());
    let steps = |costs: &[f64], of: fn(usize) -> bool| {
        median((0..STEPS).filter(|&step| of(step % SIZE)).map(|step| costs[step]).collect())
    };
    println!(
        "schedule: plain {:.1}, opening {:.1}",
        steps(&schedule, |at| at > 0),
        steps(&schedule, |at| at == 0)
    );
    println!(
        "commit: plain {:.1}, filling {:.1}",
        steps(&commit, |at| at < 15),
        steps(&commit, |at| at == 15)
    );
    Ok(())
}
