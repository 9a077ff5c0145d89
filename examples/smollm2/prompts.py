"""The requests file: JSON lines, each a prompt with options, or a system prompt for the lines that follow.

    {"system": "You are a patient teacher."}
    {"prompt": "Why is the sky blue?"}
    {"prompt": "Name a cat.", "samples": 4, "temperature": 0.8, "top_k": 40, "seed": 1, "max_new_tokens": 16}

Owns: the format and its error messages. May import: the standard library.
Invariant: a file is accepted whole or refused with the file, the line and the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PromptsError(ValueError):
    """A requests file that cannot be used; the message is one line."""


@dataclass(frozen=True)
class Prompt:
    """One request of the file; `max_new_tokens` None leaves it to the program."""

    prompt: str
    system: str | None = None
    samples: int = 1
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    max_new_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """The requests of a file, in order; empty lines are skipped. Raises PromptsError."""
    try:
        # Not splitlines: the other line separators of Unicode may stand inside a JSON string.
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    system, prompts = None, []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                fields = _parse(line)
            except (ValueError, RecursionError) as error:
                problem = error if isinstance(error, ValueError) else "not JSON: nested too deeply"
                raise PromptsError(f"{path}, line {number}: {problem}") from error
            if "system" in fields:
                system = fields["system"]
            else:
                prompts.append(Prompt(system=system, **fields))
    if not prompts:
        raise PromptsError(f'{path}: no request; write lines such as {{"prompt": "Why is the sky blue?"}}')
    return prompts


def _parse(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("system" in fields):
        raise ValueError('expected an object with either "prompt" or "system"')
    if "system" in fields and len(fields) > 1:
        raise ValueError('"system" stands alone on its line')
    for name, value in fields.items():
        if name not in _FIELDS:
            raise ValueError(f"unknown field {name!r}; known are {', '.join(_FIELDS)}")
        is_valid, expected = _FIELDS[name]
        if not is_valid(value):
            raise ValueError(f"{name} is {json.dumps(value)[:40]}, expected {expected}")
    return fields


def _text(value: Any) -> bool:
    # JSON can spell half of a surrogate pair, which is no character.
    return isinstance(value, str) and bool(value.strip()) and not re.search("[\ud800-\udfff]", value)


def _temperature(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 100


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < 2**31


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_text, "a text of whole characters"),
    "system": (_text, "a text of whole characters"),
    "samples": (_integer(1), "a whole number from 1"),
    "temperature": (_temperature, "a number from 0 to 100"),
    "top_k": (_integer(0), "a whole number from 0"),
    "seed": (_integer(0), "a whole number from 0"),
    "max_new_tokens": (_integer(1), "a whole number from 1"),
}
