//! Block hashes: the chained 128-bit hash that finds a block in the prefix cache. Imports nothing of the crate.
//!
//! Encoding: `hash[k] = xxh3_128(seed, hash[k-1] as 16 bytes little-endian, then each token id as 4 bytes
//! little-endian)`, with `hash[-1] = 0`. It is injective for a fixed block size and equal on every platform.
//! Invariant: a hash only *finds* a block; whoever finds one compares its content before using it.

use xxhash_rust::xxh3::xxh3_128_with_seed;

/// The seeded hash function of a manager.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    seed: u64,
    degenerate: bool,
}

impl BlockHasher {
    /// A hasher with an explicit seed: equal seeds give equal hashes in every process.
    pub fn new(seed: u64) -> Self {
        Self { seed, degenerate: false }
    }

    /// A hasher that gives every block the same hash, to prove that collisions are harmless.
    #[doc(hidden)]
    pub fn degenerate() -> Self {
        Self { seed: 0, degenerate: true }
    }

    /// Hash of a full block whose predecessor's hash is `parent` (0 for the first block).
    pub fn block(&self, parent: u128, tokens: &[u32]) -> u128 {
        if self.degenerate {
            return 1;
        }
        const STACK: usize = 16 + 4 * 64;
        let len = 16 + 4 * tokens.len();
        let mut stack = [0u8; STACK];
        let mut heap = Vec::new();
        let bytes = match stack.get_mut(..len) {
            Some(bytes) => bytes,
            None => {
                heap.resize(len, 0);
                &mut heap[..]
            }
        };
        bytes[..16].copy_from_slice(&parent.to_le_bytes());
        for (to, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        xxh3_128_with_seed(bytes, self.seed)
    }

    /// Hashes of all full blocks of `tokens`. O(tokens).
    pub fn chain(&self, tokens: &[u32], block_size: usize) -> Vec<u128> {
        let mut parent = 0;
        let blocks = tokens.chunks_exact(block_size);
        blocks
            .map(|block| {
                parent = self.block(parent, block);
                parent
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_chain_of_seed_zero() {
        let tokens: Vec<u32> = (0..32).collect();
        let chain = BlockHasher::new(0).chain(&tokens, 16);
        assert_eq!(chain, [GOLDEN[0], GOLDEN[1]]);
        assert_ne!(BlockHasher::new(1).chain(&tokens, 16), chain);
    }

    // Computed with an independent XXH3 implementation from the encoding above.
    const GOLDEN: [u128; 2] =
        [30338925252522429172703710732990793906, 299752104365523846659739855709458357394];

    #[test]
    fn long_blocks_take_the_heap_and_short_ones_the_stack_alike() {
        let hasher = BlockHasher::new(7);
        let tokens: Vec<u32> = (0..200).collect();
        let mut bytes = 5u128.to_le_bytes().to_vec();
        bytes.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
        for len in [0, 1, 63, 64, 65, 200] {
            let expected = xxh3_128_with_seed(&bytes[..16 + 4 * len], 7);
            assert_eq!(hasher.block(5, &tokens[..len]), expected);
        }
    }

    #[test]
    fn neighbouring_changes_that_cancel_in_a_linear_hash_do_not_cancel() {
        let hasher = BlockHasher::new(0);
        let tokens: Vec<u32> = (100..116).collect();
        let hash = hasher.block(0, &tokens);
        for base in [31, 33, 131, 1_000_003] {
            for j in 0..15 {
                let mut other = tokens.clone();
                other[j] += base;
                other[j + 1] -= 1;
                assert_ne!(hasher.block(0, &other), hash);
                let mut other = tokens.clone();
                other[j] -= 1;
                other[j + 1] += base;
                assert_ne!(hasher.block(0, &other), hash);
            }
        }
    }
}
