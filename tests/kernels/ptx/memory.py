"""Instructions that move bytes: loads, stores, atomics, asynchronous copies; and what they ask of memory.

Imports block.py. Invariant: an access that is misaligned, or outside shared memory or what the process has mapped, is a
PtxError.
"""

import numpy as np

from kernels.ptx.block import TYPES, WARP, AsyncCopies, Block, Traffic, read, unsigned, write
from kernels.ptx.program import Instruction, PtxError

BANKS, BANK_BYTES, SECTOR_BYTES = 32, 4, 32


def _cvta(block: Block, instruction: Instruction) -> None:
    """Generic addresses are those of the process; shared ones start at 0."""
    target, source = instruction.operands
    value = read(block, source, "u64")
    if "shared" in instruction.opcode:
        base = np.uint64(block.shared.ctypes.data)
        value = value - base if "to" in instruction.opcode else value + base
    write(block, target, value)


# Nothing is mapped below; an array cannot start at the null pointer.
LOWEST_ADDRESS = 4096


class _Process:
    """What NumPy sees as an array of all bytes that a process can address."""

    __array_interface__ = {  # noqa: RUF012
        "version": 3,
        "shape": (2**47 - LOWEST_ADDRESS,),
        "typestr": "|u1",
        "data": (LOWEST_ADDRESS, False),
    }


PROCESS = np.asarray(_Process())


def locate(block: Block, operand: str, space: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes that `[register+offset]` is in, and the active threads' indices there, multiples of `size`."""
    return place(block, address_of(block, operand), space, size)


def address_of(block: Block, operand: str) -> np.ndarray:
    """The active threads' addresses `[register+offset]`."""
    base, _, offset = operand.strip("[]").partition("+")
    is_word = base[0] == "%" and block.register(base).dtype.itemsize == 4
    value = read(block, base, "u32" if is_word else "u64")
    return np.broadcast_to(value, len(block.threads)).astype(np.int64) + int(offset or 0)


def place(block: Block, address: np.ndarray, space: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of addresses."""
    wrong = address % size != 0
    if wrong.any():
        raise PtxError(f"misaligned address in {_who(block, wrong)}")
    if space == "shared":
        memory, index = block.shared, address
        wrong = (address < 0) | (address + size > block.shared.size)
    else:
        memory, index = PROCESS, address - LOWEST_ADDRESS
        first, last = block.mapped
        at = np.searchsorted(first, address, side="right") - 1
        wrong = (at < 0) | (address + size > last[at])
    if wrong.any():
        number = f"{space or 'generic'} address {int(address[wrong][0]):#x}"
        raise PtxError(f"{number} is out of range in {_who(block, wrong)}")
    return memory, index


def _who(block: Block, wrong: np.ndarray) -> str:
    ids = block.special
    return f"block {','.join(str(int(ids[f'%ctaid.{a}'])) for a in 'xyz')}, thread {block.threads[wrong][0]}"


def load(memory: np.ndarray, index: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The elements that start at bytes `index`."""
    return memory[: memory.size // dtype.itemsize * dtype.itemsize].view(dtype)[index // dtype.itemsize]


def store(memory: np.ndarray, index: np.ndarray, value: np.ndarray) -> None:
    """The same way back; where two threads name one element, the last one stays."""
    size = value.dtype.itemsize
    memory[: memory.size // size * size].view(value.dtype)[index // size] = value


def _access(instruction: Instruction) -> tuple[str, int, str]:
    """State space, number of elements and type of a load or store."""
    opcode = instruction.opcode
    space = next((part for part in opcode if part in ("global", "shared", "param", "local")), "")
    if space == "local":
        raise PtxError("local memory")
    count = next((int(part[1]) for part in opcode if part in ("v2", "v4")), 1)
    return space, count, opcode[-1]


def vector(operand: str) -> list[str]:
    return operand.strip("{}").replace(",", " ").split()


def _load(block: Block, instruction: Instruction) -> None:
    space, count, kind = _access(instruction)
    dtype = TYPES[kind]
    target, source = instruction.operands
    # A vector is aligned to its own size.
    memory, index = locate(block, source, space, dtype.itemsize * count)
    measure(block, instruction, space, index, dtype.itemsize * count)
    for number, part in enumerate(vector(target)):
        write(block, part, load(memory, index + number * dtype.itemsize, dtype))


def _store(block: Block, instruction: Instruction) -> None:
    space, count, kind = _access(instruction)
    dtype = unsigned(TYPES[kind])
    target, source = instruction.operands
    memory, index = locate(block, target, space, dtype.itemsize * count)
    measure(block, instruction, space, index, dtype.itemsize * count)
    for number, part in enumerate(vector(source)):
        value = read(block, part, kind)
        store(memory, index + number * dtype.itemsize, np.broadcast_to(value.view(dtype), index.shape))


def _atomic(block: Block, instruction: Instruction) -> None:
    space, _, kind = _access(instruction)
    name = next((part for part in instruction.opcode if part in _ATOMICS), "")
    if not name:
        raise PtxError("unknown instruction")
    dtype = TYPES[kind]
    target, where, *sources = (
        ("_", *instruction.operands) if instruction.opcode[0] == "red" else instruction.operands
    )
    memory, index = locate(block, where, space, dtype.itemsize)
    given = [np.broadcast_to(read(block, each, kind), index.shape) for each in sources]
    old = np.empty(index.shape, dtype)
    # One after the other, as two threads may name one word.
    for thread in range(len(index)):
        one = index[thread : thread + 1]
        old[thread] = load(memory, one, dtype)[0]
        new = _ATOMICS[name](old[thread], *(value[thread] for value in given))
        store(memory, one, np.array([new], unsigned(dtype)))
    write(block, target, old)


_ATOMICS = {
    "add": lambda old, value: old + value,
    "max": max,
    "cas": lambda old, expected, value: value if old == expected else old,
}


def measure(block: Block, instruction: Instruction, space: str, index: np.ndarray, size: int) -> None:
    """Counts what each warp asks of global or shared memory; lanes with an index below 0 ask nothing."""
    if block.traffic is None or space not in ("global", "shared"):
        return
    traffic = block.traffic.setdefault(instruction, Traffic())
    warps = block.threads // WARP
    for warp in np.unique(warps[index >= 0]):
        mine = index[(warps == warp) & (index >= 0)]
        traffic.requests += 1
        if space == "global":
            every = np.unique(mine[:, None] + np.arange(0, size, min(size, 4)))
            traffic.sectors += len(np.unique(every // SECTOR_BYTES))
            traffic.num_bytes += len(every) * min(size, 4)
        else:
            # 128 bytes at a time: of 16-byte accesses, 8 lanes.
            lanes = min(WARP, BANKS * BANK_BYTES // max(size, BANK_BYTES))
            for first in range(0, len(mine), lanes):
                traffic.passes += bank_passes(mine[first : first + lanes], size)
                traffic.fewest_passes += 1


def bank_passes(address: np.ndarray, size: int) -> int:
    """How many times shared memory serves a request: the most distinct words that one bank holds of it."""
    words = np.unique((address[:, None] + np.arange(0, max(size, 4), 4)) // BANK_BYTES)
    return int(np.bincount(words % BANKS).max())


# --- Asynchronous copies: poison from the start to the wait, which is when the source is read.


def _copy_async(block: Block, instruction: Instruction) -> None:
    opcode = instruction.opcode
    if "commit_group" in opcode:
        block.num_groups[block.active] += 1
        return
    if "wait_group" in opcode or "wait_all" in opcode:
        pending = int(instruction.operands[0]) if "wait_group" in opcode else 0
        _land(block, block.num_groups - pending)
        return
    if opcode[:5] != ("cp", "async", "cg", "shared", "global") or instruction.operands[2] != "16":
        raise PtxError("unknown asynchronous copy")
    target, source, _, num_valid = instruction.operands
    _, to = locate(block, target, "shared", 16)
    count = np.broadcast_to(read(block, num_valid, "u32"), to.shape).astype(np.int64)
    # An address of which nothing is read may be any.
    reads = count > 0
    address = np.where(reads, address_of(block, source), block.mapped[0][0])
    _, of = place(block, address, "global", 16)
    measure(block, instruction, "global", np.where(reads, of, -1), 16)
    for offset in range(0, 16, 4):
        store(block.shared, to + offset, np.full(to.shape, 0xFFFFFFFF, np.uint32))
    threads = block.threads
    block.copies.append(AsyncCopies(threads, to, of, count, block.num_groups[threads].copy()))


def _land(block: Block, first_pending: np.ndarray) -> None:
    """Completes the active threads' copies of groups before `first_pending`."""
    waits = np.zeros(block.num_threads, bool)
    waits[block.active] = True
    left = []
    for each in block.copies:
        due = waits[each.threads] & (each.group < first_pending[each.threads])
        for offset in range(16):
            reads = due & (each.num_valid > offset)
            block.shared[each.shared[reads] + offset] = PROCESS[each.source[reads] + offset]
            block.shared[each.shared[due & ~reads] + offset] = 0
        if not due.all():
            keep = ~due
            left.append(
                AsyncCopies(
                    *(a[keep] for a in (each.threads, each.shared, each.source, each.num_valid, each.group))
                )
            )
    block.copies = left


INSTRUCTIONS = {
    "cvta": _cvta,
    "ld": _load,
    "st": _store,
    **dict.fromkeys(("atom", "red"), _atomic),
    "cp": _copy_async,
}
