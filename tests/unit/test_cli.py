"""The command line around the commands."""

import subprocess
import sys

import pytest

from kvblocks.cli import COMMANDS, main


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert [name for name, _, _ in COMMANDS if f"\n    {name} " not in printed] == []


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["forecast"])
    assert exit_.value.code == 2
    assert "invalid choice: 'forecast'" in capsys.readouterr().err


@pytest.mark.parametrize("output", [["--json", "-"], []])
def test_a_reader_that_has_gone_is_no_traceback_and_no_verdict(output: list[str]) -> None:
    code = "import sys; from kvblocks.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "plan", "llama-3-8b", "--gpu", "H200", *output]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141
