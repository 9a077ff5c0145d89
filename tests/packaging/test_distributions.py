"""The wheel and the sdist as a user meets them: built, checked, and installed where no checkout is."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Standard output of a command that must succeed, run without the checkout's Python settings."""
    keep = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=keep | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_module(module: str, *arguments: str | Path, cwd: Path, **variables: str) -> str:
    return run(sys.executable, "-m", module, *arguments, cwd=cwd, **variables)


def only_file(folder: Path) -> Path:
    files = list(folder.iterdir())
    assert len(files) == 1
    return files[0]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout."""
    out = tmp_path_factory.mktemp("wheel")
    python_module("maturin", "build", "--release", "--locked", "--out", out, cwd=ROOT)
    return only_file(out)


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    python_module("maturin", "sdist", "--out", out, cwd=ROOT)
    return only_file(out)


@pytest.fixture(scope="session", params=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment in which one of the two is installed."""
    distribution: Path = request.getfixturevalue(request.param)
    home = tmp_path_factory.mktemp("home")
    python_module("uv", "venv", "--python", sys.executable, home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    # An sdist is compiled here, with its own build requirements; the compiler's output is kept for next time.
    target = str(ROOT / "target" / "sdist")
    python_module("uv", "pip", "install", "--python", python, distribution, cwd=home, CARGO_TARGET_DIR=target)
    return python


@pytest.fixture(scope="session")
def version() -> str:
    """The version that all crates agree on."""
    text = run("cargo", "metadata", "--no-deps", "--locked", "--format-version", "1", cwd=ROOT)
    packages = json.loads(text)["packages"]
    assert len(packages) >= 3
    (only,) = {package["version"] for package in packages}
    assert isinstance(only, str)
    return only


def test_the_wheel_is_abi3_and_carries_what_it_should(wheel: Path, version: str) -> None:
    assert wheel.name.startswith(f"kvblocks-{version}-cp310-abi3-")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = message_from_bytes(archive.read(f"kvblocks-{version}.dist-info/METADATA"))
    files = {"__init__.py", "_core.abi3.so", "_core.pyi", "py.typed", "cache.py", "backends/numpy.py"}
    assert {f"kvblocks/{file}" for file in files} <= names
    assert f"kvblocks-{version}.dist-info/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {"kvblocks", f"kvblocks-{version}.dist-info"}
    assert metadata["Version"] == version
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert required == ["numpy>=2.0"]


def test_no_text_of_the_wheel_names_the_folder_it_was_built_in(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name) for name in archive.namelist() if not name.endswith(".so")}
    assert len(texts) > 10
    assert [name for name, text in texts.items() if str(ROOT).encode() in text] == []


def test_both_carry_the_kernel_sources(wheel: Path, sdist: Path) -> None:
    sources = {path.relative_to(ROOT / "cuda").as_posix() for path in (ROOT / "cuda").rglob("*.cu*")}
    assert len(sources) >= 1
    with zipfile.ZipFile(wheel) as archive:
        assert {f"kvblocks/cuda/{source}" for source in sources} <= set(archive.namelist())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"python/kvblocks/cuda/{source}" for source in sources} <= names
    assert {name for name in names if name.startswith("cuda/")} == set()


def test_the_sdist_carries_the_sources_and_the_licence(sdist: Path) -> None:
    crates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rust").glob("*/src/**/*.rs")}
    assert len(crates) >= 3
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert crates | {"Cargo.toml", "Cargo.lock", "LICENSE", "README.md", "pyproject.toml"} <= names


def test_an_installation_works_without_a_checkout(
    installed: Path, readme_example: tuple[str, str], version: str, tmp_path: Path
) -> None:
    code, expected = readme_example
    assert run(installed, "-I", "-c", code, cwd=tmp_path) == expected
    where = "import kvblocks, importlib.metadata as m; "
    where += "print(kvblocks.__file__, kvblocks.__version__, m.version('kvblocks'))"
    file, *versions = run(installed, "-I", "-c", where, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parents[1])
    assert versions == [version, version]


def test_an_installation_adds_nothing_to_the_namespace_cuda(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u, importlib.resources as r; print(u.find_spec('cuda')); "
    code += "print(sum(1 for _ in (r.files('kvblocks') / 'cuda').iterdir()))"
    spec, entries = run(installed, "-I", "-c", code, cwd=tmp_path).split()
    assert spec == "None"
    assert int(entries) >= 1


def test_the_extension_keeps_to_the_stable_abi_of_python_3_10(wheel: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    python_module("abi3audit", "--strict", "--report", "--output", report, wheel, cwd=tmp_path)
    (audit,) = json.loads(report.read_text())["specs"].values()
    objects = audit["wheel"]
    assert len(objects) >= 1
    assert all(item["result"]["is_abi3"] for item in objects)


def test_the_wheel_has_no_stray_contents(wheel: Path, tmp_path: Path) -> None:
    assert "OK" in python_module("check_wheel_contents", wheel, cwd=tmp_path)
