"""Instructions that a warp executes together: shuffles, votes, and those of matrices with their tables of lanes.

Imports block.py and memory.py. Invariant: the active threads are whole warps.
"""

import ml_dtypes
import numpy as np

from kernels.ptx.arithmetic import canonical
from kernels.ptx.block import WARP, Block, read, write
from kernels.ptx.memory import load, locate, measure, vector
from kernels.ptx.program import Instruction, PtxError


def _warps(value: np.ndarray, block: Block) -> np.ndarray:
    return np.broadcast_to(value, len(block.threads)).reshape(-1, WARP)


def _mask_is_full(block: Block, operand: str) -> None:
    if (read(block, operand, "u32") != 0xFFFFFFFF).any():
        raise PtxError("a collective of a part of a warp")


def _shuffle(block: Block, instruction: Instruction) -> None:
    if instruction.opcode != ("shfl", "sync", "bfly", "b32"):
        raise PtxError("unknown instruction")
    target, *rest = instruction.operands
    is_within = rest.pop(0) if len(rest) == 5 else "_"
    source, other, clamp, members = rest
    _mask_is_full(block, members)
    values, masks = _warps(read(block, source, "u32"), block), _warps(read(block, other, "u32"), block) & 31
    limit = _warps(read(block, clamp, "u32"), block)
    lane = np.arange(WARP, dtype=np.uint32)
    segment = limit >> np.uint32(8) & np.uint32(31)
    last = (lane & segment) | (limit & ~segment & np.uint32(31))
    of = lane ^ masks
    inside = of <= last
    of = np.where(inside, of, lane)
    write(block, target, np.take_along_axis(values, of.astype(np.int64), 1).reshape(-1))
    write(block, is_within, inside.reshape(-1))


def _vote(block: Block, instruction: Instruction) -> None:
    if instruction.opcode != ("vote", "sync", "ballot", "b32"):
        raise PtxError("unknown instruction")
    target, predicate, members = instruction.operands
    _mask_is_full(block, members)
    yes = _warps(read(block, predicate, "pred"), block)
    ballot = (yes.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(1, dtype=np.uint32)
    write(block, target, ballot.repeat(WARP))


def _sync_warp(block: Block, instruction: Instruction) -> None:
    _mask_is_full(block, instruction.operands[0])


def _load_matrix(block: Block, instruction: Instruction) -> None:
    """Lane i gives the row i % 8 of matrix i / 8 and gets, of each matrix, elements 2 (i % 4) and + 1 of row i / 4."""
    opcode = instruction.opcode
    if opcode[:5] != ("ldmatrix", "sync", "aligned", "m8n8", "x4") or opcode[-2:] != ("shared", "b16"):
        raise PtxError("unknown instruction")
    target, source = instruction.operands
    memory, index = locate(block, source, "shared", 16)
    measure(block, instruction, "shared", index, 16)
    rows = index.reshape(-1, 4, 8)
    elements = np.stack([load(memory, rows + 2 * column, np.dtype(np.uint16)) for column in range(8)], -1)
    if "trans" in opcode:
        elements = elements.swapaxes(2, 3)
    lane = np.arange(WARP)
    for matrix, register in enumerate(vector(target)):
        low, high = (elements[:, matrix, lane // 4, lane % 4 * 2 + half].astype(np.uint32) for half in (0, 1))
        write(block, register, (high << np.uint32(16) | low).reshape(-1))


def _matrix_multiply(block: Block, instruction: Instruction) -> None:
    """mma.m16n8k16 with row-major A and column-major B: sums of exact products, rounded once."""
    opcode = instruction.opcode
    if opcode[:6] != ("mma", "sync", "aligned", "m16n8k16", "row", "col"):
        raise PtxError("unknown instruction")
    kind = opcode[7]
    if opcode[6:] not in (("f32", "f16", "f16", "f32"), ("f32", "bf16", "bf16", "f32")):
        raise PtxError("unknown instruction")
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    out, *given = (vector(each) for each in instruction.operands)
    a, b = (
        np.stack([_warps(read(block, each, "u32"), block) for each in words], -1)
        .copy()
        .view(dtype)
        .astype(np.float64)
        for words in given[:2]
    )  # [warps, lanes, elements]: a0..a7 and b0..b3 of the manual
    c = np.stack([_warps(read(block, each, "f32"), block) for each in given[2]], -1).astype(np.float64)
    lane = np.arange(WARP)[:, None]
    group, in_group = lane // 4, lane % 4
    i8, i4 = np.arange(8), np.arange(4)
    left, right = np.empty((len(a), 16, 16)), np.empty((len(a), 16, 8))
    left[:, group + 8 * (i8 // 2 % 2), in_group * 2 + i8 % 2 + 8 * (i8 // 4)] = a
    right[:, in_group * 2 + i4 % 2 + 8 * (i4 // 2), group] = b
    result = (left @ right)[:, group + 8 * (i4 // 2), in_group * 2 + i4 % 2] + c
    for index, register in enumerate(out):
        write(block, register, canonical(result[:, :, index].astype(np.float32).reshape(-1)))


INSTRUCTIONS = {
    "shfl": _shuffle,
    "vote": _vote,
    "bar.warp.sync": _sync_warp,
    "ldmatrix": _load_matrix,
    "mma": _matrix_multiply,
}
