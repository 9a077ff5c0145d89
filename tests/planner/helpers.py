"""What the planner's tests share: a scenario in a few words."""

from fractions import Fraction
from typing import Any

from kvblocks.formats import KVFormat
from kvblocks.planner.architectures import describe
from kvblocks.planner.footprint import Footprint, footprint
from kvblocks.planner.lengths import Lengths, fixed
from kvblocks.planner.memory import Budget
from kvblocks.planner.models import BUILT_IN
from kvblocks.planner.plan import Scenario


def model_footprint(config: dict[str, Any], kv_format: str | None = None, **options: Any) -> Footprint:
    """The footprint of a configuration, in its own dtype unless a format is given."""
    model = describe(config, "config.json")
    return footprint(
        model,
        KVFormat.parse(kv_format or model.dtype),
        **{"block_size": 16, "residual_tokens": 128} | options,
    )


def scenario(
    name: str,
    *,
    cache_bytes: int,
    lengths: Lengths | None = None,
    kv_format: str | None = None,
    **options: Any,
) -> Scenario:
    """A built-in model with `cache_bytes` left for its cache."""
    model = describe(BUILT_IN[name], name)
    return Scenario(
        model=model,
        budget=Budget(cache_bytes, Fraction(1), 0),
        kv_format=KVFormat.parse(kv_format or model.dtype),
        lengths=lengths or fixed(4096),
        **options,
    )
