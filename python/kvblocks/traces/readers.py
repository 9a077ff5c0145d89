"""Trace files: Mooncake, Qwen-Bailian and LMCache JSON lines, and CSV with the columns of Azure, BurstGPT or your own.

Owns `read_trace`. Imports report and trace. Invariant: a row is used, or counted with its reason; a file of which no
use can be made is a UserError with the file, the line, the field and what was expected.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvblocks.report import UserError
from kvblocks.traces.trace import MAX_TOKENS, Skipped, Trace

NUM_EXAMPLES: Final = 5
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True)
class Dialect:
    """How JSON lines are meant: what one unit of `timestamp` is in seconds, and how many tokens a hash id has."""

    time_unit_s: float
    tokens_per_id: int


DIALECTS: Final = {
    "mooncake": Dialect(1e-3, 512),
    "qwen": Dialect(1.0, 16),
    "lmcache": Dialect(1e-3, 16),
}
FORMATS: Final = ("auto", "csv", *DIALECTS)

# Names of CSV columns, in lower case and without spaces, underscores and dashes; the first that a file has is used.
_ARRIVAL_S: Final = ("timestamp", "arrival", "arrivals", "arrivaltime", "arrivedat", "time", "timestamps")
_ARRIVAL_MS: Final = ("timestampms", "arrivalms", "arrivaltimems", "timems")
_PROMPT: Final = (
    *("contexttokens", "requesttokens", "input", "inputlength", "inputlen", "inputtokens", "numinputtokens"),
    *("prompt", "promptlength", "promptlen", "prompttokens", "numprefilltokens", "numprompttokens"),
)
_OUTPUT: Final = (
    *("generatedtokens", "responsetokens", "output", "outputlength", "outputlen", "outputtokens"),
    *("numoutputtokens", "completiontokens", "numdecodetokens"),
)
_REQUEST_ID: Final = ("requestid", "id")
_SESSION: Final = ("sessionid", "session")

_TIMESTAMP: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_EPOCH: Final = datetime(1970, 1, 1)


class _BadRowError(Exception):
    """A row that cannot be used: the field, and what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


@dataclass
class _Row:
    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    ids: list[int] | None = None
    request_id: object = None
    session: object = None


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",  # noqa: A002
    tokens_per_id: int | None = None,
    time_unit_s: float | None = None,
    strict: bool = False,
    limit: int | None = None,
) -> Trace:
    """Read a trace file, plain or gzip. O(file); memory O(requests + hash ids).

    format: "auto" looks at the file; "csv", or the dialect of JSON lines. tokens_per_id: tokens of a hash id, by
    default the dialect's; time_unit_s: seconds of one unit of a time that is a number, likewise. strict: the first
    broken line is an error. limit: read so many sound rows only.

    Raises UserError for a file that cannot be read, has not the columns, has no sound row, or more broken ones
    than sound ones.
    """
    if format not in FORMATS:
        raise UserError(f"format is {format!r}: expected one of {', '.join(FORMATS)}")
    path = Path(path)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path}: the file is empty: expected a CSV header or a JSON object a line")
    if first[1].startswith("["):
        raise UserError(f"{path}:{first[0]}: a JSON array: expected one JSON object a line")
    if format == "csv" or (format == "auto" and not first[1].startswith("{")):
        rows: Iterator[tuple[int, _Row | _BadRowError]] = _csv_rows(
            path, _chain(first, lines), time_unit_s or 1.0
        )
        columns = _Columns(path.name, 0, strict)
    else:
        dialect, rows = _json_rows(path, _chain(first, lines), format, tokens_per_id, time_unit_s)
        columns = _Columns(path.name, dialect.tokens_per_id, strict)
    for number, row in rows:
        columns.add(path, number, row)
        if limit is not None and len(columns.prompt) >= limit:
            break
    return columns.trace(path)


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, without their ends, whichever those are, and without a byte order mark."""
    number = 0
    try:
        with path.open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            if magic in (b"\xff\xfe", b"\xfe\xff"):
                raise UserError(f"{path}:1: UTF-16 text: expected UTF-8")
            source = gzip.GzipFile(fileobj=raw) if magic == b"\x1f\x8b" else raw
            # What is not UTF-8 becomes a character that no number has, and its row a broken one.
            text = io.TextIOWrapper(source, encoding="utf-8-sig", errors="replace")
            for number, line in enumerate(text, 1):
                if stripped := line.strip():
                    yield number, stripped
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}:{number + 1}: the gzip data is damaged or ends early: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}") from error


class _Columns:
    """Grows the columns of a trace row by row, and counts what it leaves out."""

    def __init__(self, name: str, tokens_per_id: int, strict: bool) -> None:
        self.name = name
        self.tokens_per_id = tokens_per_id
        self.strict = strict
        self.arrival = array("d")
        self.prompt = array("i")
        self.output = array("i")
        self.ids = array("i")
        self.starts = array("q", [0])
        self.session = array("i")
        self.dense: dict[int, int] = {}
        self.sessions: dict[object, int] = {}
        self.seen: set[object] = set()
        self.num_bad = self.num_empty = self.num_repeated = self.num_unordered = 0
        self.latest = -math.inf
        self.examples: list[str] = []

    def add(self, path: Path, number: int, row: _Row | _BadRowError) -> None:
        if isinstance(row, _Row):
            try:
                self._check(row)
            except _BadRowError as error:
                row = error
        if isinstance(row, _BadRowError):
            where = f"{path}:{number}: {row}"
            if self.strict:
                raise UserError(where)
            self.num_bad += 1
            if len(self.examples) < NUM_EXAMPLES:
                self.examples.append(where)
            return
        if row.prompt_tokens == 0 or row.output_tokens == 0:
            self.num_empty += 1
            return
        if row.request_id is not None:
            self.num_repeated += row.request_id in self.seen
            self.seen.add(row.request_id)
        if row.arrival_s is not None:
            self.num_unordered += row.arrival_s < self.latest
            self.latest = max(self.latest, row.arrival_s)
            self.arrival.append(row.arrival_s)
        self.prompt.append(row.prompt_tokens)
        self.output.append(row.output_tokens)
        if row.ids is not None:
            dense = self.dense
            self.ids.extend(dense.setdefault(h, len(dense)) for h in row.ids)
        self.starts.append(len(self.ids))
        if row.session is not None:
            self.session.append(self.sessions.setdefault(row.session, len(self.sessions)))

    def _check(self, row: _Row) -> None:
        for field, value in (("prompt tokens", row.prompt_tokens), ("output tokens", row.output_tokens)):
            if not 0 <= value <= MAX_TOKENS:
                raise _BadRowError(field, f"{value}, expected 0 to {MAX_TOKENS:,}")
        if row.arrival_s is not None and not 0 <= row.arrival_s < math.inf:
            raise _BadRowError("arrival", f"{row.arrival_s}, expected a finite time >= 0")
        if row.ids is not None:
            size = self.tokens_per_id
            whole, rest = divmod(row.prompt_tokens, size)
            if not whole <= len(row.ids) <= whole + (rest > 0):
                raise _BadRowError(
                    "hash_ids",
                    f"{len(row.ids)} ids for {row.prompt_tokens} prompt tokens, expected {whole + (rest > 0)} "
                    f"of {size} tokens each (--tokens-per-id)",
                )

    def trace(self, path: Path) -> Trace:
        num_rows = len(self.prompt)
        if num_rows == 0 or self.num_bad > num_rows + self.num_empty:
            if self.examples:
                raise UserError(
                    f"{self.examples[0]} ({self.num_bad:,} broken lines, {num_rows:,} requests in the file)"
                )
            raise UserError(f"{path}: no request in it: expected rows with prompt and output tokens")
        arrival = np.array(self.arrival) if len(self.arrival) == num_rows else None
        trace = Trace(
            self.name,
            arrival,
            np.array(self.prompt, np.int32),
            np.array(self.output, np.int32),
            self.tokens_per_id if len(self.ids) else 0,
            np.array(self.ids, np.int32),
            np.array(self.starts, np.int64),
            np.array(self.session, np.int32) if len(self.session) == num_rows else None,
            Skipped(
                self.num_bad, tuple(self.examples), self.num_empty, self.num_unordered, self.num_repeated
            ),
        )
        return trace if arrival is None else trace.in_order()


def _json_rows(
    path: Path,
    lines: Iterator[tuple[int, str]],
    name: str,
    tokens_per_id: int | None,
    time_unit_s: float | None,
) -> tuple[Dialect, Iterator[tuple[int, _Row | _BadRowError]]]:
    """The dialect, by its name or the fields of the first sound object, and the rows."""
    ahead: list[tuple[int, dict[str, Any] | _BadRowError]] = []
    objects = ((number, _object(line)) for number, line in lines)
    if name == "auto":
        name = "mooncake"
        for number, found in objects:
            ahead.append((number, found))
            if isinstance(found, dict):
                if "parent_chat_id" in found or "chat_id" in found:
                    name = "qwen"
                elif "session" in found:
                    name = "lmcache"
                break
    elif name not in DIALECTS:
        raise UserError(f"{path}: format {name!r} is not one of JSON lines")
    dialect = DIALECTS[name]
    dialect = Dialect(time_unit_s or dialect.time_unit_s, tokens_per_id or dialect.tokens_per_id)

    def rows() -> Iterator[tuple[int, _Row | _BadRowError]]:
        roots: dict[object, object] = {}
        for batch in (iter(ahead), objects):
            for number, found in batch:
                if isinstance(found, dict):
                    try:
                        yield number, _json_row(found, dialect, roots)
                    except _BadRowError as error:
                        yield number, error
                else:
                    yield number, found

    return dialect, rows()


def _object(line: str) -> dict[str, Any] | _BadRowError:
    try:
        found = json.loads(line)
    except ValueError as error:
        return _BadRowError("line", f"not JSON: {error}")
    except RecursionError:
        return _BadRowError("line", "not JSON: nested too deeply")
    return found if isinstance(found, dict) else _BadRowError("line", "expected a JSON object")


def _json_row(found: dict[str, Any], dialect: Dialect, roots: dict[object, object]) -> _Row:
    ids = found.get("hash_ids")
    if ids is not None and not (
        isinstance(ids, list)
        and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids)
    ):
        raise _BadRowError("hash_ids", "expected a list of integers >= 0")
    arrival = None
    if "timestamp" in found:
        value = found["timestamp"]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _BadRowError("timestamp", f"{value!r}, expected a number")
        arrival = float(value) * dialect.time_unit_s if abs(value) < 1e300 else math.inf
    else:
        raise _BadRowError("timestamp", "the field is missing")
    row = _Row(arrival, _count(found, "input_length"), _count(found, "output_length"), ids)
    if "session" in found:
        row.session = str(found["session"])
    if (chat := found.get("chat_id")) is not None:
        # A chat's root names the conversation; the parent of a root is -1.
        parent = found.get("parent_chat_id")
        row.request_id = str(chat)
        row.session = roots[str(chat)] = roots.get(str(parent), str(chat))
    return row


def _count(found: dict[str, Any], field: str) -> int:
    if field not in found:
        raise _BadRowError(field, "the field is missing")
    value = found[field]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BadRowError(field, f"{value!r}, expected a whole number of tokens")
    return value


def _csv_rows(
    path: Path, lines: Iterator[tuple[int, str]], time_unit_s: float
) -> Iterator[tuple[int, _Row | _BadRowError]]:
    number, line = next(lines)
    header = next(csv.reader([line]))
    place = {re.sub(r"[\s_-]", "", name.lower()): at for at, name in reversed([*enumerate(header)])}

    def find(names: tuple[str, ...]) -> int | None:
        return next((place[name] for name in names if name in place), None)

    prompt, output = find(_PROMPT), find(_OUTPUT)
    if prompt is None or output is None:
        missing = "prompt" if prompt is None else "output"
        raise UserError(
            f"{path}:{number}: no column of {missing} tokens among {', '.join(map(repr, header))[:300]}: expected "
            "such as 'arrival,input,output', 'TIMESTAMP,ContextTokens,GeneratedTokens' or 'Timestamp,Request tokens,"
            "Response tokens'"
        )
    seconds, milliseconds = find(_ARRIVAL_S), find(_ARRIVAL_MS)
    request_id, session = find(_REQUEST_ID), find(_SESSION)

    def cell(cells: list[str], at: int) -> str:
        if at >= len(cells):
            raise _BadRowError(header[at], f"the row has {len(cells)} of {len(header)} columns")
        return cells[at].strip()

    # Whether times are dates, which differ from plain seconds by half a century; the first time of the file says.
    dated: bool | None = None

    def time(field: str, text: str) -> float:
        nonlocal dated
        match = _TIMESTAMP.fullmatch(text)
        value = _seconds(field, text) * time_unit_s if match is None else _date_time(field, match)
        if dated is None:
            dated = match is not None
        elif dated != (match is not None):
            kind = "a date and time" if dated else "a number"
            raise _BadRowError(field, f"{text[:40]!r}, expected {kind}, as in the first row")
        return value

    def row(cells: list[str]) -> _Row:
        arrival = None
        if seconds is not None:
            arrival = time(header[seconds], cell(cells, seconds))
        elif milliseconds is not None:
            arrival = 1e-3 * _number(header[milliseconds], cell(cells, milliseconds))
        return _Row(
            arrival,
            _whole(header[prompt], cell(cells, prompt)),
            _whole(header[output], cell(cells, output)),
            request_id=None if request_id is None else cell(cells, request_id),
            session=None if session is None else cell(cells, session),
        )

    def row_or_error(line: str) -> _Row | _BadRowError:
        try:
            return row(next(csv.reader([line])))
        except csv.Error as error:
            return _BadRowError("line", f"not CSV: {error}")
        except _BadRowError as error:
            return error

    for number, line in lines:
        yield number, row_or_error(line)


def _plain(text: str) -> str:
    """The text of a number; ValueError for what Python reads as one and no trace writes, such as 1_000."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def _number(field: str, text: str) -> float:
    try:
        return float(_plain(text))
    except ValueError:
        raise _BadRowError(field, f"{text[:40]!r}, expected a number") from None


def _whole(field: str, text: str) -> int:
    try:
        return int(_plain(text))
    except ValueError:
        number = _number(field, text)
        if not number.is_integer():
            raise _BadRowError(field, f"{text[:40]!r}, expected a whole number of tokens") from None
        return int(number)


def _seconds(field: str, text: str) -> float:
    try:
        return float(_plain(text))
    except ValueError:
        raise _BadRowError(
            field, f"{text[:40]!r}, expected seconds or a time such as 2023-11-16 18:15:46.68"
        ) from None


def _date_time(field: str, match: re.Match[str]) -> float:
    """Seconds of what `_TIMESTAMP` matched, of which only differences are used."""
    day, hour, minute, second, fraction, zone = match.groups()
    try:
        begin = datetime.fromisoformat(f"{day} {hour}:{minute}:{second}") - _EPOCH
    except ValueError as error:
        raise _BadRowError(field, f"{match[0][:40]!r}: {error}") from None
    offset = 0
    if zone and zone != "Z":
        offset = (int(zone[1:3]) * 60 + int(zone[-2:])) * (-60 if zone[0] == "-" else 60)
    return begin / timedelta(seconds=1) + float(fraction or 0) - offset
