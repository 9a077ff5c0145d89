"""Every instance compiled by NVRTC for real devices, without any: registers, spills, what the code is made of."""

import re
import subprocess
from pathlib import Path

import pytest

from kernels.emulator import CUDA
from kvblocks.kernels import nvrtc
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import INSTANCES, MLA_DECODE, MLA_HEAD_DIMS, Instance

pytestmark = pytest.mark.cuda

# All instances for one architecture; a tenth for each of the others, another tenth each.
EVERYTHING = "sm_90"
OTHERS = ("sm_80", "sm_100", "sm_120")
CASES = [(instance, EVERYTHING) for instance in INSTANCES] + [
    (instance, arch) for offset, arch in enumerate(OTHERS) for instance in INSTANCES[3 * offset :: 10]
]


def disassemble(cubin: bytes, folder: Path) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    import nvidia

    (root,) = nvidia.__path__
    tool = Path(root) / "cu13" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


def count(sass: str, pattern: str) -> int:
    return len(re.findall(pattern, sass))


@pytest.mark.parametrize(("instance", "arch"), CASES, ids=[f"{each.name}-{arch}" for each, arch in CASES])
def test_instance(instance: Instance, arch: str, tmp_path: Path) -> None:
    text = read_source(instance.kernel.file, dict(instance.defines))
    cubin, log = nvrtc.compile_cubin(text, instance.kernel.file, arch, ["--ptxas-options=-v"])
    assert "warning" not in log.replace("ptxas warning : Conflicting", ""), log
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spills == [("0", "0", "0")], log
    used = re.findall(r"Used (\d+) registers", log)
    assert len(used) == 1
    assert int(used[0]) <= instance.max_registers, (
        f"{used[0]} registers, the budget is {instance.max_registers}"
    )
    if arch != EVERYTHING:
        return
    sass = disassemble(cubin, tmp_path)
    assert count(sass, r"\bEXIT\b") >= 1
    assert count(sass, r"\b(?:LDL|STL)\b") == 0
    defines = dict(instance.defines)
    if instance.has_mma:
        dims = MLA_HEAD_DIMS if instance.kernel is MLA_DECODE else None
        head_dim, head_dim_v = dims or (int(defines["KVB_HEAD_DIM"]), int(defines["KVB_HEAD_DIM_V"]))
        row_warps = int(defines.get("KVB_ROW_WARPS", 1))
        # Two products of 8 keys for 16 dims of Q K^T, two of 8 dims for 16 keys of P V, in each group of 16 keys.
        groups = 1 if row_warps == 1 else 2 if head_dim_v > 128 else 4
        assert count(sass, r"\bHMMA\.16816\.F32") >= groups * (2 * head_dim // 16 + 2 * head_dim_v // 16)
        # K and V reach shared memory by asynchronous 16-byte copies and in no other way.
        copies = r"\bLDGSTS\.\S*128\b"
        assert count(sass, copies) >= 2
        assert count(sass, r"\bLDGSTS\b") == count(sass, copies)
        assert count(sass, r"\bLDSM\b") >= head_dim // 16
        if defines["KVB_KV"] == "E4M3":
            assert count(sass, r"\bF2FP\.F16\.E4M3\.UNPACK_B\b") >= 8
        if defines["KVB_KV"] != "BF16":
            # Elements never take the slow way over float32.
            assert count(sass, r"\bF2F\b") == 0
    elif instance.loads_vectors:
        assert count(sass, r"\bLDG\.E\.\S*128\b") >= 2


def test_the_list_is_not_short() -> None:
    assert len(CASES) >= 130
    assert {arch for _, arch in CASES} == {EVERYTHING, *OTHERS}


def test_a_message_names_the_real_file_and_line() -> None:
    text = read_source("write_kv.cu", {"KVB_KV": "F16"}).replace(
        "constexpr i32 write_threads = 256;", "constexpr i32 write_threads = nonsense;"
    )
    line = 1 + next(
        number
        for number, line in enumerate((CUDA / "write_kv.cu").read_text().splitlines())
        if "write_threads = 256" in line
    )
    with pytest.raises(nvrtc.CompileError, match=rf'write_kv\.cu\({line}\): error: identifier "nonsense"'):
        nvrtc.compile_cubin(text, "write_kv.cu", EVERYTHING)


def test_version_is_the_pinned_one() -> None:
    assert nvrtc.version() == (13, 0)
