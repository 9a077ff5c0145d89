"""A batch in a poisoned pool: random sequences placed token by token, with everything else left as junk.

Places elements by the definition of the layouts, without `write` and without the views of `LayerCache`.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from conformance import reference
from conformance.harness import Harness
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

# Error of an output row against its norm; the coarser of the dtypes of q and of the cache counts.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
# Absolute, and relative for logits so large that float32 cannot do better.
LSE_TOLERANCE = 1e-4
LSE_RELATIVE_TOLERANCE = 1e-6
NAN_BYTES = 0xFF
# Table entries that no kernel may follow.
JUNK_IDS = np.array([-1, -7, 2**31 - 1], np.int32)


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to a dtype, in its storage (uint16 bits for bfloat16)."""
    if dtype == "bfloat16":
        return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(dtype)


def load(stored: np.ndarray) -> np.ndarray:
    """Exact float64 values of stored elements."""
    if stored.dtype == np.uint16:
        stored = stored.view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return stored.astype(np.float64)


def element(cache: LayerCache, slot: int) -> tuple[Any, ...]:
    """The index of a slot's heads in K or V [.., num_kv_heads, dim] of a cache."""
    block, offset = slot // cache.block_size, slot % cache.block_size
    return (block, offset) if cache.layout == "NHD" else (block, slice(None), offset)


def misaligned(array: np.ndarray) -> np.ndarray:
    """A contiguous copy whose elements start at odd addresses."""
    copy = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    assert copy.size == 0 or not copy.flags.aligned
    return copy


def fill(harness: Harness, cache: LayerCache, byte: int = NAN_BYTES) -> None:
    """Set every byte of the storage, scales that blocks have of their own included."""
    for array in cache.block_arrays:
        host = np.full(array.shape, byte, np.uint8).repeat(array.dtype.itemsize, axis=-1).view(array.dtype)
        array[...] = harness.to_device(host)


def snapshot(harness: Harness, *caches: LayerCache) -> list[bytes]:
    """The bytes of whole pools."""
    return [harness.to_host(array).tobytes() for cache in caches for array in cache.block_arrays]


def rows_close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Compare rows by the norm of their difference; rows of zeros must be exact."""
    assert actual.shape == expected.shape
    error = np.linalg.norm(actual - expected, axis=-1)
    limit = tolerance * np.linalg.norm(expected, axis=-1)
    bad = ~(error <= limit)
    assert not bad.any(), (
        f"{bad.sum()} of {bad.size} rows, the first at {np.argwhere(bad)[0]}: {error[bad][0]}"
    )


def lse_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare log-sum-exps; -inf must be exact."""
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=LSE_RELATIVE_TOLERANCE, atol=LSE_TOLERANCE)


@dataclass
class Scene:
    """A pool, the index arrays of one step over it, and the logical sequences behind them (float64)."""

    harness: Harness
    cache: LayerCache
    q: np.ndarray
    q_dtype: str
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    sequences: list[tuple[np.ndarray, np.ndarray]]

    def attend(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """The backend's (out, lse) on the host; both buffers start as NaN, to show what was not written."""
        device = self.harness.to_device
        num_tokens, num_q_heads, _ = self.q.shape
        out = device(store(np.full((num_tokens, num_q_heads, self.cache.head_dim_v), np.nan), self.q_dtype))
        lse = device(np.full((num_tokens, num_q_heads), np.nan, np.float32))
        per_head = {name: device(options[name]) for name in ("sinks", "alibi_slopes") if name in options}
        returned = self.harness.backend.attend(
            self.cache,
            device(self.q),
            device(self.block_tables),
            device(self.seq_lens),
            device(self.query_start_loc),
            out=out,
            lse=lse,
            **options | per_head,
        )
        assert returned is out
        return self.harness.to_host(out), self.harness.to_host(lse)

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """The reference's (out, lse); zeros and -inf for the tokens beyond the last row."""
        bounds = self.query_start_loc
        queries = [load(self.q[first:last]) for first, last in pairwise(bounds)]
        num_tokens, num_q_heads, _ = self.q.shape
        out = np.zeros((num_tokens, num_q_heads, self.cache.head_dim_v))
        lse = np.full((num_tokens, num_q_heads), -np.inf)
        if bounds[-1]:
            out[: bounds[-1]], lse[: bounds[-1]] = reference.attend(queries, self.sequences, **options)
        return out, lse

    def check(self, *, tolerance: float | None = None, **options: Any) -> None:
        """Compare the backend with the reference."""
        if tolerance is None:
            tolerance = max(TOLERANCE[self.q_dtype], TOLERANCE[self.cache.format.k.name])
        out, lse = self.attend(**options)
        expected_out, expected_lse = self.expected(**options)
        rows_close(load(out), expected_out, tolerance)
        lse_close(lse, expected_lse)


def make_scene(
    harness: Harness,
    *,
    seq_lens: tuple[int, ...] = (0, 1, 15, 16, 17, 33),
    query_lens: tuple[int, ...] | None = None,
    dtype: str = "float32",
    q_dtype: str | None = None,
    layout: str = "NHD",
    block_size: int = 16,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (16, 16),
    pad_tokens: int = 0,
    fill_byte: int = NAN_BYTES,
    seed: int = 0,
) -> Scene:
    """Random sequences in shuffled blocks; query_lens defaults to a decode step of one query a row.

    The random values depend on the seed and the shapes only, not on dtype, layout or block size. Block 0 is
    left alone, as a null block is. Table columns beyond a row's need hold ids that must not be followed.
    """
    rng = np.random.default_rng(seed)
    (num_q_heads, num_kv_heads), (head_dim, head_dim_v) = heads, dims
    query_lens = query_lens or (1,) * len(seq_lens)
    q_dtype = q_dtype or dtype
    values = [
        (
            rng.standard_normal((num_tokens, num_kv_heads, head_dim)) * 2,
            rng.standard_normal((num_tokens, num_kv_heads, head_dim_v)),
        )
        for num_tokens in seq_lens
    ]
    q = store(rng.standard_normal((sum(query_lens) + pad_tokens, num_q_heads, head_dim)), q_dtype)

    needs = [-(-num_tokens // block_size) for num_tokens in seq_lens]
    num_blocks = 1 + sum(needs) + 3
    config = CacheConfig(1, num_kv_heads, head_dim, head_dim_v, dtype, block_size, layout)
    (cache,) = harness.backend.allocate(config, num_blocks)
    k_host, v_host = (
        np.full(array.shape, fill_byte, np.uint8).repeat(array.dtype.itemsize, axis=-1).view(array.dtype)
        for array in (cache.k, cache.v)
    )
    ids = rng.permutation(np.arange(1, num_blocks))
    tables = rng.choice(JUNK_IDS, (len(seq_lens), max(needs, default=0) + 2))
    sequences = []
    for row, (k, v) in enumerate(values):
        blocks, ids = ids[: needs[row]], ids[needs[row] :]
        tables[row, : len(blocks)] = blocks
        k, v = store(k, dtype), store(v, dtype)
        for token in range(len(k)):
            index = element(cache, int(blocks[token // block_size]) * block_size + token % block_size)
            k_host[index] = k[token]
            v_host[index] = v[token]
        sequences.append((load(k), load(v)))
    cache.k[...] = harness.to_device(k_host)
    cache.v[...] = harness.to_device(v_host)
    return Scene(
        harness,
        cache,
        q,
        q_dtype,
        tables.astype(np.int32),
        np.array(seq_lens, np.int32),
        np.concatenate([[0], np.cumsum(query_lens, dtype=np.int64)]).astype(np.int32),
        sequences,
    )
