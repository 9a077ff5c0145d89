//! The manager: one pool, its sequences, its counters. Imports everything below it; the verbs stand in `admission`,
//! `step`, `commit` and `lifetime`, one group a file.
//!
//! Invariant: a verb checks its whole batch before it changes anything, so an error or a refusal leaves no trace.

use slotmap::SlotMap;

use crate::error::{Error, Result};
use crate::hash::BlockHasher;
use crate::ids::{BlockId, SeqHandle, SeqKey};
use crate::pool::Pool;
use crate::prompt::Preparer;
use crate::stats::Counters;
use crate::step::RowPlan;
use crate::table::{Cursors, Sequence};

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
    pub(crate) pool: Pool,
    pub(crate) seqs: SlotMap<SeqKey, Sequence>,
    pub(crate) watermark: usize,
    pub(crate) null_block: bool,
    /// Sum of the lengths of all block tables.
    pub(crate) num_logical: usize,
    pub(crate) counters: Counters,
    pub(crate) preparer: Preparer,
    /// Number of the last batch call, written into each sequence it names.
    pub(crate) batch: u64,
    /// Scratch of an admission: the cached blocks found.
    pub(crate) hits: Vec<BlockId>,
    /// Scratch of a step: what each row needs.
    pub(crate) plan: Vec<RowPlan>,
}

impl Manager {
    /// A manager over `config.num_blocks` blocks. O(num_blocks) address space; memory is touched as blocks are used.
    pub fn new(config: Config) -> Result<Self> {
        let Config { num_blocks, block_size, hasher, watermark_blocks, null_block } = config;
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
        // Ask before taking: an allocation that fails inside would end the process.
        let bytes =
            num_blocks.checked_mul(block_size).and_then(|slots| (num_blocks * 64).checked_add(slots * 4));
        if bytes.is_none_or(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_err()) {
            let slots = (num_blocks as u128 * block_size as u128).min(i64::MAX as u128) as usize;
            return value(
                "num_blocks * block_size",
                slots,
                "a number of token ids that fits into memory".into(),
            );
        }
        Ok(Self {
            preparer: Preparer::new(hasher.clone(), block_size),
            pool: Pool::new(first as u32, num_blocks as u32, block_size, hasher),
            seqs: SlotMap::with_key(),
            watermark: watermark_blocks,
            null_block,
            num_logical: 0,
            counters: Counters::default(),
            batch: 0,
            hits: Vec::new(),
            plan: Vec::new(),
        })
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.pool.block_size
    }

    /// Blocks that can be allocated.
    pub fn capacity(&self) -> usize {
        self.pool.capacity() as usize
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

    /// Block table of a sequence; a snapshot as soon as the manager is used again. O(1).
    pub fn block_table(&self, handle: SeqHandle) -> Result<&[BlockId]> {
        self.sequence(handle).map(|seq| &seq.blocks[..])
    }

    /// Known token ids of a sequence. O(tokens).
    pub fn tokens(&self, handle: SeqHandle) -> Result<Vec<u32>> {
        self.sequence(handle).map(|seq| self.history(seq))
    }

    /// Forget every cached block; returns how many. O(cached blocks).
    pub fn reset_prefix_cache(&mut self) -> usize {
        self.pool.drop_cached() as usize
    }

    pub(crate) fn sequence(&self, handle: SeqHandle) -> Result<&Sequence> {
        self.seqs.get(handle.key()).ok_or(Error::StaleHandle(handle))
    }

    /// Check that a batch names each sequence once; `resident` ones only where the verb needs blocks. O(n).
    pub(crate) fn check_batch(&mut self, handles: &[SeqHandle], resident: bool) -> Result<()> {
        self.batch += 1;
        for &handle in handles {
            let seq = self.seqs.get_mut(handle.key()).ok_or(Error::StaleHandle(handle))?;
            if seq.seen == self.batch {
                return Err(Error::DuplicateHandle(handle));
            }
            if resident && seq.is_preempted {
                return Err(Error::Preempted(handle));
            }
            seq.seen = self.batch;
        }
        Ok(())
    }

    /// Ids of the known tokens: computed ones beside their blocks, the rest in the prompt. O(tokens).
    pub(crate) fn history(&self, seq: &Sequence) -> Vec<u32> {
        let mut ids = Vec::with_capacity(seq.num_known());
        for (i, &block) in seq.blocks.iter().enumerate() {
            let computed =
                seq.num_computed.saturating_sub(i * self.pool.block_size).min(self.pool.block_size);
            ids.extend_from_slice(&self.pool.tokens.of(block)[..computed]);
        }
        ids.extend_from_slice(seq.prompt.ids.get(ids.len()..seq.prompt_len).unwrap_or_default());
        ids
    }

    pub(crate) fn note_peaks(&mut self) {
        let (live, logical) = (self.pool.num_live() as usize, self.num_logical);
        self.counters.peak_live_blocks = self.counters.peak_live_blocks.max(live);
        self.counters.peak_logical_blocks = self.counters.peak_logical_blocks.max(logical);
    }
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
