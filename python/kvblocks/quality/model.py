"""What the tool needs of a language model, and how a command line names one.

Owns `Model`, the view of a cache that it computes with, and `load_model`. Imports cache types and report.
Invariant: a model reaches its K and V through the view alone, so that whatever stands behind it, a format, a codec or
an observer, sees every row.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvblocks.batch import Step
from kvblocks.config import CacheConfig
from kvblocks.layout import Array
from kvblocks.report import UserError

F32: TypeAlias = NDArray[np.float32]
IDS: TypeAlias = NDArray[np.int64]


class CacheView(Protocol):
    """The part of `PagedKVCache` that a forward pass uses: the step's arrays, and for each layer write, then attend."""

    @property
    def step(self) -> Step:
        """The arrays of the scheduled step, such as `positions`."""

    def write(self, layer: int, k: Array, v: Array) -> None:
        """Store the step's K [num_tokens, num_kv_heads, head_dim] and V of a layer; see `PagedKVCache.write`."""

    def attend(
        self,
        layer: int,
        q: Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
    ) -> Array:
        """Attention of q [num_tokens, num_q_heads, head_dim] over the layer; see `PagedKVCache.attend`."""


# (cache, ids int64 [num_tokens], rows int64 [num_rows]) -> logits float32 [num_rows, vocab_size] of those tokens.
# The ids are those of the scheduled step, sequence by sequence; all layers are computed even where no row is asked for.
Forward: TypeAlias = Callable[[CacheView, IDS, IDS], F32]


@dataclass(frozen=True)
class Model:
    """A language model that keeps its K and V in a kvblocks cache.

    forward: one step, see `Forward`. config: the cache that it is compared with, its dtype 16 or 32 bit.
    context_tokens: the longest sequence that it was made for. encode: text to ids, without a token for the beginning.
    start: ids that every sequence begins with, such as that token. thread_safe: whether several threads may call
    forward at once, each with a cache of its own.
    """

    name: str
    forward: Forward
    config: CacheConfig
    context_tokens: int
    encode: Callable[[str], Sequence[int]]
    start: tuple[int, ...] = ()
    thread_safe: bool = False


def load_model(spec: str) -> Model:
    """Call the factory that "package.module:function" names; UserError where there is none or it makes no Model."""
    match = re.fullmatch(r"([\w.]+):(\w+)", spec)
    if match is None:
        raise UserError(f"--model {spec}: expected package.module:function, a function that returns a Model")
    module_name, function = match.groups()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"--model {spec}: there is no module {error.name}; is its folder on PYTHONPATH? "
            "(smollm2 lies in examples/ of a checkout)"
        ) from error
    factory = getattr(module, function, None)
    if not callable(factory):
        raise UserError(f"--model {spec}: {module_name} has no function {function}")
    model = factory()
    if not isinstance(model, Model):
        raise UserError(f"--model {spec}: returned {type(model).__name__}, expected a kvblocks.quality.Model")
    return model
