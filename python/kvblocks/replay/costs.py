"""What a token slot costs in bytes, and how many slots a pool has.

Owns `Cost` and `PoolSize`. Imports config, formats and planner. Invariant: a pool of so many bytes has the slots that a
cache of that size allocates: whole blocks, less the null block and the scales that are kept once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvblocks.config import parse_memory
from kvblocks.formats import FORMATS, KVFormat
from kvblocks.planner.architectures import describe
from kvblocks.planner.footprint import Footprint, footprint
from kvblocks.planner.model import Model
from kvblocks.planner.models import find_config
from kvblocks.report import UserError, format_bytes

# In blocks of this size a reservation's token is costed: every format can group so many tokens.
_RESERVED_BLOCK: Final = 64
# Newest tokens in 16 bit, where a format keeps them: what `CacheConfig` has unless told otherwise.
_RESIDUAL_TOKENS: Final = 128


@dataclass(frozen=True)
class Cost:
    """Bytes of a slot: those of a model in a format on one of num_ranks GPUs, a plain number, or unknown.

    All layers are taken to keep all tokens, as the replay drops nothing behind a window; what a sequence needs apart
    from its tokens (states, 16-bit residuals) is not counted.
    """

    kv_format: KVFormat | None = None
    model: Model | None = None
    num_ranks: int = 1
    plain_bytes: float | None = None

    def bytes_per_token(self, block_size: int | None) -> float | None:
        """Bytes of a slot; block_size None: of a reservation."""
        if self.model is None:
            return self.plain_bytes
        size = block_size or _RESERVED_BLOCK
        return sum(pool.bytes_per_block for pool in self._footprint(size).pools) / size

    def slots(self, num_bytes: int, block_size: int | None) -> int:
        """Slots that so many bytes hold."""
        per_token = self.bytes_per_token(block_size)
        if per_token is None:
            raise UserError(
                "--pool in bytes needs --model or --bytes-per-token; without a unit it is in tokens"
            )
        if not per_token:
            raise UserError("--pool in bytes: no layer of --model keeps a row of each token, only states")
        if self.model is not None:
            num_bytes -= self._footprint(block_size or _RESERVED_BLOCK).static_bytes
        slots = int(num_bytes // per_token)
        if block_size is not None:
            slots = (slots // block_size - 1) * block_size
        if slots < 1:
            unit = "token" if block_size is None else "block beside the null block"
            raise UserError(f"--pool: {num_bytes:,} bytes hold no {unit} of {per_token:,.0f} bytes a token")
        return slots

    def not_counted(self) -> list[str]:
        """A sentence for whatever the model keeps otherwise than a row of every token, which slots leave out."""
        if self.model is None:
            return []
        notes = []
        windowed = sum(count for cache, count in self.model.attentions if cache.span is not None)
        if windowed:
            notes.append(
                f"{self.model.name}: {windowed} of {self.model.num_owners} layers look back on a window, and are taken "
                "to keep all tokens: with windows the same bytes hold more"
            )
        if num_bytes := self._footprint(_RESERVED_BLOCK).sequence_bytes:
            notes.append(
                f"{self.model.name} {self.kv_format}: a request takes about {format_bytes(num_bytes)} besides its "
                "tokens (states, newest tokens in 16 bit), not counted here: keep that much free for each at once"
            )
        return notes

    def _footprint(self, block_size: int) -> Footprint:
        assert self.model is not None
        assert self.kv_format is not None
        try:
            return footprint(
                self.model,
                self.kv_format,
                block_size=block_size,
                num_ranks=self.num_ranks,
                residual_tokens=_RESIDUAL_TOKENS,
            )
        except ValueError as error:
            raise UserError(f"--kv-format {self.kv_format}: {error}") from error


@dataclass(frozen=True)
class PoolSize:
    """A pool in bytes, in token slots, or (neither) as large as it is asked to be."""

    num_bytes: int | None = None
    tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> PoolSize:
        """Read "unbounded", tokens as an integer, or a size such as "40GiB"; ValueError for anything else."""
        if text == "unbounded":
            return cls()
        if text.isascii() and text.isdigit():
            if not 1 <= int(text) < 2**40:
                raise ValueError(f"{text} tokens, expected 1 to 2**40")
            return cls(tokens=int(text))
        return cls(num_bytes=parse_memory(text))

    def slots(self, cost: Cost, block_size: int | None) -> int | None:
        """Token slots; None for unbounded. A paged pool of fewer slots than a block is a UserError."""
        if self.num_bytes is not None:
            return cost.slots(self.num_bytes, block_size)
        if self.tokens is not None and block_size is not None and self.tokens < block_size:
            raise UserError(f"--pool {self.tokens}: less than one block of {block_size} tokens")
        return self.tokens


def make_costs(
    model_name: str | None, kv_formats: Sequence[str], num_ranks: int, bytes_per_token: float | None
) -> list[Cost]:
    """A cost for each format: of a model of the planner, or one plain number, or one that is unknown."""
    if model_name is None:
        if kv_formats:
            raise UserError("--kv-format needs --model, which says what a token holds")
        return [Cost(plain_bytes=bytes_per_token)]
    if bytes_per_token is not None:
        raise UserError("give --model or --bytes-per-token, one of the two")
    model = describe(find_config(model_name), model_name)
    default = model.dtype if model.dtype in FORMATS else "bfloat16"
    try:
        formats = [KVFormat.parse(text) for text in (kv_formats or [default])]
    except ValueError as error:
        raise UserError(f"--kv-format: {error}") from error
    return [Cost(kv_format, model, num_ranks) for kv_format in dict.fromkeys(formats)]
