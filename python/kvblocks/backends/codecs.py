"""The arithmetic of the quantised formats, in NumPy: what every backend has to give, bit for bit.

Owns `encode`, `decode` and `Encoded`. Imports formats and layout.
Invariant: all arithmetic is float32, each operation rounded to nearest even. What a code stands for is at most the
format's bound away from the value, NaN and infinities have a documented code, and no scale is ever 0/0.

Signed formats (fp8, int8): code = round(saturate(x / scale)), and code * scale is its value. Beyond the limit, an
infinity included, a value becomes the largest code of its sign. NaN stays NaN in fp8 and is 0 in int8. A computed scale
is amax / limit over the finite values that share it, at least 2^-126, and 1 where all of them are 0.

Grouped formats (int4, kivi): over the finite values of a group, held within float16's range, and 0 if there are none,

    zero = float16(min)      scale = float16((max - zero) / (2^bits - 1)), 0 if that is negative
    code = round((x - zero) / scale) in 0..2^bits - 1      value = code * scale + zero

with `zero` and `scale` as they are stored, neither of them ever -0. Where the scale is 0 every code is 0, and so is
that of a NaN: the zero point.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvblocks.formats import Format

F32 = NDArray[np.float32]

_SMALLEST_NORMAL: Final = np.finfo(np.float32).tiny
_LARGEST_HALF: Final = np.float32(65504)
# Mantissa bits and exponent bias.
_FP8: Final = {"fp8_e4m3": (3, 7), "fp8_e5m2": (2, 15)}

# Infinities and NaN are data here, and a division by a scale of 0 is overwritten.
_quiet = np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


class Encoded(NamedTuple):
    """Codes [num_tokens, num_heads, stored elements of a row] with their scales and zeros, and what was lost.

    scale, zero: float16 or float32, with num_tokens (or num_tokens / group) where a cache has blocks and slots; None
    where the format has none. amax: float32 [num_heads], the largest finite magnitude. num_clipped: int64 [num_heads],
    values that the format's largest code, or float16 in a grouped format, does not reach; infinities among them.
    """

    codes: NDArray[Any]
    scale: NDArray[Any] | None
    zero: NDArray[Any] | None
    amax: F32
    num_clipped: NDArray[np.int64]


@_quiet
def encode(x: F32, part: Format, scale: F32 | None = None) -> Encoded:
    """Quantise x [num_tokens, num_heads, dim] in a format that has a scale; scale is computed if None.

    scale: float32 [1], [num_heads], [num_heads, dim] or [num_tokens, num_heads], as the format's scaling has it.
    """
    magnitude = np.abs(x)
    amax = np.max(magnitude, axis=(0, 2), initial=0.0, where=np.isfinite(x))
    if part.has_zero:
        codes, scale, zero = _encode_groups(x, part)
        clipped = magnitude > _LARGEST_HALF
        return Encoded(codes, scale, zero, amax, clipped.sum(axis=(0, 2)))
    if scale is None:
        scale = scale_of(amax_of(x, part), part)
    # Half a step beyond the limit, a value is nearer to the next one, if there were one.
    ratio = x / per_element(scale, part, x.shape[2])
    if part.name == "int8":
        clipped = np.abs(ratio) >= 127.5
        codes = np.where(np.isnan(ratio), 0, np.clip(np.rint(ratio), -127, 127)).astype(np.int8)
    else:
        clipped = np.abs(ratio) > 464 if part.name == "fp8_e4m3" else np.abs(ratio) >= 61440
        codes = encode_fp8(ratio, part)
    return Encoded(codes, scale, None, amax, clipped.sum(axis=(0, 2)))


@_quiet
def decode(codes: NDArray[Any], part: Format, scale: NDArray[Any], zero: NDArray[Any] | None) -> F32:
    """Values [num_tokens, num_heads, dim] of codes [num_tokens, num_heads, ..].

    scale, zero: as `encode` gives them, but one of each token where a group spans tokens (`per_token`).
    """
    dim = codes.shape[2] * 8 * part.storage.itemsize // part.bits
    factor = per_element(scale, part, dim)
    if part.has_zero:
        assert zero is not None
        values = unpack(codes, part.bits).astype(np.float32) * factor
        return np.asarray(values + per_element(zero, part, dim))
    plain: F32 = codes.astype(np.float32) if part.name == "int8" else fp8_values(part)[codes]
    return np.asarray(plain * factor)


def per_token(scale: NDArray[Any], part: Format) -> NDArray[Any]:
    """Scales or zeros of groups that span tokens, [num_tokens / group, ..] -> [num_tokens, ..]; others as they are."""
    return np.repeat(scale, part.group, axis=0) if part.scaling == "token_group" else scale


def per_element(scale: NDArray[Any], part: Format, dim: int) -> F32:
    """Scales or zeros, one a token where they are not static, in a shape that broadcasts to [.., num_heads, dim]."""
    wide: F32 = scale.astype(np.float32)
    match part.scaling:
        case "head" | "token_head":
            return wide[..., None]
        case "group":
            return np.repeat(wide, part.group, axis=-1)[..., :dim]
        case _:
            return wide


@_quiet
def amax_of(x: F32, part: Format) -> F32:
    """The largest finite magnitude among the values that share a scale, in the shape of the scale."""
    axes = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,), "token_head": (2,)}[part.scaling]
    amax = np.asarray(np.max(np.abs(x), axis=axes, initial=0.0, where=np.isfinite(x)), np.float32)
    return amax.reshape(1) if part.scaling == "tensor" else amax


@_quiet
def scale_of(amax: F32, part: Format) -> F32:
    """The scale with which amax becomes the largest code; 1 where amax is 0.

    Where that is rounded up and the largest code would be infinite, the next smaller one.
    """
    limit = np.float32(part.limit)
    scale = np.maximum(amax / limit, _SMALLEST_NORMAL)
    scale = np.where(np.isinf(scale * limit), np.nextafter(scale, np.float32(0)), scale)
    return np.asarray(np.where(amax == 0, np.float32(1), scale), np.float32)


@_quiet
def encode_fp8(x: F32, part: Format) -> NDArray[np.uint8]:
    """Codes of float32 values: nearest even, beyond the limit the largest code, NaN stays NaN, and -0 is -0."""
    mantissa, bias = _FP8[part.name]
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    sign = ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    magnitude = np.minimum(np.abs(x), np.float32(part.limit))
    wide = np.ascontiguousarray(magnitude).view(np.uint32)
    dropped = np.uint32(23 - mantissa)
    # Half of the dropped field, less one if the kept part is even; the carry may run into the exponent.
    half = (np.uint32(1) << (dropped - np.uint32(1))) - np.uint32(1)
    normal = (wide + half + ((wide >> dropped) & np.uint32(1))) >> dropped
    normal -= np.uint32((127 - bias) << mantissa)
    # Below the smallest normal number the steps are even; the multiplication is exact.
    subnormal = np.rint(magnitude * np.float32(2.0 ** (bias - 1 + mantissa)))
    codes = np.where(magnitude < np.float32(2.0 ** (1 - bias)), subnormal, normal)
    codes = np.where(np.isnan(x), 0x7F, codes)
    return np.asarray(codes.astype(np.uint8) | sign)


def fp8_values(part: Format) -> F32:
    """What each of the 256 codes stands for."""
    mantissa, bias = _FP8[part.name]
    codes = np.arange(256)
    exponent, fraction = (codes & 0x7F) >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    values = np.where(exponent == 0, fraction * 2, 1 + fraction) * 2.0 ** (exponent - bias)
    if part.name == "fp8_e4m3":
        values[codes & 0x7F == 0x7F] = np.nan
    else:
        values[exponent == 31] = np.where(fraction[exponent == 31] == 0, np.inf, np.nan)
    return np.asarray(np.where(codes & 0x80, -values, values), np.float32)


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [.., dim] below 2^bits as bytes [.., dim * bits / 8], the first code in the lowest bits; bits 2 or 4."""
    per_byte = _per_byte(bits)
    grouped = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    return np.asarray(np.bitwise_or.reduce(grouped << shifts, axis=-1), np.uint8)


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """What `pack` packed."""
    per_byte = _per_byte(bits)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    codes: NDArray[np.uint8] = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * per_byte)


def _per_byte(bits: int) -> int:
    if bits not in (2, 4):
        raise ValueError(f"bits is {bits}: codes of 2 and 4 bits are packed")
    return 8 // bits


def _encode_groups(x: F32, part: Format) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any]]:
    num_tokens, num_heads, dim = x.shape
    largest = (1 << part.bits) - 1
    # [.., group, ..]: the axis of a group's members, which a short last group fills up with NaN, values of no group.
    if part.scaling == "group":
        padding = -dim % part.group
        members = np.pad(x, ((0, 0), (0, 0), (0, padding)), constant_values=np.nan)
        members, axis = members.reshape(num_tokens, num_heads, -(-dim // part.group), part.group), 3
    else:
        members, axis = x.reshape(num_tokens // part.group, part.group, num_heads, dim), 1
    finite = np.isfinite(members)
    lowest = np.min(members, axis=axis, initial=np.inf, where=finite)
    highest = np.max(members, axis=axis, initial=-np.inf, where=finite)
    nothing = ~finite.any(axis=axis)
    lowest[nothing] = highest[nothing] = 0
    lowest, highest = (np.clip(end, -_LARGEST_HALF, _LARGEST_HALF) for end in (lowest, highest))
    # Adding 0 makes a -0 of it 0: which of the two is the smaller one, nobody says.
    zero = lowest.astype(np.float16) + np.float16(0)
    spread = np.maximum(highest - zero.astype(np.float32), 0) + np.float32(0)
    scale = (spread / np.float32(largest)).astype(np.float16)

    factor = per_element(per_token(scale, part), part, dim)
    steps = np.rint((x - per_element(per_token(zero, part), part, dim)) / factor)
    steps = np.where((factor == 0) | np.isnan(steps), 0, np.clip(steps, 0, largest))
    return pack(steps.astype(np.uint8), part.bits), scale, zero
