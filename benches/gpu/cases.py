"""The rows of the table: what each moves, how long that takes at least, and what it should take.

Owns `Case`, `CASES` and `verdict`. Imports the standard library only, so that it can be tested anywhere.
One layer with the heads of Llama-3-8B (32 query heads, 8 of K and V, of 128 elements), blocks of 16 tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

NUM_Q_HEADS: Final = 32
NUM_KV_HEADS: Final = 8
HEAD_DIM: Final = 128
BLOCK_SIZE: Final = 16
# Copy, bytes read and written, at which the goals in microseconds were set.
REFERENCE_COPY: Final = 4.3e12
ELEMENT_BYTES: Final = {"bfloat16": 2, "fp8_e4m3": 1, "fp8_e4m3:tensor": 1, "int8": 1}


@dataclass(frozen=True)
class Goal:
    """What a case should take: microseconds at REFERENCE_COPY, a share of the copy, or so many times faster than one.

    kind: "us", "copy" (share of the measured copy) or "speedup" over the case `against`.
    """

    kind: str
    must: float
    stretch: float
    against: str = ""


@dataclass(frozen=True)
class Case:
    """A row. call: "decode", "write" or "copy". num_bytes: what has to move at the least."""

    name: str
    call: str
    kv_format: str
    num_seqs: int
    seq_len: int
    goal: Goal
    num_splits: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes read and written, by the formulas of docs/gpu.md."""
        kv = NUM_KV_HEADS * 2 * HEAD_DIM
        if self.call == "copy":
            return 2 * self.num_seqs * self.seq_len * 64 * 1024  # blocks x layers of 64 KiB
        stored = ELEMENT_BYTES[self.kv_format]
        scales = 2 * NUM_KV_HEADS * 4 if self.kv_format == "int8" else 0
        tokens = self.num_seqs * self.seq_len
        if self.call == "write":
            return tokens * (kv * (2 + stored) + scales + 8)
        queries = self.num_seqs * NUM_Q_HEADS * 2 * HEAD_DIM * 2
        table = self.num_seqs * -(-self.seq_len // BLOCK_SIZE) * 4
        partial = 0
        if self.num_splits > 1:
            partial = 2 * self.num_seqs * NUM_Q_HEADS * self.num_splits * (HEAD_DIM + 1) * 4
        return tokens * (kv * stored + scales) + queries + table + partial

    def floor_us(self, copy: float) -> float:
        """Microseconds that moving the bytes takes at a copy of so many bytes a second."""
        return self.num_bytes / copy * 1e6


CASES: Final = (
    Case("decode bf16, 64 x 8k", "decode", "bfloat16", 64, 8192, Goal("us", 555, 540)),
    Case(
        "decode e4m3, 64 x 8k",
        "decode",
        "fp8_e4m3:tensor",
        64,
        8192,
        Goal("speedup", 1.6, 1.8, "decode bf16, 64 x 8k"),
    ),
    Case(
        "decode int8 per token and head, 64 x 8k",
        "decode",
        "int8",
        64,
        8192,
        Goal("speedup", 1.5, 1.75, "decode bf16, 64 x 8k"),
    ),
    Case("decode bf16, 1 x 8k, cold L2", "decode", "bfloat16", 1, 8192, Goal("us", 20, 15), num_splits=33),
    Case("write e4m3, 8,192 tokens", "write", "fp8_e4m3:tensor", 1, 8192, Goal("copy", 0.8, 0.9)),
    Case("copy 1,000 blocks x 32 layers", "copy", "bfloat16", 1000, 32, Goal("copy", 0.9, 0.95)),
)


def verdict(case: Case, measured_us: Mapping[str, float], copy: float) -> tuple[str, str]:
    """What was reached, in the goal's own terms, and "stretch", "must" or "missed"; "-" where it was not measured."""
    if case.name not in measured_us or (case.goal.against and case.goal.against not in measured_us):
        return "-", "-"
    took, goal = measured_us[case.name], case.goal
    if goal.kind == "us":
        scale = REFERENCE_COPY / copy
        reached = f"{took:.1f} us of {goal.must * scale:.1f}"
        good, best = took <= goal.must * scale, took <= goal.stretch * scale
    else:
        value = measured_us[goal.against] / took if goal.kind == "speedup" else case.floor_us(copy) / took
        reached = f"{value:.2f}x" if goal.kind == "speedup" else f"{value:.0%} of copy"
        good, best = value >= goal.must, value >= goal.stretch
    return reached, "stretch" if best else "must" if good else "missed"


def markdown(results: Mapping[str, object]) -> str:
    """The page of a result: the machine, the ceilings, the checks, the table."""
    lines = [f"# {results.get('device', 'no device')}, {results.get('date', '')}", ""]
    lines += [f"- {name}: {value}" for name, value in results.items() if isinstance(value, (str, int, float))]
    copy = results.get("copy_bytes_per_s")
    measured = results.get("cases_us")
    if isinstance(copy, float) and isinstance(measured, dict):
        others = results.get("others_us")
        others = others if isinstance(others, dict) else {}
        lines += [
            "",
            "| case | floor us | measured us | reached | goal | others us |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for case in CASES:
            reached, met = verdict(case, measured, copy)
            took = f"{measured[case.name]:.1f}" if case.name in measured else "-"
            beside = ", ".join(f"{name} {us:.1f}" for name, us in others.get(case.name, {}).items()) or "-"
            lines.append(
                f"| {case.name} | {case.floor_us(copy):.1f} | {took} | {reached} | {met} | {beside} |"
            )
    failures = results.get("failures")
    if isinstance(failures, dict) and failures:
        lines += ["", "Not measured:", "", *(f"- {name}: {reason}" for name, reason in failures.items())]
    return "\n".join([*lines, ""])
