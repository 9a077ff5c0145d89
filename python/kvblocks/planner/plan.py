"""How many users fit: the footprint of a sequence against the budget of a GPU.

Owns `Scenario`, everything a question consists of, and the answers to it. Invariant: whatever is said to fit can be
allocated by a `BlockManager` for each pool, and one user more cannot.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean, pstdev
from typing import Final

from kvblocks.formats import KVFormat
from kvblocks.planner.footprint import Footprint, footprint
from kvblocks.planner.lengths import Lengths
from kvblocks.planner.memory import Budget
from kvblocks.planner.model import Model
from kvblocks.report import UserError

# Beyond any context: what still fits at this length fits at every length.
_ENDLESS: Final = 1 << 50
# A whole number of users that floating point puts just below itself.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class Scenario:
    """A model on GPUs, in a cache format, with contexts of given lengths.

    num_ranks: tensor-parallel degree, GPUs that serve a user together. num_gpus: all GPUs, a multiple of it; each
    group of ranks is a replica. shared_prefix: tokens that all users have in common at the start. is_paged: False
    reserves the longest context for every user, contiguously, and shares nothing.
    """

    model: Model
    budget: Budget
    kv_format: KVFormat
    lengths: Lengths
    block_size: int = 16
    num_ranks: int = 1
    num_gpus: int = 1
    residual_tokens: int = 128
    shared_prefix: int = 0
    is_paged: bool = True

    def __post_init__(self) -> None:
        if self.num_gpus % self.num_ranks:
            raise UserError(f"--gpus {self.num_gpus}: expected a multiple of --tp {self.num_ranks}")
        if self.model.attentions and self.model.num_query_heads % self.num_ranks:
            raise UserError(
                f"--tp {self.num_ranks}: {self.model.num_query_heads} query heads do not divide evenly"
            )

    @cached_property
    def footprint(self) -> Footprint:
        """What a sequence takes on each GPU."""
        try:
            return footprint(
                self.model,
                self.kv_format,
                block_size=self.block_size,
                num_ranks=self.num_ranks,
                residual_tokens=self.residual_tokens,
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def num_replicas(self) -> int:
        """Groups of GPUs that each hold the whole model."""
        return self.num_gpus // self.num_ranks

    def bytes_per_user(self, num_tokens: int) -> int:
        """Bytes on each GPU that one more user with a context of `num_tokens` takes."""
        if not self.is_paged:
            return self.footprint.token_bytes(self.lengths.max_tokens)
        own = self.footprint.sequence_total(num_tokens)
        return own - self.footprint.shared_total(num_tokens, self.shared_prefix)

    def fixed_bytes(self, num_tokens: int) -> int:
        """Bytes on each GPU that are taken however many users there are: null blocks, static scales, the prefix."""
        if not self.is_paged:
            return self.footprint.static_bytes
        return self.footprint.null_bytes + self.footprint.shared_total(num_tokens, self.shared_prefix)

    def bytes_for(self, num_users: int, num_tokens: int) -> int:
        """Bytes of cache on each GPU of a replica with `num_users` users; nothing for none."""
        return num_users and self.fixed_bytes(num_tokens) + num_users * self.bytes_per_user(num_tokens)

    def users_per_replica(self, num_tokens: int) -> int:
        """Users with a context of `num_tokens` that fit in one replica at the same time."""
        left = self.budget.cache_bytes - self.fixed_bytes(num_tokens)
        return max(0, left // self.bytes_per_user(num_tokens))

    def users(self, num_tokens: int) -> int:
        """Users with a context of `num_tokens` that fit on all GPUs at the same time."""
        return self.users_per_replica(num_tokens) * self.num_replicas

    def gpus_for(self, num_users: int, num_tokens: int) -> int | None:
        """GPUs, in whole replicas, on which `num_users` users fit at `num_tokens`; None where no replica fits one."""
        each = self.users_per_replica(num_tokens)
        return -(-num_users // each) * self.num_ranks if each else None

    def users_by_chance(self, probability: float) -> int:
        """Users whose contexts, independent of one another, fit together with a probability, on all GPUs.

        The bytes of n users are taken as normal with n times the mean and the variance of one user's; the average
        length alone, which `users(mean)` asks for, is exceeded about half of the time.
        """
        sizes = [self.bytes_per_user(tokens) for tokens in self.lengths.sample]
        mean, spread = fmean(sizes), NormalDist().inv_cdf(probability) * pstdev(sizes)
        left = max(0, self.budget.cache_bytes - self.fixed_bytes(self.lengths.max_tokens))
        # The larger root of mean x n + spread x sqrt(n) = left, an equation of second degree in sqrt(n).
        root = (math.sqrt(spread**2 + 4 * mean * left) - spread) / (2 * mean)
        return int(root**2 + _ROUNDING) * self.num_replicas

    def context(self, num_users: int) -> int | None:
        """The longest context that `num_users` users can have at the same time; 0: none; None: any."""
        return _last(lambda tokens: self.users(tokens) >= num_users)

    def context_beyond_weights(self) -> int | None:
        """The shortest context with which one user's cache is larger than the weights; None: no context is."""
        fitting = _last(lambda tokens: self.footprint.token_bytes(tokens) <= self.budget.weights_bytes)
        return None if fitting is None else fitting + 1

    def pool_blocks(self, num_users: int, num_tokens: int) -> list[int]:
        """`num_blocks` of each pool's `BlockManager`, the null block included.

        A single pool gets all of the budget; several get what `num_users` users of a replica need at `num_tokens`.
        """
        pools = self.footprint.pools
        if len(pools) == 1:
            states = num_users * self.footprint.sequence_bytes + self.footprint.static_bytes
            return [max(0, self.budget.cache_bytes - states) // pools[0].bytes_per_block]
        blocks = []
        for pool in pools:
            shared = pool.shared_blocks(num_tokens, self.shared_prefix)
            blocks.append(1 + shared + num_users * (pool.blocks(num_tokens) - shared))
        return blocks


def _last(holds: Callable[[int], bool]) -> int | None:
    """The largest n >= 1 for which a condition holds that ends once and for all; 0: none; None: no end."""
    if holds(_ENDLESS):
        return None
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
