"""What a cache format costs on a model: perplexity, divergence, agreement and a needle grid, beside the model's own.

`evaluate` measures any model that keeps its K and V in a kvblocks cache; `kvblocks quality` is its command line.
"""

from kvblocks.quality.evaluate import Grid, Result, Score, Text, evaluate
from kvblocks.quality.lane import Codec, Variant, with_format
from kvblocks.quality.likelihood import TextScore
from kvblocks.quality.model import CacheView, Forward, Model, load_model
from kvblocks.quality.needle import Cell
from kvblocks.quality.verdict import Thresholds

__all__ = [
    "CacheView",
    "Cell",
    "Codec",
    "Forward",
    "Grid",
    "Model",
    "Result",
    "Score",
    "Text",
    "TextScore",
    "Thresholds",
    "Variant",
    "evaluate",
    "load_model",
    "with_format",
]
