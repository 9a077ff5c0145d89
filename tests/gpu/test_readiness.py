"""`kvblocks.gpu.check`: every thing that can be missing, in plain words, with the command that mends it."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvblocks import gpu
from kvblocks.gpu import readiness as module
from kvblocks.kernels import nvrtc


class Driver:
    """libcuda.so.1 of a machine."""

    def __init__(self, version: int, status: int = 0) -> None:
        self.version, self.status = version, status

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = self.version
        return 0


def cupy_for(version: int, *capabilities: str) -> SimpleNamespace:
    runtime = SimpleNamespace(runtimeGetVersion=lambda: version, getDeviceCount=lambda: len(capabilities))
    devices = [SimpleNamespace(compute_capability=each) for each in capabilities]
    return SimpleNamespace(
        __version__="14.2.0", cuda=SimpleNamespace(runtime=runtime, Device=devices.__getitem__)
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("KVBLOCKS_CUBINS", raising=False)

    def make(
        driver: Driver | None = None, cupy: object = None, compiler: tuple[int, int] | None = (13, 0)
    ) -> gpu.Readiness:
        def version() -> tuple[int, int]:
            if compiler is None:
                raise nvrtc.NvrtcMissingError("none")
            return compiler

        monkeypatch.setattr(module, "_load_driver", lambda: driver)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(nvrtc, "version", version)
        return gpu.check()

    return make


def test_all_is_there(machine: Any) -> None:
    found = machine(Driver(13000), cupy_for(13000, "90"))
    assert found.is_ready
    assert str(found).splitlines() == [
        "found: driver: CUDA 13.0",
        "found: CuPy 14.2.0 for CUDA 13.0",
        "found: device 0: sm_90",
        "found: NVRTC 13.0",
        "found: headers: none are needed, the kernels include no header of CUDA",
        "ready",
    ]


@pytest.mark.parametrize(
    ("driver", "cupy", "compiler", "problem"),
    [
        (None, cupy_for(13000), (13, 0), "there is no NVIDIA driver (libcuda.so.1): install the one of your"),
        (
            Driver(13000, 100),
            cupy_for(13000),
            (13, 0),
            "finds no GPU (cuInit gives 100): see what nvidia-smi",
        ),
        (Driver(13000), None, (13, 0), "pip install 'kvblocks[cupy]'"),
        (Driver(12080), None, (12, 9), "pip install 'kvblocks[cupy-cuda12]'"),
        (
            Driver(12080),
            cupy_for(13000, "90"),
            (12, 9),
            "pip uninstall cupy-cuda13x && pip install 'kvblocks[cupy-cuda12]', or a newer driver",
        ),
        (Driver(13000), cupy_for(13000, "75"), (13, 0), "device 0 is sm_75: the kernels need sm_80 (Ampere)"),
        (Driver(13000), cupy_for(13000, "90"), None, "pip install 'nvidia-cuda-nvrtc==13.0.*'"),
        (Driver(12080), cupy_for(12080, "90"), None, "pip install 'nvidia-cuda-nvrtc-cu12>=12.8'"),
        (Driver(12080), cupy_for(12080, "90"), (13, 0), "NVRTC is of CUDA 13, the driver speaks CUDA 12.8"),
    ],
)
def test_one_thing_is_missing(
    machine: Any, driver: Driver | None, cupy: object, compiler: tuple[int, int] | None, problem: str
) -> None:
    found = machine(driver, cupy, compiler)
    assert len(found.problems) == 1
    assert problem in found.problems[0]
    assert str(found).endswith("\nnot ready")


def test_prebuilt_kernels_need_no_compiler(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBLOCKS_CUBINS", "/some/folder")
    assert machine(Driver(13000), cupy_for(13000, "90"), None).is_ready


def test_it_answers_on_this_machine() -> None:
    run = subprocess.run([sys.executable, "-m", "kvblocks.gpu"], capture_output=True, text=True, check=False)
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert lines[-1] == ("ready" if run.returncode == 0 else "not ready")
    assert sum(line.startswith("missing: ") for line in lines) == 0 or run.returncode == 1
    assert len(lines) >= 3


def test_importing_it_imports_neither_cupy_nor_torch() -> None:
    code = "import sys, kvblocks.gpu; print({'cupy', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
