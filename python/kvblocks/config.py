"""The description of a cache: how many layers, heads and tokens a block holds, in which dtype and layout.

Owns `CacheConfig` and `parse_memory`. Imports formats.
Invariant: a `CacheConfig` that exists is valid, and every size derived from it is exact.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from kvblocks.formats import STORAGE_DTYPES, KVFormat

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
    kv_format: how K and V are stored, "K,V" or one for both, such as "int8:channel,int8" (see `FORMATS`); a sequence
    of these gives each layer its own; None stands for dtype. residual_tokens: the newest tokens that formats with
    a residual keep in 16 bit, at least so many. Raises ValueError that names the field, its value and what is allowed.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "float32"
    block_size: int = 16
    layout: str = "NHD"
    kv_format: str | KVFormat | Sequence[str | KVFormat] | None = None
    residual_tokens: int = 128

    def __post_init__(self) -> None:
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for field in (
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "head_dim_v",
            "block_size",
            "residual_tokens",
        ):
            object.__setattr__(self, field, _positive(field, getattr(self, field)))
        _one_of("dtype", self.dtype, tuple(STORAGE_DTYPES))
        _one_of("layout", self.layout, LAYOUTS)
        given = self.kv_format
        if given is not None and not isinstance(given, (str, KVFormat)):
            # As a tuple of texts the config stays a value that can be hashed and compared.
            object.__setattr__(self, "kv_format", tuple(str(KVFormat.parse(each)) for each in given))
            if len(given) != self.num_layers:
                raise ValueError(
                    f"kv_format has {len(given)} entries: expected one of each of the {self.num_layers} layers"
                )
        elif given is not None:
            object.__setattr__(self, "kv_format", str(KVFormat.parse(given)))
        for kv_format in set(self.formats):
            kv_format.check(self.block_size, self.head_dim, self.head_dim_v or self.head_dim)

    @cached_property
    def formats(self) -> tuple[KVFormat, ...]:
        """How each layer is stored [num_layers]."""
        if isinstance(self.kv_format, tuple):
            return tuple(KVFormat.parse(text) for text in self.kv_format)
        return (KVFormat.parse(str(self.kv_format or self.dtype)),) * self.num_layers

    @property
    def has_residual(self) -> bool:
        """Whether some layer keeps its newest tokens in 16 bit."""
        return any(kv_format.has_residual for kv_format in self.formats)

    @property
    def residual_dtype(self) -> str:
        """The 16-bit dtype of the residual: bfloat16 where dtype is, else float16."""
        return "bfloat16" if self.dtype == "bfloat16" else "float16"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers: its codes, and its part of scales and zeros."""
        return self.bytes_per_block // self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block in all layers, scales and zeros included."""
        sizes = (self.block_size, *self._sizes)
        return sum(kv_format.bytes_per_block(*sizes) for kv_format in self.formats)

    @property
    def bytes_per_seq(self) -> int:
        """Bytes of the 16-bit residual of one sequence in all layers; 0 for formats that have none."""
        sizes = (self.residual_tokens, self.block_size, *self._sizes)
        return sum(kv_format.residual_bytes(*sizes) for kv_format in self.formats)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of static scales in all layers, whatever the number of blocks."""
        return sum(kv_format.fixed_bytes(*self._sizes) for kv_format in self.formats)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.head_dim, self.head_dim_v or self.head_dim


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
