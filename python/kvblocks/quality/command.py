"""`kvblocks quality`: what cache formats cost on a model, and which of them are good enough.

Owns the options, the defaults and the exit status. Imports the rest of the package and report.
Invariant: bad input is a UserError before anything is computed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

import kvblocks.report as report
from kvblocks.backends.cpu import CpuBackend
from kvblocks.calibration import Calibration
from kvblocks.config import CacheConfig
from kvblocks.quality.calibrate import calibrate, describe, needs_calibration, outliers
from kvblocks.quality.evaluate import Grid, Text, evaluate
from kvblocks.quality.lane import Variant
from kvblocks.quality.likelihood import TextScore
from kvblocks.quality.model import IDS, Model, load_model
from kvblocks.quality.render import as_json, plot_grid, print_result
from kvblocks.quality.spelling import read_variant
from kvblocks.quality.text import cut, read_text
from kvblocks.quality.verdict import Thresholds
from kvblocks.report import UserError

DEFAULT_MODEL: Final = "smollm2.quality:smollm2"
DEFAULT_FORMATS: Final = "int8 int8:channel,int8 fp8_e4m3 int4 kivi4 kivi4r kivi2 kivi2r naive_int2"
# name -> (full, quick)
_SIZES: Final[dict[str, tuple[Any, Any]]] = {
    "windows": (4, 2),
    "window_tokens": (1024, 512),
    "lengths": ([512, 1024, 2048], [384]),
    "depths": ([0, 50, 100], [0, 100]),
    "trials": (1, 1),
}
_EPILOG: Final = """\
A format is named as in CacheConfig(kv_format=...): "int8", "kivi2", "int8:channel,int8" for K and V of their own.
"kivi4@32" keeps 32 tokens in 16 bit, "kivi2r@48/16" 48 in blocks of 16. "0-1,29=bfloat16+int4" stores layers 0, 1 and
29 in bfloat16, and all others in int4. naive_int2 is a control: two bits between each row's minimum and maximum, which
a sound measurement has to fail. naive_fp8 is e4m3 at a scale of 1.

Exit status: 0; 1 if thresholds were given and a format fails one of them; 2 for input that cannot be used; 130 if it
was interrupted, after what had been measured. Where no threshold is given, the verdict is by the defaults, and the exit
status stays 0; where some are, only these count.

example:
  kvblocks quality --formats fp8_e4m3 int8 kivi4@32 --quick --max-kl 0.01
"""

_T = TypeVar("_T")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODULE:FUNCTION",
        help="function that returns a kvblocks.quality.Model (default: SmolLM2-135M of this project's examples)",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=DEFAULT_FORMATS.split(),
        metavar="FORMAT",
        help=f"what to measure, see below (default: {DEFAULT_FORMATS})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: about a minute on 2 cores, not many"
    )
    text = parser.add_argument_group("text")
    text.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: public-domain prose)")
    text.add_argument("--windows", type=_least(0), help="windows of text, 0 for none (default: 4, quick 2)")
    text.add_argument("--window-tokens", type=_least(2), help="tokens of a window (default: 1024, quick 512)")
    text.add_argument(
        "--scored-after",
        type=_least(1),
        default=256,
        help="tokens of a window that are context only (default: 256)",
    )
    needle = parser.add_argument_group("needle grid")
    needle.add_argument("--no-needle", action="store_true", help="leave the grid out")
    needle.add_argument(
        "--lengths",
        nargs="+",
        type=_least(1),
        help="context lengths, tokens (default: 512 1024 2048, quick 384)",
    )
    needle.add_argument(
        "--depths",
        nargs="+",
        type=_percent,
        help="where the key stands, %% (default: 0 50 100, quick 0 100)",
    )
    needle.add_argument("--trials", type=_least(1), help="keys per length and depth (default: 1)")
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--reference", default=None, help="dtype of the cache that the others are compared with"
    )
    cache.add_argument(
        "--block-size", type=_least(1), help="tokens a block (default: the model's, 32 for SmolLM2)"
    )
    cache.add_argument(
        "--residual",
        type=_least(1),
        help="tokens that formats with a residual keep in 16 bit, where @ says nothing else (default: 128)",
    )
    cache.add_argument(
        "--backend",
        help="default: $KVBLOCKS_BACKEND, else cpu, or numpy for formats that cpu has no kernels for",
    )
    cache.add_argument("--batch", type=_least(1), default=8, help="sequences computed together (default: 8)")
    cache.add_argument("--chunk", type=_least(1), default=16, help="tokens of each in a step (default: 16)")
    cache.add_argument(
        "--threads",
        type=_least(1),
        help="formats computed at once (default: the cores, or 1 for a model that is not said to be thread-safe)",
    )
    static = parser.add_argument_group(
        "static scales", "of formats such as int8:channel,int8 and fp8_e4m3:head"
    )
    static.add_argument("--scales", type=Path, metavar="FILE", help="calibration to take them from")
    static.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="calibrate on the text after the scored windows, and write that (.json, .safetensors)",
    )
    static.add_argument(
        "--calibration-windows",
        type=_least(1),
        default=4,
        help="windows to calibrate on where no --scales are given (default: 4)",
    )
    static.add_argument(
        "--percent",
        type=_percent,
        default=100.0,
        help="of a head's elements that its scale does not clip; a channel's clips none that was seen (default: 100)",
    )
    limits = parser.add_argument_group("thresholds")
    for name, unit in (
        ("max_kl", "mean KL divergence, nats"),
        ("max_perplexity_increase", "fraction"),
        ("min_top1", "fraction"),
        ("min_needle", "fraction of the reference's exact matches"),
    ):
        default = getattr(Thresholds(), name)
        limits.add_argument(f"--{name.replace('_', '-')}", type=_limit, help=f"{unit} (default: {default:g})")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures, unrounded; - for standard output"
    )
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw the needle grids (.png, .svg, .pdf)")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; the exit status."""
    sizes = {
        name: getattr(args, name) if getattr(args, name) is not None else pair[args.quick]
        for name, pair in _SIZES.items()
    }
    _check(args, has_text=bool(sizes["windows"]))
    report.require("rich")
    if args.plot:
        report.check_figure(args.plot)
        report.require("matplotlib")
    model = load_model(args.model)
    model = dataclasses.replace(
        model, config=_usable("--reference, --block-size or --residual", lambda: _config(model.config, args))
    )
    variants = _usable("--formats", lambda: [read_variant(text, model.config) for text in args.formats])
    ids = np.array(model.encode(read_text(args.text)), np.int64)
    windows, rest = cut(ids, sizes["windows"], sizes["window_tokens"], start=model.start)
    text = grid = None
    if sizes["windows"]:
        text = _usable("--scored-after", lambda: Text(windows, args.scored_after))
    if not args.no_needle:
        depths = tuple(depth / 100 for depth in sizes["depths"])
        grid = _usable("--lengths", lambda: Grid(tuple(sizes["lengths"]), depths, sizes["trials"]))
    scales = _calibration(args, model, variants, rest, sizes["window_tokens"])
    given = {name: value for name in _limits() if (value := getattr(args, name)) is not None}
    thresholds = Thresholds(**(dict.fromkeys(_limits()) | given)) if given else Thresholds()
    num_tokens = (text.num_tokens if text else 0) + (grid.num_tokens if grid else 0)
    with report.progress("measuring", num_tokens * (1 + len(variants))) as progress:
        result = _usable(
            "kvblocks quality",
            lambda: evaluate(
                model,
                [_with_scales(variant, scales, args.percent) for variant in variants],
                text=text,
                grid=grid,
                thresholds=thresholds,
                backend=args.backend,
                batch_size=args.batch,
                chunk_tokens=args.chunk,
                num_threads=args.threads or (CpuBackend().num_threads if model.thread_safe else 1),
                progress=progress,
            ),
        )
    settings = {
        "model": model.name,
        "text": str(args.text) if args.text else "public-domain prose of the project",
        **sizes,
        "scored_after": args.scored_after,
        "block_size": model.config.block_size,
        "residual_tokens": model.config.residual_tokens,
        "chunk_tokens": args.chunk,
        "calibration": None if scales is None else outliers(scales) | {"percent": args.percent},
    }
    if str(args.json) != "-":
        print_result(result, _title(model.name, result.reference.text))
        if scales is not None:
            report.write_line(describe(outliers(scales)))
    if args.json:
        report.write_json(args.json, as_json(result, settings, thresholds))
    if args.plot:
        if result.reference.needle is None:
            sys.stderr.write(f"kvblocks: {args.plot}: not drawn, as no key had been asked for\n")
        else:
            plot_grid(result, args.plot, f"Passkey retrieval, {model.name}")
    if result.interrupted:
        return report.INTERRUPTED
    return 1 if given and not all(score.passes for score in result.scores) else 0


def _check(args: argparse.Namespace, *, has_text: bool) -> None:
    """Refuse what would come to nothing at the end of a long run."""
    if args.plot and args.no_needle:
        raise UserError("--plot draws the needle grid: leave --no-needle out")
    for name in _limits():
        is_measured = not args.no_needle if name == "min_needle" else has_text
        if getattr(args, name) is not None and not is_measured:
            option, cause = name.replace("_", "-"), "--no-needle" if name == "min_needle" else "--windows 0"
            raise UserError(f"--{option} is a threshold of what {cause} leaves out")
    for path in (args.json, args.plot, args.calibrate):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise UserError(f"{path}: is a folder, expected the name of a file")


def _limits() -> list[str]:
    return [field.name for field in dataclasses.fields(Thresholds)]


def _config(config: CacheConfig, args: argparse.Namespace) -> CacheConfig:
    changes = {
        "dtype": args.reference,
        "block_size": args.block_size,
        "residual_tokens": args.residual,
    }
    return dataclasses.replace(
        config, **{name: value for name, value in changes.items() if value is not None}
    )


def _calibration(
    args: argparse.Namespace, model: Model, variants: Sequence[Variant], ids: IDS, window_tokens: int
) -> Calibration | None:
    """The scales that were asked for or are needed: of a file, or from `ids`, the text that is not scored."""
    if args.scales and args.calibrate:
        raise UserError("--scales reads a calibration and --calibrate makes one: give one of the two")
    if args.scales:
        return _usable("--scales", lambda: Calibration.load(args.scales, model.config))
    if not args.calibrate and not any(needs_calibration(variant.config) for variant in variants):
        return None
    windows, _ = cut(
        ids,
        args.calibration_windows,
        window_tokens,
        start=model.start,
        what="rest of the text, to calibrate on,",
    )
    with report.progress("calibrating", windows.size) as progress:
        calibration = _usable(
            "kvblocks quality", lambda: calibrate(model, windows, backend=args.backend, progress=progress)
        )
    if args.calibrate:
        try:
            _usable("--calibrate", lambda: calibration.save(args.calibrate))
        except OSError as error:
            raise UserError(f"{args.calibrate}: cannot write: {error.strerror}") from error
    return calibration


def _with_scales(variant: Variant, scales: Calibration | None, percent: float) -> Variant:
    if not needs_calibration(variant.config):
        return variant
    return dataclasses.replace(variant, calibration=scales, percent=percent)


def _title(model: str, text: TextScore | None) -> str:
    if text is None:
        return model
    return f"{model}, {text.num_tokens:,} scored tokens"


def _usable(option: str, make: Callable[[], _T]) -> _T:
    """What `make` returns; a ValueError of the library is the user's, as are sizes that no memory holds."""
    try:
        return make()
    except (ValueError, MemoryError) as error:
        raise UserError(f"{option}: {error}") from error


def _least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    integer.__name__ = f"integer from {least}"
    return integer


def _percent(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not within 0..100")
    return value


def _limit(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0")
    return value
