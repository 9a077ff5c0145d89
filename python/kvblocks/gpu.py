"""The CUDA kernels for engines that bring their own tensors: CuPy, torch, or anything with `__cuda_array_interface__`.

Owns `check`, `as_array`, `layer_cache` and the functions over one shared `CupyBackend`. Imports backends and layout;
cupy and torch when a function needs them.
Invariant: memory is the caller's, never copied and never freed here; work goes to `stream`, else to torch's current
stream where an argument is a torch tensor, else to CuPy's.
"""

import importlib
import importlib.util
import sys
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvblocks.formats import KVFormat
from kvblocks.kernels import nvrtc
from kvblocks.layout import Array, LayerCache

if TYPE_CHECKING:
    from kvblocks.backends.cupy import CupyBackend

# How torch's dtypes are stored here; the last two have no CuPy dtype.
_TORCH_DTYPES: Final = {
    "torch.float32": np.float32,
    "torch.float16": np.float16,
    "torch.bfloat16": np.uint16,
    "torch.int8": np.int8,
    "torch.uint8": np.uint8,
    "torch.int32": np.int32,
    "torch.int64": np.int64,
    "torch.float8_e4m3fn": np.uint8,
    "torch.float8_e5m2": np.uint8,
}


def check() -> list[str]:
    """What keeps the CUDA kernels from running here, in plain words with the command that mends it; [] for nothing."""
    problems = []
    if importlib.util.find_spec("cupy") is None:
        problems.append(
            "CuPy is not installed: pip install 'cupy-cuda13x[ctk]' (CUDA 12: 'cupy-cuda12x[ctk]')"
        )
    else:
        problems += _device_problems(importlib.import_module("cupy"))
    try:
        nvrtc.version()
    except nvrtc.NvrtcMissingError as error:
        problems.append(str(error))
    return problems


def _device_problems(cupy: Any) -> list[str]:
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return [
            f"there is no usable NVIDIA driver ({error}): install driver 580 or newer for CUDA 13, 525 for CUDA 12"
        ]
    if count == 0:
        return ["the driver sees no device: look at CUDA_VISIBLE_DEVICES and nvidia-smi"]
    capability = cupy.cuda.Device().compute_capability
    if int(capability) < 80:
        return [f"the device has compute capability {capability}: the kernels need 80 or newer (Ampere)"]
    return []


def as_array(tensor: Any) -> Array:
    """A CuPy array over the memory of a device tensor, which it keeps alive; bfloat16 as uint16, FP8 as uint8.

    Raises TypeError for what is none, and for a dtype that no cache or argument has.
    """
    cupy = importlib.import_module("cupy")
    if isinstance(tensor, cupy.ndarray):
        return tensor
    if _is_torch(tensor):
        if not tensor.is_cuda:
            raise TypeError(f"tensor: on {tensor.device}, expected a CUDA device")
        dtype = _TORCH_DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise TypeError(f"tensor: dtype {tensor.dtype}, expected one of {', '.join(_TORCH_DTYPES)}")
        itemsize = np.dtype(dtype).itemsize
        strides = tuple(stride * itemsize for stride in tensor.stride())
        num_bytes = (
            sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + itemsize
        )
        memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), num_bytes, tensor, tensor.device.index)
        return cupy.ndarray(tuple(tensor.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
    if hasattr(tensor, "__cuda_array_interface__"):
        return cupy.asarray(tensor)
    if hasattr(tensor, "__dlpack__"):
        return cupy.from_dlpack(tensor)
    raise TypeError(
        f"tensor: {type(tensor).__name__}, expected a CuPy array, a torch tensor, or __cuda_array_interface__ or DLPack"
    )


def layer_cache(
    k: Any,
    v: Any,
    kv_format: KVFormat | str,
    block_size: int,
    layout: str = "NHD",
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> LayerCache:
    """A `LayerCache` over an engine's own tensors, in the shapes of docs/layout.md. Make it once, not in each step."""
    arrays = (None if each is None else as_array(each) for each in (k_scale, v_scale))
    scales = dict(zip(("k_scale", "v_scale"), arrays, strict=True))
    return LayerCache(as_array(k), as_array(v), KVFormat.parse(kv_format), block_size, layout, **scales)


def write_kv(cache: LayerCache, k: Any, v: Any, slot_mapping: Any, *, stream: object = None) -> None:
    """`Backend.write` with tensors of any library."""
    with _on(stream, k, v, slot_mapping):
        backend().write(cache, as_array(k), as_array(v), as_array(slot_mapping))


def paged_attention(
    cache: LayerCache,
    q: Any,
    block_tables: Any,
    seq_lens: Any,
    query_start_loc: Any,
    *,
    out: Any = None,
    lse: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    stream: object = None,
) -> Any:
    """`Backend.attend` with tensors of any library; `out` if it is given, else a new CuPy array."""
    optional = {"out": out, "lse": lse, "sinks": sinks, "alibi_slopes": alibi_slopes}
    with _on(stream, q, block_tables, seq_lens, query_start_loc, *optional.values()):
        result = backend().attend(
            cache,
            *map(as_array, (q, block_tables, seq_lens, query_start_loc)),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            **{name: as_array(value) for name, value in optional.items() if value is not None},
        )
    return result if out is None else out


@cache
def backend() -> "CupyBackend":
    """The backend that the functions here share."""
    module = importlib.import_module("kvblocks.backends.cupy")
    shared: CupyBackend = module.CupyBackend()
    return shared


def _is_torch(tensor: object) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(tensor, torch.Tensor)


def _on(stream: object, *tensors: Any) -> Any:
    """The stream that a call's work goes to, as a context."""
    if stream is None:
        device = next((tensor.device for tensor in tensors if _is_torch(tensor)), None)
        if device is None:
            return nullcontext()
        stream = sys.modules["torch"].cuda.current_stream(device)
    return backend().on(stream)
