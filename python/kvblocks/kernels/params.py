"""The parameter structs of the kernels as NumPy records: the same bytes as in the `.cu` files, pointers as uint64.

Owns one record dtype per struct. Imports NumPy only.
Invariant: names, order, types and size are those of the C++ struct of the same name; a test compiles the comparison.
"""

from typing import Any, Final

import numpy as np

_Field = tuple[str, Any] | tuple[str, Any, tuple[int, ...]]


def _record(*fields: _Field) -> np.dtype[Any]:
    return np.dtype(list(fields), align=True)


POINTER: Final = np.uint64
_I32, _I64, _F32 = np.int32, np.int64, np.float32

PAGED: Final = _record(
    ("block_stride", _I64),
    ("token_stride", _I64),
    ("head_stride", _I64),
    ("block_size", _I32),
    ("num_blocks", _I32),
)

WRITE_PART: Final = _record(
    ("source", POINTER),
    ("cache", POINTER),
    ("scales", POINTER),
    ("token_stride", _I64),
    ("head_stride", _I64),
    ("paged", PAGED),
    ("head_dim", _I32),
    ("dtype", _I32),
    ("scale_mode", _I32),
    ("is_vector", _I32),
)
WRITE: Final = _record(
    ("part", WRITE_PART, (2,)),
    ("slot_mapping", POINTER),
    ("error", POINTER),
    ("num_slots", _I32),
    ("num_heads", _I32),
    ("lanes_log2", _I32),
    ("padding", _I32),
)

GATHER_PART: Final = _record(
    ("cache", POINTER),
    ("scales", POINTER),
    ("rows", POINTER),
    ("paged", PAGED),
    ("head_dim", _I32),
    ("scale_mode", _I32),
)
GATHER: Final = _record(
    ("part", GATHER_PART, (2,)),
    ("block_table", POINTER),
    ("error", POINTER),
    ("num_tokens", _I32),
    ("num_heads", _I32),
    ("dtype", _I32),
    ("padding", _I32),
)

REGION: Final = _record(
    ("base", POINTER),
    ("block_stride", _I64),
    ("token_stride", _I64),
    ("head_stride", _I64),
    ("run_bytes", _I64),
    ("num_blocks", _I32),
    ("num_tokens", _I32),
    ("num_heads", _I32),
    ("unit_bytes", _I32),
    ("padding", _I64),
)
COPY: Final = _record(
    ("regions", POINTER),
    ("copies", POINTER),
    ("error", POINTER),
    ("num_copies", _I32),
    ("num_pieces", _I32),
)
MOVE: Final = _record(
    ("regions", POINTER),
    ("moves", POINTER),
    ("move_start", POINTER),
    ("error", POINTER),
    ("num_moves", _I32),
    ("padding", _I32),
)

UPLOAD_RUN: Final = _record(
    ("source", _I32),
    ("destination", _I32),
    ("num_words", _I32),
    ("padding", _I32),
)
UPLOAD: Final = _record(
    ("runs", POINTER),
    ("words", POINTER),
    ("arena", POINTER),
    ("num_runs", _I32),
    ("padding", _I32),
)

QUANTIZE: Final = _record(
    ("source", POINTER),
    ("codes", POINTER),
    ("scales", POINTER),
    ("measured", POINTER),
    ("num_clipped", POINTER),
    ("largest", POINTER),
    ("token_stride", _I64),
    ("head_stride", _I64),
    ("num_tokens", _I32),
    ("num_heads", _I32),
    ("head_dim", _I32),
    ("dtype", _I32),
    ("scale_mode", _I32),
    ("lanes_log2", _I32),
    ("is_vector", _I32),
    ("phase", _I32),
)
DEQUANTIZE: Final = _record(
    ("codes", POINTER),
    ("scales", POINTER),
    ("rows", POINTER),
    ("num_rows", _I64),
    ("num_heads", _I32),
    ("head_dim", _I32),
    ("dtype", _I32),
    ("scale_mode", _I32),
)

ATTEND: Final = _record(
    ("q", POINTER),
    ("k", POINTER),
    ("v", POINTER),
    ("out", POINTER),
    ("lse", POINTER),
    ("partial_out", POINTER),
    ("partial_lse", POINTER),
    ("block_tables", POINTER),
    ("kv_indptr", POINTER),
    ("seq_lens", POINTER),
    ("query_start_loc", POINTER),
    ("sinks", POINTER),
    ("alibi_slopes", POINTER),
    ("k_scales", POINTER),
    ("v_scales", POINTER),
    ("error", POINTER),
    ("q_token_stride", _I64),
    ("q_head_stride", _I64),
    ("out_token_stride", _I64),
    ("out_head_stride", _I64),
    ("lse_token_stride", _I64),
    ("lse_head_stride", _I64),
    ("block_table_stride", _I64),
    ("k_paged", PAGED),
    ("v_paged", PAGED),
    ("scale", _F32),
    ("soft_cap", _F32),
    ("num_seqs", _I32),
    ("num_tokens", _I32),
    ("num_q_heads", _I32),
    ("num_kv_heads", _I32),
    ("head_dim", _I32),
    ("head_dim_v", _I32),
    ("max_blocks", _I32),
    ("window", _I32),
    ("q_dtype", _I32),
    ("num_splits", _I32),
    ("split_size", _I32),
    ("k_scale_mode", _I32),
    ("v_scale_mode", _I32),
    ("k_is_vector", _I32),
    ("v_is_vector", _I32),
    ("num_indices", _I32),
)
SIMT: Final = _record(("attend", ATTEND), ("lanes_log2", _I32), ("padding", _I32))

STATE: Final = _record(
    ("out", POINTER),
    ("lse", POINTER),
    ("out_token_stride", _I64),
    ("out_head_stride", _I64),
    ("lse_token_stride", _I64),
    ("lse_head_stride", _I64),
)
MERGE: Final = _record(
    ("state", STATE, (2,)),
    ("out", POINTER),
    ("lse", POINTER),
    ("out_token_stride", _I64),
    ("out_head_stride", _I64),
    ("lse_token_stride", _I64),
    ("lse_head_stride", _I64),
    ("num_rows", _I64),
    ("num_q_heads", _I32),
    ("head_dim_v", _I32),
    ("dtype", _I32),
    ("padding", _I32),
)
