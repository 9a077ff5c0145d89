"""Codecs that are measured beside the formats: one that must fail, so that a run shows that it can tell.

Owns `CONTROLS`. Imports NumPy and lane.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvblocks.config import CacheConfig
from kvblocks.layout import Array
from kvblocks.quality.lane import Codec, Variant


def min_max(bits: int) -> Codec:
    """Each row of K and of V in `bits` bits between its minimum and its maximum, and nothing against outliers."""
    highest = np.float32(2**bits - 1)

    def restore(x: Array) -> Array:
        low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        scale = (high - low) / highest
        codes = np.rint((x - low) / np.where(scale > 0, scale, 1))
        return (codes * scale + low).astype(np.float32)

    return lambda _layer, k, v: (restore(k), restore(v))


# Name -> codec, and the bits of a code.
CONTROLS: Final[dict[str, tuple[Codec, int]]] = {"naive_int2": (min_max(2), 2)}


def control(name: str, config: CacheConfig) -> Variant:
    """The variant of a control; scale and minimum of a row count as 16 bit each."""
    codec, bits = CONTROLS[name]
    return Variant(name, config, codec, bits + 32 / config.head_dim)
