//! Admission: cached prefix and blocks of a new sequence, in one transaction. Imports `manager` and below.
//!
//! Invariant: `can_allocate` answers what `allocate` would do, since both ask the same plan. Hits are pinned before
//! anything is evicted, and a hit that is cached now is not counted as available.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::SeqHandle;
use crate::manager::{settle, Answer, FullHit, Manager, Refusal};
use crate::prefix;
use crate::prompt::Prompt;
use crate::sequence::Sequence;
use crate::stats::note_evictions;
use crate::usage::Query;

/// How a request is admitted.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionOptions {
    /// Take blocks for the first so many tokens only; None for the whole prompt.
    pub reserve: Option<usize>,
    /// Look the prefix cache up.
    pub use_cache: bool,
    /// Leave the last block that was found to be computed again, for draft heads that need its hidden states.
    pub recompute_last_hit: bool,
    /// How long the sequence may become, if that is known: see `Manager::set_max_tokens`.
    pub max_tokens: Option<usize>,
    /// The most blocks that it ever holds at once, if `drop_range` takes out what a window has left behind.
    pub max_resident_blocks: Option<usize>,
}

impl Default for AdmissionOptions {
    fn default() -> Self {
        Self {
            reserve: None,
            use_cache: true,
            recompute_last_hit: false,
            max_tokens: None,
            max_resident_blocks: None,
        }
    }
}

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
    pub fn match_prefix(&mut self, prompt: &Prompt, recompute_last_hit: bool) -> Result<usize> {
        self.check_prompt(prompt)?;
        let options = AdmissionOptions { recompute_last_hit, ..AdmissionOptions::default() };
        Ok(self.find_hits(prompt, options))
    }

    /// What `allocate` with the same arguments would answer. O(hits).
    pub fn can_allocate(&mut self, prompt: &Prompt, options: AdmissionOptions) -> Answer<Admission> {
        self.check_request(prompt, options)?;
        Ok(self.plan_admission(prompt, options))
    }

    /// Admit a request: pin its cached prefix and take blocks for the tokens to reserve.
    ///
    /// At least one token is left to compute, see `FullHit`. A prompt from a preemption continues its own handle. The
    /// watermark, and what was promised to others, is ignored while nothing is live. O(blocks).
    pub fn allocate(&mut self, prompt: &Prompt, options: AdmissionOptions) -> Answer<Allocation> {
        self.check_request(prompt, options)?;
        self.pool.prefetch_queued();
        let plan = match self.plan_admission(prompt, options) {
            Ok(plan) => plan,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let cached = plan.num_cached_tokens;
        let num_blocks = self.hits.len() + plan.num_new_blocks;
        let namespace = match prompt.resumes {
            // A preempted sequence has stayed in its namespace.
            Some(key) => self.seqs[key].namespace,
            None => self.pool.namespaces.enter(&prompt.tokens.namespace),
        };
        let mut seq = Sequence::new(Arc::clone(&prompt.tokens), namespace);
        seq.blocks = self.spare_tables.pop().unwrap_or_default();
        // Room to grow, so that a decode step finds it.
        seq.blocks.reserve(num_blocks + num_blocks / 4 + 16);
        self.pool.share_many(&self.hits, namespace);
        seq.blocks.extend_from_slice(&self.hits);
        let evictions = self.pool.evictions;
        self.pool.take_many(plan.num_new_blocks, namespace, &mut seq.blocks);
        note_evictions(&mut self.counters, &mut self.pool, namespace, evictions);
        seq.start_at(cached, cached.max(options.reserve.unwrap_or(prompt.len())));
        seq.num_published = self.hits.len();
        if let Some(&last) = self.hits.last() {
            seq.tip = prefix::link(&self.pool.blocks, last);
        }
        seq.retract(self.size.column(cached), &self.pool);
        seq.max_tokens = options.max_tokens;
        seq.max_resident = options.max_resident_blocks.map(|most| most.min(u32::MAX as usize) as u32);
        let (key, seq) = match prompt.resumes {
            Some(key) => {
                self.seqs[key].replace(seq);
                (key, &mut self.seqs[key])
            }
            None => {
                let key = self.seqs.insert(seq);
                (key, &mut self.seqs[key])
            }
        };
        settle(seq, &mut self.counters, &mut self.pool);
        if options.use_cache && self.pool.index.is_some() {
            let query = Query {
                num_tokens: prompt.len(),
                num_cached_tokens: cached,
                num_collided: self.pool.collisions,
                is_readmission: prompt.resumes.is_some(),
            };
            self.counters.total.count_query(query, self.size);
            self.pool.namespaces.usage(namespace).count_query(query, self.size);
        }
        self.note_peaks();
        let handle = key;
        Ok(Ok(Allocation { handle, num_cached_tokens: cached, num_new_tokens: prompt.len() - cached }))
    }

    fn check_request(&self, prompt: &Prompt, options: AdmissionOptions) -> Result<()> {
        let tokens = prompt.len().max(options.reserve.unwrap_or(0));
        if tokens > i32::MAX as usize && self.size.blocks(tokens) <= self.capacity() {
            let expected = format!("at most {}, what a sequence can hold", i32::MAX);
            return Err(Error::Value { argument: "tokens to reserve", got: tokens as i64, expected });
        }
        self.check_prompt(prompt)
    }

    fn check_prompt(&self, prompt: &Prompt) -> Result<()> {
        if !self.preparer.made(prompt) {
            return Err(Error::ForeignPrompt);
        }
        match prompt.resumes {
            // A sequence that was resumed and preempted again has another history by now.
            Some(key)
                if !self
                    .seqs
                    .get(key)
                    .is_some_and(|seq| seq.is_preempted && Arc::ptr_eq(&seq.prompt, &prompt.tokens)) =>
            {
                Err(Error::StalePrompt(key))
            }
            _ => Ok(()),
        }
    }

    /// Leave the cached blocks of `prompt` in `self.hits`; returns the tokens in them that are usable.
    fn find_hits(&mut self, prompt: &Prompt, options: AdmissionOptions) -> usize {
        self.hits.clear();
        self.pool.collisions = 0;
        if !options.use_cache {
            return 0;
        }
        let most = prompt.len().saturating_sub(1);
        let most_blocks = match self.full_hit {
            FullHit::WholeBlock => self.size.column(most),
            FullHit::Token => self.size.column(prompt.len()),
        };
        self.pool.find_prefix(&prompt.tokens, most_blocks, &mut self.hits);
        if options.recompute_last_hit {
            self.hits.pop();
        }
        let num_cached = (self.hits.len() * self.size.get()).min(most);
        self.hits.truncate(self.size.blocks(num_cached));
        num_cached
    }

    fn plan_admission(
        &mut self,
        prompt: &Prompt,
        options: AdmissionOptions,
    ) -> std::result::Result<Admission, Refusal> {
        let reserve = options.reserve.unwrap_or(prompt.len());
        // What was declared before a preemption holds on.
        let resumed = prompt.resumes.map(|key| &self.seqs[key]);
        let declared = options.max_tokens.or(resumed.and_then(|seq| seq.max_tokens)).unwrap_or(0);
        let resident = options
            .max_resident_blocks
            .or(resumed.and_then(|seq| seq.max_resident).map(|most| most as usize));
        let resident = resident.unwrap_or(usize::MAX);
        let whole = self.size.blocks(prompt.len().max(declared));
        let need_blocks = self.size.blocks(reserve).max(whole.min(resident));
        let capacity_blocks = self.capacity();
        if need_blocks > capacity_blocks {
            return Err(Refusal::Never { need_blocks, capacity_blocks });
        }
        let num_cached_tokens = self.find_hits(prompt, options);
        let num_blocks = self.size.blocks(reserve).max(self.hits.len());
        let num_new_blocks = num_blocks - self.hits.len();
        let mut need = num_new_blocks;
        if self.pool.num_live() > 0 {
            // What this request itself will grow to is promised to it, as is what the running ones have been.
            let own = self.size.blocks(declared).min(resident).saturating_sub(num_blocks);
            need += self.watermark + self.counters.total.promised_blocks + own;
        }
        let mut available = self.pool.num_available();
        // Hits that are cached now are not available; if there is room even so, it does not matter which are.
        if need + self.hits.len() > available {
            available -= self.hits.iter().filter(|&&block| self.pool.refs(block) == 0).count();
        }
        match need.saturating_sub(available) {
            0 => Ok(Admission { num_cached_tokens, num_new_blocks }),
            num_blocks => Err(Refusal::Later { num_blocks }),
        }
    }
}
