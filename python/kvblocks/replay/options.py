"""The options of `kvblocks replay`, and what they ask for.

Owns the parser and the way from its arguments to a trace, an engine and scenarios. Imports readers, generate, scenario
and simulate. Invariant: what cannot be meant is a UserError that names the option.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from kvblocks.replay.costs import Cost, PoolSize, make_costs
from kvblocks.replay.generate import LENGTHS, generate
from kvblocks.replay.scenario import PAGED, POLICIES, Options, Scenario
from kvblocks.replay.simulate import Engine, Mode
from kvblocks.report import UserError
from kvblocks.traces.readers import FORMATS, read_trace
from kvblocks.traces.trace import Trace

_T = TypeVar("_T")

_EPILOG: Final = """
units: lengths in tokens, rates in tokens per second, times in seconds unless the option's name says otherwise; a pool
is a number of tokens, or a size such as 40GiB where --model or --bytes-per-token says what a token takes.

  kvblocks replay --generate 500 --pool 20000,40000 --policy contiguous,paged

replays 500 made-up requests under two policies and two pools. docs/replay.md defines every figure.
"""
_MOST: Final = 2**31 - 1
# Of rates, times and bytes: beyond what anybody means, and far from where sums over time overflow.
_LEAST_NUMBER: Final = 1e-9
_MOST_NUMBER: Final = 1e12
_TIME_UNITS: Final = {"s": 1.0, "ms": 1e-3}
# What a PCIe 4.0 x16 link copies in practice.
_SWAP_BYTES_PER_S: Final = 25e9


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "trace", nargs="?", metavar="TRACE", help="trace file: JSON lines or CSV, plain or gzip"
    )
    group = parser.add_argument_group("reading")
    group.add_argument(
        "--format", choices=FORMATS, default="auto", help="what the file is (default: look at it)"
    )
    group.add_argument(
        "--tokens-per-id", type=_count, metavar="N", help="tokens of a hash id, where not the format's"
    )
    group.add_argument(
        "--time-unit", choices=list(_TIME_UNITS), help="of times that are numbers, where not the format's"
    )
    group.add_argument(
        "--strict", action="store_true", help="a broken line is an error, not counted and left out"
    )
    group.add_argument("--limit", type=_count, metavar="N", help="use the first N requests of the file only")
    group.add_argument(
        "--rate-factor", type=_positive, default=1.0, metavar="X", help="X times as many requests a second"
    )
    group = parser.add_argument_group("making up a trace")
    group.add_argument("--generate", type=_count, metavar="N", help="N requests instead of a file")
    group.add_argument(
        "--lengths",
        default="azure-conv",
        metavar="DIST",
        help=f"lengths in tokens: {', '.join(LENGTHS)}; PROMPT,OUTPUT; or MEAN/MEDIAN,MEAN/MEDIAN (log-normal)",
    )
    group.add_argument(
        "--rate", type=_positive, default=5.0, metavar="R", help="requests per second (default: 5)"
    )
    group.add_argument(
        "--shared-prefix", type=_natural, default=0, metavar="N", help="tokens of a common system prompt"
    )
    group.add_argument("--num-prefixes", type=_count, default=1, metavar="N", help="different system prompts")
    group.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="of the made-up trace (default: 0)"
    )
    group = parser.add_argument_group("what to replay: every combination of the lists")
    group.add_argument(
        "--policy", metavar="LIST", help=f"of {', '.join(POLICIES)} (default: all that the trace allows)"
    )
    group.add_argument(
        "--block-size", default="16", metavar="LIST", help="tokens, of paged policies (default: 16)"
    )
    group.add_argument(
        "--pool",
        default="unbounded",
        metavar="LIST",
        help="tokens, or sizes such as 40GiB (default: unbounded)",
    )
    group.add_argument(
        "--max-context",
        metavar="LIST",
        help="tokens stored of the longest request accepted, which is what 'contiguous' reserves (default: the "
        "longest of the trace)",
    )
    group.add_argument(
        "--over-context",
        choices=("reject", "truncate"),
        default="reject",
        help="longer requests: reject, or drop the oldest part of the prompt (default: reject)",
    )
    group.add_argument(
        "--model", metavar="MODEL", help="config.json, a folder with it, or a name of `kvblocks plan --list`"
    )
    group.add_argument(
        "--kv-format",
        action="append",
        default=[],
        metavar="FORMAT",
        help="of the model's cache, such as fp8_e4m3; may be repeated (default: the model's dtype)",
    )
    group.add_argument(
        "--tp",
        type=_count,
        default=1,
        metavar="N",
        help="tensor-parallel GPUs; pools are those of one (default: 1)",
    )
    group.add_argument(
        "--bytes-per-token",
        type=_positive,
        metavar="B",
        help="bytes of K and V of one token, instead of a model",
    )
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--mode",
        choices=("arrivals", "saturated"),
        help="requests come when the trace says, or all wait from the start and time is counted in steps (default: "
        "arrivals if the trace has times)",
    )
    group.add_argument(
        "--prefill-rate",
        type=_positive,
        default=20_000.0,
        metavar="R",
        help="prompt tokens computed per second (default: 20000)",
    )
    group.add_argument(
        "--inter-token-ms",
        type=_positive,
        default=30.0,
        metavar="T",
        help="milliseconds of a decode step (default: 30)",
    )
    group.add_argument(
        "--step-tokens",
        type=_count,
        default=16_384,
        metavar="N",
        help="prompt tokens after which a step admits no more (default: 16384)",
    )
    group.add_argument(
        "--max-seqs", type=_count, metavar="N", help="requests at once (default: as many as fit)"
    )
    group.add_argument(
        "--preemption",
        choices=("recompute", "swap", "reserve"),
        default="recompute",
        help="when the pool is short, preempt the newest and compute it anew, or copy it out and in; or admit only "
        "with room for the whole output (default: recompute)",
    )
    group.add_argument(
        "--swap-rate",
        type=_positive,
        metavar="R",
        help="tokens copied per second, each way, with --preemption swap (default: 25 GB/s)",
    )
    group.add_argument(
        "--declared-output",
        type=_count,
        metavar="N",
        help="tokens of output that requests declare, with --preemption reserve (default: the longest of the trace)",
    )
    group.add_argument(
        "--watermark",
        type=_share,
        default=0.0,
        metavar="X",
        help="share of the blocks that admissions leave free (default: 0)",
    )
    group.add_argument(
        "--decoded-blocks",
        action="store_true",
        help="let later turns of a conversation hit what earlier ones generated",
    )
    group = parser.add_argument_group("further questions")
    group.add_argument(
        "--size",
        action="store_true",
        help="find the smallest pool that is never short, beside the one the mean suggests",
    )
    group.add_argument(
        "--curve",
        action="store_true",
        help="prefix-cache hit rate against capacity: LRU, FIFO, LFU, the optimum, and an infinite cache",
    )
    group.add_argument(
        "--capacities",
        metavar="LIST",
        help="blocks, for --curve, which it implies (default: six, by the trace)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", metavar="FILE", help="everything, the series over time included; - is standard output"
    )
    group.add_argument("--csv", metavar="FILE", help="one row a replay; - is standard output")
    group.add_argument("--plots", metavar="FOLDER", help="figures as PNG")
    group.add_argument("--html", metavar="FILE", help="one page with tables and figures")


def make_trace(args: argparse.Namespace) -> Trace:
    """The trace that was asked for."""
    if (args.trace is None) == (args.generate is None):
        raise UserError("give a trace file or --generate N, one of the two")
    if args.trace is not None:
        trace = read_trace(
            Path(args.trace),
            format=args.format,
            tokens_per_id=args.tokens_per_id,
            time_unit_s=None if args.time_unit is None else _TIME_UNITS[args.time_unit],
            strict=args.strict,
            limit=args.limit,
        )
    else:
        trace = generate(
            args.generate,
            args.lengths,
            rate_per_s=args.rate,
            shared_prefix_tokens=args.shared_prefix,
            num_prefixes=args.num_prefixes,
            seed=args.seed,
        )
    return trace.scaled(args.rate_factor)


def make_engine(args: argparse.Namespace, trace: Trace) -> Engine:
    """The engine that was asked for."""
    mode: Mode = args.mode or ("saturated" if trace.arrival_s is None else "arrivals")
    if mode == "arrivals" and trace.arrival_s is None:
        raise UserError(f"--mode arrivals: {trace.name} has no times of arrival, use --mode saturated")
    return Engine(
        mode,
        args.prefill_rate,
        args.inter_token_ms / 1000,
        args.step_tokens if mode == "arrivals" else None,
        args.max_seqs,
        args.swap_rate if args.preemption == "swap" else None,
    )


def engine_of(args: argparse.Namespace, engine: Engine, scenario: Scenario) -> Engine:
    """The engine as one scenario has it: how fast it swaps depends on what a token takes."""
    if args.preemption != "swap" or engine.swap_tokens_per_s is not None:
        return engine
    if scenario.bytes_per_token is None:
        raise UserError("--preemption swap: give --swap-rate, or --model or --bytes-per-token")
    return replace(engine, swap_tokens_per_s=_SWAP_BYTES_PER_S / scenario.bytes_per_token)


def make_options(args: argparse.Namespace, trace: Trace) -> Options:
    """What paged policies share."""
    declared = None
    if args.preemption == "reserve":
        declared = args.declared_output or int(trace.output_tokens.max())
    return Options(args.watermark, declared, args.decoded_blocks)


def cost_of(args: argparse.Namespace) -> list[Cost]:
    """What a slot costs, in each of the formats."""
    return make_costs(args.model, args.kv_format, args.tp, args.bytes_per_token)


def make_scenarios(args: argparse.Namespace, trace: Trace, costs: Sequence[Cost]) -> Iterator[Scenario]:
    """Every combination of the lists."""
    default = POLICIES if trace.tokens_per_id else tuple(name for name in POLICIES if name != "prefix")
    policies = _list("--policy", args.policy, _policy) if args.policy else default
    block_sizes = _list("--block-size", args.block_size, _count)
    pools = _list("--pool", args.pool, PoolSize.parse)
    longest = int(trace.final_tokens.max())
    contexts = _list("--max-context", args.max_context, _count) if args.max_context else [longest]
    for context, pool, cost, policy in itertools.product(contexts, pools, costs, policies):
        for block_size in block_sizes if policy in PAGED else [None]:
            yield Scenario(
                policy,
                block_size,
                pool.slots(cost, block_size),
                context,
                None if cost.kv_format is None else str(cost.kv_format),
                cost.bytes_per_token(block_size),
            )


def parse_counts(option: str, text: str) -> list[int]:
    """A list of whole numbers >= 1."""
    return _list(option, text, _count)


def _list(option: str, text: str, parse: Callable[[str], _T]) -> list[_T]:
    """The items of a list, each once, in order."""
    try:
        return list(dict.fromkeys(parse(item.strip()) for item in text.split(",")))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UserError(f"{option} {text!r}: {error}") from None


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise ValueError(f"{text!r} is none of {', '.join(POLICIES)}")
    return text


def _count(text: str) -> int:
    return _integer(text, 1)


def _natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= _MOST):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from {least} to {_MOST:,}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not _LEAST_NUMBER <= value <= _MOST_NUMBER:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected a number from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}"
        )
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a share from 0 to below 1")
    return value
