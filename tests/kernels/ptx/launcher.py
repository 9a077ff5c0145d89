"""A launcher that runs kernels as NVRTC compiles them to PTX, block after block.

Owns the order in which threads run. Imports the rest of the package and kvblocks' compiler and launcher's protocol.
Invariant: threads of a block that are at the same instruction execute it at once, those furthest behind first; a
collective runs once all 32 lanes of a warp have come to it, and a barrier once all threads have. Addresses of global
memory are those of the process; shared memory is a NumPy array, 0xFF at the start.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from kernels.emulator import CUDA
from kernels.ptx import arithmetic, collectives, memory
from kernels.ptx.block import WARP, Block, Traffic
from kernels.ptx.program import Entry, Instruction, PtxError, parse
from kvblocks.kernels import nvrtc
from kvblocks.kernels.launcher import Attributes, Grid, Launch
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import Instance

# A runaway loop ends with an error, not with the test's patience.
MAX_STEPS = 20_000_000


class PtxLauncher:
    """Runs kernels on host memory, as NVRTC compiles them for an architecture: a launcher like the emulator's.

    measure: count what each memory instruction asks for, in `traffic`. greedy: a warp runs until it waits at a barrier,
    which shows a barrier that is missing. folder: another cuda/ folder.
    """

    def __init__(
        self, arch: str = "compute_90", *, measure: bool = False, greedy: bool = False, folder: Path = CUDA
    ) -> None:
        self.arch = arch
        self.folder = folder
        self.greedy = greedy
        self.traffic: dict[Instruction, Traffic] | None = {} if measure else None

    def load(self, instance: Instance) -> Entry:
        kernel = instance.kernel
        return compile_entry(kernel.file, kernel.entry, dict(instance.defines), self.arch, self.folder)

    def launch(
        self,
        function: Entry,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        params: np.ndarray,
        stream: int,
    ) -> None:
        assert threads % WARP == 0
        mapped = _mapped_memory()
        thread = np.arange(threads, dtype=np.uint32)
        special = {"%tid.x": thread, "%laneid": thread % WARP}
        special |= {
            f"%ntid.{axis}": np.uint32(size) for axis, size in zip("xyz", (threads, 1, 1), strict=True)
        }
        special |= {f"%nctaid.{axis}": np.uint32(size) for axis, size in zip("xyz", grid, strict=True)}
        # An address that is no multiple of 128 would hide what depends on alignment.
        room = np.empty(shared_bytes + 128, np.uint8)
        shared = room[-room.ctypes.data % 128 :][:shared_bytes]
        symbols = {function.param: params.ctypes.data} | dict.fromkeys(function.shared, 0)
        for z, y, x in np.ndindex(grid[2], grid[1], grid[0]):
            place = {f"%ctaid.{axis}": np.uint32(at) for axis, at in zip("xyz", (x, y, z), strict=True)}
            shared.fill(0xFF)
            block = Block(function, threads, special | place, symbols, shared, mapped, self.traffic)
            with np.errstate(all="ignore"):
                run(block, greedy=self.greedy)

    def bind(self, launches: Sequence[Launch]) -> Callable[[int], None]:
        def fire(stream: int) -> None:
            for each in launches:
                self.launch(*each, stream)

        return fire

    def attributes(self, function: Entry) -> Attributes:
        """PTX knows no machine registers."""
        return Attributes(registers=0, local_bytes=0)

    def measured(self, *opcode: str) -> Sequence[tuple[Instruction, Traffic]]:
        """The traffic of the instructions whose opcode has all these parts."""
        assert self.traffic is not None
        return [item for item in self.traffic.items() if set(opcode) <= set(item[0].opcode)]


# All but branches, ends and barriers of a block, which the schedule knows.
INSTRUCTIONS = {**arithmetic.INSTRUCTIONS, **memory.INSTRUCTIONS, **collectives.INSTRUCTIONS}


def run(block: Block, *, greedy: bool = False) -> None:
    """Runs all threads of a block to their end, a warp at a time as far as it can if greedy. Raises PtxError."""
    left = MAX_STEPS
    while left > 0:
        if not block.is_ready.any():
            if block.is_done.all():
                break
            _pass_barrier(block)
        runs = block.is_ready
        if greedy:
            runs = runs & (block.every // WARP == np.argmax(runs) // WARP)
        at = int(block.pc[runs].min())
        here = runs & (block.pc == at)
        block.active = slice(None) if here.all() else np.flatnonzero(here)
        behind = block.pc[runs & ~here]
        left = _run_until(block, at, int(behind.min()) if behind.size else None, left)
    else:
        raise PtxError(f"{block.entry.name}: {MAX_STEPS} steps without an end")
    if block.copies:
        raise PtxError(f"{block.entry.name}: exit with asynchronous copies that nothing waits for")


def _run_until(block: Block, at: int, limit: int | None, left: int) -> int:
    """Runs the active threads, all at instruction `at`, until they part, wait, end, or come to where others stand.

    Returns how many steps are left.
    """
    code, labels = block.entry.instructions, block.entry.labels
    while limit is None or at < limit:
        left -= 1
        instruction = code[at]
        name = _name(instruction.opcode)
        if name == "bra":
            taken = _chosen(block, instruction)
            target = labels[instruction.operands[0]]
            if taken.all() or not taken.any():
                at = target if taken.all() else at + 1
                if left > 0:
                    continue
            block.pc[block.active] = np.where(taken, target, at + 1)
            return left
        if name == "ret":
            gone = block.threads[_chosen(block, instruction)]
            block.is_ready[gone], block.is_done[gone] = False, True
            block.pc[block.active] = at + 1
            return left
        if name == "bar.sync":
            block.pc[block.active] = at
            block.is_ready[block.active] = False
            return left
        if name in collectives.INSTRUCTIONS and not _gather_warps(block, at):
            return left
        _execute(block, instruction, name)
        at += 1
        if name in collectives.INSTRUCTIONS:
            block.pc[block.active] = at
            block.is_ready[block.active] = True
            if not isinstance(block.active, slice):
                return left
    block.pc[block.active] = at
    return left


@cache
def _name(opcode: tuple[str, ...]) -> str:
    """The name under which an instruction is known."""
    if opcode[0] in ("bar", "barrier"):
        return "bar.warp.sync" if "warp" in opcode else "bar.sync"
    return "ret" if opcode[0] == "exit" else opcode[0]


def _execute(block: Block, instruction: Instruction, name: str) -> None:
    active = block.active
    try:
        if instruction.guard is not None:
            taken = _chosen(block, instruction)
            if not taken.any():
                return
            if not taken.all():
                block.active = block.threads[taken]
        if name not in INSTRUCTIONS:
            raise PtxError("unknown instruction")
        INSTRUCTIONS[name](block, instruction)
    except PtxError as error:
        raise PtxError(f"{instruction.place}: {instruction.text}: {error}") from None
    finally:
        block.active = active


def _chosen(block: Block, instruction: Instruction) -> np.ndarray:
    """Which of the active threads an instruction is for."""
    if instruction.guard is None:
        return np.ones(len(block.threads), bool)
    name, negated = instruction.guard
    return block.register(name)[block.active] != negated


def _gather_warps(block: Block, at: int) -> bool:
    """The active threads wait at a collective; those of complete warps, if any, become the active ones."""
    if isinstance(block.active, slice):
        return True
    block.pc[block.active] = at
    block.is_ready[block.active] = False
    waiting = ~block.is_ready & ~block.is_done & (block.pc == at)
    complete = waiting.reshape(-1, WARP).all(1).repeat(WARP)
    block.active = np.flatnonzero(complete)
    return bool(complete.any())


def _pass_barrier(block: Block) -> None:
    """All threads wait: at one barrier, or there is a deadlock."""
    where = [block.entry.instructions[at] for at in np.unique(block.pc[~block.is_done])]
    if block.is_done.any() or len(where) != 1 or _name(where[0].opcode) != "bar.sync":
        places = ", ".join(f"{each.place}: {each.text}" for each in where)
        raise PtxError(
            f"{block.entry.name}: deadlock, {int(block.is_done.sum())} threads have ended, others wait at {places}"
        )
    block.pc += 1
    block.is_ready[:] = True


def _mapped_memory() -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 addresses of the process's readable memory: beyond them an access is an error, no crash."""
    ranges: list[list[int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access = line.split()[:2]
        first, last = (int(number, 16) for number in place.split("-"))
        if access[0] == "r" and last < 2**47:
            if ranges and ranges[-1][1] == first:
                ranges[-1][1] = last
            else:
                ranges.append([first, last])
    table = np.array(ranges, np.int64)
    return table[:, 0].copy(), table[:, 1].copy()


def compile_entry(file: str, entry: str, defines: dict[str, str], arch: str, folder: Path = CUDA) -> Entry:
    """The kernel `entry` of a source file, as NVRTC compiles it for a virtual architecture such as "compute_90"."""
    return parse(compile_text(file, tuple(sorted(defines.items())), arch, folder), entry)


@cache
def compile_text(file: str, defines: tuple[tuple[str, str], ...], arch: str, folder: Path = CUDA) -> str:
    """The PTX of a source file."""
    text = read_source(file, dict(defines), folder=folder)
    return nvrtc.compile_ptx(text, file, arch, ["--generate-line-info"])
