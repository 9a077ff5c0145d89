//! A naive model of the block manager: whole prefixes instead of hashes, plain vectors instead of lists, clones instead
//! of plans. It says what every verb must answer and what the counters must be; it knows no block ids.

use std::collections::BTreeMap;

use kvblocks_core::{Refusal, Spare};

/// Names a sequence for the whole run.
pub type Name = u32;

#[derive(Clone, Debug)]
pub struct Block {
    pub refs: usize,
    pub fill: usize,
    /// The whole token prefix that ends with this block, once published, and when that was.
    pub content: Option<(Vec<u32>, u64)>,
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
}

impl Seq {
    pub fn known(&self) -> usize {
        self.computed.max(self.prompt_len)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub evicted: u64,
    pub copied: u64,
    pub preemptions: u64,
    pub queried: u64,
    pub hit: u64,
    pub readmit_queried: u64,
    pub readmit_hit: u64,
    pub requests: u64,
    pub hit_requests: u64,
    pub peak_live: usize,
}

#[derive(Clone, Debug)]
pub struct Naive {
    pub block_size: usize,
    pub capacity: usize,
    pub watermark: usize,
    pub caching: bool,
    pub free: usize,
    pub blocks: Vec<Block>,
    /// Published blocks without owner, the next to be evicted first.
    pub cached: Vec<usize>,
    pub seqs: BTreeMap<Name, Seq>,
    pub next_name: Name,
    pub publications: u64,
    pub tally: Tally,
    /// Blocks taken that were not there: how far a clone went beyond the pool.
    pub debt: usize,
    /// (sequence, column, tokens kept) of published blocks that the step being planned writes into.
    pub overwritten: Vec<(Name, usize, usize)>,
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
            free: capacity,
            blocks: Vec::new(),
            cached: Vec::new(),
            seqs: BTreeMap::new(),
            next_name: 0,
            publications: 0,
            tally: Tally::default(),
            debt: 0,
            overwritten: Vec::new(),
        }
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        (0..).find(|blocks| blocks * self.block_size >= tokens).unwrap()
    }

    pub fn live(&self) -> usize {
        self.blocks.iter().filter(|block| block.refs > 0).count()
    }

    pub fn used_slots(&self) -> usize {
        self.blocks.iter().filter(|block| block.refs > 0).map(|block| block.fill).sum()
    }

    pub fn logical(&self) -> usize {
        self.seqs.values().map(|seq| seq.table.len()).sum()
    }

    fn take(&mut self) -> usize {
        if self.free > 0 {
            self.free -= 1;
        } else if !self.cached.is_empty() {
            let victim = self.cached.remove(0);
            self.blocks[victim].content = None;
            self.tally.evicted += 1;
        } else {
            self.debt += 1;
        }
        self.blocks.push(Block { refs: 1, fill: 0, content: None });
        self.blocks.len() - 1
    }

    fn drop_ref(&mut self, block: usize) -> usize {
        self.blocks[block].refs -= 1;
        if self.blocks[block].refs > 0 {
            return 0;
        }
        match self.blocks[block].content {
            Some(_) => self.cached.push(block),
            None => self.free += 1,
        }
        1
    }

    fn note_peak(&mut self) {
        self.tally.peak_live = self.tally.peak_live.max(self.live());
    }

    /// Oldest published block with each leading prefix of `tokens`.
    pub fn hits(&self, tokens: &[u32]) -> Vec<usize> {
        let mut hits = Vec::new();
        let most = tokens.len().saturating_sub(1) / self.block_size;
        for i in 1..=most {
            let prefix = &tokens[..i * self.block_size];
            let same = self.blocks.iter().enumerate().filter_map(|(id, block)| match &block.content {
                Some((content, when)) if content == prefix => Some((*when, id)),
                _ => None,
            });
            match same.min() {
                Some((_, id)) => hits.push(id),
                None => break,
            }
        }
        hits
    }

    pub fn can_allocate(&self, tokens: &[u32], reserve: usize, use_cache: bool) -> Admission {
        let need = self.blocks_for(tokens.len().max(reserve));
        if need > self.capacity {
            return Err(Refusal::Never { need_blocks: need, capacity_blocks: self.capacity });
        }
        let hits = if use_cache { self.hits(tokens) } else { Vec::new() };
        let unused_hits = hits.iter().filter(|&&hit| self.blocks[hit].refs == 0).count();
        let new = self.blocks_for(reserve).saturating_sub(hits.len());
        let mut room = (self.free + self.cached.len() - unused_hits) as i64 - new as i64;
        if self.live() > 0 {
            room -= self.watermark as i64;
        }
        match room {
            0.. => Ok((hits.len() * self.block_size, new)),
            _ => Err(Refusal::Later { num_blocks: -room as usize }),
        }
    }

    /// `resumes`: the preempted sequence to continue.
    pub fn allocate(
        &mut self,
        tokens: &[u32],
        reserve: usize,
        use_cache: bool,
        resumes: Option<Name>,
    ) -> Result<(Name, usize), Refusal> {
        let (cached, new) = self.can_allocate(tokens, reserve, use_cache)?;
        let mut table = if use_cache { self.hits(tokens) } else { Vec::new() };
        for &hit in &table {
            self.blocks[hit].refs += 1;
            self.cached.retain(|&block| block != hit);
        }
        table.extend((0..new).map(|_| self.take()));
        let name = resumes.unwrap_or(self.next_name);
        self.next_name += u32::from(resumes.is_none());
        let seq = Seq {
            tokens: tokens.to_vec(),
            prompt_len: tokens.len(),
            computed: cached,
            scheduled: cached,
            reserved: reserve.max(cached),
            in_flight: Vec::new(),
            table,
            preempted: false,
        };
        self.seqs.insert(name, seq);
        if self.caching && use_cache {
            let (tokens, cached) = (tokens.len() as u64, cached as u64);
            match resumes {
                Some(_) => {
                    self.tally.readmit_queried += tokens;
                    self.tally.readmit_hit += cached;
                }
                None => {
                    self.tally.requests += 1;
                    self.tally.hit_requests += u64::from(cached > 0);
                    self.tally.queried += tokens;
                    self.tally.hit += cached;
                }
            }
        }
        self.note_peak();
        Ok((name, cached))
    }

    /// Schedule one row on `self`, going into debt if need be. `ids` yields the tokens nobody knows yet.
    fn schedule_row(&mut self, name: Name, num_new: usize, lookahead: usize, ids: &[u32]) {
        let mut seq = self.seqs[&name].clone();
        let (start, end) = (seq.scheduled, seq.scheduled + num_new);
        if !start.is_multiple_of(self.block_size) && num_new > 0 {
            let col = start / self.block_size;
            let (tail, kept) = (seq.table[col], seq.computed.saturating_sub(col * self.block_size));
            let kept = kept.min(self.block_size);
            if self.blocks[tail].refs > 1 {
                let copy = self.take();
                self.drop_ref(tail);
                self.blocks[copy].fill = kept;
                seq.table[col] = copy;
                self.tally.copied += 1;
            } else if self.blocks[tail].content.is_some() {
                self.overwritten.push((name, col, kept));
            }
        }
        while seq.table.len() < self.blocks_for(end + lookahead) {
            seq.table.push(self.take());
        }
        seq.in_flight.push((num_new, seq.reserved));
        seq.scheduled = end;
        seq.reserved = seq.reserved.max(end + lookahead);
        let missing = end.saturating_sub(seq.tokens.len());
        seq.tokens.extend(ids.iter().cycle().take(missing));
        self.seqs.insert(name, seq);
    }

    /// Published blocks that their sole owners write into: copied while there is room, else forgotten.
    fn settle_overwritten(&mut self) {
        let mut retired = Vec::new();
        for (name, col, kept) in std::mem::take(&mut self.overwritten) {
            let tail = self.seqs[&name].table[col];
            if self.free + self.cached.len() > 0 {
                let copy = self.take();
                self.blocks[copy].fill = kept;
                self.seqs.get_mut(&name).unwrap().table[col] = copy;
                self.tally.copied += 1;
                retired.push(tail);
            } else {
                self.blocks[tail].content = None;
                self.blocks[tail].fill = self.blocks[tail].fill.min(kept);
            }
        }
        for block in retired {
            self.drop_ref(block);
        }
        self.note_peak();
    }

    /// (rows scheduled, refusal). `rows`: (name, num_new, lookahead, ids).
    pub fn schedule(
        &mut self,
        rows: &[(Name, usize, usize, Vec<u32>)],
        fit: bool,
    ) -> (usize, Option<Refusal>) {
        let mut trial = self.clone();
        let mut refusal = None;
        for (row, (name, num_new, lookahead, ids)) in rows.iter().enumerate() {
            let need = self.blocks_for(self.seqs[name].scheduled + num_new + lookahead);
            if need > self.capacity {
                refusal = Some(Refusal::Never { need_blocks: need, capacity_blocks: self.capacity });
                self.settle_overwritten();
                return (if fit { row } else { 0 }, refusal);
            }
            trial.schedule_row(*name, *num_new, *lookahead, ids);
            if trial.debt > 0 {
                refusal = Some(Refusal::Later { num_blocks: trial.debt });
                if fit {
                    self.settle_overwritten();
                    return (row, refusal);
                }
            } else if fit {
                *self = trial.clone();
            }
        }
        if refusal.is_none() {
            *self = trial;
            self.settle_overwritten();
            return (rows.len(), None);
        }
        (0, refusal)
    }

    pub fn commit_error(&self, name: Name, count: usize) -> bool {
        let seq = &self.seqs[&name];
        match seq.in_flight.first() {
            _ if seq.preempted => true,
            None => true,
            Some(&(step, _)) => count > step || (count < step && seq.in_flight.len() > 1),
        }
    }

    /// Ids that the commit must supply.
    pub fn unknown_ids(&self, name: Name, count: usize) -> Vec<u32> {
        let seq = &self.seqs[&name];
        let end = seq.computed + count;
        seq.tokens[seq.known().min(end)..end].to_vec()
    }

    pub fn commit(&mut self, name: Name, count: usize) {
        let mut seq = self.seqs[&name].clone();
        let (_, reserved_before) = seq.in_flight.remove(0);
        seq.computed += count;
        for (col, &block) in seq.table.iter().enumerate() {
            let within = seq.computed.saturating_sub(col * self.block_size).min(self.block_size);
            // Blocks before the committed range are full already.
            let fill = &mut self.blocks[block].fill;
            *fill = within.max(*fill);
            if self.caching && within == self.block_size && self.blocks[block].content.is_none() {
                let content = seq.tokens[..(col + 1) * self.block_size].to_vec();
                self.publications += 1;
                self.blocks[block].content = Some((content, self.publications));
            }
        }
        if seq.in_flight.is_empty() && seq.scheduled > seq.computed {
            seq.scheduled = seq.computed;
            seq.reserved = seq.reserved.min(reserved_before.max(seq.computed));
            seq.tokens.truncate(seq.known());
            let keep = self.blocks_for(seq.reserved);
            for block in seq.table.split_off(keep).into_iter().rev() {
                self.drop_ref(block);
            }
        }
        self.seqs.insert(name, seq);
    }

    pub fn fork(&mut self, name: Name) -> Name {
        let mut child = self.seqs[&name].clone();
        child.table.truncate(self.blocks_for(child.computed));
        child.scheduled = child.computed;
        child.reserved = child.computed;
        child.in_flight.clear();
        child.tokens.truncate(child.known());
        for &block in &child.table {
            self.blocks[block].refs += 1;
        }
        self.seqs.insert(self.next_name, child);
        self.next_name += 1;
        self.next_name - 1
    }

    pub fn truncate_error(&self, name: Name, length: usize) -> bool {
        let seq = &self.seqs[&name];
        seq.preempted
            || length > seq.known().max(seq.scheduled)
            || (!seq.in_flight.is_empty() && length < seq.scheduled)
    }

    pub fn truncate(&mut self, name: Name, length: usize, spare: Spare) -> usize {
        let mut seq = self.seqs[&name].clone();
        let keep = self.blocks_for(length.min(seq.reserved));
        let beyond = seq.table.split_off(keep);
        let mut orphaned = 0;
        let mut kept = Vec::new();
        for block in beyond.into_iter().rev() {
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
        if let Some(&tail) = seq.table.get(seq.computed / self.block_size) {
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
            for block in std::mem::take(&mut seq.table).into_iter().rev() {
                self.drop_ref(block);
            }
            seq.prompt_len = seq.tokens.len();
            (seq.computed, seq.scheduled, seq.reserved) = (0, 0, 0);
            seq.in_flight.clear();
            seq.preempted = true;
            self.tally.preemptions += 1;
        }
        let tokens = seq.tokens.clone();
        self.seqs.insert(name, seq);
        tokens
    }

    pub fn free(&mut self, name: Name) -> usize {
        let seq = self.seqs.remove(&name).unwrap();
        seq.table.into_iter().rev().map(|block| self.drop_ref(block)).sum()
    }

    pub fn reset_prefix_cache(&mut self) -> usize {
        let dropped = std::mem::take(&mut self.cached);
        for &block in &dropped {
            self.blocks[block].content = None;
        }
        self.free += dropped.len();
        dropped.len()
    }
}
