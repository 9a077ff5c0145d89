"""`kvblocks plan`: how many users fit.

Owns the command's options and its exit status: 0, or 1 where the weights do not fit or the target is missed.
"""

import argparse
import sys
from fractions import Fraction
from pathlib import Path
from typing import Final

from kvblocks.config import parse_memory
from kvblocks.formats import FORMATS, KVFormat
from kvblocks.planner import lengths, weights
from kvblocks.planner.architectures import ARCHITECTURES, describe
from kvblocks.planner.cards import CARDS
from kvblocks.planner.fields import override
from kvblocks.planner.levers import levers
from kvblocks.planner.memory import Budget
from kvblocks.planner.model import Model
from kvblocks.planner.models import BUILT_IN, find_config
from kvblocks.planner.plan import Scenario
from kvblocks.planner.plot import plot_levers
from kvblocks.planner.summary import Question, summarise
from kvblocks.planner.tables import print_summary
from kvblocks.planner.weights import PARAMETER_BYTES, Weights
from kvblocks.report import UserError, check_figure, format_bytes, print_table, require, write_json
from kvblocks.traces.readers import read_trace

EXAMPLE: Final = (
    "kvblocks plan llama-3.1-8b --gpu H100-80GB --context 32768 --p50 2000 --p95 12000 --users 64"
)
# Bytes and parameters: no larger number is meant, and floating point holds its products.
_LARGEST: Final = 1 << 60
# What activations and captured graphs are taken to need where nobody says, in bytes of one GPU.
_ASSUMED_BYTES: Final = 2**30
_EPILOG: Final = f"""\
units:
  SIZE    bytes with a unit: GiB, MiB are powers of 1024, GB, MB powers of 1000; 24GiB, 14GB, 1.5GiB
  TOKENS  prompt and output together; an integer
  N       an integer; --params also takes 7B, 1.5B, 135M

example:
  {EXAMPLE}

All memory is that of one GPU, except --weights, which is the whole model. docs/planner.md defines every figure.
Exit status: 0; 1 where the weights do not fit or the users of --users do not; 2 for input that cannot be used.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvblocks plan`."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "model", nargs="?", help="a config.json, a folder that holds one, or a name of --list"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the models, GPUs, formats and model types known"
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--as", dest="model_type", metavar="TYPE", help="read the configuration as this model type"
    )
    model.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of it"
    )
    model.add_argument(
        "--weights",
        metavar="SIZE|PATH",
        help="size of all weights, or a folder, index or file of safetensors",
    )
    model.add_argument(
        "--params", type=_count, metavar="N", help="number of parameters, instead of --weights"
    )
    model.add_argument(
        "--weights-dtype",
        choices=list(PARAMETER_BYTES),
        help="dtype of counted parameters (default: the model's)",
    )

    gpu = parser.add_argument_group("GPU")
    gpu.add_argument("--gpu", metavar="NAME", help="a card of --list")
    gpu.add_argument("--memory", type=_size, metavar="SIZE", help="memory of one GPU, instead of --gpu")
    gpu.add_argument(
        "--tp", type=_positive, default=1, metavar="N", help="GPUs that share one model (default 1)"
    )
    gpu.add_argument(
        "--gpus", type=_positive, metavar="N", help="all GPUs, a multiple of --tp (default: --tp)"
    )
    gpu.add_argument(
        "--utilisation",
        type=_fraction,
        default=Fraction(9, 10),
        metavar="F",
        help="part of the GPU (default 0.9)",
    )
    gpu.add_argument("--free", type=_size, metavar="SIZE", help="free memory at start (default: all)")
    gpu.add_argument(
        "--activations", type=_size, metavar="SIZE", help="measure yours (1GiB is assumed otherwise)"
    )
    gpu.add_argument(
        "--graphs", type=_size, metavar="SIZE", help="captured graphs; measure (1GiB is assumed otherwise)"
    )
    gpu.add_argument("--safety", type=_size, default="0B", metavar="SIZE", help="kept back (default 0B)")
    gpu.add_argument("--price-per-hour", type=_price, metavar="X", help="price of one GPU, any currency")

    cache = parser.add_argument_group("cache")
    cache.add_argument("--kv-format", metavar="FORMAT", help="as in --list (default: the model's dtype)")
    cache.add_argument("--block-size", type=_positive, default=16, metavar="TOKENS", help="(default 16)")
    cache.add_argument(
        "--residual",
        type=_positive,
        default=128,
        metavar="TOKENS",
        help="kept in 16 bit by kivi* (default 128)",
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--context", type=_positive, metavar="TOKENS", help="the longest (default: the model's)"
    )
    load.add_argument("--p50", type=_positive, metavar="TOKENS", help="median length, with --p95: log-normal")
    load.add_argument("--p95", type=_positive, metavar="TOKENS", help="95th percentile of the lengths")
    load.add_argument(
        "--trace",
        metavar="FILE",
        help="requests whose lengths count: JSON lines or CSV, as for kvblocks replay",
    )
    load.add_argument(
        "--users", type=_positive, metavar="N", help="users that have to fit at the full context"
    )
    load.add_argument(
        "--shared-prefix",
        type=_natural,
        default=0,
        metavar="TOKENS",
        help="start that all users have in common",
    )
    load.add_argument("--growth", type=_factor, metavar="F", help="add a lever: all contexts times F")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help='write all answers as JSON; "-": instead of the tables'
    )
    output.add_argument("--plot", metavar="FILE", help="draw memory against users (.png, .svg, .pdf)")


def run(args: argparse.Namespace) -> int:
    """Answer, and say by the exit status whether it fits."""
    if args.list:
        _print_known()
        return 0
    if args.plot is not None:
        check_figure(args.plot)
        require("matplotlib")
    question = _question(args)
    pulled = list(levers(question.scenario, growth=args.growth))
    summary = summarise(question, pulled)
    if args.json != "-":
        print_summary(summary)
    if args.json is not None:
        write_json(args.json, summary)
    if summary["budget"]["short_by_bytes"]:
        if args.plot is not None:
            sys.stderr.write(f"kvblocks: {args.plot}: not drawn, as nothing fits\n")
        return 1
    if args.plot is not None:
        plot_levers(args.plot, pulled)
    target = summary["target"]
    return 1 if target is not None and not target["fits_at_full"] else 0


def _question(args: argparse.Namespace) -> Question:
    if args.model is None:
        raise UserError("no model: expected a config.json, a folder that holds one, or a name of --list")
    config = find_config(args.model)
    override(config, args.set)
    model = describe(config, args.model, args.model_type)
    size = _weights(args, model)
    card_name, memory, nominal = _memory(args)
    budget = Budget(
        total_bytes=memory,
        utilisation=args.utilisation,
        weights_bytes=size.per_gpu(args.tp),
        activations_bytes=_ASSUMED_BYTES if args.activations is None else args.activations,
        graphs_bytes=_ASSUMED_BYTES if args.graphs is None else args.graphs,
        safety_bytes=args.safety,
        free_bytes=args.free,
    )
    scenario = Scenario(
        model=model,
        budget=budget,
        kv_format=_kv_format(args.kv_format, model),
        lengths=_lengths(args, model),
        block_size=args.block_size,
        num_ranks=args.tp,
        num_gpus=args.gpus or args.tp,
        residual_tokens=args.residual,
        shared_prefix=args.shared_prefix,
    )
    assumed = tuple(name for name in ("activations", "graphs") if getattr(args, name) is None)
    return Question(scenario, size, card_name, nominal, args.users, args.price_per_hour, assumed)


def _weights(args: argparse.Namespace, model: Model) -> Weights:
    if args.weights is not None:
        return weights.from_option(args.weights)
    if args.params is not None:
        return weights.from_parameters(args.params, args.weights_dtype or model.dtype, "as given")
    folder = Path(args.model)
    if folder.is_file():
        folder = folder.parent
    found = weights.from_files(folder) if folder.is_dir() and args.model not in BUILT_IN else None
    return found or weights.from_model(model, args.weights_dtype)


def _memory(args: argparse.Namespace) -> tuple[str | None, int, Fraction | None]:
    """Name and bytes of a GPU, and its size in the gigabytes that people say."""
    if (args.gpu is None) == (args.memory is None):
        raise UserError("expected one of --gpu NAME (see --list) and --memory SIZE")
    if args.memory is not None:
        gibibytes = args.memory % 2**30 == 0
        return None, args.memory, Fraction(args.memory, 2**30 if gibibytes else 10**9)
    card = CARDS.get(args.gpu)
    if card is None:
        raise UserError(f"--gpu {args.gpu}: expected one of {', '.join(CARDS)}")
    return args.gpu, card.memory_bytes, Fraction(card.nominal_gb)


def _kv_format(text: str | None, model: Model) -> KVFormat:
    if text is None:
        return KVFormat.parse(model.dtype if model.dtype in FORMATS else "bfloat16")
    try:
        return KVFormat.parse(text)
    except ValueError as error:
        raise UserError(f"--kv-format {text}: {error}") from error


def _lengths(args: argparse.Namespace, model: Model) -> lengths.Lengths:
    longest = args.context or model.max_context
    if longest is None:
        raise UserError(
            f"{model.name}: no field max_position_embeddings: --context TOKENS says how long contexts are"
        )
    if args.trace is not None:
        if args.p50 is not None or args.p95 is not None:
            raise UserError("--trace and --p50, --p95 exclude one another: each says how long contexts are")
        return _traced(args.trace, longest)
    if args.p50 is None and args.p95 is None:
        return lengths.fixed(longest)
    if args.p50 is None or args.p95 is None:
        raise UserError("--p50 and --p95 belong together")
    try:
        return lengths.log_normal(args.p50, args.p95, longest)
    except ValueError as error:
        raise UserError(str(error)) from error


def _traced(path: str, longest: int) -> lengths.Lengths:
    """Lengths of the requests of a trace, and in words what of it was not used."""
    trace = read_trace(path)
    contexts = trace.final_tokens
    source = trace.name
    left_out = (
        (int((contexts > longest).sum()), "cut at the full context"),
        (trace.skipped.bad_lines, "broken lines left out"),
        (trace.skipped.empty_requests, "empty requests left out"),
    )
    for number, what in left_out:
        source += f", {number:,} {what}" if number else ""
    for example in trace.skipped.bad_examples:
        sys.stderr.write(f"kvblocks: left out: {example}\n")
    return lengths.observed(contexts.tolist(), longest, source)


def _print_known() -> None:
    rows = [[name, config["model_type"]] for name, config in BUILT_IN.items()]
    print_table("Models", ["name", "model_type"], rows, num_left=2)
    cards = [[name, format_bytes(card.memory_bytes), f"{card.nominal_gb} GB"] for name, card in CARDS.items()]
    print_table("GPUs", ["name", "memory as the driver reports it", "data sheet"], cards)
    print_table("Formats of the cache, K and V alike or K,V", ["name"], [[name] for name in FORMATS])
    print_table("Model types", ["model_type"], [[name] for name in sorted(ARCHITECTURES)])


def _size(text: str) -> int:
    if text.strip() in ("0", "0B"):
        return 0
    try:
        size = parse_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at most 2^60 bytes")
    return size


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer >= 0")
    if len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at most 12 digits")
    return int(text)


def _positive(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer >= 1")
    return number


def _count(text: str) -> int:
    """An integer, or a number with K, M, B or T for thousands to trillions."""
    powers = {"K": 3, "M": 6, "B": 9, "T": 12}
    digits, power = (text[:-1], powers[text[-1]]) if text[-1:] in powers else (text, 0)
    number = int(_number(digits, text) * 10**power)
    if not 1 <= number <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1 to 2^60")
    return number


def _fraction(text: str) -> Fraction:
    number = _number(text, text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0 and at most 1")
    return number


def _factor(text: str) -> Fraction:
    number = _number(text, text)
    if not 0 < number <= 10**6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0 and at most 1000000")
    return number


def _price(text: str) -> float:
    return float(_number(text, text))


def _number(digits: str, text: str) -> Fraction:
    whole, _, decimals = digits.partition(".")
    if len(text) > 24:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at most 24 characters")
    if not (whole + decimals).isdigit() or not (whole + decimals).isascii() or not whole:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number such as 7 or 0.9")
    return Fraction(int(whole + decimals), 10 ** len(decimals))
