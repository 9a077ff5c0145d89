//! A naive model of the block manager: whole prefixes instead of hashes, plain vectors instead of lists, clones instead
//! of plans. It says what every verb must answer and what the counters must be; it knows no block ids.

use std::collections::BTreeMap;

use kvblocks_core::{FullHit, Publish, Refusal, Reuse, Spare};

/// Names a sequence for the whole run.
pub type Name = u32;

/// What a table holds where a block was dropped.
pub const HOLE: usize = usize::MAX;

#[derive(Clone, Debug)]
pub struct Block {
    pub refs: usize,
    /// Those of `refs` that transfers have.
    pub holds: usize,
    pub fill: usize,
    pub namespace: u32,
    pub content: Option<Content>,
}

/// What a published block holds. A prefix is known by a number, given out when it is first published and forgotten with
/// the last block that holds it: a block whose parent's number is gone is not found again.
#[derive(Clone, Debug)]
pub struct Content {
    pub namespace: u32,
    pub parent: u64,
    pub tokens: Vec<u32>,
    pub number: u64,
    /// When it was published.
    pub when: u64,
}

/// The number of the empty prefix of a namespace.
fn root(namespace: u32) -> u64 {
    u64::MAX - u64::from(namespace)
}

#[derive(Clone, Debug)]
pub struct Seq {
    /// Known ids, then the ids of tokens in flight.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub computed: usize,
    pub scheduled: usize,
    pub reserved: usize,
    /// (tokens, reserved before) of each step in flight.
    pub in_flight: Vec<(usize, usize)>,
    pub table: Vec<usize>,
    pub preempted: bool,
    pub namespace: u32,
    pub max_tokens: Option<usize>,
    pub max_resident: Option<usize>,
    /// Columns offered to the cache.
    pub published: usize,
    /// Number of the prefix that they hold.
    pub tip: u64,
    /// Its namespace was dropped, or its chain was broken: it publishes no more.
    pub unlisted: bool,
    /// Merged away, but read by so many steps in flight.
    pub retired: Vec<(usize, usize)>,
}

/// What the arrays of a step hold already when rows are scheduled into them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behind {
    pub num_seqs: usize,
    pub num_tokens: usize,
    pub is_appended: bool,
}

/// How an admission is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub reserve: usize,
    pub use_cache: bool,
    pub recompute_last: bool,
    pub max_tokens: Option<usize>,
    pub max_resident: Option<usize>,
    pub namespace: u32,
}

impl Seq {
    pub fn known(&self) -> usize {
        self.computed.max(self.prompt_len)
    }
}

/// Number of namespaces, the default one included.
pub const NAMESPACES: u32 = 3;

/// Requests, full blocks and tokens.
pub type Counts = [u64; 3];

/// What is counted for the pool and for each namespace; collisions are another test's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub queried: Counts,
    pub hit: Counts,
    pub readmit_queried: Counts,
    pub readmit_hit: Counts,
    pub evicting: u64,
    pub evicted: u64,
    pub copied: u64,
    pub preemptions: u64,
    pub peak_live: usize,
    pub peak_logical: usize,
}

/// What is in use, in the order of the counters: live, cached, held, logical, promised blocks, sequences, used and
/// reserved slots.
pub type Gauges = [usize; 8];

/// What all namespaces use together.
pub fn sum(gauges: &[Gauges]) -> Gauges {
    let mut total = Gauges::default();
    gauges.iter().for_each(|own| total.iter_mut().zip(own).for_each(|(total, own)| *total += own));
    total
}

#[derive(Clone, Debug)]
pub struct Naive {
    pub block_size: usize,
    pub capacity: usize,
    pub watermark: usize,
    pub caching: bool,
    pub full_hit: FullHit,
    pub publish: Publish,
    pub merge: bool,
    pub reuse: Reuse,
    /// Tokens and sequences that the arrays of a step hold.
    pub max_tokens: usize,
    pub max_seqs: usize,
    /// Blocks that are in no queue.
    pub free: usize,
    pub blocks: Vec<Block>,
    /// Blocks without owner, the next to be taken first: the published ones, and under `FirstFreed` all.
    pub queue: Vec<usize>,
    pub transfers: BTreeMap<u32, Vec<usize>>,
    pub next_transfer: u32,
    pub seqs: BTreeMap<Name, Seq>,
    pub next_name: Name,
    pub publications: u64,
    pub tally: Tally,
    /// By namespace.
    pub tallies: [Tally; NAMESPACES as usize],
    /// Blocks taken that were not there: how far a clone went beyond the pool.
    pub debt: usize,
}

/// What an admission answers: cached tokens and new blocks.
pub type Admission = Result<(usize, usize), Refusal>;

impl Naive {
    pub fn new(capacity: usize, block_size: usize, watermark: usize, caching: bool) -> Self {
        Self {
            block_size,
            capacity,
            watermark,
            caching,
            full_hit: FullHit::WholeBlock,
            publish: Publish::OnCommit,
            merge: false,
            reuse: Reuse::LastFreed,
            max_tokens: usize::MAX,
            max_seqs: usize::MAX,
            free: capacity,
            blocks: Vec::new(),
            queue: Vec::new(),
            transfers: BTreeMap::new(),
            next_transfer: 0,
            seqs: BTreeMap::new(),
            next_name: 0,
            publications: 0,
            tally: Tally::default(),
            tallies: [Tally::default(); NAMESPACES as usize],
            debt: 0,
        }
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        (0..).find(|blocks| blocks * self.block_size >= tokens).unwrap()
    }

    /// Count something for the pool and for a namespace.
    fn count(&mut self, namespace: u32, what: impl Fn(&mut Tally)) {
        what(&mut self.tally);
        what(&mut self.tallies[namespace as usize]);
    }

    fn owned(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.refs > block.holds)
    }

    pub fn live(&self) -> usize {
        self.owned().count()
    }

    pub fn held(&self) -> usize {
        self.blocks.iter().filter(|block| block.holds > 0 && block.refs == block.holds).count()
    }

    pub fn cached(&self) -> usize {
        self.queue.iter().filter(|&&block| self.blocks[block].content.is_some()).count()
    }

    pub fn num_free(&self) -> usize {
        self.free + self.queue.len() - self.cached()
    }

    fn promised_to(&self, seq: &Seq) -> usize {
        match seq.max_tokens {
            Some(most) if !seq.preempted => {
                let resident = seq.table.iter().filter(|&&block| block != HOLE).count();
                let may_hold = seq.max_resident.unwrap_or(usize::MAX).saturating_sub(resident);
                self.blocks_for(most).saturating_sub(seq.table.len()).min(may_hold)
            }
            _ => 0,
        }
    }

    pub fn promised(&self) -> usize {
        self.seqs.values().map(|seq| self.promised_to(seq)).sum()
    }

    /// What each namespace uses.
    pub fn gauges(&self) -> [Gauges; NAMESPACES as usize] {
        let mut all = [Gauges::default(); NAMESPACES as usize];
        for block in &self.blocks {
            let own = &mut all[block.namespace as usize];
            if block.refs > block.holds {
                own[0] += 1;
                own[6] += block.fill;
            } else if block.refs > 0 {
                own[2] += 1;
            } else {
                own[1] += usize::from(block.content.is_some());
            }
        }
        for seq in self.seqs.values() {
            let own = &mut all[seq.namespace as usize];
            own[3] += seq.table.iter().filter(|&&block| block != HOLE).count();
            own[4] += self.promised_to(seq);
            own[5] += 1;
            own[7] += seq.reserved - seq.scheduled;
        }
        all
    }

    /// What a group of sequences uses: live, shared, reclaimable, logical blocks, used and reserved slots.
    pub fn group_usage(&self, names: &[Name]) -> [usize; 6] {
        let mut usage = [0; 6];
        let (mut inside, mut outside) = (Vec::new(), Vec::new());
        for (name, seq) in &self.seqs {
            let side = if names.contains(name) { &mut inside } else { &mut outside };
            side.extend(seq.table.iter().copied().filter(|&block| block != HOLE));
            if names.contains(name) {
                usage[3] = inside.len();
                usage[5] += seq.reserved - seq.scheduled;
            }
        }
        for (name, seq) in &self.seqs {
            let side = if names.contains(name) { &mut inside } else { &mut outside };
            side.extend(seq.retired.iter().map(|&(block, _)| block));
        }
        inside.sort_unstable();
        inside.dedup();
        for block in inside {
            let is_shared = outside.contains(&block);
            usage[0] += 1;
            usage[1] += usize::from(is_shared);
            usage[2] += usize::from(!is_shared && self.blocks[block].holds == 0);
            usage[4] += self.blocks[block].fill;
        }
        usage
    }

    fn take(&mut self, namespace: u32) -> usize {
        if self.free > 0 {
            self.free -= 1;
        } else if !self.queue.is_empty() {
            let victim = self.queue.remove(0);
            if self.blocks[victim].content.take().is_some() {
                self.count(self.blocks[victim].namespace, |tally| tally.evicted += 1);
            }
        } else {
            self.debt += 1;
        }
        self.blocks.push(Block { refs: 1, holds: 0, fill: 0, namespace, content: None });
        self.blocks.len() - 1
    }

    fn drop_ref(&mut self, block: usize) -> usize {
        self.blocks[block].refs -= 1;
        if self.blocks[block].refs > 0 {
            return 0;
        }
        self.put_back(block);
        1
    }

    fn put_back(&mut self, block: usize) {
        if self.blocks[block].content.is_some() || self.reuse == Reuse::FirstFreed {
            self.queue.push(block);
        } else {
            self.free += 1;
        }
    }

    fn drop_refs(&mut self, blocks: impl IntoIterator<Item = usize>) -> usize {
        blocks.into_iter().filter(|&block| block != HOLE).map(|block| self.drop_ref(block)).sum()
    }

    /// Make a block unfindable.
    fn forget(&mut self, block: usize) {
        self.blocks[block].content = None;
        if self.blocks[block].refs == 0 {
            self.queue.retain(|&queued| queued != block);
            self.put_back(block);
        }
    }

    pub fn note_peak(&mut self) {
        let note = |tally: &mut Tally, gauges: Gauges| {
            tally.peak_live = tally.peak_live.max(gauges[0]);
            tally.peak_logical = tally.peak_logical.max(gauges[3]);
        };
        let gauges = self.gauges();
        note(&mut self.tally, sum(&gauges));
        gauges.into_iter().zip(&mut self.tallies).for_each(|(own, tally)| note(tally, own));
    }

    /// Oldest published block with each leading prefix of `tokens`.
    fn hits(&self, tokens: &[u32], ask: Ask) -> Vec<usize> {
        let mut hits = Vec::new();
        let most = match self.full_hit {
            FullHit::WholeBlock => tokens.len().saturating_sub(1) / self.block_size,
            FullHit::Token => tokens.len() / self.block_size,
        };
        let mut parent = root(ask.namespace);
        for tokens in tokens.chunks_exact(self.block_size).take(most) {
            match self.oldest(parent, tokens, None) {
                Some(id) if ask.use_cache => hits.push(id),
                _ => break,
            }
            parent = self.number_of(hits.last().copied()).unwrap();
        }
        if ask.recompute_last {
            hits.pop();
        }
        if hits.len() == tokens.len() {
            hits.pop(); // blocks of one token: the last token is a block
        }
        hits
    }

    /// The block that was published first with some content.
    fn oldest(&self, parent: u64, tokens: &[u32], except: Option<usize>) -> Option<usize> {
        let same = self.blocks.iter().enumerate().filter_map(|(id, block)| match &block.content {
            Some(content) if content.parent == parent && content.tokens == tokens && except != Some(id) => {
                Some((content.when, id))
            }
            _ => None,
        });
        same.min().map(|(_, id)| id)
    }

    fn number_of(&self, block: Option<usize>) -> Option<u64> {
        Some(self.blocks[block?].content.as_ref()?.number)
    }

    /// Count no more than the first `full` columns as published.
    fn retract(&self, seq: &mut Seq, full: usize) {
        if seq.published > full {
            seq.published = full;
            match full {
                0 => seq.tip = root(seq.namespace),
                // Without the block before it, what comes next has no parent.
                _ if seq.table[full - 1] == HOLE => seq.unlisted = true,
                _ => seq.tip = self.number_of(Some(seq.table[full - 1])).unwrap_or(0),
            }
        }
    }

    pub fn cached_tokens(&self, tokens: &[u32], ask: Ask) -> usize {
        (self.hits(tokens, ask).len() * self.block_size).min(tokens.len().saturating_sub(1))
    }

    /// With the maxima that the sequence to resume has declared before.
    fn remember(&self, ask: Ask, resumes: Option<Name>) -> Ask {
        let seq = resumes.map(|name| &self.seqs[&name]);
        Ask {
            max_tokens: ask.max_tokens.or(seq.and_then(|seq| seq.max_tokens)),
            max_resident: ask.max_resident.or(seq.and_then(|seq| seq.max_resident)),
            ..ask
        }
    }

    /// `resumes`: the preempted sequence to continue.
    pub fn can_allocate(&self, tokens: &[u32], ask: Ask, resumes: Option<Name>) -> Admission {
        let ask = self.remember(ask, resumes);
        let (declared, resident) = (ask.max_tokens.unwrap_or(0), ask.max_resident.unwrap_or(usize::MAX));
        let whole = self.blocks_for(tokens.len().max(declared));
        let need = self.blocks_for(ask.reserve).max(whole.min(resident));
        if need > self.capacity {
            return Err(Refusal::Never { need_blocks: need, capacity_blocks: self.capacity });
        }
        let hits = self.hits(tokens, ask);
        let unused_hits = hits.iter().filter(|&&hit| self.blocks[hit].refs == 0).count();
        let new = self.blocks_for(ask.reserve).saturating_sub(hits.len());
        let mut room = (self.free + self.queue.len() - unused_hits) as i64 - new as i64;
        if self.live() > 0 {
            let own = self.blocks_for(declared).min(resident).saturating_sub(new + hits.len());
            room -= (self.watermark + self.promised() + own) as i64;
        }
        match room {
            0.. => Ok((self.cached_tokens(tokens, ask), new)),
            _ => Err(Refusal::Later { num_blocks: -room as usize }),
        }
    }

    /// `resumes`: the preempted sequence to continue.
    pub fn allocate(
        &mut self,
        tokens: &[u32],
        ask: Ask,
        resumes: Option<Name>,
    ) -> Result<(Name, usize), Refusal> {
        let (cached, new) = self.can_allocate(tokens, ask, resumes)?;
        let ask = self.remember(ask, resumes);
        let mut table = self.hits(tokens, ask);
        for &hit in &table {
            self.blocks[hit].refs += 1;
            self.queue.retain(|&block| block != hit);
        }
        let (hits, last) = (table.len(), self.number_of(table.last().copied()));
        let evicted = self.tally.evicted;
        table.extend((0..new).map(|_| self.take(ask.namespace)));
        let evicting = u64::from(self.tally.evicted > evicted);
        self.count(ask.namespace, |tally| tally.evicting += evicting);
        let name = resumes.unwrap_or(self.next_name);
        self.next_name += u32::from(resumes.is_none());
        let mut seq = Seq {
            tokens: tokens.to_vec(),
            prompt_len: tokens.len(),
            computed: cached,
            scheduled: cached,
            reserved: ask.reserve.max(cached),
            in_flight: Vec::new(),
            table,
            preempted: false,
            namespace: ask.namespace,
            max_tokens: ask.max_tokens,
            max_resident: ask.max_resident,
            published: hits,
            tip: last.unwrap_or(root(ask.namespace)),
            unlisted: false,
            retired: Vec::new(),
        };
        self.retract(&mut seq, cached / self.block_size);
        self.seqs.insert(name, seq);
        if self.caching && ask.use_cache {
            let full = |tokens: usize| tokens / self.block_size;
            let queried = [1, full(tokens.len()) as u64, tokens.len() as u64];
            let hit = [u64::from(cached > 0), self.blocks_for(cached) as u64, cached as u64];
            let add =
                |to: &mut Counts, more: Counts| to.iter_mut().zip(more).for_each(|(to, more)| *to += more);
            self.count(ask.namespace, |tally| match resumes {
                Some(_) => {
                    add(&mut tally.readmit_queried, queried);
                    add(&mut tally.readmit_hit, hit);
                }
                None => {
                    add(&mut tally.queried, queried);
                    add(&mut tally.hit, hit);
                }
            });
        }
        self.note_peak();
        Ok((name, cached))
    }

    /// Schedule one row on `self`, going into debt if need be. `ids` yields the tokens nobody knows yet. Returns the column
    /// of the published block that it writes into as the sole owner, if any.
    fn schedule_row(&mut self, name: Name, num_new: usize, lookahead: usize, ids: &[u32]) -> Option<usize> {
        let mut seq = self.seqs[&name].clone();
        let (start, end) = (seq.scheduled, seq.scheduled + num_new);
        let mut overwritten = None;
        if !start.is_multiple_of(self.block_size) && num_new > 0 {
            let col = start / self.block_size;
            let tail = seq.table[col];
            if self.blocks[tail].refs > 1 {
                seq.table[col] = self.copy_of(&seq, col);
                self.drop_ref(tail);
            } else if self.blocks[tail].content.is_some() {
                overwritten = Some(col);
            }
        }
        while seq.table.len() < self.blocks_for(end + lookahead) {
            seq.table.push(self.take(seq.namespace));
        }
        seq.in_flight.push((num_new, seq.reserved));
        seq.scheduled = end;
        seq.reserved = seq.reserved.max(end + lookahead);
        let missing = end.saturating_sub(seq.tokens.len());
        seq.tokens.extend(ids.iter().cycle().take(missing));
        self.seqs.insert(name, seq);
        overwritten
    }

    /// A new block with the computed tokens of a column.
    fn copy_of(&mut self, seq: &Seq, col: usize) -> usize {
        let copy = self.take(seq.namespace);
        self.blocks[copy].fill = self.computed_in(seq, col);
        self.count(seq.namespace, |tally| tally.copied += 1);
        copy
    }

    /// Computed tokens in a column.
    fn computed_in(&self, seq: &Seq, col: usize) -> usize {
        seq.computed.saturating_sub(col * self.block_size).min(self.block_size)
    }

    /// Let a sequence write into a published block of its own: a copy of it, or the block itself, forgotten.
    fn settle_overwritten(&mut self, name: Name, col: usize, is_copied: bool) {
        let mut seq = self.seqs[&name].clone();
        let tail = seq.table[col];
        if is_copied {
            seq.table[col] = self.copy_of(&seq, col);
            self.drop_ref(tail);
            self.seqs.insert(name, seq);
        } else {
            self.blocks[tail].content = None;
            self.blocks[tail].fill = self.blocks[tail].fill.min(self.computed_in(&seq, col));
        }
    }

    /// (rows scheduled, refusal). `rows`: (name, num_new, lookahead, ids).
    pub fn schedule(
        &mut self,
        rows: &[(Name, usize, usize, Vec<u32>)],
        fit: bool,
        behind: Behind,
    ) -> (usize, Option<Refusal>) {
        let (num_rows, mut spare, refusal) = self.plan(rows, fit, behind);
        // Row by row: what one row publishes may be the twin of a cached block that a later row takes.
        for (name, num_new, lookahead, ids) in &rows[..num_rows] {
            let evicted = self.tally.evicted;
            if let Some(col) = self.schedule_row(*name, *num_new, *lookahead, ids) {
                // The first ones are copied while there is room for that.
                self.settle_overwritten(*name, col, spare > 0);
                spare = spare.saturating_sub(1);
            }
            let evicting = u64::from(self.tally.evicted > evicted);
            let mut seq = self.seqs[name].clone();
            self.count(seq.namespace, |tally| tally.evicting += evicting);
            if self.publish == Publish::OnSchedule {
                let len = seq.scheduled.min(seq.prompt_len);
                self.publish(&mut seq, len);
                self.seqs.insert(*name, seq);
            }
        }
        self.note_peak();
        (num_rows, refusal)
    }

    /// Whether a batch, or under `fit` a single row, is larger than the arrays.
    pub fn schedule_error(&self, rows: &[(Name, usize, usize, Vec<u32>)], fit: bool, behind: Behind) -> bool {
        let (seqs, most) = (self.max_seqs - behind.num_seqs, self.max_tokens - behind.num_tokens);
        let tokens = rows.iter().map(|row| row.1);
        match fit {
            true => tokens.max() > Some(most),
            false => rows.len() > seqs || tokens.sum::<usize>() > most,
        }
    }

    /// Whether a row writes into a block that others own too, or that is published.
    fn needs_copy(&self, name: Name, num_new: usize) -> bool {
        let seq = &self.seqs[&name];
        num_new > 0 && !seq.scheduled.is_multiple_of(self.block_size) && {
            let tail = &self.blocks[seq.table[seq.scheduled / self.block_size]];
            tail.refs > 1 || tail.content.is_some()
        }
    }

    /// What a batch comes to: rows that fit, blocks left when they have theirs, refusal.
    fn plan(
        &self,
        rows: &[(Name, usize, usize, Vec<u32>)],
        fit: bool,
        behind: Behind,
    ) -> (usize, usize, Option<Refusal>) {
        let mut trial = self.clone();
        let mut refusal = None;
        let (mut num_tokens, mut spare) = (0, self.free + self.queue.len());
        for (row, (name, num_new, lookahead, ids)) in rows.iter().enumerate() {
            num_tokens += num_new;
            let num_rows = if fit { row } else { 0 };
            if behind.num_seqs + row == self.max_seqs || behind.num_tokens + num_tokens > self.max_tokens {
                return (row, spare, Some(Refusal::Later { num_blocks: 0 }));
            }
            let holes = self.seqs[name].table.iter().filter(|&&block| block == HOLE).count();
            let columns = self.blocks_for(self.seqs[name].scheduled + num_new + lookahead);
            let need = columns.saturating_sub(holes);
            if need > self.capacity {
                refusal = Some(Refusal::Never { need_blocks: need, capacity_blocks: self.capacity });
                return (num_rows, spare, refusal);
            }
            if behind.is_appended && trial.needs_copy(*name, *num_new) {
                return (num_rows, spare, refusal.or(Some(Refusal::Later { num_blocks: 0 })));
            }
            trial.schedule_row(*name, *num_new, *lookahead, ids);
            if trial.debt > 0 {
                refusal = Some(Refusal::Later { num_blocks: trial.debt });
                if fit {
                    return (row, spare, refusal);
                }
            }
            spare = trial.free + trial.queue.len();
        }
        (if refusal.is_none() { rows.len() } else { 0 }, spare, refusal)
    }

    /// Offer the blocks that the first `len` tokens fill.
    fn publish(&mut self, seq: &mut Seq, len: usize) {
        if !self.caching || seq.unlisted {
            return;
        }
        for column in seq.published..len / self.block_size {
            let block = seq.table[column];
            let tokens = seq.tokens[column * self.block_size..(column + 1) * self.block_size].to_vec();
            let older = self.oldest(seq.tip, &tokens, None);
            self.publications += 1;
            let number = self.number_of(older).unwrap_or(self.publications);
            let content = Content {
                namespace: seq.namespace,
                parent: seq.tip,
                tokens,
                number,
                when: self.publications,
            };
            self.blocks[block].fill = self.block_size;
            self.blocks[block].content = Some(content);
            seq.published = column + 1;
            seq.tip = number;
        }
    }

    /// Use an older block with the same content in place of the one in a column.
    fn merge_into(&mut self, seq: &mut Seq, column: usize, older: usize) {
        let block = std::mem::replace(&mut seq.table[column], older);
        self.blocks[older].refs += 1;
        self.queue.retain(|&queued| queued != older);
        if self.blocks[block].refs == 1 {
            self.blocks[block].content = None;
        }
        match seq.in_flight.len() {
            0 => {
                self.drop_ref(block);
            }
            steps => seq.retired.push((block, steps)),
        }
    }

    /// Return to `scheduled` tokens and what was reserved before.
    fn roll_back(&mut self, seq: &mut Seq, scheduled: usize, reserved_before: usize) {
        for column in scheduled / self.block_size..seq.published {
            let block = seq.table[column];
            self.forget(block);
            if self.blocks[block].refs == 1 {
                self.blocks[block].fill = self.blocks[block].fill.min(self.computed_in(seq, column));
            }
        }
        self.retract(seq, scheduled / self.block_size);
        seq.scheduled = scheduled;
        seq.reserved = seq.reserved.min(reserved_before.max(scheduled));
        seq.tokens.truncate(seq.known().max(scheduled));
        let keep = self.blocks_for(seq.reserved);
        let dropped = seq.table.split_off(keep.min(seq.table.len()));
        self.drop_refs(dropped.into_iter().rev());
    }

    pub fn abort(&mut self, name: Name) {
        let mut seq = self.seqs[&name].clone();
        let (num_new, reserved_before) = seq.in_flight.pop().unwrap();
        let scheduled = seq.scheduled - num_new;
        self.roll_back(&mut seq, scheduled, reserved_before);
        let left = seq.in_flight.len();
        for (block, steps) in std::mem::take(&mut seq.retired) {
            match steps.min(left) {
                0 => {
                    self.drop_ref(block);
                }
                steps => seq.retired.push((block, steps)),
            }
        }
        self.seqs.insert(name, seq);
    }

    /// Whether blocks that were published when scheduled, beyond `scheduled` tokens, have other owners.
    fn others_hit(&self, seq: &Seq, scheduled: usize) -> bool {
        (scheduled / self.block_size..seq.published).any(|column| self.blocks[seq.table[column]].refs > 1)
    }

    pub fn abort_error(&self, name: Name) -> bool {
        let seq = &self.seqs[&name];
        match seq.in_flight.last() {
            Some(&(num_new, _)) => seq.preempted || self.others_hit(seq, seq.scheduled - num_new),
            None => true,
        }
    }

    pub fn commit_error(&self, name: Name, count: usize) -> bool {
        let seq = &self.seqs[&name];
        match seq.in_flight.first() {
            _ if seq.preempted => true,
            None => true,
            Some(&(step, _)) => {
                let others = || self.others_hit(seq, seq.computed + count);
                count > step || (count < step && (seq.in_flight.len() > 1 || others()))
            }
        }
    }

    /// Ids of all tokens that the commit accepts.
    pub fn accepted_ids(&self, name: Name, count: usize) -> Vec<u32> {
        let seq = &self.seqs[&name];
        seq.tokens[seq.computed..seq.computed + count].to_vec()
    }

    /// Ids that the commit must supply.
    pub fn unknown_ids(&self, name: Name, count: usize) -> Vec<u32> {
        let seq = &self.seqs[&name];
        let end = seq.computed + count;
        seq.tokens[seq.known().min(end)..end].to_vec()
    }

    pub fn commit(&mut self, name: Name, count: usize) {
        let mut seq = self.seqs[&name].clone();
        let (step, reserved_before) = seq.in_flight.remove(0);
        seq.computed += count;
        for (column, &block) in seq.table.iter().enumerate().filter(|(_, &block)| block != HOLE) {
            let within = self.computed_in(&seq, column);
            // Blocks before the committed range are full already.
            let fill = &mut self.blocks[block].fill;
            *fill = within.max(*fill);
        }
        for (block, steps) in std::mem::take(&mut seq.retired) {
            match steps - 1 {
                0 => {
                    self.drop_ref(block);
                }
                left => seq.retired.push((block, left)),
            }
        }
        let computed = seq.computed;
        self.publish(&mut seq, computed);
        if count < step {
            self.roll_back(&mut seq, computed, reserved_before);
        }
        self.seqs.insert(name, seq);
    }

    /// What a commit of `count` tokens merges, once all its rows are accepted.
    pub fn merge_filled(&mut self, name: Name, count: usize) {
        if !self.merge {
            return;
        }
        let mut seq = self.seqs[&name].clone();
        let full = seq.published.min(seq.computed / self.block_size);
        for column in (seq.computed - count) / self.block_size..full {
            let content = self.blocks[seq.table[column]].content.clone();
            let oldest = content.and_then(|content| self.oldest(content.parent, &content.tokens, None));
            if let Some(older) = oldest.filter(|&older| older != seq.table[column]) {
                self.merge_into(&mut seq, column, older);
            }
        }
        self.seqs.insert(name, seq);
    }

    pub fn fork(&mut self, name: Name) -> Name {
        let child = self.snapshot(name);
        self.seqs.insert(self.next_name, child);
        self.next_name += 1;
        self.note_peak();
        self.next_name - 1
    }

    /// The computed tokens of a sequence as another one.
    fn snapshot(&mut self, name: Name) -> Seq {
        let mut child = self.seqs[&name].clone();
        child.table.truncate(self.blocks_for(child.computed));
        child.scheduled = child.computed;
        child.reserved = child.computed;
        child.in_flight.clear();
        child.retired.clear();
        let full = child.computed / self.block_size;
        self.retract(&mut child, full);
        (child.max_tokens, child.max_resident) = (None, None);
        child.tokens.truncate(child.known());
        for &block in child.table.iter().filter(|&&block| block != HOLE) {
            self.blocks[block].refs += 1;
        }
        child
    }

    /// Sequence i continues what sequence `parents[i]` has computed.
    pub fn reorder(&mut self, names: &[Name], parents: &[usize]) {
        let next: Vec<_> = parents.iter().map(|&parent| self.snapshot(names[parent])).collect();
        for (row, mut next) in next.into_iter().enumerate() {
            if parents[row] == row {
                // The snapshot was for nothing.
                self.drop_refs(next.table);
                continue;
            }
            let old = self.seqs.remove(&names[row]).unwrap();
            (next.max_tokens, next.max_resident) = (old.max_tokens, old.max_resident);
            self.seqs.insert(names[row], next);
            self.drop_all(old);
        }
        self.note_peak();
    }

    fn drop_all(&mut self, seq: Seq) -> usize {
        // What was published when scheduled, and never committed.
        for column in seq.computed / self.block_size..seq.published {
            let block = seq.table[column];
            if self.blocks[block].content.is_some() && self.blocks[block].refs == 1 {
                self.forget(block);
            }
        }
        let merged = self.drop_refs(seq.retired.into_iter().map(|(block, _)| block));
        merged + self.drop_refs(seq.table.into_iter().rev())
    }

    pub fn truncate_error(&self, name: Name, length: usize) -> bool {
        let seq = &self.seqs[&name];
        let inside_hole =
            !length.is_multiple_of(self.block_size) && seq.table.get(length / self.block_size) == Some(&HOLE);
        seq.preempted
            || inside_hole
            || length > seq.known().max(seq.scheduled)
            || (!seq.in_flight.is_empty() && length < seq.scheduled)
    }

    pub fn truncate(&mut self, name: Name, length: usize, spare: Spare) -> usize {
        let mut seq = self.seqs[&name].clone();
        let keep = self.blocks_for(length.min(seq.reserved));
        let beyond = seq.table.split_off(keep);
        let mut orphaned = 0;
        let mut kept = Vec::new();
        for block in beyond.into_iter().rev().filter(|&block| block != HOLE) {
            let private = self.blocks[block].refs == 1 && self.blocks[block].content.is_none();
            if spare == Spare::Keep && private {
                self.blocks[block].fill = 0;
                kept.insert(0, block);
            } else {
                orphaned += self.drop_ref(block);
            }
        }
        seq.table.extend(kept);
        seq.reserved = match spare {
            Spare::Free => seq.reserved.min(length),
            Spare::Keep => seq.reserved.min(seq.table.len() * self.block_size),
        };
        seq.prompt_len = seq.prompt_len.min(length);
        seq.computed = seq.computed.min(length);
        seq.scheduled = seq.scheduled.min(length);
        seq.tokens.truncate(seq.known().max(seq.scheduled));
        let full = seq.scheduled / self.block_size;
        self.retract(&mut seq, full);
        if let Some(&tail) = seq.table.get(seq.computed / self.block_size).filter(|&&tail| tail != HOLE) {
            let block = &mut self.blocks[tail];
            if block.refs == 1 && block.content.is_none() {
                block.fill = block.fill.min(seq.computed % self.block_size);
            }
        }
        self.seqs.insert(name, seq);
        orphaned
    }

    pub fn preempt(&mut self, name: Name) -> Vec<u32> {
        let mut seq = self.seqs[&name].clone();
        if !seq.preempted {
            seq.tokens.truncate(seq.known());
            let old = std::mem::take(&mut seq.table);
            let retired = std::mem::take(&mut seq.retired);
            self.drop_all(Seq { table: old, retired, ..seq.clone() });
            seq.prompt_len = seq.tokens.len();
            (seq.computed, seq.scheduled, seq.reserved, seq.published) = (0, 0, 0, 0);
            (seq.unlisted, seq.preempted) = (false, true);
            seq.in_flight.clear();
            self.count(seq.namespace, |tally| tally.preemptions += 1);
        }
        let tokens = seq.tokens.clone();
        self.seqs.insert(name, seq);
        tokens
    }

    /// (blocks given back, blocks that transfers still hold).
    pub fn free(&mut self, name: Name) -> (usize, usize) {
        let seq = self.seqs.remove(&name).unwrap();
        let held = self.held();
        let freed = self.drop_all(seq);
        (freed, self.held() - held)
    }

    pub fn reset_prefix_cache(&mut self) -> usize {
        self.forget_all(|block| block.refs == 0)
    }

    fn forget_all(&mut self, which: impl Fn(&Block) -> bool) -> usize {
        // Queued ones in the order of the queue: they go to its end under `FirstFreed`.
        let rest = (0..self.blocks.len()).filter(|id| !self.queue.contains(id));
        let all = self.queue.iter().copied().chain(rest);
        let chosen: Vec<_> =
            all.filter(|&id| self.blocks[id].content.is_some() && which(&self.blocks[id])).collect();
        chosen.iter().for_each(|&block| self.forget(block));
        chosen.len()
    }

    pub fn drop_namespace(&mut self, namespace: u32) -> usize {
        for seq in self.seqs.values_mut().filter(|seq| seq.namespace == namespace && !seq.preempted) {
            seq.unlisted = true;
        }
        self.forget_all(|block| block.content.as_ref().is_some_and(|content| content.namespace == namespace))
    }

    /// (start, end, blocks given back).
    pub fn drop_range(
        &mut self,
        name: Name,
        start: usize,
        end: usize,
        unpublish: bool,
    ) -> (usize, usize, usize) {
        let mut seq = self.seqs[&name].clone();
        let inside = |column: usize| {
            let (first, after) = (column * self.block_size, (column + 1) * self.block_size);
            start <= first && after <= end && after <= seq.computed
        };
        let columns: Vec<_> = (0..seq.table.len()).filter(|&column| inside(column)).collect();
        let (Some(&first), Some(&last)) = (columns.first(), columns.last()) else { return (0, 0, 0) };
        if (last + 1) * self.block_size > seq.prompt_len {
            seq.prompt_len = seq.known();
        }
        let mut freed = 0;
        for &column in columns.iter().rev() {
            let block = std::mem::replace(&mut seq.table[column], HOLE);
            if block != HOLE {
                let orphaned = self.drop_ref(block);
                if orphaned > 0 && unpublish && self.blocks[block].content.is_some() {
                    self.forget(block);
                }
                freed += orphaned;
            }
        }
        self.seqs.insert(name, seq);
        (first * self.block_size, (last + 1) * self.block_size, freed)
    }

    pub fn begin_transfer(&mut self, name: Name, start: usize, end: usize) -> u32 {
        let table = &self.seqs[&name].table;
        let blocks: Vec<_> = table[start..end].iter().copied().filter(|&block| block != HOLE).collect();
        for &block in &blocks {
            self.blocks[block].refs += 1;
            self.blocks[block].holds += 1;
        }
        self.transfers.insert(self.next_transfer, blocks);
        self.next_transfer += 1;
        self.next_transfer - 1
    }

    pub fn end_transfer(&mut self, transfer: u32) -> usize {
        let blocks = self.transfers.remove(&transfer).unwrap();
        for &block in &blocks {
            self.blocks[block].holds -= 1;
        }
        self.drop_refs(blocks.into_iter().rev())
    }
}
