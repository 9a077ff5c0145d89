"""Codecs that are measured beside the formats: what is done where nobody looks at what it costs.

Owns `CONTROLS`. Imports NumPy, the formats' arithmetic and lane.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvblocks.backends.codecs import decode, encode
from kvblocks.config import CacheConfig
from kvblocks.formats import parse_format
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


def unscaled_fp8() -> Codec:
    """e4m3 at a scale of 1: what an engine stores that is given no scale and assumes one."""
    part = parse_format("fp8_e4m3:tensor", "k")
    one = np.ones(1, np.float32)

    def restore(x: Array) -> Array:
        return decode(encode(x, part, one).codes, part, one, None)

    return lambda _layer, k, v: (restore(k), restore(v))


# Name -> codec, bits of a code, and bits that a row has beside its codes. A sound measurement fails naive_int2.
CONTROLS: Final[dict[str, tuple[Codec, int, int]]] = {
    "naive_int2": (min_max(2), 2, 32),
    "naive_fp8": (unscaled_fp8(), 8, 0),
}


def control(name: str, config: CacheConfig) -> Variant:
    """The variant of a control; scale and minimum of a row count as 16 bit each."""
    codec, bits, row_bits = CONTROLS[name]
    return Variant(name, config, codec, bits + row_bits / config.head_dim)
