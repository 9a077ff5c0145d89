"""`CacheConfig` and `parse_memory`."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.config import CacheConfig, parse_memory

SIZES = st.integers(1, 300)
CONFIGS = st.builds(
    CacheConfig,
    num_layers=SIZES,
    num_kv_heads=SIZES,
    head_dim=SIZES,
    head_dim_v=st.none() | SIZES,
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    block_size=SIZES,
    layout=st.sampled_from(["NHD", "HND"]),
)


def test_defaults() -> None:
    config = CacheConfig(30, 3, 64)
    assert config == CacheConfig(30, 3, 64, 64, "float32", 16, "NHD")
    assert config.bytes_per_token == 30 * 3 * 128 * 4
    assert config.bytes_per_block == 16 * 30 * 3 * 128 * 4


def test_known_models() -> None:
    """Bytes per token as their model cards' numbers give them."""
    assert CacheConfig(32, 8, 128, dtype="bfloat16").bytes_per_token == 128 * 1024
    assert CacheConfig(61, 1, 576, 512, dtype="bfloat16").bytes_per_token == 61 * (576 + 512) * 2


@given(CONFIGS)
def test_a_config_is_a_value(config: CacheConfig) -> None:
    again = CacheConfig(**dataclasses.asdict(config))
    assert again == config
    assert hash(again) == hash(config)
    assert config.head_dim_v is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 2  # type: ignore[misc]


def test_numpy_integers_become_ints() -> None:
    config = CacheConfig(np.int64(2), np.int32(3), np.uint8(64), block_size=np.int16(8))
    assert config == CacheConfig(2, 3, 64, block_size=8)
    assert type(config.num_layers) is int
    assert type(config.head_dim_v) is int


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "head_dim_v", "block_size"])
@pytest.mark.parametrize("value", [0, -3, 2.0, "16", True, np.bool_(True)])
def test_sizes_are_integers_from_one(field: str, value: object) -> None:
    fields = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8} | {field: value}
    with pytest.raises(ValueError, match=rf"^{field} is .*: expected an integer >= 1$") as error:
        CacheConfig(**fields)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_only_head_dim_v_may_be_left_out(field: str) -> None:
    fields = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8} | {field: None}
    with pytest.raises(ValueError, match=f"{field} is None"):
        CacheConfig(**fields)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("dtype", "int8", "'float32', 'float16', 'bfloat16'"),
        ("dtype", np.float32, "'float32', 'float16', 'bfloat16'"),
        ("layout", "nhd", "'NHD', 'HND'"),
        ("layout", None, "'NHD', 'HND'"),
    ],
)
def test_names_are_listed(field: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is .*: expected one of {allowed}$"):
        CacheConfig(1, 1, 8, **{field: value})


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("512MB", 512_000_000),
        ("1 KiB", 1024),
        (" 2TB ", 2 * 10**12),
        ("1.5GiB", 3 << 29),
        ("0.1MB", 100_000),
        ("1.0000000001GB", 1_000_000_000),
        ("7B", 7),
        (4096, 4096),
        (np.int64(5), 5),
    ],
)
def test_parse_memory(size: str | int, num_bytes: int) -> None:
    parsed = parse_memory(size)
    assert parsed == num_bytes
    assert type(parsed) is int


@given(st.integers(1, 10**6), st.sampled_from(["", "K", "M", "G", "T"]), st.sampled_from(["B", "iB"]))
def test_parse_memory_is_exact(number: int, prefix: str, suffix: str) -> None:
    base = 1000 if suffix == "B" else 1024
    unit = prefix + suffix if prefix else "B"
    expected = number * base ** " KMGT".index(prefix or " ")
    assert parse_memory(f"{number}{unit}") == expected
    assert parse_memory(f"{number}.0 {unit}") == expected
    assert parse_memory(expected) == expected


@pytest.mark.parametrize(
    "size",
    [
        *(
            "",
            "8",
            "GiB",
            "8gib",
            "8 G",
            "8Gb",
            "-1GiB",
            "1e3MB",
            "1,5GB",
            "1.GB",
            ".5GB",
            "8GiB8",
            "0MB",
            "0.5B",
        ),
        *("\u0663GB", 0, -1, 1.5, True, None, b"8GiB"),
    ],
)
def test_parse_memory_refuses(size: object) -> None:
    with pytest.raises(
        ValueError, match=r"^memory size .*: expected bytes >= 1 as an int, or a number"
    ) as error:
        parse_memory(size)
    assert repr(size) in str(error.value)
