"""Trace files of every kind, sound and broken."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.report import UserError
from kvblocks.traces.readers import read_trace
from kvblocks.traces.trace import MAX_TOKENS, Trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "arrival,input,output\n"


def write(tmp_path: Path, data: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def columns(trace: Trace) -> list[tuple[float, int, int]]:
    assert trace.arrival_s is not None
    lengths = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    times = np.round(trace.arrival_s, 6).tolist()
    return [(time, *pair) for time, pair in zip(times, lengths, strict=True)]


def mooncake(**changes: Any) -> str:
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]}
    return json.dumps({k: v for k, v in (row | changes).items() if v is not ...}) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
            [(0.0, 374, 44), (4.314579, 396, 109)],
        ),
        (
            AZURE + "2024-05-10 23:59:59.5+00:00,3,4\n2024-05-11T01:00:01.5+01:00,5,6\n",
            [(0.0, 3, 4), (2.0, 5, 6)],
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,A,472,18,490,\n45,B,87,131,218,\n",
            [(0.0, 472, 18), (40.0, 87, 131)],
        ),
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n5,1,0.5,A,472,18\n",
            [(0.0, 472, 18)],
        ),
        (PLAIN + "1.5,10,20\n2.0,30,40\n", [(0.0, 10, 20), (0.5, 30, 40)]),
        (
            "output_tokens, Input Tokens ,arrival_ms\n20,10,1500\n40,30.0,2000\n",
            [(0.0, 10, 20), (0.5, 30, 40)],
        ),
    ],
    ids=["azure 2023", "azure 2024", "burstgpt", "burstgpt with sessions", "plain", "plain in milliseconds"],
)
def test_csv_by_the_names_of_its_columns(
    tmp_path: Path, text: str, expected: list[tuple[float, int, int]]
) -> None:
    assert columns(read_trace(write(tmp_path, text))) == expected


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path, mooncake() + mooncake(timestamp=1500, hash_ids=[7, 30], input_length=513))
    )
    assert columns(trace) == [(0.0, 1000, 5), (1.5, 513, 5)]
    assert trace.tokens_per_id == 512
    assert trace.ids.tolist() == [0, 1, 0, 2]
    assert trace.session is None


def test_qwen_chats_are_conversations(tmp_path: Path) -> None:
    row = {
        "timestamp": 61.114,
        "input_length": 20,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": [1, 2],
    }
    rows = [
        row | {"chat_id": 10, "parent_chat_id": -1},
        row | {"chat_id": 11, "parent_chat_id": -1},
        row | {"chat_id": 12, "parent_chat_id": 10, "timestamp": 62.114},
    ]
    trace = read_trace(write(tmp_path, "".join(json.dumps(item) + "\n" for item in rows)))
    assert columns(trace) == [(0.0, 20, 5), (0.0, 20, 5), (1.0, 20, 5)]
    assert trace.tokens_per_id == 16
    assert trace.session is not None
    assert trace.session.tolist() == [0, 1, 0]


def test_lmcache_sessions(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path, mooncake(session="a", t_session_ms=0, input_length=40, hash_ids=[3, 4]) * 2)
    )
    assert trace.tokens_per_id == 16
    assert trace.session is not None
    assert trace.session.tolist() == [0, 0]


def test_json_lines_without_ids_or_with_ids_of_another_size(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, mooncake(hash_ids=...))).tokens_per_id == 0
    trace = read_trace(write(tmp_path, mooncake(input_length=30)), tokens_per_id=16)
    assert trace.tokens_per_id == 16


@pytest.mark.parametrize("kind", ["plain", "gzip", "byte order mark", "mixed line ends", "no last line end"])
def test_the_same_rows_however_they_are_stored(tmp_path: Path, kind: str) -> None:
    data = (PLAIN + "0,1,2\n1,3,4\n\n2,5,6\n").encode()
    if kind == "gzip":
        data = gzip.compress(data)
    elif kind == "byte order mark":
        data = b"\xef\xbb\xbf" + data
    elif kind == "mixed line ends":
        data = data.replace(b"\n", b"\r\n", 2).replace(b"3,4\n", b"3,4\r")
    elif kind == "no last line end":
        data = data.rstrip()
    assert columns(read_trace(write(tmp_path, data))) == [(0.0, 1, 2), (1.0, 3, 4), (2.0, 5, 6)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("0,-5,2", "prompt tokens: -5, expected 0 to"),
        ("0,5,-2", "output tokens: -2, expected 0 to"),
        (f"0,{MAX_TOKENS + 1},2", "prompt tokens: 16777217, expected 0 to 16,777,216"),
        ("0,5.5,2", "input: '5.5', expected a whole number"),
        ("0,five,2", "input: 'five', expected a number"),
        ("0,inf,2", "input: 'inf', expected a whole number"),
        ("0,5", "output: the row has 2 of 3 columns"),
        ("-1,5,2", "arrival: -1.0, expected a finite time >= 0"),
        ("nan,5,2", "arrival: nan, expected a finite time >= 0"),
        ("soon,5,2", "arrival: 'soon', expected seconds or a time"),
        ("2023-02-30 00:00:00,5,2", "arrival: '2023-02-30 00:00:00': day"),
        ('"0,5,2', "arrival: '0,5,2', expected seconds"),
        (b"0,\xff\xfe,2", "input: "),
    ],
)
def test_a_broken_csv_row_is_counted_and_named(tmp_path: Path, row: str | bytes, problem: str) -> None:
    raw = row.encode() if isinstance(row, str) else row
    path = write(tmp_path, PLAIN.encode() + b"0,1,2\n" + raw + b"\n1,3,4\n")
    trace = read_trace(path)
    assert columns(trace) == [(0.0, 1, 2), (1.0, 3, 4)]
    assert trace.skipped.bad_lines == 1
    assert trace.skipped.bad_examples[0].startswith(f"{path}:3: {problem}")
    with pytest.raises(UserError, match=r"trace:3: "):
        read_trace(path, strict=True)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 0, "input_le', "line: not JSON: "),
        ("[" * 100_000, "line: not JSON: "),
        ("7", "line: expected a JSON object"),
        (mooncake(input_length=...), "input_length: the field is missing"),
        (mooncake(timestamp=...), "timestamp: the field is missing"),
        (mooncake(timestamp="now"), "timestamp: 'now', expected a number"),
        (mooncake(timestamp=float("nan")), "arrival: inf, expected a finite time"),
        (mooncake(output_length="5"), "output_length: '5', expected a whole number"),
        (mooncake(output_length=True), "output_length: True, expected a whole number"),
        (mooncake(hash_ids=[]), "hash_ids: 0 ids for 1000 prompt tokens, expected 2 of 512 tokens each"),
        (mooncake(hash_ids=[1, 2, 3]), "hash_ids: 3 ids for 1000 prompt tokens, expected 2 of 512"),
        (mooncake(hash_ids=[1, -2]), "hash_ids: expected a list of integers >= 0"),
        (mooncake(hash_ids={"a": 1}), "hash_ids: expected a list of integers >= 0"),
    ],
)
def test_a_broken_json_line_is_counted_and_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path, mooncake() + line.rstrip() + "\n" + mooncake())
    trace = read_trace(path)
    assert len(trace) == 2
    assert trace.skipped.bad_lines == 1
    assert trace.skipped.bad_examples[0].startswith(f"{path}:2: {problem}")
    # Also where it comes first, and the kind of file is not known yet.
    if line.startswith("{"):
        assert len(read_trace(write(tmp_path, line.rstrip() + "\n" + mooncake() * 2))) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"trace: the file is empty"),
        (b"\n \n", r"trace: the file is empty"),
        (b"a,b,c\n1,2,3\n", r"trace:1: no column of prompt tokens among 'a', 'b', 'c': expected such as"),
        (b"arrival,input\n1,2\n", r"trace:1: no column of output tokens"),
        (PLAIN.encode(), r"trace: no request in it"),
        (b'[{"timestamp": 0}]', r"trace:1: a JSON array: expected one JSON object a line"),
        (PLAIN.encode() + b"x,1,2\ny,1,2\n1,1,2\n", r"trace:2: arrival: 'x', .*2 broken lines, 1 requests"),
        ("arrival,input,output\n0,1,2\n".encode("utf-16"), r"trace:1: UTF-16 text: expected UTF-8"),
        (gzip.compress(PLAIN.encode() * 5000)[:-20], r"trace:\d+: the gzip data is damaged or ends early"),
        (b"\x1f\x8bnothing", r"trace:1: the gzip data is damaged|cannot read"),
    ],
)
def test_a_file_of_no_use_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trace(write(tmp_path, data))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing: cannot read: No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(UserError, match=r"cannot read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(UserError, match=r"format is 'xml': expected one of auto, csv"):
        read_trace(tmp_path, format="xml")


def test_times_out_of_order_are_sorted_with_their_ids(tmp_path: Path) -> None:
    text = mooncake(timestamp=2000, hash_ids=[1, 2]) + mooncake(
        timestamp=1000, hash_ids=[3], input_length=512
    )
    text += mooncake(timestamp=2000, hash_ids=[4, 5], output_length=9)
    trace = read_trace(write(tmp_path, text))
    assert columns(trace) == [(0.0, 512, 5), (1.0, 1000, 5), (1.0, 1000, 9)]
    assert trace.ids.tolist() == [2, 0, 1, 3, 4]
    assert trace.starts.tolist() == [0, 1, 3, 5]
    assert trace.skipped.out_of_order == 1


def test_empty_requests_and_repeated_ids_are_counted(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "id,arrival,input,output\na,0,1,2\nb,1,0,2\nc,2,3,0\na,3,3,4\n"))
    assert columns(trace) == [(0.0, 1, 2), (3.0, 3, 4)]
    assert (trace.skipped.empty_requests, trace.skipped.repeated_ids) == (2, 1)


def test_times_in_another_unit(tmp_path: Path) -> None:
    seconds = write(tmp_path, mooncake() + mooncake(timestamp=3))
    assert columns(read_trace(seconds, time_unit_s=1.0))[1][0] == 3.0
    milliseconds = write(tmp_path, PLAIN + "0,1,2\n3,1,2\n")
    assert columns(read_trace(milliseconds, time_unit_s=1e-3))[1][0] == 0.003


def test_no_times_and_a_limit(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "input,output\n1,2\n3,4\n5,6\n"), limit=2)
    assert trace.arrival_s is None
    assert trace.prompt_tokens.tolist() == [1, 3]


SOUND: dict[str, list[bytes]] = {
    "json": [mooncake().encode(), mooncake(timestamp=5, hash_ids=[7, 8]).encode()],
    "csv": [PLAIN.encode(), b"0,1,2\n", b"2023-11-16 18:15:46.68,3,4\n"],
}


@given(
    st.sampled_from(sorted(SOUND)),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3), st.binary(max_size=4)), max_size=4),
    st.booleans(),
)
def test_whatever_the_bytes_it_is_a_trace_or_one_error(
    kind: str, edits: list[tuple[int, int, bytes]], is_gzip: bool
) -> None:
    data = b"".join(SOUND[kind])
    if is_gzip:
        data = gzip.compress(data)
    for at, removed, added in edits:
        at %= len(data) + 1
        data = data[:at] + added + data[at + removed :]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), data)
        trace, problem = None, ""
        try:
            trace = read_trace(path)
        except UserError as error:
            problem = str(error)
    if trace is None:
        assert str(path) in problem
        return
    assert len(trace) >= 1
    assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 1
    assert trace.skipped.bad_lines <= len(data) + 1


@pytest.mark.parametrize("number", ["1_000", "\u0663", "\uff11"])
def test_a_number_that_only_python_reads_is_broken(number: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"arrival,input,output\n0,{number},2\n1,4,{number}\n{number},4,2\n2,4,2\n3,4,2\n4,4,2\n")
    trace = read_trace(path)
    assert trace.arrival_s is not None
    assert (trace.arrival_s.tolist(), trace.skipped.bad_lines) == ([0.0, 1.0, 2.0], 3)


def test_times_of_another_kind_and_hours_of_no_clock_are_broken(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    times = [
        "2023-11-16 18:15:46.5",
        "5",
        "2023-11-16 25:00:00",
        "2023-11-16 18:61:00",
        "2023-11-16T18:15:48Z",
    ]
    rows = "".join(f"{time},{number},2\n" for number, time in enumerate(times * 2, 1))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows + "2023-11-16 18:15:47,4,2\n" * 5)
    trace = read_trace(path)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0.0, 0.0, *[0.5] * 5, 1.5, 1.5]
    assert trace.skipped.bad_lines == 6
    assert "'5', expected a date and time, as in the first row" in trace.skipped.bad_examples[0]
    path.write_text("arrival,input,output\n1,1,2\n2,4,2\n2023-11-16 18:15:46,3,1\n")
    assert "expected a number" in read_trace(path).skipped.bad_examples[0]
