"""The direction of dependencies, and that the checks which guard it look at something."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "kvblocks"

NEW_MODULES = """
import json, sys, numpy
before = set(sys.modules)
import kvblocks
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_kvblocks_imports_numpy_and_the_standard_library_only(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", NEW_MODULES], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    new = json.loads(run.stdout)
    assert {"kvblocks", "kvblocks._core", "kvblocks.cache"} <= set(new)
    third_party = {name.partition(".")[0] for name in new} - {"kvblocks", "numpy"} - sys.stdlib_module_names
    assert third_party == set()
    assert [name for name in new if name.startswith("kvblocks.integrations")] == []


@pytest.mark.parametrize(("crate", "at_least"), [("kvblocks-core", 3), ("kvblocks-cpu", 2)])
def test_the_crates_below_the_bindings_know_nothing_of_python(crate: str, at_least: int) -> None:
    tree = subprocess.run(
        ["cargo", "tree", "--locked", "--package", crate, "--edges", "normal", "--prefix", "none"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found = {line.split()[0] for line in tree.stdout.splitlines() if line}
    assert crate in found
    assert len(found) >= at_least
    assert {name for name in found if name == "numpy" or name.startswith("pyo3")} == set()


def lint_imports(package_parent: Path, config: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of `config` on the package found in `package_parent`."""
    command = "import sys; sys.path.insert(0, sys.argv[1]); from importlinter.cli import lint_imports; "
    command += "sys.exit(lint_imports(config_filename=sys.argv[2], no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", command, package_parent, config],
        cwd=package_parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_import_contracts_hold_and_were_checked_on_every_module() -> None:
    run = lint_imports(PACKAGE.parent, ROOT / "pyproject.toml")
    assert run.returncode == 0, run.stdout + run.stderr
    modules = list(PACKAGE.rglob("*.py"))
    assert len(modules) >= 5
    analyzed = re.search(r"Analyzed (\d+) files", run.stdout)
    assert analyzed
    assert int(analyzed[1]) >= len(modules)
    assert "2 kept, 0 broken" in run.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("config.py", "import kvblocks.layout"),
        ("layout.py", "import kvblocks.backends"),
        ("batch.py", "import kvblocks.backends.base"),
        ("backends/base.py", "import kvblocks.batch"),
        ("backends/numpy.py", "from kvblocks.cache import PagedKVCache"),
        ("cache.py", "import torch"),
        ("cache.py", "from kvblocks.integrations import nano_vllm"),
        ("cache.py", "import prometheus_client"),
        ("integrations/nano_vllm.py", "import prometheus_client"),
    ],
)
def test_a_wrong_import_breaks_a_contract(module: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "kvblocks", ignore=shutil.ignore_patterns("cuda", "__pycache__"))
    with (tmp_path / "kvblocks" / module).open("a") as source:
        source.write(f"\n{line}\n")
    run = lint_imports(tmp_path, ROOT / "pyproject.toml")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 broken" in run.stdout


def test_no_module_imports_from_the_package_itself() -> None:
    """What the contracts cannot see, as the extension has no source: `from kvblocks import cache` for any module."""
    modules = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    assert len(modules) >= 5
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "kvblocks", f"{path}:{node.lineno}"
            if isinstance(node, ast.Import):
                assert all(alias.name != "kvblocks" for alias in node.names), f"{path}:{node.lineno}"


def scans(tree: ast.AST) -> bool:
    """Whether the code walks over files that it finds by itself."""
    walkers = {"glob", "iglob", "rglob", "iterdir", "scandir", "walk"}
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        isinstance(call, ast.Attribute)
        and call.attr in walkers
        and not (isinstance(call.value, ast.Name) and call.value.id == "ast")
        for call in calls
    )


def asserts_a_minimum(tree: ast.AST) -> bool:
    """Whether the code contains `assert len(...) >= n` or the like."""
    return any(
        isinstance(node, ast.Assert)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.GtE | ast.Eq)
        for node in ast.walk(tree)
    )


def test_every_scanner_asserts_that_it_found_something() -> None:
    """A scanner whose folder has moved passes on nothing, unless it counts what it read."""
    found = 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if scans(node):
                found += 1
                assert asserts_a_minimum(node), f"{path}:{node.lineno} scans and asserts no minimum"
    assert found >= 2
