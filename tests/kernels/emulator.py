"""A launcher that compiles kernels for the host with g++ and runs them in emulator.cpp.

Libraries are kept in .cache/kernels under the hash of what they were made from.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvblocks.backends.device import DeviceBackend
from kvblocks.kernels.launcher import Attributes, Grid, Launch
from kvblocks.kernels.specs import Instance

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "cuda"
SCHEDULES = ("forward", "reverse", "greedy", "greedy_reverse", "random")
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fvisibility=default",
)
MESSAGE_BYTES = 4096
LARGEST_POISONED_BYTES = 64 << 20


class KernelFaultError(RuntimeError):
    """What the emulator found: a fault, a divergence, a deadlock, and where."""


@cache
def _headers_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    paths = sorted((folder / "include" / "kvblocks").glob("*.cuh"))
    assert len(paths) >= 5
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(
    source: Path, folder: Path, defines: tuple[tuple[str, str], ...] = (), flags: tuple[str, ...] = ()
) -> Path:
    """The library of a source file, compiled if its hash is new. folder: the cuda/ folder of its headers."""
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ is not installed"
    options = [*FLAGS, *flags, *(f"-D{name}={value}" for name, value in defines)]
    key = hashlib.sha256(
        "\0".join([_headers_hash(folder), source.read_text(), *options]).encode()
    ).hexdigest()
    library = ROOT / ".cache" / "kernels" / f"{source.stem}-{key[:24]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Threads and processes may build the same library at once: each under its own name, the last one stays.
        unfinished = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        command = [
            compiler,
            *options,
            f"-I{folder / 'include'}",
            "-x",
            "c++",
            str(source),
            "-o",
            str(unfinished),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        unfinished.rename(library)
    return library


class EmulatedLauncher:
    """Runs kernels on host memory: addresses are those of NumPy arrays, streams mean nothing.

    schedule: the order in which threads run. folder: another cuda/ folder, whose sources may hold planted bugs.
    flags: for the compiler, the same ones in the whole process.
    """

    # The emulator has one state for the whole process.
    _lock = threading.Lock()

    def __init__(
        self, schedule: str = "forward", seed: int = 0, folder: Path = CUDA, flags: tuple[str, ...] = ()
    ) -> None:
        self.schedule = schedule
        self.flags = flags
        self.seed = seed
        self.folder = folder
        self.num_launches = 0
        self._functions: dict[Instance, ctypes._NamedFuncPointer] = {}

    @property
    def loaded_names(self) -> set[str]:
        """The instances that were used."""
        return {instance.name for instance in self._functions}

    def load(self, instance: Instance) -> "ctypes._NamedFuncPointer":
        if instance not in self._functions:
            _emulator(self.flags)
            path = build(self.folder / instance.kernel.file, self.folder, instance.defines, self.flags)
            library = ctypes.CDLL(str(path))
            function = getattr(library, instance.kernel.entry)
            size = getattr(library, f"{instance.kernel.entry}_params_size")()
            assert size == instance.kernel.params.itemsize, instance.name
            self._functions[instance] = function
        return self._functions[instance]

    def launch(
        self,
        function: "ctypes._NamedFuncPointer",
        grid: Grid,
        threads: int,
        shared_bytes: int,
        params: np.ndarray,
        stream: int,
    ) -> None:
        assert all(1 <= size <= limit for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=True)), (
            grid
        )
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        with self._lock:
            self.num_launches += 1
            failed = _emulator(self.flags).kvb_emulate(
                function,
                ctypes.c_void_p(params.ctypes.data),
                (ctypes.c_int32 * 3)(*grid),
                ctypes.c_int32(threads),
                ctypes.c_uint32(shared_bytes),
                ctypes.c_int32(SCHEDULES.index(self.schedule)),
                ctypes.c_uint64(self.seed),
                message,
                ctypes.c_uint64(MESSAGE_BYTES),
            )
        if failed:
            raise KernelFaultError(message.value.decode())

    def bind(self, launches: Sequence[Launch]) -> Callable[[int], None]:
        def fire(stream: int) -> None:
            for each in launches:
                self.launch(*each, stream)

        return fire

    def attributes(self, function: object) -> Attributes:
        """A host has no registers to count."""
        return Attributes(registers=0, local_bytes=0)


@cache
def _emulator(flags: tuple[str, ...]) -> ctypes.CDLL:
    library = build(Path(__file__).with_name("emulator.cpp"), CUDA, flags=flags)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class HostMemory:
    """NumPy arrays; no stream. A small device, so that small batches split their keys."""

    num_multiprocessors = 7
    max_shared_bytes = 227 * 1024

    def describe(self, name: str, array: Any) -> np.ndarray:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: {type(array).__name__}, expected a NumPy array")
        return array

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Poisoned (NaN in every floating-point format), unless it is so large that it had better stay untouched."""
        array = np.empty(shape, dtype)
        if 0 < array.nbytes <= LARGEST_POISONED_BYTES:
            array.reshape(-1).view(np.uint8).fill(0xFF)
        return array

    def scratch(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return self.empty(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def plain(self, array: np.ndarray) -> np.ndarray:
        return array.copy(order="C")

    def assign(self, target: np.ndarray, source: Any) -> None:
        target[...] = source

    def convert(self, array: np.ndarray, dtype: Any) -> np.ndarray:
        return array.astype(dtype)

    def device(self) -> int:
        return 0

    def stream(self) -> int:
        return 0


@cache
def emulated_backend(
    name: str = "emulated", schedule: str = "forward", split_size: int | None = None
) -> DeviceBackend:
    """The backend of the CUDA kernels on the host; the same one for the same arguments."""
    return DeviceBackend(name, EmulatedLauncher(schedule), HostMemory(), split_size=split_size)
