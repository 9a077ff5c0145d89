"""NVRTC by ctypes: a kernel's text to a cubin or PTX, on any machine, with or without a device.

Owns `compile_cubin`, `compile_ptx` and the search for the library. Imports the standard library only.
Invariant: nothing is loaded before the first compilation.
"""

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path


class CompileError(RuntimeError):
    """The compiler's log, with the names of the real files."""


class NvrtcMissingError(RuntimeError):
    """There is no NVRTC; says which package brings it."""


def compile_cubin(text: str, name: str, arch: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """The cubin of a source text for an architecture such as "sm_90", and the compiler's log.

    name: what messages call the text. Raises CompileError. Seconds of CPU time; releases the interpreter.
    """
    return _compile(text, name, arch, options, "CUBIN")


def compile_ptx(text: str, name: str, arch: str, options: Sequence[str] = ()) -> str:
    """The PTX of a source text for a virtual architecture such as "compute_90".

    name: what messages call the text. Raises CompileError. Releases the interpreter.
    """
    return _compile(text, name, arch, options, "PTX")[0].rstrip(b"\0").decode()


def _compile(text: str, name: str, arch: str, options: Sequence[str], what: str) -> tuple[bytes, str]:
    """A result of the compiler, "CUBIN" or "PTX", and its log."""
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), ctypes.c_int(0), None, None
        ),
    )
    try:
        flags = [f"--gpu-architecture={arch}", "--std=c++17", "--fmad=true", *options]
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = nvrtc.nvrtcCompileProgram(program, ctypes.c_int(len(flags)), encoded)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status != 0:
            raise CompileError(f"{name} for {arch}:\n{log}")
        return _read(nvrtc, program, what), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """Major and minor version of the library that is used."""
    nvrtc = _library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def _library() -> ctypes.CDLL:
    for folder in _folders():
        # The library looks for its built-in functions by name, which finds them once they are loaded.
        for builtins in sorted(folder.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        for library in sorted(folder.glob("libnvrtc.so*")):
            return _declared(ctypes.CDLL(str(library)))
    name = ctypes.util.find_library("nvrtc")
    if name is not None:
        return _declared(ctypes.CDLL(name))
    raise NvrtcMissingError(
        "NVRTC is not installed: pip install 'nvidia-cuda-nvrtc==13.0.*' (or nvidia-cuda-nvrtc-cu12)"
    )


def _folders() -> list[Path]:
    """Where the packages of CUDA 13 and of CUDA 12 keep the library."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except ImportError:
        spec = None
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    return [
        folder
        for root in roots
        for folder in (root / "cu13" / "lib", root / "cuda_nvrtc" / "lib")
        if folder.is_dir()
    ]


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, data))
    return data.raw
