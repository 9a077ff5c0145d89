"""The kernels on a GPU for engines that bring their own tensors.

Imports nothing that a machine without a GPU lacks; CuPy and torch are imported when a call needs them.
"""

from kvblocks.backends.cupy import CaptureError
from kvblocks.gpu.calls import (
    copy_blocks,
    dequantize,
    first_error,
    gather_kv,
    layer_cache,
    merge_states,
    move_slots,
    paged_attention,
    paged_attention_csr,
    quantize,
    warmup,
    write_kv,
)
from kvblocks.gpu.latents import latent_cache, mla_decode, write_latents
from kvblocks.gpu.readiness import Readiness, check
from kvblocks.gpu.steps import DeviceArrays, DeviceStep
from kvblocks.gpu.swap import Swapper, Transfer, pinned_pool
from kvblocks.kernels.cubins import prebuild

__all__ = [
    "CaptureError",
    "DeviceArrays",
    "DeviceStep",
    "Readiness",
    "Swapper",
    "Transfer",
    "check",
    "copy_blocks",
    "dequantize",
    "first_error",
    "gather_kv",
    "latent_cache",
    "layer_cache",
    "merge_states",
    "mla_decode",
    "move_slots",
    "paged_attention",
    "paged_attention_csr",
    "pinned_pool",
    "prebuild",
    "quantize",
    "warmup",
    "write_kv",
    "write_latents",
]
