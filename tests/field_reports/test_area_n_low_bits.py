"""Area N: INT8, and 4 and 2 bits in groups with a residual; P106 of widths is in the contract suite."""

import numpy as np
import pytest

import kvblocks as kv

from .helpers import needs


def test_p104_the_newest_tokens_are_exact_and_so_is_a_group_that_is_not_whole(backend: kv.Backend) -> None:
    needs(backend, "kivi2")
    config = kv.CacheConfig(1, 1, 32, block_size=32, kv_format="kivi2", residual_tokens=32)
    cache = kv.PagedKVCache(config, 8, backend=backend)
    handle = cache.manager.allocate(cache.manager.prepare(range(100))).handle
    cache.schedule([handle], 100)
    written = np.random.default_rng(0).standard_normal((2, 100, 1, 32)).astype(np.float16).astype(np.float32)
    cache.write(0, *written)
    cache.manager.commit([handle], 100)
    for part, rows in zip(cache.gather(handle, 0), written, strict=True):
        exact = (part == rows).all(axis=(1, 2))
        assert exact[64:].all()  # 68..99 by the rule; 64..67 as their group is not whole
        assert not exact[:64].any()


def test_p105_groups_end_with_their_sequence(backend: kv.Backend) -> None:
    """Two sequences in one batch, one a thousand times as large: the other one's codes are those of a run alone."""
    needs(backend, "kivi2")
    config = kv.CacheConfig(1, 2, 32, block_size=32, kv_format="kivi2")
    rows = np.random.default_rng(0).standard_normal((2, 40, 2, 32)).astype(np.float32)
    blocks = []
    for sizes in ([1.0], [1.0, 1000.0]):
        cache = kv.PagedKVCache(config, 8, backend=backend, enable_prefix_cache=False)
        handles = [cache.manager.allocate(cache.manager.prepare(range(40))).handle for _ in sizes]
        cache.schedule(handles, 40)
        cache.write(0, *(np.concatenate([part * np.float32(size) for size in sizes]) for part in rows))
        block = cache.manager.block_table(handles[0])[0]
        blocks.append([array[block].tobytes() for array in cache.layers[0].block_arrays])
    assert blocks[0] == blocks[1]


def test_p105_the_pool_is_as_small_as_it_says() -> None:
    sizes = {"num_layers": 1, "num_kv_heads": 8, "head_dim": 128, "block_size": 32}
    pools = {
        kv_format: kv.PagedKVCache(
            kv.CacheConfig(**sizes, kv_format=kv_format), 65, backend="numpy", max_seqs=1
        )
        for kv_format in ("float16", "kivi2")
    }
    held = {
        name: sum(array.nbytes for _, array in cache.layers[0].named_arrays) for name, cache in pools.items()
    }
    assert held["kivi2"] <= 0.22 * held["float16"]
    assert held["kivi2"] == pools["kivi2"].nbytes - pools["kivi2"].config.bytes_per_seq


@pytest.mark.parametrize("head_dim", [80, 96])
def test_p106_a_short_last_group(backend: kv.Backend, head_dim: int) -> None:
    needs(backend, "int4")
    x = np.random.default_rng(0).standard_normal((4, 1, head_dim)).astype(np.float32)
    encoded = backend.quantize(x, "int4", "amax")
    assert encoded.codes.shape == (4, 1, head_dim // 2)
    assert encoded.scale.shape == (4, 1, 3)
    restored = backend.dequantize(encoded.codes, "int4", encoded.scale, encoded.zero)
    assert np.abs(restored - x).max() <= 0.51 * np.ptp(x) / 15


def test_p106_a_row_that_is_no_whole_number_of_bytes() -> None:
    for kv_format in ("int4", "kivi2"):
        with pytest.raises(ValueError, match=r"^head_dim is 100: k_format .* needs a multiple of 8$"):
            kv.CacheConfig(1, 1, 100, block_size=32, kv_format=kv_format)
    with pytest.raises(ValueError, match="k_format is 'int3': expected one of"):
        kv.CacheConfig(1, 1, 96, kv_format="int3")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8", "int4"])
def test_p108_the_tail_of_the_last_block_stays_out(backend: kv.Backend, kv_format: str, layout: str) -> None:
    """17 tokens in blocks of 16, everything else 0xFF, scales NaN among it."""
    needs(backend, kv_format)
    (cache,) = backend.allocate(kv.CacheConfig(1, 2, 32, kv_format=kv_format, layout=layout), 4)
    for array in cache.block_arrays:
        array.view(np.uint8)[...] = 0xFF
    rows = np.random.default_rng(0).standard_normal((2, 17, 2, 32)).astype(np.float32)
    backend.write(cache, *rows, np.array([*range(48, 64), 16]))
    table = np.array([3, 1], np.int32)
    for part, written in zip(backend.gather(cache, table, 17), rows, strict=True):
        assert part.shape == (17, 2, 32)
        np.testing.assert_allclose(part, written, atol=0.3)
    q = rows[0][:1].copy()
    out = backend.attend(cache, q, table[None], np.array([17], np.int32), np.array([0, 1], np.int32))
    assert np.isfinite(out).all()
