"""The description of a cache: how many layers, heads and tokens a block holds, in which dtype and layout.

Owns `CacheConfig`, the table of cache dtypes and `parse_memory`. Imports NumPy and the standard library only.
Invariant: a `CacheConfig` that exists is valid, and every size derived from it is exact.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

# bfloat16 has no NumPy dtype: its bits are kept in uint16, here and in every argument of the library.
STORAGE_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
LAYOUTS: Final = ("NHD", "HND")

_UNITS: Final[dict[str, int]] = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_MEMORY: Final = re.compile(r"([0-9]+)(?:\.([0-9]+))? ?([A-Za-z]+)", re.ASCII)


@dataclass(frozen=True)
class CacheConfig:
    """What a paged KV cache stores, per token and layer `num_kv_heads` rows of K and of V.

    head_dim, head_dim_v: elements of a K row and of a V row (None: as K; stored resolved).
    dtype: "float32", "float16" or "bfloat16". block_size: tokens per block, any integer >= 1.
    layout: "NHD" [num_blocks, block_size, num_kv_heads, head_dim] or "HND" (the two middle axes swapped).
    Raises ValueError that names the field, its value and what is allowed.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "float32"
    block_size: int = 16
    layout: str = "NHD"

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for field in ("num_layers", "num_kv_heads", "head_dim", "head_dim_v", "block_size"):
            object.__setattr__(self, field, _positive(field, getattr(self, field)))
        _one_of("dtype", self.dtype, tuple(STORAGE_DTYPES))
        _one_of("layout", self.layout, LAYOUTS)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        row_elements = self.head_dim + (self.head_dim_v or self.head_dim)
        return self.num_layers * self.num_kv_heads * row_elements * STORAGE_DTYPES[self.dtype].itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self.block_size * self.bytes_per_token


def parse_memory(size: str | int) -> int:
    """Bytes of a memory size: an int, or a number with a unit, such as "8GiB", "512MB" or "1.5 GiB".

    KiB, MiB, GiB and TiB are powers of 1024; KB, MB, GB and TB powers of 1000; B is one byte. A fraction of a
    byte is dropped. Raises ValueError for anything else, and for a size below one byte.
    """
    num_bytes = _parse(size) if isinstance(size, str) else as_integer(size)
    if num_bytes is None or num_bytes < 1:
        raise ValueError(
            f"memory size {size!r}: expected bytes >= 1 as an int, or a number with a unit of "
            f"{', '.join(_UNITS)}, such as '8GiB'"
        )
    return num_bytes


def _parse(text: str) -> int | None:
    match = _MEMORY.fullmatch(text.strip())
    if match is None or match[3] not in _UNITS:
        return None
    fraction = match[2] or ""
    denominator: int = 10 ** len(fraction)
    return int(match[1] + fraction) * _UNITS[match[3]] // denominator


def as_integer(value: object) -> int | None:
    """`value` as an int if it is one of Python's or NumPy's integers, else None; a bool is none."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    return None


def _positive(field: str, value: object) -> int:
    number = as_integer(value)
    if number is None or number < 1:
        raise ValueError(f"{field} is {value!r}: expected an integer >= 1")
    return number


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} is {value!r}: expected one of {', '.join(map(repr, allowed))}")
