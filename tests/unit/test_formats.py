"""The list of formats: its texts, its refusals, and that what it says in bytes is what is allocated."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.config import CacheConfig
from kvblocks.formats import FORMATS, KVFormat, all_formats, parse_format
from kvblocks.layout import LayerCache, allocate_host, storage_shape

K_FORMATS, V_FORMATS = (st.sampled_from(all_formats(part)) for part in ("k", "v"))
KV_FORMATS = st.builds(KVFormat, K_FORMATS, V_FORMATS)


def test_the_list() -> None:
    assert list(FORMATS) == [
        *(
            "float32",
            "float16",
            "bfloat16",
            "fp8_e4m3",
            "fp8_e5m2",
            "int8",
            "int4",
            "kivi4",
            "kivi2",
            "kivi4r",
            "kivi2r",
        )
    ]
    assert [str(part) for part in all_formats("k")[3:]] == [
        *("fp8_e4m3", "fp8_e4m3:head", "fp8_e4m3:tensor", "fp8_e5m2", "fp8_e5m2:head", "fp8_e5m2:tensor"),
        *("int8", "int8:head", "int8:channel", "int4", "kivi4", "kivi2", "kivi4r", "kivi2r"),
    ]
    assert {str(part) for part in all_formats("k")} - {str(part) for part in all_formats("v")} == {
        "int8:channel"
    }


@given(KV_FORMATS)
def test_a_format_is_read_as_it_is_written(kv_format: KVFormat) -> None:
    assert KVFormat.parse(str(kv_format)) == kv_format
    assert KVFormat.parse(kv_format) is kv_format


def test_texts() -> None:
    assert KVFormat.parse("int8:token_head") == KVFormat.parse("int8") == KVFormat.parse(" int8, int8 ")
    mixed = KVFormat.parse("int8:channel,fp8_e4m3:head")
    assert (mixed.k.scaling, mixed.v.name, mixed.v.scaling) == ("channel", "fp8_e4m3", "head")
    assert str(mixed) == "int8:channel,fp8_e4m3:head"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8", "k_format is 'fp8': expected one of 'float32', 'float16', 'bfloat16', 'fp8_e4m3'"),
        ("", "k_format is '': expected one of"),
        ("int8,", "v_format is '': expected one of"),
        ("int8:block", "k_format is 'int8:block': the scaling of int8 is one of token_head, head, channel"),
        ("int8:channel", "v_format is 'int8:channel': the scaling of int8 is one of token_head, head$"),
        ("int4:head", "k_format is 'int4:head': the scaling of int4 is one of group"),
        ("int8,int8,int8", "format is 'int8,int8,int8': expected one for K and V, or two"),
        (None, "format is None: expected one for K and V"),
        (8, "format is 8: expected one for K and V"),
    ],
)
def test_texts_that_are_none(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVFormat.parse(text)


@pytest.mark.parametrize(
    ("kv_format", "sizes", "message"),
    [
        ("kivi2", (16, 64), "block_size is 16: k_format kivi2 needs a multiple of 32"),
        ("kivi4", (48, 64), "block_size is 48: k_format kivi4 needs a multiple of 32"),
        ("int4", (16, 100), "head_dim is 100: k_format int4 needs a multiple of 8"),
        ("float16,int4", (16, 12), "head_dim_v is 12: v_format int4 needs a multiple of 8"),
    ],
)
def test_sizes_that_a_format_cannot_hold(kv_format: str, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(2, 2, sizes[1], block_size=sizes[0], kv_format=kv_format)


@given(
    st.lists(KV_FORMATS, min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([32, 64]),
    st.sampled_from(["NHD", "HND"]),
)
def test_bytes_are_those_of_the_arrays(
    formats, heads, num_blocks, eighths, eighths_v, block_size, layout
) -> None:
    config = CacheConfig(
        *(len(formats), heads, 8 * eighths, 8 * eighths_v),
        block_size=block_size,
        layout=layout,
        kv_format=formats,
    )
    caches = allocate_host(config, num_blocks)
    held = [array for cache in caches for _, array in cache.named_arrays]
    assert sum(array.nbytes for array in held) == num_blocks * config.bytes_per_block + config.fixed_bytes
    assert sum(cache.nbytes for cache in caches) == sum(array.nbytes for array in held)
    assert config.bytes_per_token * block_size == config.bytes_per_block
    in_blocks = sum(array.nbytes for cache in caches for array in cache.block_arrays)
    assert in_blocks == num_blocks * config.bytes_per_block
    for layer, (cache, kv_format) in enumerate(zip(caches, formats, strict=True)):
        assert cache.format == kv_format
        assert (cache.k.shape, cache.v.shape) == storage_shape(config, num_blocks, layer)
        assert (cache.head_dim, cache.head_dim_v) == (config.head_dim, config.head_dim_v)


@pytest.mark.parametrize(
    ("kv_format", "bits"),
    [
        # 64 elements a row: 8 bits and a float32 scale; 4 bits and two float16 for 32; 2 bits likewise.
        ("float16", 16),
        ("fp8_e4m3:tensor", 8),
        ("fp8_e4m3", 8.5),
        ("int8", 8.5),
        ("int4", 5),
        ("kivi4", 5 + 16 * 160 / 4096),
        ("kivi2", 3 + 16 * 160 / 4096),
        ("int8,kivi2", (8.5 + 3) / 2 + 16 * 160 / 4096),
    ],
)
def test_bits_per_element(kv_format: str, bits: float) -> None:
    sizes = {"block_size": 32, "residual_tokens": 128, "num_kv_heads": 3, "head_dim": 64, "head_dim_v": 64}
    assert KVFormat.parse(kv_format).bits_per_element(4096, **sizes) == pytest.approx(bits)


def test_bits_of_the_rotated_formats() -> None:
    """With at most 64 tokens of residual, 4 bits cost 5 and 2 bits 3.5, all included."""
    sizes = {"num_kv_heads": 3, "head_dim": 64, "head_dim_v": 64}
    kivi4r, kivi2r = KVFormat.parse("kivi4r"), KVFormat.parse("kivi2r")
    assert kivi4r.bits_per_element(4096, block_size=32, residual_tokens=32, **sizes) == 5.0
    assert kivi2r.bits_per_element(4096, block_size=16, residual_tokens=48, **sizes) == 3.5


def test_bytes_of_known_models() -> None:
    """Llama-3.1-8B: FP8 halves the 128 KiB of bfloat16; a scale a token and head adds 2 * 8 * 4 bytes a layer."""
    llama = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    assert CacheConfig(**llama).bytes_per_token == 131_072
    assert CacheConfig(**llama, kv_format="fp8_e4m3:tensor").bytes_per_token == 65_536
    assert CacheConfig(**llama, kv_format="fp8_e4m3:tensor").fixed_bytes == 32 * 2 * 4
    assert CacheConfig(**llama, kv_format="fp8_e4m3").bytes_per_token == 65_536 + 32 * 2 * 8 * 4
    assert CacheConfig(**llama, kv_format="int8:channel,int8").fixed_bytes == 32 * 8 * 128 * 4
    kivi = CacheConfig(**llama, block_size=32, kv_format="kivi2", residual_tokens=32)
    assert kivi.bytes_per_token / 131_072 == 3 / 16 <= 0.22
    assert kivi.bytes_per_seq == 64 * 131_072
    assert CacheConfig(**llama).bytes_per_seq == 0


def test_layers_of_their_own() -> None:
    """Window layers stay in 16 bit while full ones go to 8."""
    config = CacheConfig(3, 2, 64, dtype="bfloat16", kv_format=["bfloat16", "fp8_e4m3:tensor", "bfloat16"])
    assert config.bytes_per_token == 2 * 128 * (2 + 1 + 2)
    assert config == CacheConfig(3, 2, 64, dtype="bfloat16", kv_format=config.kv_format)
    assert hash(config)
    assert [str(each) for each in config.formats] == ["bfloat16", "fp8_e4m3:tensor", "bfloat16"]
    with pytest.raises(ValueError, match="kv_format has 2 entries: expected one of each of the 3 layers"):
        CacheConfig(3, 2, 64, kv_format=["int8", "int8"])


def test_dtype_is_the_format_unless_another_is_given() -> None:
    assert CacheConfig(2, 2, 64, dtype="float16").formats == (KVFormat.parse("float16"),) * 2
    assert CacheConfig(2, 2, 64, kv_format="float16").formats == (KVFormat.parse("float16"),) * 2
    assert CacheConfig(2, 2, 64, dtype="float32").residual_dtype == "float16"
    assert CacheConfig(2, 2, 64, dtype="bfloat16").residual_dtype == "bfloat16"


def test_static_scales_are_not_a_number_until_they_are_set() -> None:
    (cache,) = allocate_host(CacheConfig(1, 2, 8, kv_format="int8:channel,int8:head"), 2)
    assert np.isnan(cache.k_scale).all()
    assert np.isnan(cache.v_scale).all()
    assert (cache.k_scale.shape, cache.v_scale.shape) == ((2, 8), (2,))


SHAPES = {"k": (3, 32, 2, 8), "v": (3, 32, 2, 8)}


@pytest.mark.parametrize(
    ("kv_format", "changes", "error", "message"),
    [
        (
            "int8",
            {"k_scale": None},
            ValueError,
            r"k_scale: missing, a int8 cache needs one of shape \(3, 32, 2\)",
        ),
        ("int8", {"v_zero": np.zeros(1, np.float32)}, ValueError, "v_zero: a int8 cache has none"),
        ("float16", {"k_scale": np.ones(1, np.float32)}, ValueError, "k_scale: a float16 cache has none"),
        ("int8", {"v_scale": np.ones((3, 32, 2))}, TypeError, "v_scale: dtype float64, expected float32"),
        (
            "int8:head,int8",
            {"k_scale": np.ones(4, np.float32)},
            ValueError,
            r"k_scale: shape \(4,\), .* \(2,\)",
        ),
        ("kivi2", {"k_zero": None}, ValueError, r"k_zero: missing, a kivi2 cache needs .* \(3, 1, 2, 32\)"),
        (
            "int4",
            {"v_scale": np.ones((3, 32, 2, 1), np.float32)},
            TypeError,
            "v_scale: dtype float32, .* float16",
        ),
    ],
)
def test_scales_that_do_not_fit(kv_format, changes, error, message) -> None:
    parts = KVFormat.parse(kv_format)
    arrays = {name: np.zeros(shape, getattr(parts, name).storage) for name, shape in SHAPES.items()}
    for name, part in (("k", parts.k), ("v", parts.v)):
        shape = part.scale_shape(3, 32, 2, 8 * 8 * part.storage.itemsize // part.bits)
        if shape is not None:
            arrays[f"{name}_scale"] = np.ones(shape, part.scale_dtype)
        if part.has_zero:
            arrays[f"{name}_zero"] = np.ones(shape, part.scale_dtype)
    LayerCache(**arrays, format=kv_format, block_size=32, layout="NHD")
    with pytest.raises(error, match=message):
        LayerCache(**arrays | changes, format=kv_format, block_size=32, layout="NHD")


def test_every_format_says_what_its_codes_are() -> None:
    for part in {*all_formats("k"), *all_formats("v")}:
        assert part == parse_format(str(part), "k") or part == parse_format(str(part), "v")
        assert part.is_plain == math.isinf(part.limit) or part.has_zero
        assert part.has_zero == (part.group > 0)


def test_the_page_lists_every_format_with_its_bits() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    table = page[page.index("| K and V |") : page.index("K and V may have")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:] if line]
    assert len(rows) >= 13
    listed = set()
    for names, _, *bits, _ in rows:
        for text in re.findall("`(.*?)`", names):
            kv_format = KVFormat.parse(text)
            listed |= {kv_format.k, kv_format.v}
            for head_dim, stated in zip((64, 128), bits, strict=True):
                num_bytes = kv_format.bytes_per_block(32, 8, head_dim, head_dim)
                assert 8 * num_bytes / (32 * 8 * 2 * head_dim) == float(stated), (text, head_dim)
    assert listed == {*all_formats("k"), *all_formats("v")}
