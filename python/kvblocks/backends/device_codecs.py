"""Codes of 8 bits from values and back, on a device, as calls of their own.

Owns `quantize` and `dequantize` of `DeviceBackend`. Imports what calls of kernels share, and the shared checks.
"""

import numpy as np

from kvblocks.backends.base import Supported
from kvblocks.backends.checks import check_decode, check_encode
from kvblocks.backends.codecs import Encoded
from kvblocks.backends.geometry import address_of, steps_by, strides
from kvblocks.backends.kernels import MOST_BLOCKS_OF_A_LOOP, Kernels
from kvblocks.formats import Format
from kvblocks.kernels import params as records
from kvblocks.kernels import specs
from kvblocks.kernels.specs import DTYPES, SCALE_MODES
from kvblocks.layout import Array, dtype_name, storage_dtype


def quantize(
    kernels: Kernels, supported: Supported, x: Array, kv_format: Format | str, scale: Array | float | str
) -> Encoded:
    """See `Backend.quantize`. One launch, and one before it where a static scale is computed."""
    see = kernels.memory.describe
    view = see("x", x)
    given = scale if isinstance(scale, (str, int, float)) or scale is None else see("scale", scale)
    part, scales = check_encode(supported, view, kv_format, given)
    num_tokens, num_heads, dim = view.shape
    shape = part.scale_shape(num_tokens, 1, num_heads, dim)
    assert shape is not None
    shape = (num_tokens, num_heads) if part.scaling == "token_head" else shape
    codes = kernels.memory.empty(view.shape, part.storage)
    # Magnitudes are compared as their bits; those of 0 are 0.
    largest = kernels.memory.zeros((num_heads,), np.float32)
    num_clipped = kernels.memory.zeros((num_heads,), np.uint32)
    if scales is None:
        device_scale = kernels.memory.empty(shape, np.float32)
    elif isinstance(scale, (int, float)):
        # A copy, as what is uploaded may serve later calls too, and the result is the caller's to change.
        device_scale = kernels.memory.plain(kernels.memory.upload(scales))
    else:
        device_scale = kernels.plain(scale, scales).array
    record = np.zeros((), records.QUANTIZE)
    source = kernels.rows(x, view)
    record["source"], record["codes"] = address_of(source.view), address_of(see("codes", codes))
    record["scales"] = address_of(see("scale", device_scale))
    measured = kernels.memory.zeros(shape if part.is_static else (1,), np.uint32)
    record["measured"] = address_of(see("measured", measured))
    record["num_clipped"] = address_of(see("num_clipped", num_clipped))
    record["largest"] = address_of(see("largest", largest))
    record["token_stride"], record["head_stride"] = strides(source.view)[:2]
    record["num_tokens"], record["num_heads"], record["head_dim"] = num_tokens, num_heads, dim
    record["dtype"], record["scale_mode"] = DTYPES[dtype_name(view.dtype)], SCALE_MODES[part.scaling]
    record["lanes_log2"] = lanes_log2 = min(5, (-(-dim // 8) - 1).bit_length())
    record["is_vector"] = dim % 8 == 0 and steps_by(source.view, 16)
    blocks = -(-num_tokens * num_heads // (specs.QUANTIZE.threads >> lanes_log2))
    if blocks and dim:
        phases = (2,) if scales is not None else (0, 1) if part.is_static else (1,)
        for record["phase"] in phases:
            grid = (min(blocks, MOST_BLOCKS_OF_A_LOOP), 1, 1)
            kernels.launch(specs.quantize(part.name), grid, 0, record)
    return Encoded(codes, device_scale, None, largest, kernels.memory.convert(num_clipped, np.int64))


def dequantize(
    kernels: Kernels,
    supported: Supported,
    codes: Array,
    kv_format: Format | str,
    scale: Array,
    zero: Array | None = None,
    *,
    dtype: str = "float32",
) -> Array:
    """See `Backend.dequantize`. One launch. dtype: of the values: "float32", "float16" or "bfloat16"."""
    see = kernels.memory.describe
    view, scale_view = see("codes", codes), see("scale", scale)
    part = check_decode(supported, view, kv_format, scale_view, None if zero is None else see("zero", zero))
    values = kernels.memory.empty(view.shape, storage_dtype(dtype))
    if view.size == 0:
        return values
    plain, scales = kernels.plain(codes, view), kernels.plain(scale, scale_view)
    record = np.zeros((), records.DEQUANTIZE)
    record["codes"], record["scales"] = address_of(plain.view), address_of(scales.view)
    record["rows"] = address_of(see("values", values))
    num_tokens, num_heads, dim = view.shape
    record["num_rows"], record["num_heads"], record["head_dim"] = num_tokens * num_heads, num_heads, dim
    record["dtype"], record["scale_mode"] = DTYPES[dtype], SCALE_MODES[part.scaling]
    blocks = -(-num_tokens * num_heads * -(-dim // 8) // specs.DEQUANTIZE.threads)
    kernels.launch(specs.dequantize(part.name), (min(blocks, MOST_BLOCKS_OF_A_LOOP), 1, 1), 0, record)
    return values
