"""Scales for formats that need them beforehand: the model runs over text once, and its K and V are looked at.

Owns `calibrate` and what it finds in words. Imports calibration, lane and model.
Invariant: a calibration is frozen before anything is measured with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvblocks.backends import Backend
from kvblocks.calibration import Calibration
from kvblocks.config import CacheConfig
from kvblocks.layout import Array
from kvblocks.quality.lane import Lane, Variant, choose_backend
from kvblocks.quality.model import IDS, Model

# Nothing is scored, so a step may be long.
_CHUNK_TOKENS = 128


def calibrate(
    model: Model,
    windows: IDS,
    *,
    backend: str | Backend | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Calibration:
    """Magnitudes of the model's K and V over windows of token ids [num_windows, num_tokens]; one forward pass."""
    calibration = Calibration(model.config)

    def observe(layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        calibration.observe(layer, k, v)
        return k, v

    for window in windows:
        lane = Lane(
            model.forward,
            Variant("calibration", model.config, observe),
            num_seqs=1,
            num_tokens=len(window),
            chunk_tokens=_CHUNK_TOKENS,
            backend=choose_backend(model.config, backend),
        )
        for _ in lane.run(window[None], len(window), progress):
            pass
    calibration.freeze()
    return calibration


def needs_calibration(config: CacheConfig) -> bool:
    """Whether some layer's format has a scale that must be known before the first write."""
    return any(part.is_static for layer in config.formats for part in (layer.k, layer.v))


def outliers(calibration: Calibration) -> dict[str, Any]:
    """The most uneven head of K: its largest channel as a multiple of its median one, and where it is."""
    ratios = np.array([calibration.outlier_ratio("k", layer) for layer in range(len(calibration.num_tokens))])
    layer, head = np.unravel_index(ratios.argmax(), ratios.shape)
    return {
        "tokens": int(calibration.num_tokens[0]),
        "largest_k_outlier_ratio": float(ratios[layer, head]),
        "layer": int(layer),
        "head": int(head),
        "median_k_outlier_ratio": float(np.median(ratios)),
    }


def describe(found: dict[str, Any]) -> str:
    """`outliers` as a sentence."""
    return (
        f"calibrated on {found['tokens']:,} tokens: the largest channel of a K head is "
        f"{found['largest_k_outlier_ratio']:.1f} times its median one in layer {found['layer']}, head {found['head']}, "
        f"{found['median_k_outlier_ratio']:.1f} times in the median head"
    )
