"""The formats in which K and V can be stored, and their exact sizes: the one list that everybody reads.

Owns `Format`, `KVFormat`, `FORMATS` and the table of plain dtypes. Imports NumPy and the standard library only.
Invariant: every size is exact; what a format says in bytes is what its arrays hold.

A part is the K or the V of a layer. Its elements are stored as codes, and a code stands for `code * scale + zero`,
in float32, where a format without a zero has none. `scaling` says who shares a scale:

    none         nobody has one: float32, float16, bfloat16
    tensor       float32 [1], static
    head         float32 [num_kv_heads], static
    channel      float32 [num_kv_heads, head_dim], static; of K only, as it can be folded into Q
    token_head   float32 [num_blocks, block_size, num_kv_heads], computed as a token is written
    group        float16 [num_blocks, block_size, num_kv_heads, groups], and zeros alike: a group is `group`
                 neighbouring elements of a row, the last one of a row perhaps fewer
    token_group  float16 [num_blocks, block_size / group, num_kv_heads, head_dim], and zeros alike: a group is one
                 channel of `group` tokens that start at a multiple of it

Static scales are given by the user or come from a calibration; nothing stands for one that is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

Scaling = Literal["none", "tensor", "head", "channel", "token_head", "group", "token_group"]
Part = Literal["k", "v"]

# bfloat16 has no NumPy dtype: its bits are kept in uint16, here and in every argument of the library.
STORAGE_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
_STATIC: Final = frozenset({"tensor", "head", "channel"})
_GROUPED: Final = frozenset({"group", "token_group"})


@dataclass(frozen=True)
class Format:
    """How one part of a layer is stored.

    bits: of one code; codes of less than a byte are packed along the row, the first in the lowest bits. storage:
    dtype of the array of codes. limit: the largest magnitude of a code, where codes have a sign. group: elements
    that share a scale. residual: whether the newest tokens are kept in 16 bit beside the blocks. rotated: whether rows
    are multiplied by a Hadamard matrix before they are stored (see `rotation`).
    """

    name: str
    bits: int
    storage: np.dtype[Any]
    scaling: Scaling = "none"
    limit: float = math.inf
    group: int = 0
    residual: bool = False
    rotated: bool = False

    def __str__(self) -> str:
        """The name, with the scaling where it is not the name's first one."""
        return (
            self.name
            if self in (choices[0] for choices in FORMATS[self.name])
            else f"{self.name}:{self.scaling}"
        )

    @property
    def is_plain(self) -> bool:
        """Whether an element is stored as a floating-point number of its own, with no scale."""
        return self.scaling == "none"

    @property
    def is_static(self) -> bool:
        """Whether the scale has to be known before the first write."""
        return self.scaling in _STATIC

    @property
    def has_zero(self) -> bool:
        """Whether a group has a zero point beside its scale."""
        return self.scaling in _GROUPED

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """The dtype of scales and zeros."""
        return np.dtype(np.float16 if self.has_zero else np.float32)

    def row_elements(self, dim: int) -> int:
        """Stored elements of a row of `dim` values."""
        return dim * self.bits // (8 * self.storage.itemsize)

    def scale_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, dim: int
    ) -> tuple[int, ...] | None:
        """Shape of the array of scales, and of zeros where the format has them; None for a plain format."""
        match self.scaling:
            case "none":
                return None
            case "tensor":
                return (1,)
            case "head":
                return (num_kv_heads,)
            case "channel":
                return (num_kv_heads, dim)
            case "token_head":
                return (num_blocks, block_size, num_kv_heads)
            case "group":
                return (num_blocks, block_size, num_kv_heads, -(-dim // self.group))
            case "token_group":
                return (num_blocks, block_size // self.group, num_kv_heads, dim)

    def bytes_per_block(self, block_size: int, num_kv_heads: int, dim: int) -> int:
        """Bytes that grow with the pool: codes, scales and zeros of one block in one layer."""
        codes = block_size * num_kv_heads * self.row_elements(dim) * self.storage.itemsize
        return codes + (0 if self.is_static else self._scale_bytes(1, block_size, num_kv_heads, dim))

    def fixed_bytes(self, num_kv_heads: int, dim: int) -> int:
        """Bytes of one layer that the pool has once: its static scales."""
        return self._scale_bytes(1, 1, num_kv_heads, dim) if self.is_static else 0

    def check(self, part: Part, block_size: int, dim: int) -> None:
        """Raise ValueError that names the argument and both numbers for sizes that the format cannot hold."""
        if self.bits < 8 and dim % 8:
            name = "head_dim" if part == "k" else "head_dim_v"
            raise ValueError(f"{name} is {dim}: {part}_format {self} needs a multiple of 8")
        if self.scaling == "token_group" and block_size % self.group:
            raise ValueError(
                f"block_size is {block_size}: {part}_format {self} needs a multiple of {self.group} (its group)"
            )

    def _scale_bytes(self, num_blocks: int, block_size: int, num_kv_heads: int, dim: int) -> int:
        shape = self.scale_shape(num_blocks, block_size, num_kv_heads, dim)
        if shape is None:
            return 0
        return math.prod(shape) * self.scale_dtype.itemsize * (2 if self.has_zero else 1)


@dataclass(frozen=True)
class KVFormat:
    """The formats of the K and the V of one layer."""

    k: Format
    v: Format

    @classmethod
    def parse(cls, text: object) -> KVFormat:
        """Read "K,V" or one for both, each a name or "name:scaling", such as "int8:channel,int8".

        Raises ValueError that lists what is allowed.
        """
        if isinstance(text, KVFormat):
            return text
        parts = text.split(",") if isinstance(text, str) else []
        if not 1 <= len(parts) <= 2:
            raise ValueError(
                f"format is {text!r}: expected one for K and V, or two with a comma between them"
            )
        return cls(parse_format(parts[0], "k"), parse_format(parts[-1], "v"))

    def __str__(self) -> str:
        """What `parse` reads back."""
        k, v = str(self.k), str(self.v)
        return k if k == v else f"{k},{v}"

    @property
    def has_residual(self) -> bool:
        """Whether the newest tokens of a sequence are kept in 16 bit."""
        return self.k.residual or self.v.residual

    @property
    def is_plain(self) -> bool:
        """Whether neither part has a scale."""
        return self.k.is_plain and self.v.is_plain

    def check(self, block_size: int, head_dim: int, head_dim_v: int) -> None:
        """Raise ValueError that names the argument and both numbers for sizes that a part cannot hold."""
        self.k.check("k", block_size, head_dim)
        self.v.check("v", block_size, head_dim_v)

    def bytes_per_block(self, block_size: int, num_kv_heads: int, head_dim: int, head_dim_v: int) -> int:
        """Bytes of codes, scales and zeros of one block in one layer."""
        k = self.k.bytes_per_block(block_size, num_kv_heads, head_dim)
        return k + self.v.bytes_per_block(block_size, num_kv_heads, head_dim_v)

    def fixed_bytes(self, num_kv_heads: int, head_dim: int, head_dim_v: int) -> int:
        """Bytes of static scales of one layer, whatever the pool's size."""
        return self.k.fixed_bytes(num_kv_heads, head_dim) + self.v.fixed_bytes(num_kv_heads, head_dim_v)

    def residual_bytes(
        self, residual_tokens: int, block_size: int, num_kv_heads: int, head_dim: int, head_dim_v: int
    ) -> int:
        """Bytes of the 16-bit residual of one sequence in one layer; 0 for formats that have none.

        It holds `residual_slots` tokens, which are never fewer than the newest `residual_tokens`.
        """
        if not self.has_residual:
            return 0
        return residual_slots(residual_tokens, block_size) * num_kv_heads * (head_dim + head_dim_v) * 2

    def bits_per_element(
        self,
        num_tokens: int,
        *,
        block_size: int,
        residual_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int,
    ) -> float:
        """Mean bits that a stored element costs a sequence of `num_tokens`: whole blocks and the residual."""
        blocks = -(-num_tokens // block_size)
        num_bytes = blocks * self.bytes_per_block(block_size, num_kv_heads, head_dim, head_dim_v)
        num_bytes += self.residual_bytes(residual_tokens, block_size, num_kv_heads, head_dim, head_dim_v)
        return 8 * num_bytes / (num_tokens * num_kv_heads * (head_dim + head_dim_v))


def residual_slots(residual_tokens: int, block_size: int) -> int:
    """Tokens that the residual of a sequence has room for: the newest ones, and a block that is being filled."""
    return residual_tokens + block_size


_UINT8, _INT8 = np.dtype(np.uint8), np.dtype(np.int8)
_FP8: Final[tuple[Scaling, ...]] = ("token_head", "head", "tensor")
_INT8_K: Final[tuple[Scaling, ...]] = ("token_head", "head", "channel")


def _kivi(
    name: str, bits: int, *, group_tokens: int, group_channels: int, rotated: bool = False
) -> tuple[tuple[Format], tuple[Format]]:
    """K in groups of the tokens of a channel, V in groups of the channels of a token, the newest in 16 bit."""

    def part(scaling: Scaling, group: int) -> Format:
        return Format(name, bits, _UINT8, scaling, group=group, residual=True, rotated=rotated)

    return (part("token_group", group_tokens),), (part("group", group_channels),)


# Name -> the formats of K and of V that it can mean, the first one if nothing else is said. int8 stops at 127, so
# that both signs reach as far.
FORMATS: Final[dict[str, tuple[tuple[Format, ...], tuple[Format, ...]]]] = {
    **{name: ((Format(name, 8 * dtype.itemsize, dtype),),) * 2 for name, dtype in STORAGE_DTYPES.items()},
    "fp8_e4m3": (tuple(Format("fp8_e4m3", 8, _UINT8, scaling, 448.0) for scaling in _FP8),) * 2,
    "fp8_e5m2": (tuple(Format("fp8_e5m2", 8, _UINT8, scaling, 57344.0) for scaling in _FP8),) * 2,
    "int8": (
        tuple(Format("int8", 8, _INT8, scaling, 127.0) for scaling in _INT8_K),
        tuple(Format("int8", 8, _INT8, scaling, 127.0) for scaling in _INT8_K[:2]),
    ),
    "int4": ((Format("int4", 4, _UINT8, "group", group=32),),) * 2,
    "kivi4": _kivi("kivi4", 4, group_tokens=32, group_channels=32),
    "kivi2": _kivi("kivi2", 2, group_tokens=32, group_channels=32),
    "kivi4r": _kivi("kivi4r", 4, group_tokens=32, group_channels=64, rotated=True),
    "kivi2r": _kivi("kivi2r", 2, group_tokens=16, group_channels=64, rotated=True),
}


def parse_format(text: object, part: Part) -> Format:
    """The format of one part that "name" or "name:scaling" stands for; ValueError with the list otherwise."""
    name, _, scaling = text.strip().partition(":") if isinstance(text, str) else ("", "", "")
    if name not in FORMATS:
        raise ValueError(f"{part}_format is {text!r}: expected one of {', '.join(map(repr, FORMATS))}")
    choices = FORMATS[name][0 if part == "k" else 1]
    for choice in choices:
        if scaling == choice.scaling or (not scaling and choice is choices[0]):
            return choice
    allowed = ", ".join(choice.scaling for choice in choices)
    raise ValueError(f"{part}_format is {text!r}: the scaling of {name} is one of {allowed}")


def all_formats(part: Part) -> tuple[Format, ...]:
    """Every format of a part, each scaling a format of its own."""
    return tuple(choice for choices in FORMATS.values() for choice in choices[0 if part == "k" else 1])
