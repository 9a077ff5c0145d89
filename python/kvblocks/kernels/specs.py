"""Every kernel that can be compiled: the one list that the loader, the compile tests, the warm-up and the docs read.

Owns `Kernel`, `Instance` and `INSTANCES`. Imports NumPy and the standard library only.
Invariant: an instance is a source file and the values of its compile-time parameters; everything else is a run-time
parameter of its struct. Compile-time are the element type of the cache and, for attention, what decides how much a
thread holds: head dims and rows on tensor cores, 16-byte vectors of a row elsewhere.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvblocks.kernels import params

# The run-time numbers of element.cuh, and the types of its compile-time names.
DTYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4, "int8": 5}
ELEMENTS: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "fp8_e4m3": "E4M3",
    "fp8_e5m2": "E5M2",
    "int8": "Int8",
}
SCALED: Final = ("fp8_e4m3", "fp8_e5m2", "int8")
SCALE_MODES: Final = {"none": 0, "tensor": 1, "head": 2, "channel": 3, "token_head": 4}

# (head_dim, head_dim_v) on tensor cores; every other pair runs without them.
MMA_HEAD_DIMS: Final = (
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
)
MAX_HEAD_DIM: Final = 576
# Latents on tensor cores: (head_dim, head_dim_v) where V is the first elements of K, and the dtypes that there are.
MLA_HEAD_DIMS: Final = (576, 512)
MLA_DTYPES: Final = ("float16", "bfloat16", "fp8_e4m3")


@dataclass(frozen=True)
class Kernel:
    """A source file of cuda/ and what its instances share.

    entry: the name of its function. threads: of a block. params: the record that it takes.
    """

    file: str
    entry: str
    threads: int
    params: np.dtype[Any]


WRITE_KV: Final = Kernel("write_kv.cu", "kvb_write_kv", 256, params.WRITE)
GATHER_KV: Final = Kernel("gather_kv.cu", "kvb_gather_kv", 128, params.GATHER)
COPY_BLOCKS: Final = Kernel("copy_blocks.cu", "kvb_copy_blocks", 128, params.COPY)
MOVE_SLOTS: Final = Kernel("move_slots.cu", "kvb_move_slots", 128, params.MOVE)
UPLOAD_STEP: Final = Kernel("upload_step.cu", "kvb_upload_step", 128, params.UPLOAD)
QUANTIZE: Final = Kernel("quantize.cu", "kvb_quantize", 256, params.QUANTIZE)
DEQUANTIZE: Final = Kernel("dequantize.cu", "kvb_dequantize", 256, params.DEQUANTIZE)
MERGE_STATES: Final = Kernel("merge_states.cu", "kvb_merge_states", 128, params.MERGE)
COMBINE_SPLITS: Final = Kernel("combine_splits.cu", "kvb_combine_splits", 128, params.ATTEND)
ATTENTION_SIMT: Final = Kernel("paged_attention_simt.cu", "kvb_paged_attention_simt", 128, params.SIMT)
ATTENTION_MMA: Final = Kernel("paged_attention_mma.cu", "kvb_paged_attention_mma", 128, params.ATTEND)

MLA_DECODE: Final = Kernel("mla_decode.cu", "kvb_mla_decode", 256, params.ATTEND)


@dataclass(frozen=True)
class Instance:
    """A kernel with its compile-time parameters.

    max_registers: the budget of a thread, which a compile test holds it to. loads_vectors, has_mma: what the hot loop
    is made of, which the test looks for in the machine code.
    """

    kernel: Kernel
    defines: tuple[tuple[str, str], ...] = ()
    max_registers: int = 64
    loads_vectors: bool = False
    has_mma: bool = False

    @property
    def name(self) -> str:
        """The file's name and the parameters: "paged_attention_mma-BF16-128-128-1"."""
        return "-".join([self.kernel.file.removesuffix(".cu"), *(value for _, value in self.defines)])


def write_kv(kv_dtype: str) -> Instance:
    """`write_kv` into a cache of a dtype."""
    return Instance(WRITE_KV, _element(kv_dtype), 64, loads_vectors=True)


def gather_kv(kv_dtype: str) -> Instance:
    """`gather_kv` out of a cache of a dtype."""
    return Instance(GATHER_KV, _element(kv_dtype), 64)


def quantize(kv_dtype: str) -> Instance:
    """`quantize` to an 8-bit dtype."""
    return Instance(QUANTIZE, _element(kv_dtype), 64, loads_vectors=True)


def dequantize(kv_dtype: str) -> Instance:
    """`dequantize` from an 8-bit dtype."""
    return Instance(DEQUANTIZE, _element(kv_dtype), 64)


def simt_lanes_log2(kv_dtype: str, largest_dim: int) -> tuple[int, int]:
    """How a row is spread: (log2 of the lanes of a key, 16-byte vectors a lane), as few lanes as one vector allows."""
    width = 16 // element_bytes(kv_dtype)
    vectors = -(-largest_dim // width)
    lanes_log2 = min(5, (vectors - 1).bit_length())
    held = -(-vectors >> lanes_log2)
    return lanes_log2, next(count for count in _SIMT_VECTORS[element_bytes(kv_dtype)] if count >= held)


def attention_simt(kv_dtype: str, vectors: int) -> Instance:
    """Attention without tensor cores, for rows of up to 32 * `vectors` vectors of 16 bytes."""
    defines = (*_element(kv_dtype), ("KVB_VECTORS", str(vectors)))
    return Instance(ATTENTION_SIMT, defines, 168 if vectors == 1 else 255, loads_vectors=True)


def attention_mma(kv_dtype: str, head_dim: int, head_dim_v: int, row_warps: int) -> Instance:
    """Attention on tensor cores. row_warps: 1 for tiles of 16 rows (decode), 4 for tiles of 64 (chunked prefill)."""
    defines = (
        *_element(kv_dtype),
        ("KVB_HEAD_DIM", str(head_dim)),
        ("KVB_HEAD_DIM_V", str(head_dim_v)),
        ("KVB_ROW_WARPS", str(row_warps)),
    )
    # Three blocks of an SM, where decode is to keep 32 KiB a block under way; prefill may take all there is.
    budget = 168 if row_warps == 1 and head_dim <= 128 else 255
    return Instance(ATTENTION_MMA, defines, budget, loads_vectors=True, has_mma=True)


def mla_decode(kv_dtype: str) -> Instance:
    """Attention over latents, of a dtype of MLA_DTYPES; a tile has 32 rows."""
    return Instance(MLA_DECODE, _element(kv_dtype), 255, loads_vectors=True, has_mma=True)


def mla_shared_bytes(kv_dtype: str) -> int:
    """Dynamic shared memory of `mla_decode`: `MlaPlan` of its source."""
    tables, q_stride = 3 * 64 * (8 + 8 + 4 + 4), 73 * 16
    row_stride = (576 * element_bytes(kv_dtype) // 16 | 1) * 16
    return tables + 32 * 4 + 2 * 4 * 32 * 4 + 32 * 9 * 16 + 16 + 32 * q_stride + 2 * 64 * row_stride


def mma_shared_bytes(kv_dtype: str, head_dim: int, head_dim_v: int, row_warps: int) -> int:
    """Dynamic shared memory of `attention_mma`: `Plan::total_bytes` of its source."""
    size = element_bytes(kv_dtype)
    keys = 32 if row_warps == 4 and head_dim_v > 128 else 64
    tables = 3 * keys * (8 + 8 + 4 + 4) + 3 * 64 * 4 + 16
    q = 16 * row_warps * (head_dim // 8 | 1) * 16
    stages = 2 * keys * ((head_dim * size // 16 | 1) + (head_dim_v * size // 16 | 1)) * 16
    sums_stride = head_dim_v + ((head_dim_v + 16) % 32 if size == 1 else 8)
    return tables + q + max(stages, 64 * sums_stride * 4)


def simt_shared_bytes(kv_dtype: str, lanes_log2: int, vectors: int) -> int:
    """Dynamic shared memory of `attention_simt`: 8 partial rows, their maxima and sums."""
    return 8 * ((vectors * 16 // element_bytes(kv_dtype) << lanes_log2) + 2) * 4


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype of DTYPES."""
    return 4 if dtype == "float32" else 2 if dtype in ("float16", "bfloat16") else 1


def _element(kv_dtype: str) -> tuple[tuple[str, str], ...]:
    return (("KVB_KV", ELEMENTS[kv_dtype]),)


# By bytes of an element, the vectors that a lane may hold: up to 32 lanes * vectors * 16 bytes >= 576 elements.
_SIMT_VECTORS: Final = {4: (1, 2, 5), 2: (1, 3), 1: (1, 2)}

INSTANCES: Final = (
    *(make(dtype) for make in (write_kv, gather_kv) for dtype in DTYPES),
    *(make(dtype) for make in (quantize, dequantize) for dtype in SCALED),
    Instance(COPY_BLOCKS, max_registers=64, loads_vectors=True),
    Instance(MOVE_SLOTS),
    Instance(UPLOAD_STEP),
    Instance(MERGE_STATES),
    Instance(COMBINE_SPLITS),
    *map(mla_decode, MLA_DTYPES),
    *(attention_simt(dtype, count) for dtype in DTYPES for count in _SIMT_VECTORS[element_bytes(dtype)]),
    *(
        attention_mma(dtype, *dims, row_warps)
        for row_warps in (1, 4)
        for dims in MMA_HEAD_DIMS
        for dtype in DTYPES
        if dtype != "float32"
    ),
)


def only(kernel: Kernel) -> Instance:
    """The instance of a kernel that has no compile-time parameters."""
    (instance,) = (each for each in INSTANCES if each.kernel is kernel)
    return instance
