//! What can be wrong with the arguments of a kernel. Imports nothing of the crate.
//!
//! Invariant: an error is returned before anything is written.

/// Result of a kernel.
pub type Result<T> = std::result::Result<T, Error>;

/// A wrong argument, with the numbers that show it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A size is 0 where at least 1 is needed, or a product of sizes exceeds the address space.
    #[error("{argument}: a size is 0, or the product of the sizes is too large")]
    Size {
        /// Name of the argument.
        argument: &'static str,
    },
    /// A slice has the wrong number of elements, or too few where strides are used.
    #[error("{argument} has {got} elements, expected {expected}")]
    Length {
        /// Name of the argument.
        argument: &'static str,
        /// Elements found.
        got: usize,
        /// Elements needed.
        expected: usize,
    },
    /// An index array says what cannot be.
    #[error("{argument}: {problem}")]
    Index {
        /// Name of the argument.
        argument: &'static str,
        /// The row or column, and the numbers that do not go together.
        problem: String,
    },
    /// Query heads must be a multiple of the heads of the cache.
    #[error("num_q_heads is {num_q_heads}, not a multiple of {num_kv_heads} heads of the cache")]
    Heads {
        /// Heads of the queries.
        num_q_heads: usize,
        /// Heads of the cache.
        num_kv_heads: usize,
    },
    /// Codes of a format with scales where numbers are needed, or the other way round.
    #[error("{argument}: the element type does not fit")]
    Codes {
        /// Name of the argument.
        argument: &'static str,
    },
    /// K and V disagree on blocks, tokens or heads.
    #[error("k and v differ in {0}")]
    Geometry(&'static str),
}

/// `Err(Index)`.
pub(crate) fn wrong_index<T>(argument: &'static str, problem: String) -> Result<T> {
    Err(Error::Index { argument, problem })
}

/// `Err(Length)` unless the numbers agree.
pub(crate) fn check_len(argument: &'static str, got: usize, expected: usize) -> Result<()> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::Length { argument, got, expected })
    }
}

/// The product of sizes.
pub(crate) fn product(argument: &'static str, sizes: &[usize]) -> Result<usize> {
    sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size)).ok_or(Error::Size { argument })
}
