//! Division by the block size. Imports nothing.
//!
//! Invariant: any size >= 1; a power of two, which nearly all are, divides by a shift.

/// Tokens per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSize {
    size: usize,
    /// log2 of the size, or `NO_SHIFT`.
    shift: u32,
}

const NO_SHIFT: u32 = u32::MAX;

impl BlockSize {
    pub fn new(size: usize) -> Self {
        Self { size, shift: if size.is_power_of_two() { size.trailing_zeros() } else { NO_SHIFT } }
    }

    #[inline]
    pub fn get(self) -> usize {
        self.size
    }

    /// Column of a position.
    #[inline]
    pub fn column(self, position: usize) -> usize {
        if self.shift == NO_SHIFT {
            position / self.size
        } else {
            position >> self.shift
        }
    }

    /// Offset of a position in its block.
    #[inline]
    pub fn offset(self, position: usize) -> usize {
        if self.shift == NO_SHIFT {
            self.remainder(position)
        } else {
            position & (self.size - 1)
        }
    }

    /// A division, out of the way of loops over rows.
    #[cold]
    fn remainder(self, position: usize) -> usize {
        position % self.size
    }

    /// Blocks that hold `tokens` tokens.
    #[inline]
    pub fn blocks(self, tokens: usize) -> usize {
        self.column(tokens) + usize::from(self.offset(tokens) > 0)
    }

    /// How many of the first `tokens` tokens lie in a column.
    #[inline]
    pub fn within(self, tokens: usize, column: usize) -> usize {
        tokens.saturating_sub(column * self.size).min(self.size)
    }
}
