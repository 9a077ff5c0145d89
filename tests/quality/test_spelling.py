"""How `--formats` is read: formats, formats of layers, residuals and blocks of their own."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks import CacheConfig
from kvblocks.quality.controls import CONTROLS
from kvblocks.quality.render import bits_per_element
from kvblocks.quality.spelling import read_variant

CONFIG = CacheConfig(6, 2, 64, block_size=32)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("int8", {"kv_format": "int8"}),
        ("int8:channel,int8", {"kv_format": "int8:channel,int8"}),
        ("kivi4@32", {"kv_format": "kivi4", "residual_tokens": 32}),
        ("kivi2r@48/16", {"kv_format": "kivi2r", "residual_tokens": 48, "block_size": 16}),
        ("0=float16+kivi2", {"kv_format": ["float16", *["kivi2"] * 5]}),
        ("kivi2+0-1,5=float16", {"kv_format": ["float16", "float16", "kivi2", "kivi2", "kivi2", "float16"]}),
        ("0-2=int8,int4+3-5=fp8_e4m3", {"kv_format": [*["int8,int4"] * 3, *["fp8_e4m3"] * 3]}),
        (
            "0=int8:channel,int8+kivi2@64",
            {"kv_format": ["int8:channel,int8", *["kivi2"] * 5], "residual_tokens": 64},
        ),
        ("5=int8+int8", {"kv_format": ["int8"] * 6}),
    ],
)
def test_what_is_spelled_is_the_config(text: str, changes: dict[str, object]) -> None:
    variant = read_variant(text, CONFIG)
    assert variant.name == text
    assert variant.config == dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert variant.codec is None


def test_layers_weigh_the_bits_of_the_whole() -> None:
    """Two of six layers in 16 bit, four in 8.5."""
    assert bits_per_element(read_variant("0,5=float16+int8", CONFIG)) == (2 * 16 + 4 * 8.5) / 6


@given(st.lists(st.sampled_from(["int8", "int4", "kivi2", "fp8_e4m3:head,int8"]), min_size=6, max_size=6))
def test_any_list_of_layers_can_be_spelled(formats: list[str]) -> None:
    text = "+".join(f"{layer}={name}" for layer, name in enumerate(formats))
    assert read_variant(text, CONFIG).config == dataclasses.replace(CONFIG, kv_format=formats)


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_controls_are_no_formats(name: str) -> None:
    variant = read_variant(name, CONFIG)
    assert variant.codec is not None
    assert variant.config == CONFIG
    with pytest.raises(ValueError, match=rf"^'{name}@32': {name} keeps no tokens in 16 bit"):
        read_variant(f"{name}@32", CONFIG)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "k_format is '': expected one of"),
        ("int8@", "'int8@': expected tokens after the @"),
        ("kivi2@many", "'kivi2@many': expected tokens after the @"),
        ("kivi2@64/", "expected tokens after the @"),
        ("kivi2@-1", "expected tokens after the @"),
        ("kivi2@0", "residual_tokens is 0"),
        ("kivi2@32/24", "block_size is 24: k_format kivi2"),
        ("int8@32", "'int8@32': int8 keeps no tokens in 16 bit"),
        ("0=int8", "'0=int8': 5 layers have none, and 0 formats are for all others"),
        ("0-5=int8+int4", "no layer is left, and 1 formats are for all others"),
        ("int8+int4", "6 layers have none, and 2 formats are for all others"),
        ("0-6=int8", "layers 0-6 are none of the model's 0..5"),
        ("3-1=int8+int4", "layers 3-1 are none"),
        ("-1=int8+int4", "'-1' are no layers: expected a number or a range"),
        ("=int8", "'' are no layers"),
        ("0,0=int8+int4", "layer 0 has two formats"),
        ("0-2=int8+2=int4+int8", "layer 2 has two formats"),
        ("0=int9+int4", "k_format is 'int9'"),
        ("0=naive_int2+int4", "k_format is 'naive_int2'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared as it stands
        read_variant(text, CONFIG)
    assert message in str(caught.value)
