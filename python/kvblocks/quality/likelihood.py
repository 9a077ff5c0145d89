"""How far a format's predictions are from the reference's, on text.

Owns the figures of one row of logits and `TextScore`, their summary. Imports NumPy only.
Invariant: reference and format are compared row by row, on the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class TextScore:
    """Figures over `num_tokens` predicted tokens; natural logarithms.

    perplexity: exp of the mean negative log-likelihood. kl_mean, kl_stderr, kl_max: Kullback-Leibler divergence of
    the format's distribution of the next token from the reference's, in nats, and the standard error of its mean.
    top1: fraction of the tokens for which both find the same next token likeliest.
    """

    num_tokens: int
    perplexity: float
    kl_mean: float
    kl_stderr: float
    kl_max: float
    top1: float


@dataclass
class TextTally:
    """Collects rows; O(1) memory a row."""

    nll: list[F64] = field(default_factory=list)
    kl: list[F64] = field(default_factory=list)
    agrees: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, reference: F32, logits: F32, targets: NDArray[np.int64]) -> None:
        """Add rows: log-probabilities of the reference and logits [num_rows, vocab_size], targets [num_rows]."""
        own = log_softmax(logits)
        self.nll.append(-own[np.arange(len(own)), targets].astype(np.float64))
        self.kl.append(divergence(reference, own))
        self.agrees.append(reference.argmax(-1) == own.argmax(-1))

    def score(self) -> TextScore:
        """The summary of what was added, which must be something."""
        nll, kl, agrees = (np.concatenate(part) for part in (self.nll, self.kl, self.agrees))
        return TextScore(
            num_tokens=len(nll),
            perplexity=float(np.exp(nll.mean())),
            kl_mean=float(kl.mean()),
            kl_stderr=float(kl.std() / np.sqrt(len(kl))),
            kl_max=float(kl.max()),
            top1=float(agrees.mean()),
        )


def log_softmax(logits: F32) -> F32:
    """Log-probabilities of logits [num_rows, vocab_size], the sum taken in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total).astype(np.float32))


def divergence(reference: F32, other: F32) -> F64:
    """KL(reference || other) in nats of rows of log-probabilities [num_rows, vocab_size]."""
    weights = np.exp(reference)
    # The differences first: for formats close to the reference, two entropies would cancel. A token that the model
    # itself rules out, with a logit of -inf, has no part in the sum.
    terms = np.subtract(reference, other, where=weights > 0, out=np.zeros_like(reference))
    return np.asarray((weights * terms).sum(axis=-1, dtype=np.float64))
