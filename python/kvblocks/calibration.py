"""What K and V of a model look like: magnitudes per layer, head and channel, collected while it runs.

Owns `Calibration`. Imports backends' codecs, config, formats and layout; safetensors only for files of that name.
Invariant: the number of tokens seen is known at all times, and nothing changes after `freeze`, which happens in one
place: where it is called, or at the end of the `observe` call that fills the window.
"""

from __future__ import annotations

import importlib
import math
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvblocks.backends.codecs import amax_of, scale_of
from kvblocks.config import CacheConfig
from kvblocks.formats import Format, Part
from kvblocks.layout import to_float32

if TYPE_CHECKING:
    from pathlib import Path

F32 = NDArray[np.float32]

# Bins of magnitudes: the first one from 2^-24 on, each 2^(1/16) wide, so a percentile is at most 4.4 % too large.
_BINS_PER_OCTAVE: Final = 16
_LOWEST_OCTAVE: Final = -24
_NUM_BINS: Final = 48 * _BINS_PER_OCTAVE
_KIND: Final = "kvblocks-calibration"
_VERSION: Final = 1
_ARRAYS: Final = ("k_amax", "v_amax", "k_histogram", "v_histogram", "num_tokens")


class Calibration:
    """Magnitudes of K and V of every layer: the largest of each channel, a histogram of each head.

    window_tokens: tokens of a layer after which it is frozen; None: only `freeze` does that. The arrays are the
    calibration's own: k_amax, v_amax float32 [num_layers, num_kv_heads, head_dim or head_dim_v], k_histogram,
    v_histogram int64 [num_layers, num_kv_heads, bins], num_tokens int64 [num_layers]. NaN and infinities are left out.
    """

    def __init__(self, config: CacheConfig, *, window_tokens: int | None = None) -> None:
        if window_tokens is not None and window_tokens < 1:
            raise ValueError(f"window_tokens is {window_tokens}, expected 1 or more, or None")
        layers, heads, dim_v = config.num_layers, config.num_kv_heads, config.head_dim_v or config.head_dim
        self.window_tokens = window_tokens
        self.k_amax = np.zeros((layers, heads, config.head_dim), np.float32)
        self.v_amax = np.zeros((layers, heads, dim_v), np.float32)
        self.k_histogram = np.zeros((layers, heads, _NUM_BINS), np.int64)
        self.v_histogram = np.zeros((layers, heads, _NUM_BINS), np.int64)
        self.num_tokens = np.zeros(layers, np.int64)
        self._frozen = np.zeros(layers, np.bool_)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is taken in any more, in any layer."""
        return bool(self._frozen.all())

    def freeze(self) -> None:
        """Take in nothing any more."""
        self._frozen[:] = True

    def observe(self, layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Take in K [num_tokens, num_kv_heads, head_dim] and V of a layer; all of a call, or nothing once frozen.

        float32, float16 or bfloat16 bits. Raises ValueError for a layer or shapes that are not those of the config, and
        has then taken in nothing. O(elements).
        """
        if not 0 <= layer < len(self._frozen):
            raise ValueError(f"layer is {layer}, expected 0..{len(self._frozen) - 1}")
        if self._frozen[layer]:
            return
        for name, given, amax in (("k", k, self.k_amax[layer]), ("v", v, self.v_amax[layer])):
            if given.shape != (len(k), *amax.shape):
                raise ValueError(
                    f"{name} of layer {layer} has shape {given.shape}, expected {(len(k), *amax.shape)}"
                )
        for rows, amax, histogram in (
            (to_float32(k), self.k_amax[layer], self.k_histogram[layer]),
            (to_float32(v), self.v_amax[layer], self.v_histogram[layer]),
        ):
            magnitude = np.where(np.isfinite(rows), np.abs(rows), np.float32(0))
            np.maximum(amax, magnitude.max(axis=0, initial=0.0), out=amax)
            bins = _bin_of(magnitude)
            for head in range(len(amax)):
                histogram[head] += np.bincount(bins[:, head].ravel(), minlength=_NUM_BINS)
        self.num_tokens[layer] += len(k)
        if self.window_tokens is not None and self.num_tokens[layer] >= self.window_tokens:
            self._frozen[layer] = True

    def of_heads(self, first: int, last: int) -> Calibration:
        """What is known of the heads first..last, as a rank needs it that has these only: a frozen copy.

        The scale of a whole tensor is then that of these heads. Raises ValueError for heads that are none.
        """
        num_heads = self.k_amax.shape[1]
        if not 0 <= first < last <= num_heads:
            raise ValueError(f"heads {first}..{last}, expected a range within 0..{num_heads}")
        part = deepcopy(self)
        for name in ("k_amax", "v_amax", "k_histogram", "v_histogram"):
            setattr(part, name, getattr(self, name)[:, first:last].copy())
        part.freeze()
        return part

    def percentile(self, part: Part, layer: int, percent: float) -> F32:
        """The magnitude that `percent` of a head's elements do not exceed [num_kv_heads]; 100 is the amax.

        At most 4.4 % too large, never too small.
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent is {percent}, expected a number above 0, up to 100")
        amax = (self.k_amax if part == "k" else self.v_amax)[layer].max(axis=1)
        if percent == 100:
            return np.asarray(amax)
        counts = (self.k_histogram if part == "k" else self.v_histogram)[layer]
        cumulated = np.cumsum(counts, axis=1)
        bins = np.argmax(cumulated >= cumulated[:, -1:] * (percent / 100), axis=1)
        return np.asarray(np.minimum(_upper_edge(bins), amax))

    def scale(self, part: Part, layer: int, kv_format: Format, percent: float = 100) -> F32:
        """The static scale of a format, float32 in its shape: the magnitude of `percent` becomes the largest code.

        Raises ValueError for a format without a static scale, for a layer that has seen no tokens, and for a percentile
        of a channel, of which only the largest magnitude is known.
        """
        if not kv_format.is_static:
            raise ValueError(f"{kv_format} has no static scale")
        if self.num_tokens[layer] == 0:
            raise ValueError(f"layer {layer} has seen no tokens")
        if kv_format.scaling == "channel":
            if percent != 100:
                raise ValueError(
                    f"percent is {percent}: a channel's scale is that of its largest magnitude, 100"
                )
            return scale_of((self.k_amax if part == "k" else self.v_amax)[layer], kv_format)
        of_heads = self.percentile(part, layer, percent)
        return scale_of(amax_of(of_heads[None, :, None], kv_format), kv_format)

    def clipped(self, part: Part, layer: int, kv_format: Format, scale: F32) -> NDArray[np.float64]:
        """The part of each head's elements that a scale clips [num_kv_heads], whole bins of the histogram counted.

        scale: of scaling tensor or head; see `Format`.
        """
        counts = (self.k_histogram if part == "k" else self.v_histogram)[layer]
        limits = np.broadcast_to(scale * np.float32(kv_format.limit), (len(counts),))
        beyond = np.arange(_NUM_BINS) > _bin_of(limits)[:, None]
        return np.asarray((counts * beyond).sum(axis=1) / np.maximum(counts.sum(axis=1), 1))

    def outlier_ratio(self, part: Part, layer: int) -> NDArray[np.float64]:
        """The largest channel of each head, as a multiple of its median one [num_kv_heads]."""
        amax = (self.k_amax if part == "k" else self.v_amax)[layer].astype(np.float64)
        return np.asarray(amax.max(axis=1) / np.maximum(np.median(amax, axis=1), np.finfo(np.float32).tiny))

    def save(self, path: str | Path) -> None:
        """Write a JSON file, or a safetensors file where the name ends so; it replaces one that is there as a whole."""
        path = _path(path)
        part = path.with_name(path.name + ".part")
        header = {"kind": _KIND, "version": str(_VERSION), "window_tokens": str(self.window_tokens)}
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        if path.suffix == ".safetensors":
            _safetensors().save_file(arrays, part, metadata=header)
        else:
            part.write_text(
                importlib.import_module("json").dumps(
                    header | {name: array.tolist() for name, array in arrays.items()}
                )
            )
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path, config: CacheConfig) -> Calibration:
        """Read what `save` wrote, frozen. Raises ValueError that names the file, the field and what was expected."""
        path = _path(path)
        fields = _read(path)
        if fields.get("kind") != _KIND or fields.get("version") != str(_VERSION):
            raise ValueError(
                f"{path}: kind {fields.get('kind')!r}, version {fields.get('version')!r}: expected "
                f"{_KIND!r}, '{_VERSION}'"
            )
        calibration = cls(config)
        for name in _ARRAYS:
            array = getattr(calibration, name)
            try:
                with np.errstate(over="ignore"):
                    # Not by the constructor, which cuts fractions off.
                    values = np.array(fields[name]).astype(array.dtype, casting="same_kind")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: {name}: missing or no array of numbers ({error})") from error
            if values.shape != array.shape:
                raise ValueError(f"{path}: {name} has shape {values.shape}, this model needs {array.shape}")
            if not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError(f"{path}: {name}: expected finite numbers from 0 on")
            array[...] = values
        calibration.freeze()
        return calibration


def _bin_of(magnitude: NDArray[Any]) -> NDArray[np.int64]:
    """The bin of each magnitude; 0 takes everything below, and the last one everything above."""
    with np.errstate(divide="ignore"):
        octaves = np.log2(magnitude) - _LOWEST_OCTAVE
    return np.asarray(np.clip(np.ceil(octaves * _BINS_PER_OCTAVE), 0, _NUM_BINS - 1), np.int64)


def _upper_edge(bins: NDArray[np.int64]) -> F32:
    # A little more than the edge, as the logarithm is rounded.
    edges = 2.0 ** (bins / _BINS_PER_OCTAVE + _LOWEST_OCTAVE) * (1 + 2.0**-20)
    return np.where(bins == _NUM_BINS - 1, math.inf, edges).astype(np.float32)


def _path(path: str | Path) -> Path:
    # Files come last, if at all: what they need is not imported with the package.
    made: Path = importlib.import_module("pathlib").Path(path)
    return made


def _read(path: Path) -> dict[str, Any]:
    json = importlib.import_module("json")
    try:
        if path.suffix == ".safetensors":
            with _safetensors_open(path) as file:
                return dict(file.metadata() or {}) | {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fields = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: not a calibration: arrays within arrays without end") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: {type(fields).__name__}, expected a JSON object")
    return fields


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ModuleNotFoundError as error:
        raise ValueError(
            "safetensors is not installed: pip install safetensors, or choose a name that ends in .json"
        ) from error


def _safetensors_open(path: Path) -> Any:
    _safetensors()
    module = importlib.import_module("safetensors")
    try:
        return module.safe_open(path, "numpy")
    except module.SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error
