//! The blocks of one cache and the state of each: free, live, cached or held. Imports `block_size`,
//! `blocks`, `free_list`, `hash`, `ids`, `namespaces`, `prefix`, `prompt`.
//!
//! Invariants: a block is live while a sequence owns it, held while only transfers do, cached while nobody does and it
//! is published, else free; the counters follow, so free + live + cached + held == capacity. A block leaves the pool
//! with exactly one reference. `fill` of a block is its written high-water mark; `used_slots` sums it over live blocks.

use std::collections::HashMap;
use std::sync::Arc;

use crate::block_size::BlockSize;
use crate::blocks::Blocks;
use crate::free_list::{FreeList, Reuse};
use crate::hash::{Algorithm, BlockHasher, Digest};
use crate::ids::BlockId;
use crate::namespaces::Namespaces;
use crate::prefix::{self, Content, ContentId, Link, PrefixIndex};
use crate::prompt::Tokens;

/// Blocks to look ahead when memory is asked for: a wait of about 100 ns at 10 to 20 ns a block.
pub(crate) const AHEAD: usize = 8;

/// Blocks to release together.
const CHUNK: usize = 32;

pub(crate) struct Pool {
    pub block_size: BlockSize,
    first: u32,
    num_blocks: u32,
    num_live: u32,
    num_held: u32,
    num_cached: u32,
    used_slots: u64,
    pub list: FreeList,
    pub blocks: Blocks,
    pub namespaces: Namespaces,
    /// References that transfers hold, of the blocks that have any.
    pub holds: HashMap<BlockId, u32>,
    /// None when the prefix cache is off: then nothing is hashed, published or looked up.
    pub index: Option<PrefixIndex>,
    pub hasher: BlockHasher,
    pub evictions: u64,
    /// Blocks that the last look-up met with an equal digest and other content.
    pub collisions: u64,
}

impl Pool {
    /// None if the memory cannot be had.
    pub fn new(
        first: u32,
        num_blocks: u32,
        block_size: BlockSize,
        hasher: Option<BlockHasher>,
        reuse: Reuse,
    ) -> Option<Self> {
        let n = num_blocks as usize;
        let wide = hasher.is_some_and(|hasher| hasher.algorithm == Algorithm::Sha256);
        Some(Self {
            block_size,
            first,
            num_blocks,
            num_live: 0,
            num_held: 0,
            num_cached: 0,
            used_slots: 0,
            list: FreeList::new(first, num_blocks, reuse)?,
            blocks: Blocks::new(n, block_size.get(), wide)?,
            namespaces: Namespaces::new(),
            holds: HashMap::new(),
            index: if hasher.is_some() { Some(PrefixIndex::new(n)?) } else { None },
            hasher: hasher.unwrap_or(BlockHasher { algorithm: Algorithm::Xxh3, seed: 0 }),
            evictions: 0,
            collisions: 0,
        })
    }

    /// Ids that can be handed out.
    pub fn ids(&self) -> impl Iterator<Item = BlockId> {
        (self.first..self.num_blocks).map(BlockId)
    }

    /// Whether an id is one that can be handed out.
    pub fn holds_id(&self, block: BlockId) -> bool {
        (self.first..self.num_blocks).contains(&block.0)
    }

    pub fn capacity(&self) -> usize {
        (self.num_blocks - self.first) as usize
    }

    pub fn num_live(&self) -> usize {
        self.num_live as usize
    }

    pub fn num_held(&self) -> usize {
        self.num_held as usize
    }

    pub fn num_cached(&self) -> usize {
        self.num_cached as usize
    }

    pub fn num_free(&self) -> usize {
        self.num_available() - self.num_cached()
    }

    /// Blocks that `take` can hand out, evictions included. O(1).
    #[inline]
    pub fn num_available(&self) -> usize {
        (self.list.num_unqueued() + self.list.num_queued()) as usize
    }

    pub fn used_slots(&self) -> u64 {
        self.used_slots
    }

    #[inline]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.blocks.refs(block)
    }

    pub fn fill(&self, block: BlockId) -> usize {
        self.blocks[block].fill as usize
    }

    #[inline]
    pub fn is_published(&self, block: BlockId) -> bool {
        prefix::is_published(&self.blocks, block)
    }

    /// Whether one owner alone may write into the block as it is.
    #[inline]
    pub fn is_private(&self, block: BlockId) -> bool {
        self.refs(block) == 1 && !self.is_published(block)
    }

    /// Hand out a block with one reference and no content: a free one, else the least recently used cached one. O(1).
    #[inline]
    pub fn take(&mut self, namespace: u32) -> Option<BlockId> {
        let block = self.take_uncounted(namespace)?;
        self.count_taken(1, namespace);
        Some(block)
    }

    /// `take` of a block that the caller counts, with others, by `count_taken`. O(1).
    #[inline]
    pub fn take_uncounted(&mut self, namespace: u32) -> Option<BlockId> {
        let mut evictions = Evictions::default();
        let block = self.take_evicting(namespace, &mut evictions)?;
        self.count_evictions(&evictions);
        Some(block)
    }

    /// Count blocks that have been taken for a namespace.
    #[inline]
    pub fn count_taken(&mut self, num_blocks: usize, namespace: u32) {
        self.num_live += num_blocks as u32;
        self.namespaces.usage(namespace).live_blocks += num_blocks;
    }

    /// Ask for what is known of the block that will be taken after `count` others, if it is one without content.
    #[inline]
    pub fn prefetch_free(&self, count: usize) {
        if let Some(block) = self.list.peek_recycled(count) {
            self.blocks.prefetch_refs(block);
            self.blocks.prefetch(block);
        }
    }

    /// `take`, `count` times, onto the end of a table that has room; the caller has seen that so many are available.
    #[inline]
    pub fn take_many(&mut self, count: usize, namespace: u32, table: &mut Vec<BlockId>) {
        let num_taken = count.min(self.list.num_unqueued() as usize);
        for _ in 0..num_taken {
            if let Some(block) = self.list.pop_unqueued() {
                self.blocks.begin(block, namespace);
                table.push(block);
            }
        }
        if count > num_taken {
            self.evict_many(count - num_taken, namespace, table);
        }
        self.count_taken(count, namespace);
    }

    #[inline(never)]
    fn evict_many(&mut self, count: usize, namespace: u32, table: &mut Vec<BlockId>) {
        let mut evictions = Evictions { ahead: self.list.front(), ..Evictions::default() };
        for _ in 0..AHEAD.min(count) {
            self.look_ahead(&mut evictions);
        }
        for _ in 0..count {
            table.extend(self.take_evicting(namespace, &mut evictions));
        }
        self.count_evictions(&evictions);
    }

    #[inline]
    fn take_evicting(&mut self, namespace: u32, evictions: &mut Evictions) -> Option<BlockId> {
        let block = match self.list.pop_unqueued() {
            Some(block) => block,
            None => self.pop_queued(evictions)?,
        };
        self.blocks.begin(block, namespace);
        Some(block)
    }

    /// Add a sequence to the owners of a live, held or cached block; its content stays. O(1).
    #[inline]
    pub fn share(&mut self, block: BlockId) {
        let refs = self.blocks.refs(block);
        *self.blocks.refs_mut(block) = refs + 1;
        if refs == 0 {
            self.list.unlink(block, &mut self.blocks);
            let namespace = self.blocks[block].namespace;
            self.count_revived(1, u64::from(self.blocks[block].fill), namespace);
        } else if self.is_held(block, refs) {
            self.leave_held(block);
            self.become_live(block);
        }
    }

    /// Add a sequence of a namespace to the owners of blocks that it hits. O(blocks).
    pub fn share_many(&mut self, hits: &[BlockId], namespace: u32) {
        let (mut num_revived, mut slots) = (0, 0);
        for &block in hits {
            let refs = self.blocks.refs(block);
            if refs == 0 {
                *self.blocks.refs_mut(block) = 1;
                self.list.unlink(block, &mut self.blocks);
                num_revived += 1;
                slots += u64::from(self.blocks[block].fill);
            } else {
                self.share(block);
            }
        }
        self.count_revived(num_revived, slots, namespace);
    }

    /// Count cached blocks of a namespace that have become live.
    fn count_revived(&mut self, num_blocks: u32, slots: u64, namespace: u32) {
        self.num_cached -= num_blocks;
        self.num_live += num_blocks;
        self.used_slots += slots;
        let usage = self.namespaces.usage(namespace);
        usage.cached_blocks -= num_blocks as usize;
        usage.live_blocks += num_blocks as usize;
        usage.used_slots += slots;
    }

    /// Remove a sequence from the owners; true if nobody owns the block any more. It is then cached if published, else
    /// free. O(1).
    #[inline]
    pub fn release(&mut self, block: BlockId) -> bool {
        let refs = self.blocks.refs_mut(block);
        *refs -= 1;
        let refs = *refs;
        if refs > 0 && !self.is_held(block, refs) {
            return false;
        }
        self.lose_last_sequence(block, refs)
    }

    /// Add `times` sequences to the owners of blocks that a sequence owns already. O(blocks), whatever the number.
    pub fn share_owned(&mut self, table: &[BlockId], times: u32) {
        let refs = self.blocks.all_refs_mut();
        for block in table.iter().filter(|&&block| block != BlockId::HOLE) {
            refs[block.index()] += times;
        }
    }

    /// Release part of the table of a sequence of a namespace, last block first, `times` times; returns (holes, blocks
    /// that nobody owns any more). O(blocks), whatever the number.
    pub fn release_many(&mut self, part: &[BlockId], times: u32, namespace: u32) -> (usize, usize) {
        let (mut num_holes, mut num_orphans, mut num_cached, mut slots) = (0, 0, 0, 0);
        for chunk in part.rchunks(CHUNK) {
            // First the reference counts, which stand close together, then what nobody owns any more.
            let (mut orphans, mut len) = ([BlockId::HOLE; CHUNK], 0);
            let refs = self.blocks.all_refs_mut();
            for &block in chunk.iter().rev() {
                if block == BlockId::HOLE {
                    num_holes += 1;
                    continue;
                }
                let refs = &mut refs[block.index()];
                *refs -= times;
                orphans[len % CHUNK] = block;
                len += usize::from(*refs == 0);
            }
            if !self.holds.is_empty() {
                for &block in chunk.iter().rev().filter(|&&block| block != BlockId::HOLE) {
                    let refs = self.refs(block);
                    if refs > 0 && self.is_held(block, refs) {
                        self.become_held(block);
                    }
                }
            }
            let orphans = &orphans[..len];
            orphans.iter().for_each(|&block| self.blocks.prefetch(block));
            for &block in orphans {
                slots += u64::from(self.blocks[block].fill);
                num_cached += usize::from(self.put_back_uncounted(block));
            }
            num_orphans += len;
        }
        self.num_cached += num_cached as u32;
        self.namespaces.usage(namespace).cached_blocks += num_cached;
        self.count_lost(num_orphans, slots, namespace);
        (num_holes, num_orphans)
    }

    /// The rest of `release`: no sequence owns the block any more, `refs` transfers do.
    #[inline]
    fn lose_last_sequence(&mut self, block: BlockId, refs: u32) -> bool {
        if refs > 0 {
            self.become_held(block);
            return false;
        }
        let (fill, namespace) = (self.blocks[block].fill, self.blocks[block].namespace);
        self.count_lost(1, u64::from(fill), namespace);
        self.put_back(block);
        true
    }

    fn become_held(&mut self, block: BlockId) {
        let (fill, namespace) = (self.blocks[block].fill, self.blocks[block].namespace);
        self.count_lost(1, u64::from(fill), namespace);
        self.num_held += 1;
        self.namespaces.usage(namespace).held_blocks += 1;
        self.namespaces.add_refs(namespace, 1);
    }

    /// Count blocks of a namespace that are live no more.
    fn count_lost(&mut self, num_blocks: usize, slots: u64, namespace: u32) {
        self.num_live -= num_blocks as u32;
        self.used_slots -= slots;
        let usage = self.namespaces.usage(namespace);
        usage.live_blocks -= num_blocks;
        usage.used_slots -= slots;
    }

    /// Add a transfer to the owners of a live block. O(1).
    pub fn hold(&mut self, block: BlockId) {
        *self.blocks.refs_mut(block) += 1;
        *self.holds.entry(block).or_default() += 1;
    }

    /// Remove a transfer from the owners; true if nobody owns the block any more. O(1).
    pub fn unhold(&mut self, block: BlockId) -> bool {
        if let Some(holds) = self.holds.get_mut(&block) {
            *holds -= 1;
            if *holds == 0 {
                self.holds.remove(&block);
            }
        }
        *self.blocks.refs_mut(block) -= 1;
        if self.blocks.refs(block) > 0 {
            return false;
        }
        self.put_back(block);
        self.leave_held(block);
        true
    }

    fn leave_held(&mut self, block: BlockId) {
        let namespace = self.blocks[block].namespace;
        self.num_held -= 1;
        self.namespaces.usage(namespace).held_blocks -= 1;
        self.namespaces.drop_ref(namespace);
    }

    /// Whether `refs` references are all transfers'.
    #[inline]
    fn is_held(&self, block: BlockId, refs: u32) -> bool {
        !self.holds.is_empty() && self.holds.get(&block) == Some(&refs)
    }

    fn become_live(&mut self, block: BlockId) {
        let (fill, namespace) = (self.blocks[block].fill, self.blocks[block].namespace);
        self.num_live += 1;
        self.used_slots += u64::from(fill);
        let usage = self.namespaces.usage(namespace);
        usage.live_blocks += 1;
        usage.used_slots += u64::from(fill);
    }

    #[inline]
    fn put_back(&mut self, block: BlockId) {
        if self.put_back_uncounted(block) {
            let namespace = self.blocks[block].namespace;
            self.namespaces.usage(namespace).cached_blocks += 1;
            self.num_cached += 1;
        }
    }

    /// Returns whether the block is cached now, which the caller counts.
    #[inline]
    fn put_back_uncounted(&mut self, block: BlockId) -> bool {
        let is_cached = self.is_published(block);
        if is_cached {
            self.list.push_back(block, &mut self.blocks);
        } else {
            self.list.push_unpublished(block, &mut self.blocks);
        }
        is_cached
    }

    /// Raise the written high-water mark of a live block; returns by how much, which the caller counts. O(1).
    #[inline]
    fn raise_uncounted(&mut self, block: BlockId, fill: usize) -> u32 {
        let record = &mut self.blocks[block];
        let raised = (fill as u32).saturating_sub(record.fill);
        record.fill += raised;
        raised
    }

    /// Raise the written high-water mark of a live block. O(1).
    #[inline]
    pub fn raise_fill(&mut self, block: BlockId, fill: usize) {
        let raised = self.raise_uncounted(block, fill);
        let namespace = self.blocks[block].namespace;
        self.count_written(raised, namespace);
    }

    /// Ask for where a token goes, ahead of `store_each`.
    #[inline]
    pub fn prefetch_token(&self, block: BlockId, offset: usize) {
        self.blocks.prefetch(block);
        self.blocks.prefetch_token(block, offset);
    }

    /// Write ids of single tokens, each into its slot (block, offset), and raise the marks of the blocks. O(ids).
    #[inline]
    pub fn store_each(&mut self, slots: &[(BlockId, u32)], ids: &[u32]) {
        // Neighbours are mostly of the same namespace.
        let (mut written, mut namespace) = (0, 0);
        for (&(block, offset), &id) in slots.iter().zip(ids) {
            self.blocks.write_token(block, offset as usize, id);
            let record = &mut self.blocks[block];
            let raised = (offset + 1).saturating_sub(record.fill);
            record.fill += raised;
            if record.namespace != namespace {
                let next = record.namespace;
                self.count_written(std::mem::take(&mut written), namespace);
                namespace = next;
            }
            written += raised;
        }
        self.count_written(written, namespace);
    }

    /// Count slots by which marks were raised. O(1).
    #[inline]
    pub fn count_written(&mut self, raised: u32, namespace: u32) {
        self.used_slots += u64::from(raised);
        self.namespaces.usage(namespace).used_slots += u64::from(raised);
    }

    /// Write ids beside the blocks that hold the positions from `at` on, and raise their marks. O(ids).
    #[inline]
    pub fn store(&mut self, table: &[BlockId], namespace: u32, mut at: usize, mut ids: &[u32]) {
        let size = self.block_size;
        let mut raised = 0;
        while !ids.is_empty() {
            let (block, offset) = (table[size.column(at)], size.offset(at));
            let (now, later) = ids.split_at(ids.len().min(size.get() - offset));
            self.blocks.write_tokens(block, offset, now);
            raised += self.raise_uncounted(block, offset + now.len());
            at += now.len();
            ids = later;
        }
        self.count_written(raised, namespace);
    }

    /// Lower the mark of a live block to `fill`; for its sole owner only. O(1).
    pub fn lower_fill(&mut self, block: BlockId, fill: usize) {
        let record = &mut self.blocks[block];
        let lowered = record.fill.saturating_sub(fill as u32);
        record.fill -= lowered;
        let namespace = record.namespace;
        self.used_slots -= u64::from(lowered);
        self.namespaces.usage(namespace).used_slots -= u64::from(lowered);
    }

    /// Make a block's content unfindable. A cached block is then free. O(1).
    pub fn withdraw(&mut self, block: BlockId) {
        let Some(index) = &mut self.index else { return };
        index.withdraw(block, &mut self.blocks);
        let (refs, namespace) = (self.blocks.refs(block), self.blocks[block].namespace);
        if refs == 0 {
            self.list.unlink(block, &mut self.blocks);
            self.num_cached -= 1;
            self.namespaces.usage(namespace).cached_blocks -= 1;
            self.list.push_unpublished(block, &mut self.blocks);
        }
        self.namespaces.drop_ref(namespace);
    }

    /// The longest run of published blocks that hold the leading blocks of a prompt, pushed to `hits`. O(hits).
    pub fn find_prefix(&mut self, prompt: &Tokens, most: usize, hits: &mut Vec<BlockId>) {
        let (Some(index), Some(namespace)) = (&self.index, self.namespaces.find(&prompt.namespace)) else {
            return;
        };
        let mut parent = ContentId::root(namespace);
        // What is likely found, a few blocks ahead; its bucket is asked for twice as far ahead.
        let mut candidates = [None; AHEAD];
        let candidate = |digest| index.prefetch_candidate(digest, &self.blocks);
        for (to, digest) in candidates.iter_mut().zip(&prompt.hashes) {
            *to = candidate(digest);
        }
        let parts = prompt.ids.chunks_exact(self.block_size.get());
        for (i, (tokens, digest)) in parts.zip(&prompt.hashes).enumerate().take(most) {
            let wanted = Content { digest, parent, tokens, extra: prompt.extra(i) };
            let likely = candidates[i % AHEAD].filter(|&block| prefix::holds(block, &wanted, &self.blocks));
            let Some(block) = likely.or_else(|| index.find(wanted, &self.blocks, &mut self.collisions))
            else {
                return;
            };
            parent = ContentId(self.blocks[block].content());
            hits.push(block);
            if let Some(far) = prompt.hashes.get(i + 2 * AHEAD) {
                index.prefetch(prefix::fragment(far));
            }
            candidates[i % AHEAD] = prompt.hashes.get(i + AHEAD).and_then(candidate);
        }
    }

    /// Digest of a full block after `parent`. O(block_size).
    #[inline]
    pub fn digest(&self, block: BlockId, parent: &Link, extra: Option<&Arc<[u8]>>) -> Digest {
        let extra = extra.map_or(&[][..], |extra| &extra[..]);
        self.hasher.block(parent.digest, self.blocks.tokens(block), extra)
    }

    /// Publish a full live block after `parent`; `digest` where it is known already. Returns its chain value. The caller
    /// counts it in its namespace. O(block_size).
    #[inline]
    pub fn publish(
        &mut self,
        block: BlockId,
        parent: &Link,
        digest: Option<&Digest>,
        extra: Option<&Arc<[u8]>>,
    ) -> Option<Link> {
        let digest = match digest {
            Some(digest) => *digest,
            None => self.digest(block, parent, extra),
        };
        let index = self.index.as_mut()?;
        let content = index.publish(block, &digest, parent.content, extra, &mut self.blocks);
        Some(Link { digest, content })
    }

    /// The oldest block with the content of a published one, if that is another. O(1) expected, and O(twins).
    pub fn older_twin(&self, block: BlockId) -> Option<BlockId> {
        self.index.as_ref()?.older_twin(block, &self.blocks)
    }

    /// Drop the cached blocks that `which` chooses by namespace; returns how many. O(cached blocks).
    pub fn drop_cached(&mut self, mut which: impl FnMut(u32) -> bool) -> usize {
        let chosen: Vec<_> = self
            .list
            .queued(&self.blocks)
            .filter(|&block| self.is_published(block) && which(self.blocks[block].namespace))
            .collect();
        for &block in &chosen {
            self.withdraw(block);
        }
        chosen.len()
    }

    /// Take the front of the queue, evicting its content.
    fn pop_queued(&mut self, evictions: &mut Evictions) -> Option<BlockId> {
        self.look_ahead(evictions);
        let block = self.list.pop_front(&mut self.blocks)?;
        match &mut self.index {
            Some(index) if prefix::is_published(&self.blocks, block) => {
                let namespace = self.blocks[block].namespace;
                index.withdraw(block, &mut self.blocks);
                if namespace != evictions.namespace {
                    self.count_evictions(evictions);
                    (evictions.namespace, evictions.count) = (namespace, 0);
                }
                evictions.count += 1;
            }
            _ => self.list.note_taken(block),
        }
        Some(block)
    }

    /// Ask for the index entry of a block further on in the queue, whose record is read on the way.
    #[inline]
    fn look_ahead(&self, evictions: &mut Evictions) {
        if let (Some(block), Some(index)) = (evictions.ahead, &self.index) {
            index.prefetch(self.blocks[block].fragment());
            evictions.ahead = self.list.after(block, &self.blocks);
        }
    }

    fn count_evictions(&mut self, evictions: &Evictions) {
        if evictions.count > 0 {
            self.evictions += evictions.count as u64;
            self.num_cached -= evictions.count as u32;
            let usage = self.namespaces.usage(evictions.namespace);
            usage.cached_blocks -= evictions.count;
            usage.evicted_blocks += evictions.count as u64;
            self.namespaces.drop_refs(evictions.namespace, evictions.count);
        }
    }
}

/// A run of evictions of blocks of one namespace, counted together.
#[derive(Default)]
struct Evictions {
    namespace: u32,
    count: usize,
    /// A block further on in the queue, to look at ahead of its eviction.
    ahead: Option<BlockId>,
}
