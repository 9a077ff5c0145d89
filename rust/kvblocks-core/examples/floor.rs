//! The floor of the speed table: what its rows cost a bare loop that does nothing else, on the machine it runs on.
//!
//! One file, no Python, no handles, no checks, no accounting, no copy-on-write beyond what a row needs: arrays of fields,
//! an open-addressing table of block ids compared through them, an intrusive queue of cached blocks, tokens beside each
//! block. `python -m benches.table` builds and runs it beside the manager.
//!
//! floor ROW SAMPLES [TRACE]: prints the cost of each part as `part median`, in ns per cycle, the clock's cost taken off.
//! TRACE is a file of int32: number of prompts, then for each its tokens, the number of its ids and the ids, each of
//! which stands for 512 tokens.

use std::hint::black_box;
use std::time::Instant;

use xxhash_rust::xxh3::xxh3_128_with_seed;

const SIZE: usize = 16;
const NIL: u32 = u32::MAX;
const VOCABULARY: u64 = 128_256;
type Block = [u32; SIZE];

/// Fields of all blocks, and where they are found.
struct Pool {
    refs: Vec<u32>,
    prev: Vec<u32>,
    next: Vec<u32>,
    digests: Vec<u128>,
    tokens: Vec<Block>,
    free: Vec<u32>,
    /// Block ids by digest, linear probing, at most half full; `NIL` is empty.
    index: Vec<u32>,
    head: u32,
    tail: u32,
}

impl Pool {
    fn new(n: usize) -> Self {
        Self {
            refs: vec![0; n],
            prev: vec![NIL; n],
            next: vec![NIL; n],
            digests: vec![0; n],
            tokens: vec![[0; SIZE]; n],
            free: (0..n as u32).rev().collect(),
            index: vec![NIL; (2 * n).next_power_of_two()],
            head: NIL,
            tail: NIL,
        }
    }

    fn home(&self, digest: u128) -> usize {
        digest as usize & (self.index.len() - 1)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.index.len() - 1)
    }

    fn find(&self, digest: u128, tokens: &Block) -> Option<u32> {
        let mut at = self.home(digest);
        loop {
            match self.index[at] {
                NIL => return None,
                block if self.digests[block as usize] == digest && self.tokens[block as usize] == *tokens => {
                    return Some(block)
                }
                _ => at = self.after(at),
            }
        }
    }

    /// Name a block whose tokens stand beside it; a second one with the same content stays unnamed.
    fn publish(&mut self, block: u32, digest: u128) {
        let mut at = self.home(digest);
        while self.index[at] != NIL {
            if self.digests[self.index[at] as usize] == digest {
                return;
            }
            at = self.after(at);
        }
        self.index[at] = block;
        self.digests[block as usize] = digest;
    }

    fn withdraw(&mut self, block: u32) {
        let digest = std::mem::take(&mut self.digests[block as usize]);
        let mut hole = self.home(digest);
        while self.index[hole] != block {
            hole = self.after(hole);
        }
        let mut at = hole;
        loop {
            at = self.after(at);
            let entry = self.index[at];
            if entry == NIL {
                break;
            }
            let home = self.home(self.digests[entry as usize]);
            let mask = self.index.len() - 1;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.index[hole] = entry;
                hole = at;
            }
        }
        self.index[hole] = NIL;
    }

    fn take(&mut self) -> u32 {
        let block = self.free.pop().unwrap_or_else(|| {
            let block = self.head;
            self.unlink(block);
            self.withdraw(block);
            block
        });
        self.refs[block as usize] = 1;
        block
    }

    fn share(&mut self, block: u32) {
        if self.refs[block as usize] == 0 {
            self.unlink(block);
        }
        self.refs[block as usize] += 1;
    }

    fn release(&mut self, block: u32) {
        let at = block as usize;
        self.refs[at] -= 1;
        if self.refs[at] > 0 {
            return;
        }
        if self.digests[at] == 0 {
            self.free.push(block);
            return;
        }
        (self.prev[at], self.next[at]) = (self.tail, NIL);
        match self.tail {
            NIL => self.head = block,
            tail => self.next[tail as usize] = block,
        }
        self.tail = block;
    }

    fn unlink(&mut self, block: u32) {
        let (prev, next) = (self.prev[block as usize], self.next[block as usize]);
        match prev {
            NIL => self.head = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NIL => self.tail = prev,
            next => self.prev[next as usize] = prev,
        }
    }

    fn reset(&mut self) {
        while self.head != NIL {
            let block = self.head;
            self.unlink(block);
            self.withdraw(block);
            self.free.push(block);
        }
    }
}

fn hash(parent: u128, tokens: &Block) -> u128 {
    let mut bytes = [0u8; 16 + 4 * SIZE];
    bytes[..16].copy_from_slice(&parent.to_le_bytes());
    bytes[16..].copy_from_slice(bytemuck::bytes_of(tokens));
    xxh3_128_with_seed(&bytes, 0)
}

fn blocks_of(tokens: &[u32]) -> impl Iterator<Item = &Block> {
    tokens.as_chunks().0.iter()
}

fn chain(tokens: &[u32], digests: &mut Vec<u128>) {
    digests.clear();
    let mut parent = 0;
    digests.extend(blocks_of(tokens).map(|block| {
        parent = hash(parent, block);
        parent
    }));
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * u128::from(limit)) >> 64) as u64
    }

    fn tokens(&mut self, len: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(VOCABULARY) as u32).collect()
    }
}

/// Laps of all cycles of one sample, in ns.
type Sample = Vec<Vec<f64>>;

struct Clock {
    cost: f64,
    last: Instant,
}

impl Clock {
    fn new() -> Self {
        let mut clock = Self { cost: 0.0, last: Instant::now() };
        let mut costs: Vec<f64> = (0..2001).map(|_| clock.lap()).collect();
        clock.cost = median(&mut costs);
        clock
    }

    fn start(&mut self) {
        self.last = Instant::now();
    }

    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let ns = (now - self.last).as_nanos() as f64 - self.cost;
        self.last = Instant::now();
        ns.max(0.0)
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2] + values[(values.len() - 1) / 2]) / 2.0
}

/// The typical cost of each part: per cycle the median of all samples but the first, then the mean over the cycles.
fn report(parts: &[&str], samples: &[Sample]) {
    let kept = &samples[1.min(samples.len() - 1)..];
    for (part, name) in parts.iter().enumerate() {
        let cycles = kept[0].len();
        let typical =
            |cycle: usize| median(&mut kept.iter().map(|laps| laps[cycle][part]).collect::<Vec<_>>());
        println!("{name} {:.3}", (0..cycles).map(typical).sum::<f64>() / cycles as f64);
    }
}

/// A decoding sequence: one cache line of cursors beside its table.
#[derive(Clone)]
struct Seq {
    scheduled: u32,
    computed: u32,
    /// Slot of the next token to schedule.
    slot: u32,
    /// Block of the next token to commit.
    block: u32,
    tip: u128,
    table: Vec<u32>,
}

/// One token more for each of `n` sequences; tables have 2,048 columns.
fn decode(n: usize, samples: usize) {
    let mut random = Random(1);
    let lengths: Vec<usize> =
        (0..n).map(|i| (64 + random.below(188) as usize) * SIZE + (i * 7919) % n % SIZE).collect();
    let prompts: Vec<Vec<u32>> = lengths.iter().map(|&len| random.tokens(len)).collect();
    let sampled: Vec<Vec<u32>> = (0..64).map(|_| random.tokens(n)).collect();
    let (mut slots, mut positions, mut lens) = (vec![0i64; n], vec![0i32; n], vec![0i32; n]);
    let (mut starts, mut tables, mut changes) = (vec![0i32; n + 1], vec![0i32; n * 2048], vec![0i32; 3 * n]);
    let mut pool = Pool::new(256 * n);
    let mut all = Vec::new();
    let mut clock = Clock::new();
    for _ in 0..samples {
        let mut seqs: Vec<Seq> = Vec::new();
        for tokens in &prompts {
            let (mut table, mut tip) = (Vec::new(), 0);
            table.reserve(tokens.len() / SIZE + 16);
            for block in tokens.chunks(SIZE) {
                let id = pool.take();
                pool.tokens[id as usize][..block.len()].copy_from_slice(block);
                if block.len() == SIZE {
                    tip = hash(tip, &pool.tokens[id as usize]);
                    pool.publish(id, tip);
                }
                table.push(id);
            }
            let len = tokens.len();
            let block = table[(len - 1) / SIZE];
            let slot = block * SIZE as u32 + (len % SIZE) as u32;
            seqs.push(Seq { scheduled: len as u32, computed: len as u32, slot, block, tip, table });
        }
        let mut laps = Vec::new();
        for ids in &sampled {
            clock.start();
            let mut num_changes = 0;
            for (row, seq) in seqs.iter_mut().enumerate() {
                let at = seq.scheduled;
                if (at as usize).is_multiple_of(SIZE) {
                    let block = pool.take();
                    let column = seq.table.len();
                    seq.table.push(block);
                    tables[row * 2048 + column] = block as i32;
                    changes[3 * num_changes..3 * num_changes + 3].copy_from_slice(&[
                        row as i32,
                        column as i32,
                        1,
                    ]);
                    num_changes += 1;
                    seq.slot = block * SIZE as u32;
                }
                slots[row] = i64::from(seq.slot);
                positions[row] = at as i32;
                lens[row] = at as i32 + 1;
                starts[row + 1] = row as i32 + 1;
                seq.slot += 1;
                seq.scheduled = at + 1;
            }
            black_box((&mut slots, &mut positions, &mut lens, &mut starts, &mut changes));
            let schedule = clock.lap();
            for (seq, &id) in seqs.iter_mut().zip(ids) {
                let offset = seq.computed as usize % SIZE;
                if offset == 0 {
                    seq.block = seq.table[seq.computed as usize / SIZE];
                }
                pool.tokens[seq.block as usize][offset] = id;
                seq.computed += 1;
                if offset == SIZE - 1 {
                    seq.tip = hash(seq.tip, &pool.tokens[seq.block as usize]);
                    pool.publish(seq.block, seq.tip);
                }
            }
            laps.push(vec![schedule, clock.lap()]);
        }
        all.push(laps);
        for seq in &seqs {
            seq.table.iter().rev().for_each(|&block| pool.release(block));
        }
        pool.reset();
    }
    report(&["schedule", "commit"], &all);
}

/// A 2,048-token prompt in and out, no cache.
fn uncached(samples: usize) {
    let mut random = Random(2);
    let prompts: Vec<Vec<u32>> = (0..100).map(|_| random.tokens(2048)).collect();
    let mut pool = Pool::new(65_536);
    let (mut table, mut ids) = (Vec::new(), Vec::new());
    let mut all = Vec::new();
    let mut clock = Clock::new();
    for _ in 0..samples {
        let mut laps = Vec::new();
        for prompt in &prompts {
            clock.start();
            ids.clear();
            ids.extend_from_slice(black_box(prompt));
            let prepare = clock.lap();
            table.extend((0..ids.len().div_ceil(SIZE)).map(|_| pool.take()));
            let allocate = clock.lap();
            table.drain(..).rev().for_each(|block| pool.release(block));
            laps.push(vec![prepare, allocate, clock.lap()]);
        }
        all.push(laps);
    }
    report(&["prepare", "allocate", "free"], &all);
}

/// `prepare`, `allocate`, `schedule`, `commit` and `free` of one request after the other, each computed in one step.
fn requests(
    num_blocks: usize,
    count: usize,
    samples: usize,
    fresh: bool,
    prompt: impl Fn(usize, &mut Vec<u32>),
) {
    let mut pool = Pool::new(num_blocks);
    let (mut tokens, mut ids) = (Vec::new(), Vec::new());
    let (mut digests, mut table, mut row) = (Vec::new(), Vec::new(), Vec::new());
    let (mut slots, mut positions) = (Vec::new(), Vec::new());
    let mut all = Vec::new();
    let mut clock = Clock::new();
    for _ in 0..samples {
        let mut laps = Vec::new();
        for at in 0..count {
            prompt(at, &mut tokens);
            clock.start();
            ids.clear();
            ids.extend_from_slice(black_box(&tokens));
            chain(&ids, &mut digests);
            let prepare = clock.lap();
            table.clear();
            for (digest, block) in digests[..(ids.len() - 1) / SIZE].iter().zip(blocks_of(&ids)) {
                let Some(hit) = pool.find(*digest, block) else { break };
                pool.share(hit);
                table.push(hit);
            }
            let hits = table.len();
            table.extend((hits..ids.len().div_ceil(SIZE)).map(|_| pool.take()));
            let allocate = clock.lap();
            slots.clear();
            for &block in &table[hits..] {
                slots.extend((0..SIZE as i64).map(|offset| i64::from(block) * SIZE as i64 + offset));
            }
            slots.truncate(ids.len() - hits * SIZE);
            positions.clear();
            positions.extend((hits * SIZE) as i32..ids.len() as i32);
            row.clear();
            row.extend_from_slice(&table);
            black_box((&mut slots, &mut positions, &mut row));
            let schedule = clock.lap();
            for (column, block) in ids.chunks(SIZE).enumerate().skip(hits) {
                let id = table[column];
                match <&Block>::try_from(block) {
                    Ok(block) => {
                        pool.tokens[id as usize] = *block;
                        pool.publish(id, digests[column]);
                    }
                    Err(_) => pool.tokens[id as usize][..block.len()].copy_from_slice(block),
                }
            }
            let commit = clock.lap();
            table.iter().rev().for_each(|&block| pool.release(block));
            laps.push(vec![prepare, allocate, schedule, commit, clock.lap()]);
        }
        all.push(laps);
        if fresh {
            pool.reset();
            // As in a pool that was used once: ids would be shuffled, from sample to sample.
            pool.free.sort_unstable_by(|a, b| b.cmp(a));
        }
    }
    report(&["prepare", "allocate", "schedule", "commit", "free"], &all);
}

/// A 4,090-token sequence forked into 8, one token more for each, the 8 freed.
fn fork(samples: usize) {
    let mut pool = Pool::new(65_536);
    let parent: Vec<u32> = (0..4090usize.div_ceil(SIZE)).map(|_| pool.take()).collect();
    let mut children = vec![Vec::new(); 8];
    let (mut slots, mut tables, mut copies) = (vec![0i64; 8], vec![0u32; 8 * 2048], Vec::new());
    let mut all = Vec::new();
    let mut clock = Clock::new();
    for _ in 0..samples {
        let mut laps = Vec::new();
        for _ in 0..100 {
            clock.start();
            for &block in &parent {
                pool.refs[block as usize] += 8;
            }
            for table in &mut children {
                table.clear();
                table.extend_from_slice(&parent);
            }
            let fork = clock.lap();
            copies.clear();
            for (row, table) in children.iter_mut().enumerate() {
                let last = table.len() - 1;
                let (src, dst) = (table[last], pool.take());
                pool.release(src);
                pool.tokens[dst as usize] = pool.tokens[src as usize];
                copies.push((src, dst));
                table[last] = dst;
                slots[row] = i64::from(dst) * SIZE as i64 + 10;
                tables[row * 2048..row * 2048 + table.len()].copy_from_slice(table);
            }
            black_box((&mut slots, &mut tables, &mut copies));
            let schedule = clock.lap();
            for (id, table) in children.iter().enumerate() {
                pool.tokens[table[table.len() - 1] as usize][10] = id as u32;
            }
            let commit = clock.lap();
            for table in &children {
                table.iter().rev().for_each(|&block| pool.release(block));
            }
            laps.push(vec![fork, schedule, commit, clock.lap()]);
        }
        all.push(laps);
    }
    report(&["fork", "schedule", "commit", "free"], &all);
}

/// Digests of 32,768 tokens, ns per token.
fn hashes(samples: usize) {
    let tokens = Random(8).tokens(32_768);
    let mut digests = Vec::new();
    let mut all = Vec::new();
    let mut clock = Clock::new();
    for _ in 0..samples {
        let mut laps = Vec::new();
        for _ in 0..5 {
            clock.start();
            chain(black_box(&tokens), &mut digests);
            black_box(&mut digests);
            laps.push(vec![clock.lap()]);
        }
        all.push(laps);
    }
    report(&["block_hashes"], &all);
}

/// Prompts of a trace, as hash ids of 512 tokens.
fn read_trace(path: &str) -> std::io::Result<Vec<(usize, Vec<u32>)>> {
    let bytes = std::fs::read(path)?;
    let mut words =
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let mut next = || words.next().unwrap_or_default() as usize;
    Ok((0..next()).map(|_| (next(), (0..next()).map(|_| next() as u32).collect())).collect())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [row, samples, trace @ ..] = &arguments[..] else { return Err("floor ROW SAMPLES [TRACE]".into()) };
    let samples = samples.parse()?;
    let mut random = Random(3);
    let copy = |from: &[u32], to: &mut Vec<u32>| {
        to.clear();
        to.extend_from_slice(from);
    };
    match row.as_str() {
        "W1a 256" | "W1b 256" => decode(256, samples),
        "W1a 1024" | "W1b 1024" => decode(1024, samples),
        "W2 uncached" => uncached(samples),
        "W2 evicting" => {
            let prompts: Vec<_> = (0..65_536 / 128 + 64).map(|_| random.tokens(2048)).collect();
            requests(65_536, prompts.len(), samples, false, |at, to| copy(&prompts[at], to));
        }
        "W3" => {
            let shared = random.tokens(2000);
            let own: Vec<_> = (0..65_536 / 12 + 64).map(|_| random.tokens(200)).collect();
            requests(65_536, own.len(), samples, false, |at, to| {
                copy(&shared, to);
                to.extend_from_slice(&own[at]);
            });
        }
        "W4" => {
            let prompts: Vec<_> = (0..2 * 65_536 * SIZE / 2112).map(|_| random.tokens(2112)).collect();
            let order: Vec<_> =
                (0..3 * prompts.len()).map(|_| random.below(prompts.len() as u64) as usize).collect();
            requests(65_536, order.len(), samples, false, |at, to| copy(&prompts[order[at]], to));
        }
        "W5" => fork(samples),
        "W7 xxh3" => hashes(samples),
        row if row.starts_with("W6 ") && !trace.is_empty() => {
            let prompts = read_trace(&trace[0])?;
            requests(row[3..].parse()?, prompts.len(), samples, true, |at, to| {
                let (len, ids) = &prompts[at];
                to.clear();
                to.extend(ids.iter().flat_map(|id| (0..512).map(move |offset| id * 512 + offset)));
                to.truncate(*len);
            });
        }
        _ => return Err(format!("no floor for row {row}").into()),
    }
    Ok(())
}
