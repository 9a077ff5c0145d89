"""What a sequence takes on each GPU: blocks of the pools that grow with it, and bytes of fixed size.

Owns `Footprint` and `Pool`. Layers with the same span see the same tokens and share block tables: they are one pool,
which one `BlockManager` serves. Invariant: sizes are exact, and rounded up to whole blocks.
"""

from dataclasses import dataclass
from fractions import Fraction

from kvblocks.formats import KVFormat
from kvblocks.planner.model import Attention, Model


@dataclass(frozen=True)
class Pool:
    """The blocks of all layers that look back equally far.

    span: tokens, None: all. bytes_per_block: of all these layers on one GPU. num_layers: how many those are.
    """

    span: int | None
    bytes_per_block: int
    num_layers: int
    block_size: int
    slides: bool

    def blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence holds on its way to `num_tokens`.

        A window that starts inside a block reaches into one block more than its length fills.
        """
        whole = -(-num_tokens // self.block_size)
        if self.span is None:
            return whole
        if self.slides:
            return min(whole, (self.span + self.block_size - 2) // self.block_size + 1)
        return min(whole, -(-self.span // self.block_size) + (self.span % self.block_size > 0))

    def tokens(self, num_tokens: int) -> int:
        """Tokens whose rows are needed at `num_tokens`."""
        return num_tokens if self.span is None else min(num_tokens, self.span)

    def shared_blocks(self, num_tokens: int, prefix_tokens: int) -> int:
        """Blocks of the prefix that a sequence of `num_tokens` shares: whole ones, one token left to compute.

        A sequence that is longer than the span has dropped the start, so none are counted.
        """
        if self.span is not None and num_tokens > self.span:
            return 0
        return min(prefix_tokens, max(num_tokens - 1, 0)) // self.block_size


@dataclass(frozen=True)
class Footprint:
    """What sequences need on one of `num_ranks` tensor-parallel GPUs.

    sequence_bytes: states and residuals of one sequence, whatever its length. static_bytes: scales kept once.
    """

    pools: tuple[Pool, ...]
    sequence_bytes: int
    static_bytes: int

    def bytes_per_token(self, num_tokens: int | None = None) -> Fraction:
        """Bytes that one more token adds to a sequence of `num_tokens`; None: beyond every span."""
        pools = [
            pool
            for pool in self.pools
            if pool.span is None or (num_tokens is not None and num_tokens < pool.span)
        ]
        return sum((Fraction(pool.bytes_per_block, pool.block_size) for pool in pools), Fraction(0))

    def token_bytes(self, num_tokens: int) -> int:
        """Bytes of a sequence without rounding to blocks: what a contiguous cache of that length takes."""
        tokens = sum(
            (
                pool.tokens(num_tokens) * Fraction(pool.bytes_per_block, pool.block_size)
                for pool in self.pools
            ),
            Fraction(0),
        )
        return -int(-tokens // 1) + self.sequence_bytes

    def sequence_total(self, num_tokens: int) -> int:
        """Bytes of a sequence of `num_tokens`, in whole blocks."""
        return (
            sum(pool.blocks(num_tokens) * pool.bytes_per_block for pool in self.pools) + self.sequence_bytes
        )

    def shared_total(self, num_tokens: int, prefix_tokens: int) -> int:
        """Bytes of the blocks that all sequences of `num_tokens` with a common prefix store once."""
        return sum(
            pool.shared_blocks(num_tokens, prefix_tokens) * pool.bytes_per_block for pool in self.pools
        )

    @property
    def null_bytes(self) -> int:
        """Bytes of the null blocks, one in each pool, and of what is kept once."""
        return sum(pool.bytes_per_block for pool in self.pools) + self.static_bytes


def footprint(
    model: Model, kv_format: KVFormat, *, block_size: int, num_ranks: int = 1, residual_tokens: int = 0
) -> Footprint:
    """The footprint of a model's sequences in a format; ValueError or UserError where the sizes do not go together."""
    pools: dict[tuple[int | None, bool], Pool] = {}
    sequence_bytes = sum(state.bytes_per_rank(num_ranks) * count for state, count in model.states)
    static_bytes = 0
    for cache, count in model.attentions:
        key = (cache.span, cache.kind != "chunked attention")
        pool = pools.get(key, Pool(cache.span, 0, 0, block_size, key[1]))
        block_bytes = pool.bytes_per_block + count * layer_block_bytes(
            cache, kv_format, block_size, num_ranks
        )
        pools[key] = Pool(cache.span, block_bytes, pool.num_layers + count, block_size, key[1])
        if cache.bytes_per_token is None:
            heads = cache.heads_per_rank(num_ranks)
            static_bytes += count * kv_format.fixed_bytes(heads, cache.key_dim, cache.value_dim)
            sequence_bytes += count * kv_format.residual_bytes(
                residual_tokens, block_size, heads, cache.key_dim, cache.value_dim
            )
    return Footprint(tuple(pools.values()), sequence_bytes, static_bytes)


def layer_block_bytes(cache: Attention, kv_format: KVFormat, block_size: int, num_ranks: int) -> int:
    """Bytes of one block in one layer on one GPU, scales included; a latent row is stored as K alone."""
    if cache.bytes_per_token is not None:
        return cache.bytes_per_token * block_size
    heads = cache.heads_per_rank(num_ranks)
    kv_format.k.check("k", block_size, cache.key_dim)
    if not cache.value_dim:
        return kv_format.k.bytes_per_block(block_size, heads, cache.key_dim)
    kv_format.v.check("v", block_size, cache.value_dim)
    return kv_format.bytes_per_block(block_size, heads, cache.key_dim, cache.value_dim)
