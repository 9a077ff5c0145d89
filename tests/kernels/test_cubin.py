"""The cache of compiled kernels on disk."""

from pathlib import Path

import pytest

from kvblocks.kernels import cubin, specs

pytestmark = pytest.mark.cuda

INSTANCE = specs.gather_kv("float16")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cubin, "num_compiled", 0)
    return tmp_path / "kvblocks"


def test_a_second_load_compiles_nothing(folder: Path) -> None:
    first = cubin.load_cubin(INSTANCE, "sm_90")
    assert cubin.num_compiled == 1
    assert cubin.load_cubin(INSTANCE, "sm_90") == first
    assert cubin.num_compiled == 1
    assert len(list(folder.iterdir())) == 1


def test_architectures_instances_and_sources_are_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin.load_cubin(INSTANCE, "sm_90")
    cubin.load_cubin(INSTANCE, "sm_80")
    cubin.load_cubin(specs.gather_kv("float32"), "sm_90")
    read = cubin.read_source
    monkeypatch.setattr(cubin, "read_source", lambda *args: read(*args) + "\n// changed\n")
    cubin.load_cubin(INSTANCE, "sm_90")
    assert cubin.num_compiled == 4
    assert len(list(folder.iterdir())) == 4


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    assert cubin.load_cubin(INSTANCE, "sm_90").startswith(b"\x7fELF")
