"""The requests file: what it may hold, and the one line that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from smollm2.prompts import Prompt, PromptsError, read_prompts


def _read(tmp_path: Path, text: str) -> list[Prompt]:
    path = tmp_path / "requests.jsonl"
    path.write_text(text, "utf-8")
    return read_prompts(path)


def test_options_and_system_prompts(tmp_path: Path) -> None:
    assert _read(
        tmp_path,
        '{"prompt": "a"}\n\n{"system": "s"}\n{"prompt": "ü", "samples": 4, "temperature": 1}\n'
        '{"system": "t"}\n{"prompt": "c", "top_k": 5, "seed": 9, "max_new_tokens": 3}',
    ) == [
        Prompt("a"),
        Prompt("ü", "s", samples=4, temperature=1),
        Prompt("c", "t", top_k=5, seed=9, max_new_tokens=3),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "not JSON: .* at column 15"),
        ("[1]", 'expected an object with either "prompt" or "system"'),
        ('{"samples": 2}', 'expected an object with either "prompt" or "system"'),
        ('{"prompt": "a", "system": "b"}', 'expected an object with either "prompt" or "system"'),
        ('{"system": "a", "samples": 2}', '"system" stands alone'),
        ('{"prompt": "a", "sample": 2}', "unknown field 'sample'; known are prompt, system, samples"),
        ('{"prompt": " "}', 'prompt is " ", expected a text'),
        ('{"prompt": 7}', "prompt is 7, expected a text"),
        (r'{"prompt": "\ud800 hi"}', r'prompt is "\\ud800 hi", expected a text of whole characters'),
        ("[" * 200_000, "not JSON: nested too deeply"),
        ('{"prompt": ' + "[" * 200_000, "not JSON: nested too deeply"),
        ('{"prompt": "a", "samples": 0}', "samples is 0, expected a whole number from 1"),
        ('{"prompt": "a", "samples": true}', "samples is true, expected"),
        ('{"prompt": "a", "samples": 1e3}', "samples is 1000.0, expected"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1, expected a number from 0 to 100"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is NaN, expected"),
        ('{"prompt": "a", "top_k": "5"}', 'top_k is "5", expected'),
        ('{"prompt": "a", "seed": -5}', "seed is -5, expected"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0, expected"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(PromptsError, match=f"requests.jsonl, line 3: {words}") as raised:
        _read(tmp_path, f'{{"prompt": "good"}}\n\n{line}\n')
    assert "\n" not in str(raised.value)


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    separators = "a\u2028b\u2029c\u0085d"
    assert _read(tmp_path, f'{{"prompt": "{separators}"}}\r\n{{"prompt": "e"}}') == [
        Prompt(separators),
        Prompt("e"),
    ]


def test_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    assert _read(tmp_path, '\ufeff{"prompt": "a"}\n') == [Prompt("a")]


@pytest.mark.parametrize("text", ["", "\n\n", '{"system": "alone"}\n'])
def test_file_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(PromptsError, match="no request; write lines such as"):
        _read(tmp_path, text)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"cannot read .*absent.jsonl: No such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(PromptsError, match="cannot read"):
        read_prompts(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "ü"}'.encode("latin-1"))
    with pytest.raises(PromptsError, match=r"cannot read .*latin.jsonl: .*utf-8"):
        read_prompts(tmp_path / "latin.jsonl")
