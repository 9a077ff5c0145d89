//! Where a token lives: (block table, position) -> slot -> row. The only maker of cache offsets. Imports `code`, `error`.
//!
//! Invariant: a `Paged` that passed `check` against a length keeps every row of every slot inside that length.

use std::ops::Range;

use crate::code::{with_elements, Elements};
use crate::error::{Error, Result};
use crate::scaling::Scaling;

/// Geometry of K or V of one layer, in elements; the elements of a row are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paged {
    /// Elements between two blocks.
    pub block_stride: usize,
    /// Elements between two tokens of a block.
    pub token_stride: usize,
    /// Elements between two heads of a token.
    pub head_stride: usize,
    /// Blocks of storage.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Heads of a token.
    pub num_heads: usize,
    /// Elements of a row.
    pub head_dim: usize,
}

/// K or V of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Cache<'a> {
    /// The elements that the geometry addresses.
    pub data: Elements<'a>,
    /// Where they are.
    pub paged: Paged,
    /// What a code stands for.
    pub scaling: Scaling<'a>,
}

impl Cache<'_> {
    /// Bytes of a row of storage.
    pub(crate) fn row_bytes(&self) -> usize {
        self.paged.head_dim * with_elements!(Elements, self.data, slice => size_of_val(&slice[0]))
    }
}

impl Paged {
    /// A dense `[num_blocks, block_size, num_heads, head_dim]`.
    pub fn nhd(num_blocks: usize, block_size: usize, num_heads: usize, head_dim: usize) -> Result<Self> {
        let token_stride = product(num_heads, head_dim)?;
        let block_stride = product(token_stride, block_size)?;
        let head_stride = head_dim;
        Ok(Self { block_stride, token_stride, head_stride, num_blocks, block_size, num_heads, head_dim })
    }

    /// A dense `[num_blocks, num_heads, block_size, head_dim]`.
    pub fn hnd(num_blocks: usize, block_size: usize, num_heads: usize, head_dim: usize) -> Result<Self> {
        let head_stride = product(block_size, head_dim)?;
        let block_stride = product(head_stride, num_heads)?;
        let token_stride = head_dim;
        Ok(Self { block_stride, token_stride, head_stride, num_blocks, block_size, num_heads, head_dim })
    }

    /// Slots of storage.
    pub fn num_slots(&self) -> usize {
        // Cannot saturate once checked: every slot holds an element or more.
        self.num_blocks.saturating_mul(self.block_size)
    }

    /// Every size is 1 or more and the last row ends within `len` elements.
    pub(crate) fn check(&self, argument: &'static str, len: usize) -> Result<()> {
        let sizes = [self.num_blocks, self.block_size, self.num_heads, self.head_dim];
        let strides = [self.block_stride, self.token_stride, self.head_stride, 1];
        let end = sizes.iter().zip(strides).try_fold(1usize, |end, (&size, stride)| {
            end.checked_add(size.checked_sub(1)?.checked_mul(stride)?)
        });
        // Strides of 0 would let a huge cache end early; rows that do not overlap need this many elements.
        let elements = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        match (end, elements) {
            (Some(end), Some(elements)) if end.max(elements) <= len => Ok(()),
            (Some(end), Some(elements)) => {
                Err(Error::Length { argument, got: len, expected: end.max(elements) })
            }
            _ => Err(Error::Size { argument }),
        }
    }

    /// Whether no two rows share an element: each axis steps over all that the narrower ones cover.
    pub(crate) fn rows_are_apart(&self) -> bool {
        let mut axes = [
            (self.block_stride, self.num_blocks),
            (self.token_stride, self.block_size),
            (self.head_stride, self.num_heads),
        ];
        axes.sort_unstable();
        let mut covered = self.head_dim;
        axes.into_iter().filter(|&(_, size)| size > 1).all(|(stride, size)| {
            let apart = stride >= covered;
            covered += (size - 1) * stride;
            apart
        })
    }

    /// The elements of a block, in as few runs as there are.
    pub(crate) fn runs(&self, block: usize) -> impl Iterator<Item = Range<usize>> {
        let (token, block_len) =
            (self.num_heads * self.head_dim, self.block_size * self.num_heads * self.head_dim);
        let nhd = self.head_stride == self.head_dim && self.token_stride == token;
        let hnd = self.token_stride == self.head_dim && self.head_stride == self.block_size * self.head_dim;
        let (tokens, heads, len) =
            if nhd || hnd { (1, 1, block_len) } else { (self.block_size, self.num_heads, self.head_dim) };
        let this = *self;
        (0..tokens * heads).map(move |row| {
            let start = this.row_in_block(block, row / heads, row % heads).start;
            start..start + len
        })
    }

    /// Elements of the row of a head at a slot below `num_slots`.
    pub(crate) fn row(&self, slot: usize, head: usize) -> Range<usize> {
        self.row_in_block(slot / self.block_size, slot % self.block_size, head)
    }

    /// Elements of the row of a head at an offset within a block.
    pub(crate) fn row_in_block(&self, block: usize, offset: usize, head: usize) -> Range<usize> {
        let start = block * self.block_stride + offset * self.token_stride + head * self.head_stride;
        start..start + self.head_dim
    }

    /// The first of the columns `columns` of a table that names no block of the storage.
    pub(crate) fn wrong_column(&self, table: &[i32], columns: Range<usize>) -> Option<usize> {
        let mut columns = columns.start..columns.end.min(table.len());
        columns.find(|&column| usize::try_from(table[column]).map_or(true, |block| block >= self.num_blocks))
    }
}

fn product(a: usize, b: usize) -> Result<usize> {
    crate::error::product("geometry", &[a, b])
}
