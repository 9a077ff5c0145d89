//! What the blocks of the pool hold: token ids, how far each is written, and what can be found. Part of `pool`.
//!
//! Invariant: `fill` of a block is its written high-water mark, and `used_slots` sums it over live blocks.

use std::sync::Arc;

use super::Pool;
use crate::hash::Digest;
use crate::ids::BlockId;
use crate::prefetch::AHEAD;
use crate::prefix::{self, ContentId, Link};
use crate::prompt::Tokens;

impl Pool {
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

    /// Write ids of single tokens, each into its slot (block, position), and raise the marks of the blocks. Returns how many
    /// have filled their block, which `filled`, as long as the rest, begins with then. O(ids).
    #[inline]
    pub fn store_each(&mut self, slots: &[(BlockId, u32)], ids: &[u32], filled: &mut [u32]) -> usize {
        let Self { blocks, namespaces, used_slots, block_size, .. } = self;
        blocks.write_each(slots, ids, *block_size, filled, |raised, namespace| {
            *used_slots += u64::from(raised);
            namespaces.usage(namespace).used_slots += u64::from(raised);
        })
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
            if let Some(&ahead) = table.get(size.column(at) + AHEAD) {
                self.blocks.prefetch(ahead);
            }
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
            self.list.unlink(block, block, 1, &mut self.blocks);
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
        let root = ContentId::root(namespace);
        index.find_chain(prompt, root, most, &self.blocks, &mut self.collisions, hits);
    }

    /// Digest of a full block after `parent`. O(block_size).
    #[inline]
    pub fn digest(&self, block: BlockId, parent: &Link, extra: Option<&Arc<[u8]>>) -> Digest {
        let extra = extra.map_or(&[][..], |extra| &extra[..]);
        self.hasher.block(parent.digest, self.blocks.tokens(block), extra)
    }

    /// Ask for what publishing a block touches.
    #[inline]
    pub fn prefetch_publication(&self, block: BlockId, digest: &Digest) {
        self.blocks.prefetch(block);
        if let Some(index) = &self.index {
            index.prefetch(prefix::fragment(digest));
        }
    }

    /// Publish a full live block after `tip`; returns its chain value. The caller counts it in its namespace. O(block_size).
    #[inline]
    pub fn publish(&mut self, block: BlockId, digest: &Digest, tip: Link, extra: Option<&Arc<[u8]>>) -> Link {
        let Self { index: Some(index), blocks, .. } = self else { return tip };
        Link { digest: *digest, content: index.publish(block, digest, tip.content, extra, blocks) }
    }

    /// Publish the full live blocks at the end of a table, from column `from` on, the first of them after `tip`; `known`
    /// are digests of the first ones, `prompt` has extra keys. Returns the last one's chain value. The caller counts them
    /// in their namespace. O(tokens).
    pub fn publish_many(
        &mut self,
        table: &[BlockId],
        from: usize,
        known: &[Digest],
        mut tip: Link,
        prompt: &Tokens,
    ) -> Link {
        let Self { index: Some(index), blocks, hasher, .. } = self else { return tip };
        known.iter().take(AHEAD).for_each(|digest| index.prefetch(prefix::fragment(digest)));
        let mut before = table[..from].last().copied().unwrap_or(BlockId::HOLE);
        for (i, &block) in table[from..].iter().enumerate() {
            if let Some(ahead) = known.get(i + AHEAD) {
                index.prefetch(prefix::fragment(ahead));
            }
            let extra = prompt.extra(from + i);
            let digest = known.get(i).copied().unwrap_or_else(|| {
                hasher.block(tip.digest, blocks.tokens(block), extra.map_or(&[], |extra| &extra[..]))
            });
            let content = index.publish(block, &digest, tip.content, extra, blocks);
            tip = Link { digest, content };
            blocks.suggest_next(before, block);
            before = block;
        }
        tip
    }

    /// The oldest block with the content of a published one, if that is another. O(1) expected, and O(twins).
    pub fn older_twin(&self, block: BlockId) -> Option<BlockId> {
        self.index.as_ref()?.older_twin(block, &self.blocks)
    }
}
