"""How a command line spells what is measured: a format, formats of layers, a control, each with sizes of its own.

Owns the grammar of `--formats` and `read_variant`. Imports config, controls, formats and lane.
Invariant: what is spelled stands in the name of the variant, so that no two lines of a table look alike by mistake.

    VARIANT = KINDS[@RESIDUAL[/BLOCK]]     KINDS = control, or KIND[+KIND]...     KIND = [LAYERS=]K[,V]

RESIDUAL: tokens that stay in 16 bit; BLOCK: tokens of a block. LAYERS: numbers and ranges from 0, such as 0-1,29; a
kind without them is that of all other layers.
"""

from __future__ import annotations

import dataclasses
import re

from kvblocks.config import CacheConfig
from kvblocks.formats import KVFormat
from kvblocks.quality.controls import CONTROLS, control
from kvblocks.quality.lane import Variant


def read_variant(text: str, config: CacheConfig) -> Variant:
    """The variant of a model that `text` spells, with the sizes of `config` where it gives none of its own.

    Raises ValueError that names what cannot be read, or the field of the config as `CacheConfig` does.
    """
    kinds, at, sizes = text.partition("@")
    if at:
        config = _sized(config, text, sizes)
    if kinds in CONTROLS:
        if at:
            raise ValueError(f"{text!r}: {kinds} keeps no tokens in 16 bit, and has no blocks of its own")
        return control(kinds, config)
    config = dataclasses.replace(config, kv_format=_by_layer(kinds, config.num_layers))
    if at and not config.has_residual:
        raise ValueError(f"{text!r}: {kinds} keeps no tokens in 16 bit")
    return Variant(text, config)


def _sized(config: CacheConfig, text: str, sizes: str) -> CacheConfig:
    match = re.fullmatch(r"([0-9]{1,9})(?:/([0-9]{1,9}))?", sizes)
    if match is None:
        raise ValueError(
            f"{text!r}: expected tokens after the @, as in kivi2@64, or with those of a block, kivi2r@48/16"
        )
    residual, block_size = match.groups()
    return dataclasses.replace(
        config,
        residual_tokens=int(residual),
        block_size=config.block_size if block_size is None else int(block_size),
    )


def _by_layer(kinds: str, num_layers: int) -> str | list[KVFormat]:
    """One format for all layers as it is spelled, or a list of one for each."""
    if "=" not in kinds and "+" not in kinds:
        return kinds
    formats: list[KVFormat | None] = [None] * num_layers
    others: list[KVFormat] = []
    for kind in kinds.split("+"):
        layers, equals, name = kind.rpartition("=")
        kv_format = KVFormat.parse(name)
        if not equals:
            others.append(kv_format)
            continue
        for layer in _layers(layers, kinds, num_layers):
            if formats[layer] is not None:
                raise ValueError(f"{kinds!r}: layer {layer} has two formats")
            formats[layer] = kv_format
    missing = [layer for layer, kv_format in enumerate(formats) if kv_format is None]
    if len(others) > 1 or bool(others) != bool(missing):
        left = f"{len(missing)} layers have none" if missing else "no layer is left"
        raise ValueError(
            f"{kinds!r}: {left}, and {len(others)} formats are for all others: expected LAYERS=FORMAT, joined by +, "
            "and one format alone if layers are left"
        )
    return [kv_format or others[0] for kv_format in formats]


def _layers(text: str, kinds: str, num_layers: int) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        if match is None:
            raise ValueError(f"{kinds!r}: {part!r} are no layers: expected a number or a range, such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < num_layers:
            raise ValueError(f"{kinds!r}: layers {part} are none of the model's 0..{num_layers - 1}")
        found.extend(range(first, last + 1))
    return found
