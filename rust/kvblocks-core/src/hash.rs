//! Block hashes: the chained digest that finds a block in the prefix cache. Imports `error`,
//! `keys`, `prefetch`.
//!
//! Encoding, equal on every platform. The digest of block k covers, in this order: the digest of block k-1 (of the
//! *root* for k = 0); each of its `block_size` token ids as 4 bytes little-endian; its extra keys, framed (see `keys`).
//! The root covers the framed keys of the namespace, nothing for the default one. XXH3 takes the seed as its own seed;
//! SHA-256 has none, so its root starts with the seed as 8 bytes little-endian. For a fixed block size this is
//! injective: the first parts have a fixed width, and what follows is framed.
//!
//! Invariant: a digest only *finds* a block; whoever finds one compares its content before using it.

use std::borrow::Cow;
use std::sync::Arc;

use sha2::block_api::compress256;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::error::{Error, Result};
use crate::keys::Keys;
use crate::prefetch::prefetch;

/// Digest of a block: 16 bytes for XXH3 (`high` is 0), 32 for SHA-256.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Digest {
    /// The first 16 bytes, little-endian.
    pub low: u128,
    /// The last 16 bytes, little-endian.
    pub high: u128,
}

/// The hash function of a prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// XXH3 of 128 bits, seeded: the fast default. Content is compared on a hit, so a collision costs a miss.
    Xxh3,
    /// SHA-256, for where digests leave the process and content cannot be compared.
    Sha256,
    /// One digest for everything, to prove that collisions are harmless.
    Degenerate,
}

impl Algorithm {
    /// Bytes of a digest.
    pub fn num_bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Xxh3 | Self::Degenerate => 16,
        }
    }
}

/// Token ids in a cache line.
const TOKENS_PER_LINE: usize = 16;

/// Token ids to ask for ahead: those of 24 lines, as memory takes as long as hashing so many.
const TOKENS_AHEAD: usize = 24 * TOKENS_PER_LINE;

/// The hash function and its seed: equal ones give equal digests in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHasher {
    /// The function.
    pub algorithm: Algorithm,
    /// Keeps others from foreseeing digests.
    pub seed: u64,
}

impl BlockHasher {
    /// Digest of the empty prefix of a namespace, whose keys are given framed.
    pub fn root(&self, keys: &[u8]) -> Digest {
        match self.algorithm {
            Algorithm::Xxh3 => Digest { low: xxh3_128_with_seed(keys, self.seed), high: 0 },
            Algorithm::Sha256 => sha256(&mut [&self.seed.to_le_bytes(), keys].concat()),
            Algorithm::Degenerate => Digest { low: 1, high: 0 },
        }
    }

    /// Digest of a full block after `parent`. O(tokens).
    pub fn block(&self, parent: Digest, tokens: &[u32], extra: &[u8]) -> Digest {
        self.link(parent, tokens, extra, &mut Vec::new())
    }

    /// As `block`, with the preimage put together in `bytes`, which a chain of blocks uses again.
    #[inline]
    pub(crate) fn link(&self, parent: Digest, tokens: &[u32], extra: &[u8], bytes: &mut Vec<u8>) -> Digest {
        if let (Algorithm::Xxh3, Ok(tokens), true) =
            (self.algorithm, <&[u32; 16]>::try_from(tokens), extra.is_empty() && LITTLE_ENDIAN)
        {
            return Digest { low: xxh3_of_16(parent.low, tokens, self.seed), high: 0 };
        }
        let head = self.algorithm.num_bytes();
        let end = head + 4 * tokens.len();
        bytes.resize(end, 0);
        bytes[..16].copy_from_slice(&parent.low.to_le_bytes());
        if head == 32 {
            bytes[16..32].copy_from_slice(&parent.high.to_le_bytes());
        }
        if LITTLE_ENDIAN {
            bytes[head..end].copy_from_slice(bytemuck::cast_slice(tokens));
        } else {
            for (to, token) in bytes[head..end].chunks_exact_mut(4).zip(tokens) {
                to.copy_from_slice(&token.to_le_bytes());
            }
        }
        bytes.extend_from_slice(extra);
        match self.algorithm {
            Algorithm::Xxh3 => Digest { low: xxh3_128_with_seed(bytes, self.seed), high: 0 },
            Algorithm::Sha256 => sha256(bytes),
            Algorithm::Degenerate => Digest { low: 1, high: 0 },
        }
    }

    /// Digests of the full blocks of a prompt, as a manager with this hasher gives them; with `parent`, the digest of
    /// an earlier block, of what follows that block (media positions count from there). O(tokens).
    pub fn chain(
        &self,
        tokens: &[u32],
        keys: &Keys,
        parent: Option<&[u8]>,
        block_size: usize,
    ) -> Result<Vec<Digest>> {
        keys.check(tokens.len())?;
        if block_size == 0 {
            return Err(Error::Value { argument: "block_size", got: 0, expected: "1 or more".into() });
        }
        let parent = match parent {
            None => self.root(&keys.namespace()),
            Some(bytes) => Digest::from_bytes(bytes, self.algorithm)?,
        };
        let mut digests = reserve(tokens.len(), block_size)?;
        self.extend_from(&mut digests, parent, tokens, &keys.extras(block_size), block_size, |_| {});
        Ok(digests)
    }

    /// Add the digests of the full blocks of `tokens` that `digests` does not hold yet, and return the tokens as the
    /// caller's own. `parent` comes before the first block of all; `extras` are framed media keys in the order of blocks.
    /// Tokens are copied block by block as they are hashed, and asked for ahead: each block waits for the digest before it,
    /// memory meanwhile is read for nothing. O(tokens).
    pub(crate) fn extend(
        &self,
        digests: &mut Vec<Digest>,
        parent: Digest,
        tokens: Cow<[u32]>,
        extras: &[(usize, Arc<[u8]>)],
        block_size: usize,
    ) -> Vec<u32> {
        match tokens {
            Cow::Owned(tokens) => {
                self.extend_from(digests, parent, &tokens, extras, block_size, |_| {});
                tokens
            }
            Cow::Borrowed(tokens) => {
                let mut own = Vec::with_capacity(tokens.len());
                own.extend_from_slice(&tokens[..digests.len() * block_size]);
                let ask = |from: usize, len| {
                    (from..from + len).step_by(TOKENS_PER_LINE).for_each(|at| prefetch(tokens, at));
                };
                ask(own.len(), TOKENS_AHEAD);
                self.extend_from(digests, parent, tokens, extras, block_size, |block| {
                    ask(own.len() + TOKENS_AHEAD, block.len());
                    own.extend_from_slice(block);
                });
                own.extend_from_slice(&tokens[own.len()..]);
                own
            }
        }
    }

    /// As `extend`, with each block that is hashed shown to `see`.
    #[inline]
    fn extend_from(
        &self,
        digests: &mut Vec<Digest>,
        parent: Digest,
        tokens: &[u32],
        extras: &[(usize, Arc<[u8]>)],
        block_size: usize,
        mut see: impl FnMut(&[u32]),
    ) {
        let known = digests.len();
        let mut digest = digests.last().copied().unwrap_or(parent);
        if self.algorithm == Algorithm::Xxh3 && block_size == 16 && extras.is_empty() && LITTLE_ENDIAN {
            digests.extend(tokens.as_chunks().0[known..].iter().map(|block| {
                see(block);
                digest.low = xxh3_of_16(digest.low, block, self.seed);
                digest
            }));
            return;
        }
        let mut extras = extras.iter().skip_while(|extra| extra.0 < known).peekable();
        let mut bytes = Vec::new();
        for (i, block) in tokens.chunks_exact(block_size).enumerate().skip(known) {
            let extra = extras.next_if(|extra| extra.0 == i).map_or(&[][..], |extra| &extra.1[..]);
            see(block);
            digest = self.link(digest, block, extra, &mut bytes);
            digests.push(digest);
        }
    }
}

/// Room for the digests of a prompt's full blocks.
pub(crate) fn reserve(num_tokens: usize, block_size: usize) -> Result<Vec<Digest>> {
    let (len, mut digests) = (num_tokens / block_size, Vec::new());
    let bytes = len.saturating_mul(size_of::<Digest>());
    match digests.try_reserve_exact(len) {
        Ok(()) => Ok(digests),
        Err(_) => Err(Error::Memory { argument: "tokens", got: num_tokens, bytes }),
    }
}

impl Digest {
    fn from_bytes(bytes: &[u8], algorithm: Algorithm) -> Result<Self> {
        if bytes.len() != algorithm.num_bytes() {
            let expected = algorithm.num_bytes();
            return Err(Error::Length { argument: "parent", got: bytes.len(), expected });
        }
        let (mut low, mut high) = ([0; 16], [0; 16]);
        low.copy_from_slice(&bytes[..16]);
        high[..bytes.len() - 16].copy_from_slice(&bytes[16..]);
        Ok(Self { low: u128::from_le_bytes(low), high: u128::from_le_bytes(high) })
    }
}

/// XXH3 of a block of the usual size without extra keys: sizes that the compiler knows halve the time.
#[inline]
fn xxh3_of_16(parent: u128, tokens: &[u32; 16], seed: u64) -> u128 {
    let mut bytes = [0u8; 16 + 64];
    bytes[..16].copy_from_slice(&parent.to_le_bytes());
    bytes[16..].copy_from_slice(bytemuck::bytes_of(tokens));
    xxh3_128_with_seed(&bytes, seed)
}

/// SHA-256 of a message (FIPS 180-4), padded where it stands: the library's compression function on whole blocks, without
/// its buffering in between, which costs a third of the time of a short message.
fn sha256(message: &mut Vec<u8>) -> Digest {
    let num_bits = 8 * message.len() as u64;
    message.push(0x80);
    message.resize((message.len() + 8).next_multiple_of(64) - 8, 0);
    message.extend_from_slice(&num_bits.to_be_bytes());
    let mut state = SHA256_START;
    compress256(&mut state, message.as_chunks().0);
    let mut halves = [[0; 16]; 2];
    for (to, word) in halves.as_flattened_mut().chunks_exact_mut(4).zip(state) {
        to.copy_from_slice(&word.to_be_bytes());
    }
    Digest { low: u128::from_le_bytes(halves[0]), high: u128::from_le_bytes(halves[1]) }
}

/// Fractions of the square roots of the first eight primes.
const SHA256_START: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

const LITTLE_ENDIAN: bool = cfg!(target_endian = "little");
