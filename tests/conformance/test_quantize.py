"""`quantize` and `dequantize`: every format bit for bit as the specification has it, and its bound for every value."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import PARAMS, Harness
from kvblocks.backends.codecs import pack, unpack
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.formats import Format, all_formats, parse_format

SCALED = [part for part in dict.fromkeys((*all_formats("k"), *all_formats("v"))) if not part.is_plain]
SIGNED = [part for part in SCALED if not part.has_zero]
GROUPED = [part for part in SCALED if part.has_zero]
ML_DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
LARGEST = float(np.finfo(np.float32).max)
LIMITS = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
# A part of the value, and of the scale: half a step of the mantissa, and half of the smallest step.
STEPS = {"fp8_e4m3": (2.0**-4, 2.0**-10), "fp8_e5m2": (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}


def full_name(part: Format) -> str:
    """K and V of a kivi format share their text, and not their scaling."""
    return f"{part.name}-{part.scaling}"


def is_supported(harness: Harness, part: Format | str) -> bool:
    table = harness.backend.supported()
    return str(part) in (*table.k_formats, *table.v_formats)


def skip_unless_supported(harness: Harness, part: Format | str) -> None:
    """A format that the backend's table leaves out is refused with the list of those that it has."""
    if is_supported(harness, part):
        return
    x = harness.to_device(np.ones((32, 2, 8), np.float32))
    with pytest.raises(ValueError, match=rf"^kv_format is .*{part}.*: supported are float32"):
        harness.backend.quantize(x, part, "amax")
    pytest.skip(f"{harness.name} refuses {part}")


def quantize(harness: Harness, x: np.ndarray, part: Format | str, scale: Any) -> Any:
    skip_unless_supported(harness, part)
    device = harness.to_device
    encoded = harness.backend.quantize(
        device(x), part, device(scale) if isinstance(scale, np.ndarray) else scale
    )
    return type(encoded)(*(array if array is None else harness.to_host(array) for array in encoded))


def dequantize(harness: Harness, encoded: Any, part: Format | str) -> np.ndarray:
    device = harness.to_device
    zero = None if encoded.zero is None else device(encoded.zero)
    return harness.to_host(
        harness.backend.dequantize(device(encoded.codes), part, device(encoded.scale), zero)
    )


def scale_of_each(encoded: Any, part: Format, dim: int, name: str = "scale") -> np.ndarray:
    """The scale (or zero) of each element in float64 [num_tokens, num_heads, dim], written out by hand."""
    array = getattr(encoded, name).astype(np.float64)
    num_tokens, num_heads = encoded.codes.shape[:2]
    each, group = np.empty((num_tokens, num_heads, dim)), part.group or 1
    for token, head, channel in np.ndindex(each.shape):
        where = {
            "tensor": (0,),
            "head": (head,),
            "channel": (head, channel),
            "token_head": (token, head),
            "group": (token, head, channel // group),
            "token_group": (token // group, head, channel),
        }[part.scaling]
        each[token, head, channel] = array[where]
    return each


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_every_16_bit_value_becomes_the_code_of_the_reference(
    harness: Harness, name: str, source: str
) -> None:
    """The reference knows no saturation: it gets the values clipped."""
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(np.float16) if source == "float16" else bits
    with np.errstate(invalid="ignore"):
        wide = bits.view(np.float16 if source == "float16" else ml_dtypes.bfloat16).astype(np.float32)
        expected = np.clip(wide, -LIMITS[name], LIMITS[name]).astype(ML_DTYPES[name]).view(np.uint8)
    encoded = quantize(harness, x.reshape(-1, 1, 256), f"{name}:tensor", 1.0)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(encoded.codes.reshape(-1)[number], expected[number])
    # A NaN has one code of each sign.
    assert (encoded.codes.reshape(-1)[~number] & 0x7F == 0x7F).all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_code_stands_for_the_value_of_the_reference(harness: Harness, name: str) -> None:
    skip_unless_supported(harness, name)
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    one = harness.to_device(np.ones(1, np.float32))
    values = harness.backend.dequantize(harness.to_device(codes), f"{name}:tensor", one)
    expected = codes.view(ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(harness.to_host(values), expected)
    np.testing.assert_array_equal(np.signbit(harness.to_host(values)[0, 0, [0, 128]]), [False, True])


def test_edges_of_e4m3_and_e5m2(harness: Harness) -> None:
    edges = {
        448: 0x7E,
        464: 0x7E,
        465: 0x7E,
        1e9: 0x7E,
        -np.inf: 0xFE,
        2**-9: 0x01,
        2**-10: 0x00,
        1.5 * 2**-10: 0x01,
    }
    x = np.array([*edges, -0.0, np.nan], np.float32).reshape(1, 1, -1)
    codes = quantize(harness, x, "fp8_e4m3:tensor", 1.0).codes[0, 0].tolist()
    assert codes[:-1] == [*edges.values(), 0x80]
    assert codes[-1] in (0x7F, 0xFF)
    wide = np.array([57344, 61440, 1e9, np.inf, -np.inf], np.float32).reshape(1, 1, -1)
    encoded = quantize(harness, wide, "fp8_e5m2:tensor", 1.0)
    assert encoded.codes[0, 0].tolist() == [0x7B, 0x7B, 0x7B, 0x7B, 0xFB]
    assert encoded.num_clipped.tolist() == [4]


def test_a_scale_is_never_assumed(harness: Harness) -> None:
    skip_unless_supported(harness, "fp8_e4m3:tensor")
    x = np.array([1000, -1000, 0.1], np.float32).reshape(3, 1, 1)
    with pytest.raises(TypeError, match="scale"):
        harness.backend.quantize(harness.to_device(x), "fp8_e4m3:tensor")
    clipped = quantize(harness, x, "fp8_e4m3:tensor", 1.0)
    assert dequantize(harness, clipped, "fp8_e4m3:tensor").ravel().tolist() == [448, -448, 0.1015625]
    assert (clipped.num_clipped.tolist(), clipped.amax.tolist()) == ([2], [1000])
    for scale in (1000 / 448, "amax"):
        kept = quantize(harness, x, "fp8_e4m3:tensor", scale)
        np.testing.assert_allclose(
            dequantize(harness, kept, "fp8_e4m3:tensor").ravel()[:2], [1000, -1000], rtol=2e-7
        )
        assert kept.num_clipped.tolist() == [0]


def test_heads_of_very_different_sizes(harness: Harness) -> None:
    """A scale for each head keeps the precision of all; that of the first one clips the others, and says so."""
    rng = np.random.default_rng(0)
    x = (rng.uniform(0.5, 1, (64, 8, 16)) * 2.0 ** np.arange(8)[:, None]).astype(np.float32)
    encoded = quantize(harness, x, "fp8_e4m3:head", "amax")
    np.testing.assert_allclose(dequantize(harness, encoded, "fp8_e4m3:head"), x, rtol=0.0625)
    assert encoded.scale.shape == (8,)
    assert not encoded.num_clipped.any()
    first = quantize(harness, x, "fp8_e4m3:tensor", float(encoded.scale[0]))
    assert first.num_clipped[0] == 0
    assert (first.num_clipped[2:] == 64 * 16).all()


@pytest.mark.parametrize(
    ("kv_format", "scale", "error", "message"),
    [
        (
            "fp8_e4m3:head",
            np.ones(4, np.float32),
            ValueError,
            r"scale: shape \(4,\), fp8_e4m3:head needs \(8,\)",
        ),
        ("fp8_e4m3:tensor", np.ones(8, np.float32), ValueError, r"scale: shape \(8,\), .* needs \(1,\)"),
        ("fp8_e4m3", np.ones((8, 64), np.float32), ValueError, r"scale: shape \(8, 64\), .* needs \(64, 8\)"),
        ("int8:channel", np.ones((8,), np.float32), ValueError, r"scale: shape \(8,\), .* needs \(8, 16\)"),
        ("int8:head", np.ones(8), TypeError, "scale: dtype float64, expected float32"),
        ("int8:head", 0.0, ValueError, "scale: expected finite numbers > 0"),
        ("int8:head", float("nan"), ValueError, "scale: expected finite numbers > 0"),
        ("int8:head", "max", ValueError, "scale is 'max': expected 'amax', a number or an array"),
        ("int8:head", None, TypeError, "scale: NoneType, expected a NumPy array"),
        ("int4", 1.0, ValueError, "scale: int4 computes its own, expected 'amax'"),
        ("float16", 1.0, ValueError, "kv_format is float16: expected a format with a scale"),
        ("int3", 1.0, ValueError, "k_format is 'int3': expected one of"),
    ],
)
@pytest.mark.usefixtures("host_arrays")
def test_refusals(harness: Harness, kv_format: str, scale: Any, error: type[Exception], message: str) -> None:
    skip_unless_supported(harness, "int4" if kv_format == "int4" else "int8")
    with pytest.raises(error, match=message):
        harness.backend.quantize(np.ones((64, 8, 16), np.float32), kv_format, scale)


@pytest.mark.usefixtures("host_arrays")
def test_refusals_of_shapes(harness: Harness) -> None:
    backend = harness.backend
    skip_unless_supported(harness, "kivi2")
    with pytest.raises(ValueError, match=r"x: axis 0 \(num_tokens\) is 33, kivi2 needs a multiple of 32"):
        backend.quantize(np.ones((33, 1, 8), np.float32), "kivi2", "amax")
    with pytest.raises(ValueError, match=r"x: axis 2 \(head_dim\) is 100, int4 needs a multiple of 8"):
        backend.quantize(np.ones((1, 1, 100), np.float32), "int4", "amax")
    with pytest.raises(TypeError, match="x: dtype float64"):
        backend.quantize(np.ones((1, 1, 8)), "int4", "amax")
    codes, halves = np.zeros((32, 2, 4), np.uint8), np.ones((32, 2, 1), np.float16)
    with pytest.raises(TypeError, match="zero: NoneType"):
        backend.dequantize(codes, "int4", halves)
    with pytest.raises(ValueError, match=r"zero: shape \(32, 2\), int4 needs \(32, 2, 1\)"):
        backend.dequantize(codes, "int4", halves, halves[..., 0])
    with pytest.raises(ValueError, match="zero: int8 has none"):
        backend.dequantize(codes.view(np.int8), "int8", np.ones((32, 2), np.float32), halves)
    with pytest.raises(TypeError, match="codes: dtype uint8, expected int8"):
        backend.dequantize(codes, "int8", np.ones((32, 2), np.float32))


@pytest.mark.parametrize("part", SCALED, ids=full_name)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-8, 1e-30, 1e-42, 3e4, 1e30, LARGEST])
def test_small_and_large_values(harness: Harness, part: Format, value: float) -> None:
    """Zeros stay exact, small values keep their relative precision down to what scales can say."""
    x = np.full((32, 2, 32), value, np.float32)
    x[:, 0] *= np.random.default_rng(0).uniform(-1, 1, x[:, 0].shape).astype(np.float32)
    encoded = quantize(harness, x, part, "amax")
    restored = dequantize(harness, encoded, part)
    assert np.isfinite(restored).all()
    if value == 0:
        assert not restored.any()
        if not part.has_zero:
            assert (encoded.scale == 1).all()
            assert (encoded.codes.view(np.uint8) & 0x7F == 0).all()
    elif not part.has_zero and abs(value) > 1e-35:
        np.testing.assert_allclose(restored[:, 1], x[:, 1], rtol=1e-6)
    elif part.has_zero and abs(value) < 1e-9:
        assert not restored.any()  # below half of float16's smallest number
    elif part.has_zero and value >= 1e30:
        assert (restored[:, 1] == 65504).all()
        assert encoded.num_clipped[1] == 32 * 32


ROUND_TRIP = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 65504.0, 448.0, LARGEST]
)


@pytest.mark.parametrize("backend", [param for param in PARAMS if param.id != "cupy"])
@given(
    st.sampled_from(SCALED),
    st.lists(ROUND_TRIP, min_size=1, max_size=60),
    st.sampled_from([8, 40, 64]),
    st.data(),
)
def test_the_round_trip_stays_within_the_bound(backend: Harness, part, values, dim, data) -> None:
    """Any float32 whatever, its neighbours in a group included."""
    harness = backend  # not the fixture, which Hypothesis would run once for all examples
    if not is_supported(harness, part):
        return
    num_tokens = 32 if part.scaling == "token_group" else 3
    places = data.draw(
        st.lists(st.integers(0, num_tokens * 2 * dim - 1), min_size=len(values), max_size=len(values))
    )
    x = np.random.default_rng(len(values)).standard_normal(num_tokens * 2 * dim).astype(np.float32)
    x[places] = values
    x = x.reshape(num_tokens, 2, dim)
    encoded = quantize(harness, x, part, "amax")
    restored = dequantize(harness, encoded, part).astype(np.float64)
    assert restored.shape == x.shape
    scale = scale_of_each(encoded, part, dim)
    assert np.isfinite(scale).all()
    finite, exact = np.isfinite(x), x.astype(np.float64)
    if part.has_zero:
        zero = scale_of_each(encoded, part, dim, "zero")
        assert np.isfinite(zero).all()
        largest = 2**part.bits - 1
        inside = np.clip(exact, -65504, 65504)
        # Half a step; what float16 makes of the zero, and of the scale (its smallest number is 2^-24).
        bound = scale / 2 + np.abs(zero) * 2.0**-11 + largest * (scale * 2.0**-11 + 2.0**-25) + 2.0**-25
        bound += 2.0**-22 * (np.abs(zero) + largest * scale)
        assert (np.abs(restored - inside)[finite] <= bound[finite]).all()
        assert (restored[np.isnan(x)] == zero[np.isnan(x)]).all()
        assert np.isfinite(restored).all()
        return
    of_value, of_scale = STEPS[part.name]
    magnitude = np.where(finite, np.abs(exact), 0)
    bound = of_value * magnitude + of_scale * scale
    # The division, the scale and the product are rounded, and subnormal ones by a fixed step.
    bound += 2.0**-21 * magnitude + 256 * 2.0**-149
    limit = LIMITS[part.name] * scale * (1 + 2.0**-20)
    assert (np.abs(exact[finite]) <= limit[finite]).all()
    assert (np.abs(restored - exact)[finite] <= bound[finite]).all()
    infinite = np.isinf(x)
    np.testing.assert_allclose(
        restored[infinite], np.copysign(LIMITS[part.name] * scale, x)[infinite], rtol=2e-7
    )
    lost = restored[np.isnan(x)]
    assert np.isnan(lost).all() if part.name != "int8" else not lost.any()
    assert encoded.num_clipped.tolist() == infinite.sum(axis=(0, 2)).tolist()
    if part.name != "int8":
        number = ~np.isnan(x)
        np.testing.assert_array_equal(np.signbit(restored)[number], np.signbit(x)[number])


# Ends of groups: zeros of both signs, what float16 makes 0 or its smallest numbers of, ties between two codes, and
# what lies beyond float16.
ENDS = st.sampled_from(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.0, 1.5, -7.5, 15.0]
    + [sign * 2.0**power for sign in (-1, 1) for power in (-26, -25, -24, -20, 10)]
    + [65504.0, -65504.0, 65520.0, -LARGEST]
)


@pytest.mark.parametrize("backend", [param for param in PARAMS if param.id not in ("numpy", "cupy")])
@given(
    st.sampled_from(SCALED),
    st.sampled_from([8, 16, 24, 40, 80, 128]),
    st.lists(ENDS | st.floats(width=32), min_size=1, max_size=6),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float32", "float16"]),
)
def test_every_bit_is_that_of_the_specification(backend: Harness, part, dim, values, seed, source) -> None:
    """Rows of a few values only, so that groups are of one value, of -0 and 0, or of none that is finite."""
    harness = backend  # not the fixture, which Hypothesis would run once for all examples
    if not is_supported(harness, part):
        return
    rng = np.random.default_rng(seed)
    num_tokens = 2 * part.group if part.scaling == "token_group" else 3
    with np.errstate(over="ignore"):
        few = np.array(values, np.float32).astype(source)
    x = rng.choice(few, (num_tokens, 2, dim))
    x[:, 1] = rng.choice(few[:2], x[:, 1].shape)
    expected = NumpyBackend().quantize(x, part, "amax")
    actual = quantize(harness, x, part, "amax")
    if part.name.startswith("fp8"):
        for encoded in (expected, actual):
            encoded.codes[encoded.codes & 0x7F == 0x7F] = 0x7F  # a NaN has one code of each sign
    for name, one, other in zip(expected._fields, actual, expected, strict=True):
        assert (one is None) == (other is None), name
        if other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert one.tobytes() == other.tobytes(), name
    with np.errstate(invalid="ignore", over="ignore"):
        restored = NumpyBackend().dequantize(expected.codes, part, expected.scale, expected.zero)
    np.testing.assert_array_equal(dequantize(harness, expected, part), restored)


@pytest.mark.parametrize("part", SCALED, ids=full_name)
def test_an_outlier_stays_where_it_is(harness: Harness, part: Format) -> None:
    """One infinity in a head: the other head has the same codes as without it."""
    if part.scaling == "tensor":
        pytest.skip("all heads share a scale, which is of finite values anyway")
    x = np.random.default_rng(0).standard_normal((32, 2, 32)).astype(np.float32)
    clean = quantize(harness, x, part, "amax")
    x[3, 0, 5] = np.inf
    spoilt = quantize(harness, x, part, "amax")
    np.testing.assert_array_equal(spoilt.codes[:, 1], clean.codes[:, 1])
    assert np.isfinite(dequantize(harness, spoilt, part)).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_packing_is_the_identity_on_all_bytes(bits: int) -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    codes = unpack(packed, bits)
    assert codes.shape == (4, 64 * 8 // bits)
    assert codes.max() == 2**bits - 1
    np.testing.assert_array_equal(pack(codes, bits), packed)
    assert unpack(np.array([0b11_10_01_00], np.uint8), 2).tolist() == [0, 1, 2, 3]
    assert unpack(np.array([0xA3], np.uint8), 4).tolist() == [3, 10]


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_other_widths_are_not_packed(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits is {bits}: codes of 2 and 4 bits are packed"):
        pack(np.zeros(8, np.uint8), bits)


@pytest.mark.parametrize("part", GROUPED, ids=full_name)
@pytest.mark.parametrize("dim", [80, 96])
def test_a_short_last_group_is_a_group(harness: Harness, part: Format, dim: int) -> None:
    """The channels beyond the last whole group of 32 have a scale of their own."""
    x = np.random.default_rng(0).standard_normal((32, 1, dim)).astype(np.float32)
    x[..., 64:] *= 1000
    error = np.abs(dequantize(harness, quantize(harness, x, part, "amax"), part) - x)
    step = np.ptp(x[..., :64]) / (2**part.bits - 1)
    assert error[..., :64].max() <= 0.51 * step
    assert error[..., 64:].max() > 10 * step


@pytest.mark.parametrize("part", SIGNED, ids=full_name)
@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_16_bit_values_are_taken_as_their_float32(harness: Harness, part: Format, source: str) -> None:
    wide = np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float16).astype(np.float32)
    wide = wide.astype(ml_dtypes.bfloat16).astype(np.float32)
    narrow = (
        wide.astype(np.float16) if source == "float16" else wide.astype(ml_dtypes.bfloat16).view(np.uint16)
    )
    for actual, expected in zip(
        quantize(harness, narrow, part, "amax"), quantize(harness, wide, part, "amax"), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_parts_that_only_values_have(harness: Harness) -> None:
    """A text means K; V's own format is given as such."""
    part = parse_format("kivi2", "v")
    encoded = quantize(harness, np.ones((3, 1, 32), np.float32), part, "amax")
    assert encoded.scale.shape == (3, 1, 1)


@pytest.mark.parametrize("part", SCALED, ids=full_name)
def test_no_tokens(harness: Harness, part: Format) -> None:
    encoded = quantize(harness, np.empty((0, 2, 16), np.float32), part, "amax")
    assert encoded.num_clipped.tolist() == [0, 0]
    assert encoded.amax.tolist() == [0, 0]
    assert dequantize(harness, encoded, part).shape == (0, 2, 16)
