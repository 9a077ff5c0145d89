"""The state of one block of threads, and how instructions read and write it.

Owns `Block`, the types of operands and the traffic that is counted. Imports program.py and NumPy.
Invariant: a register holds the values of all threads as unsigned integers; instructions see those of the active ones.
"""

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from kernels.ptx.program import Entry, Instruction, PtxError

WARP = 32
_SIGNED = {f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)}
_UNSIGNED = {f"{kind}{bits}": f"u{bits // 8}" for kind in "ub" for bits in (8, 16, 32, 64)}
TYPES = {
    **{name: np.dtype(code) for name, code in (_SIGNED | _UNSIGNED).items()},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype(bool),
    # Two halves in a word, and formats without a type of NumPy's: bits.
    "f16": np.dtype("u2"),
    "bf16": np.dtype("u2"),
    "f16x2": np.dtype("u4"),
    "bf16x2": np.dtype("u4"),
    "e4m3x2": np.dtype("u2"),
    "e5m2x2": np.dtype("u2"),
}


@dataclass
class Traffic:
    """What one instruction asked of memory, summed over warps: how often, 32-byte sectors, and distinct bytes.

    For shared memory: how many times a warp's request was served, and the fewest times that would do.
    """

    requests: int = 0
    sectors: int = 0
    num_bytes: int = 0
    passes: int = 0
    fewest_passes: int = 0


@dataclass
class AsyncCopies:
    """The copies of one instruction that have not landed, by thread."""

    threads: np.ndarray
    shared: np.ndarray
    source: np.ndarray
    num_valid: np.ndarray
    group: np.ndarray


@dataclass
class Block:
    """The state of one block of threads. Instructions change it through `read`, `write` and the memory functions."""

    entry: Entry
    num_threads: int
    special: dict[str, np.ndarray]
    symbols: dict[str, int]
    shared: np.ndarray
    mapped: tuple[np.ndarray, np.ndarray]
    traffic: dict[Instruction, Traffic] | None
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    active: slice | np.ndarray = field(default_factory=lambda: slice(None))
    copies: list[AsyncCopies] = field(default_factory=list)
    num_groups: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.pc = np.zeros(self.num_threads, np.int64)
        self.is_ready = np.ones(self.num_threads, bool)
        self.is_done = np.zeros(self.num_threads, bool)
        self.num_groups = np.zeros(self.num_threads, np.int64)
        self.every = np.arange(self.num_threads)

    @property
    def threads(self) -> np.ndarray:
        """The indices of the active threads."""
        return self.every[self.active]

    def register(self, name: str) -> np.ndarray:
        """All threads' values, as unsigned integers."""
        if name not in self.registers:
            kind = self.entry.registers[name.rstrip("0123456789")]
            dtype = bool if kind == "pred" else f"u{int(kind[1:]) // 8}"
            self.registers[name] = np.zeros(self.num_threads, dtype)
        return self.registers[name]


def unsigned(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")


def read(block: Block, operand: str, kind: str) -> np.ndarray:
    """The active threads' values of a register, a special register, a symbol or an immediate value."""
    dtype = TYPES[kind]
    if operand in block.special:
        value = block.special[operand]
        value = value[block.active] if value.ndim else value
    elif operand[0] == "%":
        value = block.register(operand)[block.active]
    elif operand[0] == "{":
        parts = operand.strip("{}").replace(",", " ").split()
        bits = dtype.itemsize * 8 // len(parts)
        value = np.zeros((), unsigned(dtype))
        for index, part in enumerate(parts):
            word = read(block, part, f"u{bits}").astype(value.dtype)
            value = value | word << value.dtype.type(index * bits)
    elif operand in block.symbols:
        value = np.array(block.symbols[operand], np.uint64)
    else:
        return _immediate(operand, kind)
    value = np.asarray(value)
    if "b" in (value.dtype.kind, dtype.kind):
        return value
    if value.dtype.itemsize != dtype.itemsize:
        value = value.astype(unsigned(dtype))
    return value.view(dtype)


@cache
def _immediate(operand: str, kind: str) -> np.ndarray:
    dtype = TYPES[kind]
    if operand[:2] in ("0f", "0d"):
        size = 4 if operand[1] == "f" else 8
        bits = np.frombuffer(bytes.fromhex(operand[2:]), f">u{size}")[0].astype(f"u{size}")
        return np.array(bits.view(f"f{size}") if dtype.kind == "f" else bits).astype(dtype)
    try:
        number = int(operand.rstrip("U"), 0)
    except ValueError:
        raise PtxError(f"unknown operand {operand!r}") from None
    if dtype.kind == "b":
        return np.array(bool(number))
    return np.array(number % 2 ** (8 * dtype.itemsize), unsigned(dtype)).view(dtype)


def write(block: Block, operand: str, value: np.ndarray) -> None:
    """Into a register of the active threads; a narrow value is extended by its sign if it has one."""
    if operand == "_":
        return
    if operand[0] == "{":
        parts = operand.strip("{}").replace(",", " ").split()
        value = np.asarray(value)
        bits = value.dtype.itemsize * 8 // len(parts)
        for index, part in enumerate(parts):
            write(block, part, (value >> value.dtype.type(index * bits)).astype(f"u{bits // 8}"))
        return
    register = block.register(operand)
    value = np.asarray(value)
    if value.dtype.kind != "b":
        if value.dtype.itemsize != register.dtype.itemsize:
            assert value.dtype.kind in "iu" or value.dtype.itemsize < register.dtype.itemsize
            if value.dtype.kind == "f":
                value = value.view(unsigned(value.dtype))
            value = value.astype(register.dtype)
        value = value.view(register.dtype)
    register[block.active] = value
