"""The text of a kernel: a `.cu` file with its headers in place, and the definitions of an instance before it.

Owns `read_source`. Imports the standard library only.
Invariant: the text is complete (a compiler needs no search path) and depends on nothing but the files and the
definitions, so that it can be the key of a cache. `#line` marks let a compiler's messages name the real files.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "cuda"
_INCLUDE = re.compile(r'\s*#include "(?:kvblocks/)?(\w+\.cuh)"\s*')


def read_source(file: str, defines: Mapping[str, str], *, folder: Path | None = None) -> str:
    """The source of `file` (such as "write_kv.cu") with its macros defined. folder: another cuda/ folder."""
    lines = [f"#define {name} {value}" for name, value in sorted(defines.items())]
    return "\n".join([*lines, _flatten(file, folder or FOLDER), ""])


@cache
def _flatten(file: str, folder: Path) -> str:
    return "\n".join(_expand(folder / file, folder / "include" / "kvblocks", set()))


def _expand(path: Path, include: Path, seen: set[str]) -> list[str]:
    """The lines of a file, each header in the place of its first inclusion."""
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _INCLUDE.fullmatch(line)
        if match is None:
            lines.append("" if line.startswith("#pragma once") else line)
            continue
        # The host's twins are behind a condition that no device compiler meets.
        if match[1] not in seen and match[1] != "host_twins.cuh":
            seen.add(match[1])
            lines += _expand(include / match[1], include, seen)
        lines.append(f'#line {number + 1} "{path.name}"')
    return lines
