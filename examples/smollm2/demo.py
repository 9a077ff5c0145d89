"""Serve a file of chat requests with SmolLM2 out of one paged KV cache, then report what paging saved.

Owns: the command line and the printing of answers. May import: everything beside it.
Invariant: what a user can get wrong ends in one line on stderr and exit code 2; Ctrl-C in the report and 130.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # Until `main` takes care of it: an interrupted import may end in any exception.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

# Run as a script, so that the package of these modules has to be named to Python.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from kvblocks import CacheConfig, KVFormat, PagedKVCache
    from kvblocks.backends import get_backend
    from kvblocks.calibration import Calibration
    from smollm2.engine import Engine
    from smollm2.model import Llama
    from smollm2.prompts import Prompt, PromptsError, read_prompts
    from smollm2.report import report
    from smollm2.request import Event, Failed, Finished, Request, RequestError, Token, counted
    from smollm2.tokenizer import TextStream, Tokenizer
    from smollm2.weights import Checkpoint, ModelError, load
except ModuleNotFoundError as error:
    print(f"demo.py: {error.name} is not installed; `make demo` installs what is needed", file=sys.stderr)
    raise SystemExit(2) from None

POOL_TOKENS = 320  # of the default pool: so small that requests queue and are preempted
MAX_SEQS, MAX_TOKENS = 16, 64  # of a step
RESIDUAL_TOKENS = (
    32  # kept in 16 bit by formats that do that: few, so that short answers see what the format costs
)


class UsageError(Exception):
    """Something the user has to change, in one line."""


class Answers:
    """Prints the answers as they come.

    On a terminal the earliest unfinished answer is shown token by token, and the others wait for their turn;
    elsewhere each answer is printed whole when it is finished.
    """

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, live: bool) -> None:
        self._titles = {
            (str(i), sample): prompt.prompt + (f"  [sample {sample + 1}]" if prompt.samples > 1 else "")
            for i, prompt in enumerate(prompts, start=1)
            for sample in range(prompt.samples)
        }
        self._order = list(self._titles)
        self._streams: dict[tuple[str, int], TextStream] = {key: tokenizer.stream() for key in self._order}
        self._texts = dict.fromkeys(self._order, "")
        self._shown: dict[tuple[str, int], int] = {}  # characters printed, of answers whose title is printed
        self._ends: dict[tuple[str, int], str] = {}
        self._live = live
        self.num_finished = self.num_failed = 0

    def take(self, event: Event) -> None:
        """Print what an event adds, or keep it for later."""
        key = event.request_id, event.sample
        match event:
            case Token():
                self._texts[key] += self._streams[key].feed(event.token)
            case Finished():
                self._texts[key] += self._streams[key].close()
                cut = ", cut" if event.reason == "length" else ""
                self._ends[key] = f"{counted(len(event.tokens), 'token')}{cut}"
            case Failed():
                self._ends[key] = f"failed: {event.message}"
                self.num_failed += 1
        if self._live:
            while self._order and self._show(self._order[0]):
                del self._order[0]
        elif key in self._ends:
            self._show(key)

    def _show(self, key: tuple[str, int]) -> bool:
        """Print what is new of an answer; whether it is finished."""
        text, end = self._texts[key].lstrip(), self._ends.get(key)
        if key not in self._shown:
            if not text and end is None:
                return False
            print(f"> {self._titles[key]}\n", end="")
        print(text[self._shown.get(key, 0) :], end="", flush=True)
        self._shown[key] = len(text)
        if end is None:
            return False
        self.num_finished += 1
        print(f"  ({self.num_finished}/{len(self._titles)}: {end})\n", flush=True)
        return True


def main() -> int:
    """Run the demo; the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # answers may hold what its encoding does not
    arguments = parse_arguments()
    prompts = read_prompts(arguments.requests)
    try:
        backend = get_backend(arguments.backend)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    checkpoint = load(progress=show_conversion)
    tokenizer, model = Tokenizer(checkpoint.vocabulary), Llama(checkpoint.config, checkpoint.tensors)
    try:
        config = make_config(checkpoint, arguments.block_size, arguments.kv_format)
    except ValueError as error:
        raise UsageError(f"{error} (--block-size, --kv-format)") from error
    block_size = config.block_size
    num_blocks = arguments.num_blocks or -(-POOL_TOKENS // block_size) + 1
    try:
        cache = PagedKVCache(
            config,
            num_blocks=num_blocks,
            backend=backend.name,
            enable_prefix_cache=arguments.prefix_cache,
            watermark_blocks=min(-(-MAX_SEQS // block_size), num_blocks - 2),
            max_seqs=MAX_SEQS,
            max_tokens=MAX_TOKENS,
        )
    except (ValueError, OverflowError, MemoryError) as error:
        size = f"{counted(num_blocks, 'block')} of {counted(config.block_size, 'token')}"
        options = "--num-blocks or --block-size" if arguments.num_blocks else "--block-size"
        raise UsageError(f"cannot make a pool of {size}: {error}; lower {options}") from error
    requests = [
        make_request(str(i), prompt, tokenizer, arguments.max_new_tokens)
        for i, prompt in enumerate(prompts, start=1)
    ]
    if any(part.is_static for layer in config.formats for part in (layer.k, layer.v)):
        cache.apply_scales(calibrate(model, config, [int(token) for token in requests[0].prompt]))
    engine = Engine(model, cache, max_seqs=MAX_SEQS, max_tokens=MAX_TOKENS)
    try:
        for request in requests:
            engine.add(request)
    except RequestError as error:
        options = "--num-blocks, --max-new-tokens, or the request's line"
        raise UsageError(f"{error} ({options})") from error

    interrupts: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        # The first one ends the run after its step; the second one at once.
        interrupts.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, interrupt)
    pool = f"{counted(num_blocks - 1, 'block')} of {counted(config.block_size, 'token')}"
    stored = f", stored as {config.kv_format}" if config.kv_format else ""
    print(f"{counted(len(prompts), 'request')}, {pool}, backend {backend.name}{stored}\n", flush=True)
    answers = Answers(prompts, tokenizer, live=sys.stdout.isatty())
    start = time.perf_counter()
    while not engine.idle and not interrupts:
        for event in engine.step():
            answers.take(event)
    seconds = time.perf_counter() - start
    engine.close()

    text, home = report(engine, config, prefix_cache=arguments.prefix_cache, seconds=seconds)
    print(f"\n\ninterrupted; so far\n{text}" if interrupts else f"report\n{text}", flush=True)
    if interrupts:
        return 130
    return 0 if home and not answers.num_failed else 1


def parse_arguments() -> argparse.Namespace:
    """The command line; ends the program with one line if it is wrong."""
    parser = _Parser(prog="demo.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--requests",
        type=Path,
        default=Path(__file__).with_name("requests.jsonl"),
        metavar="FILE",
        help='JSON lines such as {"prompt": "...", "samples": 4} or {"system": "..."}; default: eight requests',
    )
    parser.add_argument(
        "--block-size",
        type=_at_least(1),
        metavar="TOKENS",
        help="default 16, or 32 for formats whose groups span so many tokens",
    )
    parser.add_argument(
        "--kv-format",
        metavar="K[,V]",
        help="how K and V are stored: int8, fp8_e4m3, int4, kivi2, int8:channel,int8, ...; default float32. Static "
        "scales come from the first request's prompt",
    )
    parser.add_argument(
        "--num-blocks",
        type=_at_least(2),
        metavar="N",
        help=f"blocks of the pool, one of them the null block; default: room for {POOL_TOKENS} tokens",
    )
    parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false")
    parser.add_argument("--backend", metavar="NAME", help="default: $KVBLOCKS_BACKEND, else the library's")
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least(1),
        default=64,
        metavar="N",
        help="of each answer whose line does not say; default 64",
    )
    return parser.parse_args()


def make_config(checkpoint: Checkpoint, block_size: int | None, kv_format: str | None) -> CacheConfig:
    """The cache that the model needs; ValueError for a format that is none, or does not fit the block size."""
    c = checkpoint.config
    if block_size is None:
        parsed = KVFormat.parse(kv_format or "float32")
        block_size = max(
            [16, *(part.group for part in (parsed.k, parsed.v) if part.scaling == "token_group")]
        )
    return CacheConfig(
        *(c.num_layers, c.num_kv_heads, c.head_dim),
        block_size=block_size,
        kv_format=kv_format,
        residual_tokens=RESIDUAL_TOKENS,
    )


def calibrate(model: Llama, config: CacheConfig, prompt: Sequence[int]) -> Calibration:
    """What the model writes for a prompt, into a float32 cache."""
    plain = replace(config, kv_format=None)
    calibration = Calibration(plain)
    cache = PagedKVCache(
        plain, -(-len(prompt) // plain.block_size) + 2, max_tokens=MAX_TOKENS, calibration=calibration
    )
    engine = Engine(model, cache, max_seqs=1, max_tokens=MAX_TOKENS)
    engine.add(Request("calibration", prompt, max_new_tokens=1))
    for _ in engine.run():
        pass
    return calibration


def make_request(name: str, prompt: Prompt, tokenizer: Tokenizer, max_new_tokens: int) -> Request:
    """A line of the requests file as the engine takes it."""
    messages = [{"role": "user", "content": prompt.prompt}]
    if prompt.system:
        messages.insert(0, {"role": "system", "content": prompt.system})
    return Request(
        id=name,
        prompt=tokenizer.encode_chat(messages),
        max_new_tokens=prompt.max_new_tokens or max_new_tokens,
        num_samples=prompt.samples,
        temperature=prompt.temperature,
        top_k=prompt.top_k,
        seed=prompt.seed,
        stop_ids=frozenset([tokenizer.eos]),
    )


def show_conversion(done: int, total: int) -> None:
    """Progress of the one-time conversion, on stderr: a moving line on a terminal, else its start and end."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rconverting the model, once: {done / total:4.0%}", end=end, file=sys.stderr, flush=True)
    elif done == total:
        print(f"converted the model, once: {total / 1e6:,.0f} MB", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


def run() -> int:
    """Run `main`; its exit code, or that of the line which says why it ended."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - it was closed, and print would fall back on stdout
    if sys.stdout is None:
        print("demo.py: the standard output is closed", file=sys.stderr)
        return 2
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except (UsageError, PromptsError, ModelError) as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # Nothing more can be printed, not even what Python still has to flush when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 1  # the reader has seen enough
        print(f"demo.py: cannot go on: {error.strerror or error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
