"""What a model keeps for each sequence: layers that cache rows per token, layers that keep a state of fixed size.

Owns `Attention`, `State` and `Model`, the planner's description of a model; sizes in elements, not yet in bytes.
Invariant: only layers that own a cache are listed; a layer that reads another one's is not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvblocks.report import UserError

# Bytes of an element, by the names that config.json and --weights-dtype use.
DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


@dataclass(frozen=True)
class Attention:
    """The rows that one layer caches for a token: per head `key_dim` elements of K and `value_dim` of V.

    span: the most tokens that the layer looks back on, its own included; None: all. kind: as the report says it.
    is_latent: one row that all query heads read, so that each tensor-parallel rank keeps all of it.
    bytes_per_token: where the architecture fixes the storage, whatever the cache's format.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    span: int | None = None
    kind: str = "full attention"
    is_latent: bool = False
    bytes_per_token: int | None = None

    def heads_per_rank(self, num_ranks: int) -> int:
        """KV heads on each of `num_ranks` tensor-parallel ranks, replicated where there are fewer heads than ranks."""
        return 1 if self.is_latent else per_rank(self.num_kv_heads, num_ranks, "KV heads")


@dataclass(frozen=True)
class StatePart:
    """One array of a layer's state: `num_units` units, shared out over ranks, of `unit_elements` elements each."""

    name: str
    num_units: int
    unit_elements: int
    dtype: str

    def bytes_per_rank(self, num_ranks: int) -> int:
        """Bytes of a sequence on each rank; replicated where there are fewer units than ranks."""
        return per_rank(self.num_units, num_ranks, self.name) * self.unit_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class State:
    """What one recurrent layer keeps for a sequence, however long that is."""

    kind: str
    parts: tuple[StatePart, ...]

    def bytes_per_rank(self, num_ranks: int) -> int:
        """Bytes of a sequence on each rank."""
        return sum(part.bytes_per_rank(num_ranks) for part in self.parts)


Cache = Attention | State


@dataclass(frozen=True)
class Model:
    """A model as the planner sees it.

    num_layers: decoder layers; num_owners: those that own a cache or a state; caches: what they own, with how many
    layers own the same; max_context: tokens, None
    where the configuration does not say; dtype: of weights and unquantised cache; fields: the configuration;
    assumed: fields that it leaves to the model type's default, with those.
    """

    name: str
    model_type: str
    num_layers: int
    num_owners: int
    num_query_heads: int
    caches: tuple[tuple[Cache, int], ...]
    max_context: int | None
    dtype: str
    fields: Mapping[str, Any] = field(repr=False)
    assumed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def attentions(self) -> tuple[tuple[Attention, int], ...]:
        """Caches of rows per token, with their numbers of layers."""
        return tuple((cache, count) for cache, count in self.caches if isinstance(cache, Attention))

    @property
    def states(self) -> tuple[tuple[State, int], ...]:
        """States of fixed size, with their numbers of layers."""
        return tuple((cache, count) for cache, count in self.caches if isinstance(cache, State))


def collect(layers: Iterable[Iterable[Cache]]) -> tuple[tuple[Cache, int], ...]:
    """Equal caches counted, in the order in which they first occur."""
    return tuple(Counter(cache for layer in layers for cache in layer).items())


def per_rank(num_units: int, num_ranks: int, what: str) -> int:
    """Units on each rank: an even share, or one that is replicated; a UserError where neither is possible."""
    if num_units % num_ranks == 0:
        return num_units // num_ranks
    if num_ranks % num_units == 0:
        return 1
    raise UserError(
        f"--tp {num_ranks}: {num_units} {what} neither divide evenly over {num_ranks} ranks "
        f"nor does {num_ranks} divide by {num_units}"
    )
