//! Admission: cached prefix and blocks of a new sequence, in one transaction. Imports `manager` and below.
//!
//! Invariant: `can_allocate` answers what `allocate` would do, since both ask the same plan. Hits are pinned before
//! anything is evicted, and a hit that is cached now is not counted as available.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::SeqHandle;
use crate::manager::{Answer, Manager, Refusal};
use crate::prefix::Link;
use crate::prompt::Prompt;
use crate::table::Sequence;

/// What an admission would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// Leading tokens whose K/V is cached.
    pub num_cached_tokens: usize,
    /// Blocks it would take beside the cached ones.
    pub num_new_blocks: usize,
}

/// An admitted sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Names the sequence until it is freed.
    pub handle: SeqHandle,
    /// Leading tokens whose K/V is cached: `num_computed` of the new sequence.
    pub num_cached_tokens: usize,
    /// Prompt tokens left to compute, at least one of a non-empty prompt.
    pub num_new_tokens: usize,
}

impl Manager {
    /// Leading tokens that `allocate` would find cached. O(hits).
    pub fn match_prefix(&mut self, prompt: &Prompt) -> Result<usize> {
        self.check_prompt(prompt)?;
        let collisions = self.pool.collisions;
        self.find_hits(prompt, true);
        self.pool.collisions = collisions;
        Ok(self.hits.len() * self.pool.block_size)
    }

    /// What `allocate` with the same arguments would answer. O(hits).
    pub fn can_allocate(&mut self, prompt: &Prompt, reserve: Option<usize>) -> Answer<Admission> {
        self.check_prompt(prompt)?;
        let collisions = self.pool.collisions;
        let answer = self.plan_admission(prompt, reserve, true);
        self.pool.collisions = collisions;
        Ok(answer)
    }

    /// Admit a request: pin its cached prefix and take blocks for its first `reserve` tokens (None: all of them).
    ///
    /// At least one token is left to compute: at most `floor((n - 1) / block_size)` blocks are hits. A prompt from a
    /// preemption continues its own handle. The watermark is ignored while nothing is live. O(blocks).
    pub fn allocate(
        &mut self,
        prompt: &Prompt,
        reserve: Option<usize>,
        use_cache: bool,
    ) -> Answer<Allocation> {
        self.check_prompt(prompt)?;
        let plan = match self.plan_admission(prompt, reserve, use_cache) {
            Ok(plan) => plan,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let cached = plan.num_cached_tokens;
        let mut seq = Sequence::new(Arc::clone(&prompt.tokens));
        seq.blocks.reserve(self.hits.len() + plan.num_new_blocks);
        for &block in &self.hits {
            self.pool.share(block);
            seq.blocks.push(block);
        }
        seq.blocks.extend((0..plan.num_new_blocks).map_while(|_| self.pool.take()));
        seq.num_computed = cached;
        seq.num_scheduled = cached;
        seq.num_reserved = cached.max(reserve.unwrap_or(prompt.len()));
        seq.num_published = self.hits.len();
        seq.tip = match (self.hits.last(), &self.pool.index) {
            (Some(&block), Some(index)) => index.link(block),
            _ => Link::ROOT,
        };
        self.num_logical += seq.blocks.len();
        let key = match prompt.resumes {
            Some(key) => {
                seq.epoch = self.seqs[key].epoch + 1;
                self.seqs[key] = seq;
                key
            }
            None => self.seqs.insert(seq),
        };
        if use_cache && self.pool.index.is_some() {
            self.counters.count_query(prompt.len(), cached, prompt.resumes.is_some());
        }
        self.note_peaks();
        let handle = SeqHandle::of(key);
        Ok(Ok(Allocation { handle, num_cached_tokens: cached, num_new_tokens: prompt.len() - cached }))
    }

    fn check_prompt(&self, prompt: &Prompt) -> Result<()> {
        if !self.preparer.made(prompt) {
            return Err(Error::ForeignPrompt);
        }
        match prompt.resumes {
            Some(key) if !self.seqs.get(key).is_some_and(|seq| seq.is_preempted) => {
                Err(Error::StalePrompt(SeqHandle::of(key)))
            }
            _ => Ok(()),
        }
    }

    /// Leave the cached blocks of `prompt` in `self.hits`.
    fn find_hits(&mut self, prompt: &Prompt, use_cache: bool) {
        self.hits.clear();
        if use_cache {
            let most = prompt.len().saturating_sub(1) / self.pool.block_size;
            self.pool.find_prefix(&prompt.tokens.ids, &prompt.tokens.hashes, most, &mut self.hits);
        }
    }

    fn plan_admission(
        &mut self,
        prompt: &Prompt,
        reserve: Option<usize>,
        use_cache: bool,
    ) -> std::result::Result<Admission, Refusal> {
        let block_size = self.pool.block_size;
        let reserve = reserve.unwrap_or(prompt.len());
        let need_blocks = prompt.len().max(reserve).div_ceil(block_size);
        let capacity_blocks = self.capacity();
        if need_blocks > capacity_blocks {
            return Err(Refusal::Never { need_blocks, capacity_blocks });
        }
        self.find_hits(prompt, use_cache);
        let num_new_blocks = reserve.div_ceil(block_size).saturating_sub(self.hits.len());
        let revived = self.hits.iter().filter(|&&block| self.pool.refs(block) == 0).count();
        let watermark = if self.pool.num_live() == 0 { 0 } else { self.watermark };
        let available = self.pool.num_available() as usize - revived;
        match (num_new_blocks + watermark).saturating_sub(available) {
            0 => Ok(Admission { num_cached_tokens: self.hits.len() * block_size, num_new_blocks }),
            num_blocks => Err(Refusal::Later { num_blocks }),
        }
    }
}
