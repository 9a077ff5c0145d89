"""The addresses of cuda/include/kvblocks/paged.cuh, compiled for the host, against those of layout.py."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache, storage_dtype, storage_shape

INCLUDE = Path(__file__).resolve().parents[2] / "cuda" / "include"

DRIVER = """
#include "kvblocks/paged.cuh"
using namespace kvb;

extern "C" void locate(const Paged* paged, const i32* table, const i32* positions, const i32* heads, i32 n,
                       i64* slots, i64* by_slot, i64* by_position) {
    for (i32 i = 0; i < n; ++i) {
        slots[i] = slot_of(*paged, table, positions[i]);
        by_slot[i] = row_offset(*paged, slots[i], heads[i]);
        by_position[i] = row_offset(*paged, table, positions[i], heads[i]);
    }
}

extern "C" bool skipped(i64 slot) {
    return is_skipped(slot);
}
"""


class Paged(ctypes.Structure):
    """The host's copy of `kvb::Paged`."""

    _fields_ = [
        ("block_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
    ]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("paged")
    source, library = folder / "driver.cpp", folder / "driver.so"
    source.write_text(DRIVER)
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, f"-I{INCLUDE}", str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.skipped.restype = ctypes.c_bool
    return loaded


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def check(driver: ctypes.CDLL, cache: LayerCache, table: np.ndarray, positions: np.ndarray) -> int:
    """Compare the offsets of all heads at the positions, for K and V; returns the largest."""
    heads = np.tile(np.arange(cache.num_kv_heads, dtype=np.int32), len(positions))
    positions = positions.repeat(cache.num_kv_heads).astype(np.int32)
    largest = 0
    for array, nhd in ((cache.k, cache.k_nhd), (cache.v, cache.v_nhd)):
        strides = [stride // array.itemsize for stride in nhd.strides]
        assert strides[3] == 1
        paged = Paged(*strides[:3], cache.block_size, cache.num_blocks)
        slots, by_slot, by_position = np.empty((3, len(positions)), np.int64)
        driver.locate(
            ctypes.byref(paged),
            *map(pointer, (table, positions, heads)),
            len(positions),
            *map(pointer, (slots, by_slot, by_position)),
        )
        for i, (position, head) in enumerate(zip(positions.tolist(), heads.tolist(), strict=True)):
            block, offset = int(table[position // cache.block_size]), position % cache.block_size
            expected = (address(nhd[block, offset, head]) - address(array)) // array.itemsize
            assert slots[i] == block * cache.block_size + offset
            assert by_slot[i] == by_position[i] == expected
            largest = max(largest, expected)
    return largest


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 64, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_addresses(driver: ctypes.CDLL, layout: str, block_size: int, dtype: str) -> None:
    config = CacheConfig(1, 3, 40, 24, dtype, block_size, layout)
    num_blocks = 5 + 70 // block_size
    arrays = [np.empty(shape, storage_dtype(dtype)) for shape in storage_shape(config, num_blocks)]
    table = np.random.default_rng(block_size).permutation(num_blocks).astype(np.int32)
    largest = check(driver, LayerCache(*arrays, dtype, block_size, layout), table, np.arange(70))
    assert largest > 0


def test_addresses_in_a_pool_that_interleaves_k_and_v(driver: ctypes.CDLL) -> None:
    pool = np.empty((9, 2, 4, 3, 8), np.float32)
    cache = LayerCache(pool[:, 0], pool[:, 1], "float32", 4, "NHD")
    assert check(driver, cache, np.array([8, 0, 5], np.int32), np.arange(12)) > 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("num_blocks", "block_size"), [(200_000, 16), (2**31 - 1, 24)])
def test_addresses_beyond_two_to_the_31(
    driver: ctypes.CDLL, layout: str, num_blocks: int, block_size: int
) -> None:
    """Elements, then slots too. Addresses are taken, never followed: one element stands for the whole pool."""
    config = CacheConfig(1, 8, 256, 1, "float16", block_size, layout)
    arrays = []
    for shape in storage_shape(config, num_blocks):
        strides = 2 * np.cumprod((1, *shape[:0:-1]))[::-1]
        arrays.append(
            np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), shape, tuple(strides.tolist()))
        )
    table = np.array([num_blocks - 1, 65_536, 3], np.int32)
    cache = LayerCache(*arrays, "float16", block_size, layout)
    assert check(driver, cache, table, np.arange(3 * block_size)) > 2**32


def test_negative_slots_are_skipped(driver: ctypes.CDLL) -> None:
    assert [driver.skipped(ctypes.c_int64(slot)) for slot in (-(2**63), -2, -1, 0, 2**62)] == [True] * 3 + [
        False
    ] * 2


def test_headers_include_each_other_only() -> None:
    """Kernels must compile without the CUDA toolkit's headers and without the standard library's."""
    headers = sorted((INCLUDE / "kvblocks").glob("*.cuh"))
    assert len(headers) >= 2
    names = {header.name for header in headers}
    for header in headers:
        for line in header.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert line.split('"')[1] in names, f"{header.name}: {line}"
