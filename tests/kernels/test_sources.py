"""The rules that keep one source for device and host, and the list of instances."""

import re
from pathlib import Path

from kernels.emulator import CUDA
from kvblocks.kernels.source import read_source
from kvblocks.kernels.specs import DTYPES, INSTANCES

COMPAT = {"device_compat.cuh", "host_twins.cuh"}
# What differs between devices and hosts, or between two devices.
FORBIDDEN = re.compile(
    r"\basm\b|__\w*sync\w*|__shfl|__ballot|__popc|\bthreadIdx\b|\bblockIdx\b|\bblockDim\b|\bgridDim\b|__CUDA\w*|"
    r"\batomic[A-Z]\w*|__ldg|__half|__nv_\w+|__global__|__device__|__host__|__shared__|__constant__|__launch_bounds__|"
    r"KVB_ON_DEVICE|\b__(?:float|int|uint)_as_\w+|\bfmaxf?\b|\bexpf?\b|\bexp2f?\b|\blogf?\b|\btanhf?\b|\bmemcpy\b"
)
CODE = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def sources() -> list[Path]:
    """Every file that a kernel is made of."""
    found = sorted(path for path in CUDA.rglob("*.cu*") if path.is_file())
    assert len(found) >= 18
    return found


def test_intrinsics_stand_in_one_file() -> None:
    checked = 0
    for path in sources():
        if path.name in COMPAT:
            assert FORBIDDEN.search(path.read_text()) or path.name == "host_twins.cuh"
            continue
        checked += 1
        for number, line in enumerate(CODE.sub("", path.read_text()).splitlines(), start=1):
            found = FORBIDDEN.search(line)
            assert found is None, f"{path.name}:{number}: {found and found[0]}"
    assert checked >= 16


def test_host_twins_cover_every_wrapper() -> None:
    """Each function of the device's section has a twin of the same name."""
    compat = (CUDA / "include" / "kvblocks" / "device_compat.cuh").read_text()
    device = compat[compat.index("#if KVB_ON_DEVICE\n") : compat.index('#include "host_twins.cuh"')]
    names = set(re.findall(r"KVB_DEVICE [\w\* ]+?\*?(\w+)\(", device))
    assert len(names) >= 35
    twins = set(
        re.findall(
            r"^(?:template <.*> )?inline [\w\* ]+?\*?(\w+)\(",
            (CUDA / "include" / "kvblocks" / "host_twins.cuh").read_text(),
            re.MULTILINE,
        )
    )
    assert names - twins == set()


def test_sources_include_their_own_headers_only() -> None:
    included = 0
    for path in sources():
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                included += 1
                assert re.fullmatch(r'\s*#include "(kvblocks/)?\w+\.cuh"', line), f"{path.name}: {line}"
    assert included >= 20


def test_a_text_is_complete_and_names_its_files() -> None:
    text = read_source("paged_attention_mma.cu", {"KVB_KV": "BF16"})
    assert text.startswith("#define KVB_KV BF16\n")
    assert "#pragma once" not in text
    for header in ("device_compat", "element", "paged", "check", "softmax", "attention"):
        assert text.count(f'#line 1 "{header}.cuh"') == 1
    assert [line for line in text.splitlines() if line.lstrip().startswith("#include")] == [], (
        "an include is left"
    )


def test_every_source_has_instances_and_every_instance_a_name_of_its_own() -> None:
    files = {path.name for path in sources() if path.suffix == ".cu"}
    assert {instance.kernel.file for instance in INSTANCES} == files
    names = [instance.name for instance in INSTANCES]
    assert len(names) == len(set(names))
    assert 100 <= len(names) <= 130
    for instance in INSTANCES:
        text = (CUDA / instance.kernel.file).read_text()
        assert f"KVB_KERNEL({instance.kernel.entry}," in text
        assert set(
            re.findall(r"\bKVB_(?:KV|VECTORS|HEAD_DIM_V|HEAD_DIM|ROW_WARPS)\b", CODE.sub("", text))
        ) == {name for name, _ in instance.defines}


def test_numbers_of_dtypes_are_those_of_the_sources() -> None:
    text = (CUDA / "include" / "kvblocks" / "element.cuh").read_text()
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
    for name, number in DTYPES.items():
        assert f"dtype_{short.get(name, name)} = {number}" in text
