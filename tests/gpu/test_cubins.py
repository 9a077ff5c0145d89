"""Where machine code comes from: keys, the cache of the next process, prebuilt folders."""

import json
from pathlib import Path

import pytest

from gpu.fake import fake_cubins
from kvblocks.kernels import cubins as module
from kvblocks.kernels import nvrtc, specs
from kvblocks.kernels.cubins import Cubins, cubin_key, prebuild, read_manifest

WRITE = specs.write_kv("float16")
COPY = next(each for each in specs.INSTANCES if each.kernel is specs.COPY_BLOCKS)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = fake_cubins(tmp_path)
    code = first.get(WRITE, "sm_90")
    assert first.get(WRITE, "sm_90") == code
    assert first.num_compiled == 1
    second = fake_cubins(tmp_path)
    assert second.get(WRITE, "sm_90") == code
    assert second.num_compiled == 0


def test_code_of_another_architecture_compiler_or_instance_is_other_code(tmp_path: Path) -> None:
    fake_cubins(tmp_path).get(WRITE, "sm_90")
    for cubins, instance, arch in (
        (fake_cubins(tmp_path), WRITE, "sm_80"),
        (fake_cubins(tmp_path, version=(13, 1)), WRITE, "sm_90"),
        (fake_cubins(tmp_path), specs.write_kv("int8"), "sm_90"),
    ):
        cubins.get(instance, arch)
        assert cubins.num_compiled == 1


def test_every_part_of_a_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        cubin_key("text", "sm_90", (13, 0)),
        cubin_key("texu", "sm_90", (13, 0)),
        cubin_key("text", "sm_80", (13, 0)),
        cubin_key("text", "sm_90", (13, 1)),
        cubin_key("text", "sm_90", (1, 30)),
    }
    monkeypatch.setattr(module, "OPTIONS", ("-G",))
    keys.add(cubin_key("text", "sm_90", (13, 0)))
    assert len(keys) == 6


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cubins = fake_cubins(tmp_path / "file" / "cache")
    code = cubins.get(WRITE, "sm_90")
    assert cubins.get(WRITE, "sm_90") == code
    assert cubins.num_compiled == 2


def test_the_cache_is_where_cupy_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "here"))
    cubins = Cubins(compile_cubin=lambda *_: (b"code", ""), version=lambda: (13, 0))
    cubins.get(WRITE, "sm_90")
    (kept,) = (tmp_path / "here" / "kvblocks").iterdir()
    assert kept.suffix == ".cubin"
    assert kept.read_bytes() == b"code"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert module._default_cache() == tmp_path / "home" / ".cupy" / "kernel_cache" / "kvblocks"


def test_prebuilt_code_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = module.read_source(WRITE.kernel.file, dict(WRITE.defines))
    (tmp_path / f"{cubin_key(text, 'sm_90', (12, 9))}.cubin").write_bytes(b"prebuilt")
    (tmp_path / "manifest.json").write_text(json.dumps({"arch": "sm_90", "nvrtc": [12, 9], "kernels": {}}))

    def missing() -> tuple[int, int]:
        raise nvrtc.NvrtcMissingError("no compiler")

    monkeypatch.setenv("KVBLOCKS_CUBINS", str(tmp_path))
    cubins = Cubins(cache=tmp_path / "cache", version=missing)
    assert cubins.get(WRITE, "sm_90") == b"prebuilt"
    assert cubins.num_compiled == 0
    with pytest.raises(nvrtc.NvrtcMissingError, match="no compiler"):
        cubins.get(COPY, "sm_90")


def test_a_folder_that_nobody_prebuilt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json: expected a folder that"):
        Cubins(prebuilt=tmp_path)


@pytest.mark.cuda
def test_prebuild_writes_what_get_reads(tmp_path: Path) -> None:
    manifest = prebuild(tmp_path, "sm_90", [COPY])
    assert manifest == read_manifest(tmp_path)
    entry = manifest["kernels"][COPY.name]
    assert 1 <= entry["registers"] <= COPY.max_registers
    assert manifest["nvrtc"] == list(nvrtc.version())
    cubins = Cubins(prebuilt=tmp_path, cache=tmp_path / "none")
    assert cubins.get(COPY, "sm_90") == (tmp_path / f"{entry['key']}.cubin").read_bytes()
    assert cubins.num_compiled == 0
    assert not (tmp_path / "none").exists()
    written = (tmp_path / f"{entry['key']}.cubin").stat().st_mtime_ns
    prebuild(tmp_path, "sm_90", [COPY])
    assert (tmp_path / f"{entry['key']}.cubin").stat().st_mtime_ns == written
