"""Made-up traces: length distributions whose parameters are published, Poisson arrivals, a seed.

Owns `LENGTHS` and `generate`. Imports trace and NumPy. Invariant: the same arguments give the same trace everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvblocks.report import UserError
from kvblocks.traces.trace import MAX_TOKENS, Trace

# Tokens of a hash id of a generated trace: the granularity at which generated prompts share a prefix.
TOKENS_PER_ID: Final = 16


@dataclass(frozen=True)
class LogNormal:
    """Lengths in tokens with this mean and this median, at most longest_tokens; mean == median: all are equal."""

    mean_tokens: float
    median_tokens: float
    longest_tokens: int = MAX_TOKENS

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.int32]:
        """Lengths [size], each >= 1."""
        # The mean of exp(N(mu, sigma^2)) is exp(mu + sigma^2 / 2), its median exp(mu).
        sigma = math.sqrt(2 * math.log(self.mean_tokens / self.median_tokens))
        lengths = np.exp(rng.normal(math.log(self.median_tokens), sigma, size))
        return np.clip(np.rint(lengths), 1, self.longest_tokens).astype(np.int32)


# Name -> (prompt, output). Mean, median and longest of the published traces, computed from them: Azure 2023 (Patel et
# al., Splitwise, ISCA 2024) and Mooncake (Qin et al., FAST 2025; of its outputs the mean and the standard deviation, as
# their median exceeds the mean). ShareGPT and Alpaca: means of Kwon et al. (PagedAttention,
# SOSP 2023), figure 11, which gives no median; here the standard deviation is taken to be the mean.
LENGTHS: Final = {
    "azure-conv": (LogNormal(1154.7, 1020, 14_050), LogNormal(211.1, 129, 1000)),
    "azure-code": (LogNormal(2047.8, 1469, 7437), LogNormal(27.9, 13, 1899)),
    "mooncake-conv": (LogNormal(12_035, 6909, 126_195), LogNormal(342.6, 276.8, 2000)),
    "sharegpt": (LogNormal(161.31, 161.31 / math.sqrt(2)), LogNormal(337.99, 337.99 / math.sqrt(2))),
    "alpaca": (LogNormal(19.31, 19.31 / math.sqrt(2)), LogNormal(58.45, 58.45 / math.sqrt(2))),
}


def parse_lengths(text: str) -> tuple[LogNormal, LogNormal]:
    """A name of `LENGTHS`, or PROMPT_MEAN/PROMPT_MEDIAN,OUTPUT_MEAN/OUTPUT_MEDIAN in tokens, or PROMPT,OUTPUT.

    Raises UserError for anything else, and for a mean below its median.
    """
    if text in LENGTHS:
        return LENGTHS[text]
    try:
        prompt, output = (tuple(float(number) for number in part.split("/")) for part in text.split(","))
        lengths = tuple(LogNormal(pair[0], pair[-1]) for pair in (prompt, output) if len(pair) <= 2)
        if len(lengths) == 2 and all(1 <= of.median_tokens <= of.mean_tokens <= MAX_TOKENS for of in lengths):
            return lengths[0], lengths[1]
    except ValueError:
        pass
    raise UserError(
        f"--lengths {text!r}: expected {', '.join(LENGTHS)}, or tokens as MEAN/MEDIAN,MEAN/MEDIAN or PROMPT,OUTPUT, "
        f"each from 1 to {MAX_TOKENS:,}, a mean not below its median"
    )


def generate(
    num_requests: int,
    lengths: str = "azure-conv",
    *,
    rate_per_s: float = 5.0,
    shared_prefix_tokens: int = 0,
    num_prefixes: int = 1,
    seed: int = 0,
) -> Trace:
    """Make a trace of Poisson arrivals with independent lengths. O(requests).

    lengths: see `parse_lengths`. shared_prefix_tokens: in front of every prompt stands one of num_prefixes system
    prompts of that many tokens, each as likely; rounded down to whole blocks of 16 for sharing.
    """
    prompt_lengths, output_lengths = parse_lengths(lengths)
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate_per_s, num_requests))
    prompt = prompt_lengths.sample(rng, num_requests)
    output = output_lengths.sample(rng, num_requests)
    num_shared = shared_prefix_tokens // TOKENS_PER_ID
    ids = np.empty(0, np.int32)
    starts = np.zeros(num_requests + 1, np.int64)
    if num_shared:
        prompt = np.minimum(prompt.astype(np.int64) + shared_prefix_tokens, MAX_TOKENS).astype(np.int32)
        counts = prompt // TOKENS_PER_ID
        starts[1:] = np.cumsum(counts, dtype=np.int64)
        place = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        system = np.repeat(rng.integers(num_prefixes, size=num_requests), counts) * num_shared
        is_shared = place < num_shared
        own = num_prefixes * num_shared + np.cumsum(~is_shared) - 1
        ids = np.where(is_shared, system + place, own).astype(np.int32)
    return Trace(
        f"{num_requests} requests like {lengths}, seed {seed}",
        arrival - arrival[:1],
        prompt,
        output,
        TOKENS_PER_ID if num_shared else 0,
        ids,
        starts,
    )
