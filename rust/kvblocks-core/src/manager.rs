//! The manager: one pool, its sequences, its counters. Imports everything below it; the verbs stand in `admission`,
//! `step`, `commit`, `lifetime`, `cut` and `transfer`, one group a file.
//!
//! Invariant: a verb checks its whole batch before it changes anything, so an error or a refusal leaves no trace.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::block_size::BlockSize;
use crate::commit::CommitRows;
use crate::error::{Error, Result};
use crate::free_list::Reuse;
use crate::hash::BlockHasher;
use crate::ids::{BlockId, SeqHandle, TransferHandle};
use crate::keys::{namespace_matches, Keys};
use crate::pool::Pool;
use crate::prompt::Preparer;
use crate::sequence::{Cursors, Sequence};
use crate::sequences::Sequences;
use crate::stats::{Counters, Series};
use crate::step::RowPlan;
use crate::step_arrays::SingleRows;
use crate::transfer::Transfer;

/// How much of a prompt a full hit leaves to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullHit {
    /// Its last block: `floor((n - 1) / block_size)` blocks are hits, nothing is copied.
    #[default]
    WholeBlock,
    /// Its last token: n - 1 tokens are hits, the last block is copied when that token is written.
    Token,
}

/// When a block that a step fills becomes findable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Publish {
    /// When the step is committed.
    #[default]
    OnCommit,
    /// When the step is scheduled, if its ids are known: later rows of the same step may hit it. Such a step must run, or
    /// be aborted.
    OnSchedule,
}

/// What a manager is built from.
#[derive(Clone, Debug)]
pub struct Config {
    /// Blocks of storage, ids `0..num_blocks`.
    pub num_blocks: usize,
    /// Tokens per block, any number >= 1.
    pub block_size: usize,
    /// The hash function of the prefix cache; None turns the cache off.
    pub hasher: Option<BlockHasher>,
    /// Blocks that admissions leave free for running sequences.
    pub watermark_blocks: usize,
    /// Keep block 0 back as padding: it is never handed out, so `num_blocks - 1` can be allocated.
    pub null_block: bool,
    /// See [`FullHit`].
    pub full_hit: FullHit,
    /// See [`Publish`].
    pub publish: Publish,
    /// Let a sequence give up a block that holds the same as an older one, and use that.
    pub merge: bool,
    /// See [`Reuse`].
    pub reuse: Reuse,
    /// Take a sample of the counters every so many steps (0: never), and keep the last `series_len` of them.
    pub series_every: usize,
    /// See `series_every`.
    pub series_len: usize,
}

impl Config {
    /// The defaults around a size.
    pub fn new(num_blocks: usize, block_size: usize, hasher: Option<BlockHasher>) -> Self {
        Self {
            num_blocks,
            block_size,
            hasher,
            watermark_blocks: 0,
            null_block: true,
            full_hit: FullHit::default(),
            publish: Publish::default(),
            merge: false,
            reuse: Reuse::default(),
            series_every: 0,
            series_len: 0,
        }
    }
}

/// Why a request was not served; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not now: this many blocks are missing.
    Later {
        /// Blocks short.
        num_blocks: usize,
    },
    /// Not even in an empty pool.
    Never {
        /// Blocks needed at once.
        need_blocks: usize,
        /// Blocks there are.
        capacity_blocks: usize,
    },
}

/// An answer that may be a refusal.
pub(crate) type Answer<T> = Result<std::result::Result<T, Refusal>>;

/// Allocator of the blocks of one paged KV cache.
pub struct Manager {
    pub(crate) size: BlockSize,
    pub(crate) pool: Pool,
    pub(crate) seqs: Sequences,
    pub(crate) transfers: BTreeMap<TransferHandle, Transfer>,
    pub(crate) next_transfer: TransferHandle,
    pub(crate) watermark: usize,
    pub(crate) null_block: bool,
    pub(crate) full_hit: FullHit,
    pub(crate) publish: Publish,
    pub(crate) merge: bool,
    pub(crate) counters: Counters,
    pub(crate) series: Series,
    pub(crate) preparer: Preparer,
    /// Number of the last batch call, written into each sequence it names.
    pub(crate) batch: u32,
    /// Scratch of an admission: the cached blocks found.
    pub(crate) hits: Vec<BlockId>,
    /// Scratch of a step: the rows that need something from the pool.
    pub(crate) plan: Vec<RowPlan>,
    /// Scratch of a step: what its arrays are to hold of rows of one token.
    pub(crate) single: SingleRows,
    /// Scratch of a commit.
    pub(crate) commit: CommitRows,
    /// Tables of ended sequences, to be used again.
    pub(crate) spare_tables: Vec<Vec<BlockId>>,
}

impl Manager {
    /// A manager over `config.num_blocks` blocks. O(num_blocks) address space; memory is touched as blocks are used.
    pub fn new(config: Config) -> Result<Self> {
        let Config { num_blocks, block_size, hasher, watermark_blocks, null_block, .. } = config;
        let first = usize::from(null_block);
        let value = |argument, got: usize, expected: String| {
            Err(Error::Value { argument, got: i64::try_from(got).unwrap_or(i64::MAX), expected })
        };
        if num_blocks <= first || num_blocks > i32::MAX as usize {
            let least = if null_block { "2 (block 0 is the null block)" } else { "1" };
            return value("num_blocks", num_blocks, format!("{least} to {}", i32::MAX));
        }
        if block_size == 0 || block_size > i32::MAX as usize {
            return value("block_size", block_size, format!("1 to {}", i32::MAX));
        }
        if watermark_blocks > num_blocks - first {
            return value(
                "watermark_blocks",
                watermark_blocks,
                format!("at most {} blocks", num_blocks - first),
            );
        }
        if config.series_len > 1 << 24 {
            return value("series_len", config.series_len, format!("at most {}", 1 << 24));
        }
        let Some(pool) =
            Pool::new(first as u32, num_blocks as u32, BlockSize::new(block_size), hasher, config.reuse)
        else {
            let slots = num_blocks.saturating_mul(block_size);
            return value(
                "num_blocks * block_size",
                slots,
                "a number of token ids that fits into memory".into(),
            );
        };
        let preparer = Preparer::new(hasher, block_size);
        let no_tokens = preparer.tokens(Cow::default(), Keys::default())?;
        Ok(Self {
            size: BlockSize::new(block_size),
            pool,
            seqs: Sequences::new(no_tokens),
            transfers: BTreeMap::new(),
            next_transfer: TransferHandle::FIRST,
            watermark: watermark_blocks,
            null_block,
            full_hit: config.full_hit,
            publish: config.publish,
            merge: config.merge,
            counters: Counters::default(),
            series: Series::new(config.series_every, config.series_len),
            preparer,
            batch: 0,
            hits: Vec::new(),
            plan: Vec::new(),
            single: SingleRows::default(),
            commit: CommitRows::default(),
            spare_tables: Vec::new(),
        })
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.size.get()
    }

    /// Blocks that can be allocated.
    pub fn capacity(&self) -> usize {
        self.pool.capacity()
    }

    /// What pads block tables: the null block, or -1 without one.
    pub fn padding(&self) -> i32 {
        if self.null_block {
            0
        } else {
            -1
        }
    }

    /// Makes this manager's prompts, without a reference to it.
    pub fn preparer(&self) -> &Preparer {
        &self.preparer
    }

    /// Cursors of a sequence. O(1).
    pub fn cursors(&self, handle: SeqHandle) -> Result<Cursors> {
        self.sequence(handle).map(Sequence::cursors)
    }

    /// Block table of a sequence, `BlockId::HOLE` for dropped blocks; a snapshot as soon as the manager is used again.
    pub fn block_table(&self, handle: SeqHandle) -> Result<&[BlockId]> {
        self.sequence(handle).map(|seq| &seq.blocks[..])
    }

    /// Known token ids of a sequence. O(tokens).
    pub fn tokens(&self, handle: SeqHandle) -> Result<Vec<u32>> {
        self.sequence(handle).map(|seq| seq.history(&self.pool))
    }

    /// Declare how long sequences may become: admissions leave room for them to get there. O(n).
    pub fn set_max_tokens(&mut self, handles: &[SeqHandle], max_tokens: Counts) -> Result<()> {
        self.check_batch(handles, false)?;
        max_tokens.check("max_tokens", handles.len())?;
        let most = self.capacity() * self.size.get();
        let is_bounded = |row: usize| self.seqs[handles[row]].max_resident.is_none();
        if let Some(row) = (0..handles.len()).find(|&row| max_tokens.at(row) > most && is_bounded(row)) {
            let expected = format!("at most {most}, what the pool can hold");
            return Err(Error::Row { argument: "max_tokens", row, got: max_tokens.at(row) as i64, expected });
        }
        for (row, &handle) in handles.iter().enumerate() {
            let seq = &mut self.seqs[handle];
            seq.max_tokens = Some(max_tokens.at(row));
            settle(seq, &mut self.counters, &mut self.pool);
        }
        Ok(())
    }

    /// Forget every cached block that nobody owns; returns how many. O(cached blocks).
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.pool.drop_cached(|_| true)
    }

    /// Make everything of a namespace unfindable: of all that have the adapter and the salt that are given. Returns the
    /// blocks concerned, those still in use included. What their
    /// sequences compute from now on is not published, until they are preempted and computed anew. O(num_blocks).
    pub fn drop_namespace(&mut self, wanted: &Keys) -> Result<usize> {
        if wanted.adapter.is_none() && wanted.salt.is_none() {
            let expected = "an adapter, a salt, or both".to_owned();
            return Err(Error::Value { argument: "number of keys", got: 0, expected });
        }
        wanted.check(0)?;
        let chosen: Vec<u32> = self
            .pool
            .namespaces
            .iter()
            .filter(|(_, keys, _, _)| namespace_matches(keys, wanted))
            .map(|(index, ..)| index)
            .collect();
        let published: Vec<_> = self
            .pool
            .ids()
            .filter(|&block| self.pool.is_published(block))
            .filter(|&block| chosen.contains(&self.pool.blocks[block].namespace))
            .collect();
        for &block in &published {
            self.pool.withdraw(block);
        }
        for seq in self.seqs.values_mut().filter(|seq| chosen.contains(&seq.namespace)) {
            seq.unlisted = true;
        }
        Ok(published.len())
    }

    pub(crate) fn sequence(&self, handle: SeqHandle) -> Result<&Sequence> {
        self.seqs.get(handle).ok_or(Error::StaleHandle(handle))
    }

    /// Check that a batch names each sequence once; `resident` ones only where the verb needs blocks. O(n).
    pub(crate) fn check_batch(&mut self, handles: &[SeqHandle], resident: bool) -> Result<()> {
        self.next_batch();
        for &handle in handles {
            let seq = self.seqs.get_mut(handle).ok_or(Error::StaleHandle(handle))?;
            check_member(seq, handle, self.batch, resident)?;
        }
        Ok(())
    }

    /// Begin a batch call: no sequence has been seen in it.
    pub(crate) fn next_batch(&mut self) {
        self.batch = self.batch.wrapping_add(1);
        if self.batch == 0 {
            // After 2**32 calls an old mark could be taken for a new one.
            self.seqs.values_mut().for_each(|seq| seq.seen = 0);
            self.batch = 1;
        }
    }
}

/// Count a sequence as it is now, in place of how it was counted last, and note the length of its table. O(1).
#[inline]
pub(crate) fn settle(seq: &mut Sequence, counters: &mut Counters, pool: &mut Pool) {
    seq.num_cols = seq.blocks.len() as u32;
    let (old, new) = (seq.share, seq.share_now(pool.block_size));
    counters.total.replace(old, new);
    pool.namespaces.touch(seq.namespace).replace(old, new);
    seq.share = new;
}

/// Mark a sequence as seen in a batch; an error if it was, or if it is preempted where that matters.
#[inline]
pub(crate) fn check_member(seq: &mut Sequence, handle: SeqHandle, batch: u32, resident: bool) -> Result<()> {
    if seq.seen == batch {
        return Err(Error::DuplicateHandle(handle));
    }
    if resident && seq.is_preempted {
        return Err(Error::Preempted(handle));
    }
    seq.seen = batch;
    Ok(())
}

/// One count for a whole batch, or one a row.
#[derive(Clone, Copy, Debug)]
pub enum Counts<'a> {
    /// The same for every row.
    All(i32),
    /// One a row.
    Each(&'a [i32]),
}

impl Counts<'_> {
    /// The count of a row.
    #[inline]
    pub(crate) fn at(&self, row: usize) -> usize {
        match self {
            Self::All(count) => *count as usize,
            Self::Each(counts) => counts[row] as usize,
        }
    }

    /// Refuse a wrong number of entries and negative ones, so that `at` is right for every row. O(n).
    pub(crate) fn check(&self, argument: &'static str, rows: usize) -> Result<()> {
        let expected = || "0 or more".to_owned();
        match *self {
            Self::All(count) if count < 0 => {
                Err(Error::Value { argument, got: count.into(), expected: expected() })
            }
            Self::All(_) => Ok(()),
            Self::Each(counts) if counts.len() != rows => {
                Err(Error::Length { argument, got: counts.len(), expected: rows })
            }
            Self::Each(counts) => match counts.iter().position(|&count| count < 0) {
                Some(row) => Err(Error::Row { argument, row, got: counts[row].into(), expected: expected() }),
                None => Ok(()),
            },
        }
    }
}
