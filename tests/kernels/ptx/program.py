"""A text of PTX as instructions.

Owns `parse`. Imports the standard library only. Invariant: nothing of the text is skipped but directives and comments.
"""

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)[^{]*\{(.*?)\n\}", re.DOTALL)
_PARAM = re.compile(r"\.param \.align \d+ \.b8 (\w+)\[(\d+)\]")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>;")
_SHARED = re.compile(r"\.extern \.shared [^;]*?(\w+)\[\];")
_FILE = re.compile(r"^\s*\.file\s+(\d+) \"(?:[^\"]*/)?([^\"]+)\"", re.MULTILINE)
_PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at (\d+) (\d+))?")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


class PtxError(RuntimeError):
    """A fault, a deadlock or an instruction that the interpreter does not know, and where."""


@dataclass(frozen=True)
class Instruction:
    """guard: the predicate register, and whether it is negated."""

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    text: str
    place: str  # file and line of the source, and where that was inlined


@dataclass(frozen=True)
class Entry:
    """A kernel: instructions in order, where labels stand among them, and the widths of its registers."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    registers: dict[str, str]  # prefix such as "%rd" to type
    param: str
    shared: frozenset[str]


def parse(text: str, entry: str) -> Entry:
    """The kernel of that name in a text of PTX."""
    bodies = {match[1]: match for match in _ENTRY.finditer(text)}
    if entry not in bodies:
        raise PtxError(f"no entry {entry!r}, there are {sorted(bodies)}")
    param = _PARAM.search(bodies[entry][2])
    assert param is not None
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    files = dict(_FILE.findall(text))
    place = ""
    for raw in bodies[entry][3].splitlines():
        stripped = re.sub(r"//.*", "", raw).strip()
        if match := _PLACE.match(stripped):
            where = [f"{files[file]}:{line}" for file, line in (match.group(1, 2), match.group(3, 4)) if file]
            place = " in ".join(where)
        elif match := re.fullmatch(r"(\$\w+):", stripped):
            labels[match[1]] = len(instructions)
        elif stripped and stripped[0] not in ".{}":
            statements = (part.strip() for part in stripped.split(";"))
            instructions += [_instruction(statement, place) for statement in statements if statement]
    registers = {prefix: kind for kind, prefix, _ in _REGISTERS.findall(bodies[entry][3])}
    return Entry(entry, tuple(instructions), labels, registers, param[1], frozenset(_SHARED.findall(text)))


def _instruction(statement: str, place: str) -> Instruction:
    match = _STATEMENT.fullmatch(statement)
    if match is None:
        raise PtxError(f"not understood: {statement!r}")
    negated, guard, opcode, operands = match.groups()
    # "%r1|%p1" are two results of one instruction.
    operands = re.sub(r"(%\w+)\|(%\w+)", r"\1, \2", operands)
    return Instruction(
        tuple(opcode.replace("::", ":").split(".")),
        tuple(_OPERAND.findall(operands)),
        None if guard is None else (guard, bool(negated)),
        " ".join(statement.split()),
        place,
    )
