"""The contract of a backend: what moves the bytes of a paged cache and computes attention over it.

Owns the protocol `Backend` and `Supported`. Imports config and layout.
Invariant: a backend never decides a block id, and every method checks all of its arguments (shapes, dtypes,
and on host arrays also values, alignment, overlap and whether they can be written) before it writes anything.

Shared meaning of the arguments, for every method:

- dtypes: K, V, Q and `out` are float32, float16, or uint16, which always means bfloat16 bits. A cache of
  another dtype than K and V rounds to nearest even.
- strides: arguments may have any, and inputs may be misaligned; `out` and `lse` must be aligned. The arrays of a
  cache are aligned, with contiguous rows (the last axis), and their other axes, in any order, each step over all
  that the narrower ones cover: positive strides, no overlap. Views of a larger pool are fine.
- sharing: what a call writes shares no memory with its other arguments, nor K of a cache with V in a write.
- precision: `numpy` computes in float64, the others in float32, where a logit (q.k, its scale and its slope
  included) beyond the range of float32 is infinite. scale and soft_cap are normal float32 numbers, scale also 0.
- slot: block_id * block_size + offset, in int64. A slot of -1 is skipped; any other negative slot, a slot
  beyond the storage and a slot named twice are ValueErrors.
- block tables: int32 [n, max_blocks], read only in the columns that the visible keys of a row need; the rest
  may hold anything.
- null block: backends know none. A manager that reserves a block never names it in a slot mapping or as the
  destination of a copy, so its bytes are never written.
- threads: any thread may call. Calls that touch the same memory, unless all of them only read it, run one after the
  other in the order in which they came; so a call sees a cache as whole calls left it, and waiting is no error.
- errors: TypeError or ValueError that names the argument, the axis and both numbers, or the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvblocks.config import CacheConfig
from kvblocks.formats import Format
from kvblocks.layout import Array, LayerCache

if TYPE_CHECKING:
    from kvblocks.backends.codecs import Encoded


@dataclass(frozen=True, eq=False)
class Tail:
    """The newest keys and values of a batch, which `attend` reads from here and not from the cache.

    k [>= start_loc[-1], num_kv_heads, head_dim] and v [.., head_dim_v]: float32, float16 or bfloat16 bits, contiguous
    rows. start_loc int32 [num_seqs + 1]: row i has start_loc[i]..start_loc[i + 1], the last keys of its sequence. The
    caller owns the arrays.
    """

    k: Array
    v: Array
    start_loc: Array


@dataclass(frozen=True)
class Supported:
    """What a backend can do; everything else is refused with the list that holds here.

    k_formats, v_formats: as `str(Format)` writes them; mixed: whether their names may differ in a layer. head_dims,
    block_sizes: None for any value >= 1; else what is allowed (a range or a tuple), head_dims for K and for V.
    features: of "window", "soft_cap", "sinks", "alibi", "lse", "tail". checks_values: whether a call refuses wrong
    values in index arrays and scales; where it does not, as reading them would wait for a device, the kernels skip
    them.
    """

    q_dtypes: tuple[str, ...]
    k_formats: tuple[str, ...]
    v_formats: tuple[str, ...]
    mixed: bool
    layouts: tuple[str, ...]
    features: frozenset[str]
    head_dims: Sequence[int] | None = None
    block_sizes: Sequence[int] | None = None
    checks_values: bool = True


@runtime_checkable
class Backend(Protocol):
    """Write, attend, copy and gather over the cache of one layer (or of all layers, where stated)."""

    name: str

    def supported(self) -> Supported:
        """The table of what this backend can do."""

    def allocate(self, config: CacheConfig, num_blocks: int) -> list[LayerCache]:
        """Storage for every layer; the caches own it and its contents are undefined.

        Raises ValueError for a config that is not supported.
        """

    def write(self, cache: LayerCache, k: Array, v: Array, slot_mapping: Array) -> None:
        """Store the first num_slots rows of k and v at their slots.

        k [>= num_slots, num_kv_heads, head_dim], v [>= num_slots, num_kv_heads, head_dim_v], slot_mapping
        int64 [num_slots]. A format whose scales span tokens is written in whole groups: slots that name a part of one
        are a ValueError, and so is a static scale that has not been set. O(num_slots).
        """

    def attend(
        self,
        cache: LayerCache,
        q: Array,
        block_tables: Array,
        seq_lens: Array,
        query_start_loc: Array,
        *,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        alibi_slopes: Array | None = None,
        tail: Tail | None = None,
        out: Array | None = None,
        lse: Array | None = None,
    ) -> Array:
        """Causal attention of each row's queries over its cached keys; returns `out`, made if not given.

        q [num_tokens, num_q_heads, head_dim]; seq_lens int32 [n], keys of a row; query_start_loc int32 [n +
        1]: row i owns queries query_start_loc[i]..query_start_loc[i + 1], which are the last positions of its
        sequence. out [num_tokens, num_q_heads, head_dim_v] of q's dtype; lse float32 [num_tokens,
        num_q_heads], filled if given. Query head h reads key head h // (num_q_heads / num_kv_heads).

        A query at position p sees the keys max(0, p + 1 - window)..p. The logit of key j is
        s = scale * q.k (scale: 1 / sqrt(head_dim) by default), then soft_cap * tanh(s / soft_cap), then
        + alibi_slopes[h] * (j - p); exp(sinks[h]) joins the denominator. sinks and alibi_slopes are float32
        [num_q_heads]; a sink of -inf is none. lse is the natural log of the denominator, the sink included:
        of states to be merged, give the sinks to one only. tail: the last keys of each row, which seq_lens counts too;
        their slots are not read.

        Rows of seq_len 0, queries of no row, and queries whose logits are all -inf, a sink included, give
        exactly 0 and -inf. A row with more queries than keys is a ValueError otherwise.
        """

    def copy_blocks(self, caches: Sequence[LayerCache], copies: Array) -> None:
        """Copy whole blocks in every cache; copies int32 [m, 2] of (src, dst).

        A dst named twice, or one that is also a src, is a ValueError. O(m * len(caches)).
        """

    def gather(self, cache: LayerCache, block_table: Array, seq_len: int) -> tuple[Array, Array]:
        """The first seq_len tokens of a sequence, as new contiguous float32 arrays.

        block_table int32 [max_blocks]; returns k [seq_len, num_kv_heads, head_dim] and v [seq_len,
        num_kv_heads, head_dim_v]. O(seq_len).
        """

    def merge_states(self, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
        """Attention over the union of two disjoint sets of keys, from the two outputs; new arrays (out, lse).

        out_a, out_b [num_tokens, num_q_heads, head_dim_v] of one dtype; lse_a, lse_b float32 [num_tokens,
        num_q_heads]. A state whose lse is -inf takes no part, whatever its out holds.
        """

    def quantize(self, x: Array, kv_format: Format | str, scale: Array | float | str) -> Encoded:
        """Codes of x [num_tokens, num_heads, dim], with what was lost per head; see `codecs` for the arithmetic.

        kv_format: one that has a scale; a text is read as K's. scale: "amax" computes it; else a number, or a float32
        array of the format's shape ([num_tokens, num_heads] for token_head). Formats with zeros take "amax" only, and
        those whose groups span tokens whole groups of them. O(elements).
        """

    def dequantize(
        self, codes: Array, kv_format: Format | str, scale: Array, zero: Array | None = None
    ) -> Array:
        """Float32 values [num_tokens, num_heads, dim] of what `quantize` gave. O(elements)."""
