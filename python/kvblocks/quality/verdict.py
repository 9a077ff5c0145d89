"""What a format may cost before it fails.

Owns `Thresholds` and the judgement. Imports the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvblocks.quality.likelihood import TextScore


@dataclass(frozen=True)
class Thresholds:
    """Limits against the reference; None: not judged.

    max_kl: mean KL divergence in nats. max_perplexity_increase: fraction, 0.01 for one percent. min_top1: fraction of
    agreement. min_needle: fraction of the keys that the reference repeats exactly and the format has to repeat too.
    """

    max_kl: float | None = 0.01
    max_perplexity_increase: float | None = 0.02
    min_top1: float | None = 0.93
    min_needle: float | None = 0.95


def failures(
    thresholds: Thresholds,
    reference: tuple[TextScore | None, float | None],
    own: tuple[TextScore | None, float | None],
) -> list[str]:
    """What a format fails, a phrase with both numbers each; scores are of the text and of the grid's exact match."""
    (reference_text, reference_needle), (text, needle) = reference, own
    found = []
    if text is not None and reference_text is not None:
        increase = text.perplexity / reference_text.perplexity - 1
        limit = thresholds.max_kl
        if limit is not None and not text.kl_mean <= limit:
            found.append("KL {} > {}".format(*_apart("{:.{}g}", 3, text.kl_mean, limit)))
        limit = thresholds.max_perplexity_increase
        if limit is not None and not increase <= limit:
            found.append("perplexity {} > {}".format(*_apart("{:+.{}%}", 1, increase, limit)))
        limit = thresholds.min_top1
        if limit is not None and not text.top1 >= limit:
            found.append("top-1 {} < {}".format(*_apart("{:.{}%}", 1, text.top1, limit)))
    if needle is not None and reference_needle is not None:
        limit = thresholds.min_needle
        # A reference that finds nothing cannot be lost to.
        if limit is not None and not needle >= limit * reference_needle:
            found.append(f"needle {needle:.0%} of {reference_needle:.0%}")
    return found


def _apart(form: str, digits: int, own: float, limit: float) -> list[str]:
    """Both numbers with so many digits, or with as many more as tell them apart; float64 has 17."""
    for some in range(digits, 18):
        texts = [form.format(number, some) for number in (own, limit)]
        if texts[0] != texts[1]:
            break
    return texts
