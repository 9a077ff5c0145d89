"""How far a format's predictions are from the reference's, on text.

Owns the figures of one row of logits and `TextScore`, their summary. Imports NumPy only.
Invariant: reference and format are compared row by row, on the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Rows:
    """Figures of predicted tokens [num_rows]: negative log-likelihood, divergence (nats), the same likeliest token."""

    nll: F64
    kl: F64
    agrees: NDArray[np.bool_]


def compare(reference: F32, targets: NDArray[np.int64], logits: F32) -> Rows:
    """The figures of logits [num_rows, vocab_size] beside the reference's log-probabilities; targets [num_rows]."""
    own = log_softmax(logits)
    return Rows(
        nll=-own[np.arange(len(own)), targets].astype(np.float64),
        kl=divergence(reference, own),
        agrees=reference.argmax(-1) == own.argmax(-1),
    )


def summary(parts: Sequence[Rows]) -> TextScore:
    """The score over the rows of all parts, which must be some."""
    nll, kl = (np.concatenate([getattr(part, name) for part in parts]) for name in ("nll", "kl"))
    return TextScore(
        num_tokens=len(nll),
        perplexity=float(np.exp(nll.mean())),
        kl_mean=float(kl.mean()),
        kl_stderr=float(kl.std() / np.sqrt(len(kl))),
        kl_max=float(kl.max()),
        top1=float(np.concatenate([part.agrees for part in parts]).mean()),
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
