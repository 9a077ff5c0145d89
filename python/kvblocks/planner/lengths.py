"""How long contexts are: the maximum, the 95th percentile and the mean, from whatever is known of them.

Owns `Lengths`. All in tokens, prompt and output together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Final

_Z95: Final = NormalDist().inv_cdf(0.95)
_SAMPLE_SIZE: Final = 1000


@dataclass(frozen=True)
class Lengths:
    """Lengths of contexts: the most that is allowed, the 95th percentile, the mean; `source` says whence.

    sample: lengths that stand for equal parts of all users, in order.
    """

    max_tokens: int
    p95_tokens: int
    mean_tokens: int
    source: str
    sample: tuple[int, ...]

    def rows(self) -> list[tuple[str, int]]:
        """The three, with names for people; one where all are the same."""
        rows = [("full", self.max_tokens), ("p95", self.p95_tokens), ("mean", self.mean_tokens)]
        return rows if len({tokens for _, tokens in rows}) > 1 else [("full", self.max_tokens)]

    def scaled(self, factor: Fraction) -> "Lengths":
        """All lengths times a factor, rounded up."""

        def scale(tokens: int) -> int:
            return max(1, math.ceil(tokens * factor))

        return Lengths(
            scale(self.max_tokens),
            scale(self.p95_tokens),
            scale(self.mean_tokens),
            f"{self.source}, times {float(factor):g}",
            tuple(map(scale, self.sample)),
        )


def fixed(max_tokens: int) -> Lengths:
    """Every context is as long as it may be."""
    return Lengths(max_tokens, max_tokens, max_tokens, "every context is full", (max_tokens,))


def log_normal(p50_tokens: int, p95_tokens: int, max_tokens: int) -> Lengths:
    """A log-normal distribution through two percentiles, cut at the maximum: min(X, max) where ln X is normal.

    Raises ValueError unless 1 <= p50 <= p95.
    """
    if not 1 <= p50_tokens <= p95_tokens:
        raise ValueError(f"p50 is {p50_tokens}, p95 {p95_tokens}: expected 1 <= p50 <= p95")
    mu, sigma = math.log(p50_tokens), math.log(p95_tokens / p50_tokens) / _Z95
    source = f"log-normal, p50 {p50_tokens:,} and p95 {p95_tokens:,}, cut at {max_tokens:,}"
    normal = NormalDist()
    if sigma == 0:
        mean = float(min(p50_tokens, max_tokens))
    else:
        cut = (math.log(max_tokens) - mu) / sigma
        mean = math.exp(mu + sigma**2 / 2) * normal.cdf(cut - sigma) + max_tokens * (1 - normal.cdf(cut))
    sample = (
        math.exp(mu + sigma * normal.inv_cdf((index + 0.5) / _SAMPLE_SIZE)) for index in range(_SAMPLE_SIZE)
    )
    return Lengths(
        max_tokens,
        min(p95_tokens, max_tokens),
        # Where all lengths are cut, the sum of the two parts may round to above the cut.
        min(max(1, math.ceil(mean)), max_tokens),
        source,
        tuple(min(max(1, math.ceil(length)), max_tokens) for length in sample),
    )


def observed(lengths: Iterable[int], max_tokens: int | None, source: str) -> Lengths:
    """Lengths as they were seen, those above `max_tokens` cut; nearest-rank percentile, mean rounded up.

    Raises ValueError where there are none.
    """
    ordered = sorted(lengths if max_tokens is None else (min(length, max_tokens) for length in lengths))
    if not ordered:
        raise ValueError("no requests")
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    mean = math.ceil(sum(ordered) / len(ordered))
    step = max(1, len(ordered) / _SAMPLE_SIZE)
    sample = tuple(ordered[int((index + 0.5) * step)] for index in range(min(len(ordered), _SAMPLE_SIZE)))
    return Lengths(max_tokens or ordered[-1], p95, mean, f"{len(ordered):,} requests of {source}", sample)
