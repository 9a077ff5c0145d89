"""The command line: `kvblocks plan`, `kvblocks replay`, `kvblocks quality`.

Owns the list of commands and how they end: 0 done, 1 a verdict that says no, 2 bad input (one line on standard
error, no traceback), 130 interrupted, 141 where whoever read the output has gone. A command is a module with
`configure(parser)` and `run(args) -> int`; it is imported when it is asked for, so that one command does not need
what another one does.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from kvblocks._core import __version__
from kvblocks.report import INTERRUPTED, UserError

# Name, module, the one line of `kvblocks --help`.
COMMANDS: Final = (
    ("plan", "kvblocks.planner.command", "how many users fit on a GPU, at the peak"),
    ("replay", "kvblocks.replay.command", "a trace through the real allocator, policies side by side"),
    ("quality", "kvblocks.quality.command", "what a cache format costs on a model, and what it buys"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with `argv` (None: the process's arguments); the exit status as documented above."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, module = _parser(arguments)
        args = parser.parse_args(arguments)
        if module is None:
            parser.print_help()
            return 0
        status: int = module.run(args)
        sys.stdout.flush()
        return status
    except UserError as error:
        sys.stderr.write(f"kvblocks: {error}\n")
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would be an error again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser(arguments: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """The parser, in which the command that `arguments` name is complete, and that command's module."""
    parser = argparse.ArgumentParser(prog="kvblocks", description="Size, replay and judge a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"kvblocks {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    chosen: ModuleType | None = None
    for name, module_name, summary in COMMANDS:
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == wanted:
            chosen = importlib.import_module(module_name)
            chosen.configure(command)
    return parser, chosen
