"""What would change the number of users: one thing at a time, side by side.

Owns the list of levers; each is a scenario that differs from the given one in what its name says.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from kvblocks.formats import FORMATS, Format, KVFormat
from kvblocks.planner.fields import Fields
from kvblocks.planner.model import Attention, Cache, Model
from kvblocks.planner.plan import Scenario

# Compared besides every name of FORMATS: 8 bit without a scale for each token.
_ONE_SCALE: Final = "fp8_e4m3:tensor"


@dataclass(frozen=True)
class Lever:
    """A scenario and what distinguishes it."""

    name: str
    scenario: Scenario


def attention_name(model: Model) -> str:
    """How heads share K and V, for people: "GQA, 8 KV heads for 32 query heads"."""
    if not model.attentions:
        return "no attention"
    cache = model.attentions[0][0]
    if cache.is_latent:
        return f"MLA, one latent row for {model.num_query_heads} query heads"
    if cache.num_kv_heads == model.num_query_heads:
        return f"MHA, {cache.num_kv_heads} heads"
    if cache.num_kv_heads == 1:
        return f"MQA, 1 KV head for {model.num_query_heads} query heads"
    return f"GQA, {cache.num_kv_heads} KV heads for {model.num_query_heads} query heads"


def levers(base: Scenario, *, growth: Fraction | None = None) -> Iterator[Lever]:
    """The scenario as given, then with each lever pulled alone; those that cannot change anything are left out."""
    yield Lever("as given", base)
    unshared = _every_head(base.model)
    if unshared is not None:
        yield Lever(
            f"without {attention_name(base.model)[:3]}: K and V of every head", replace(base, model=unshared)
        )
    yield from _formats(base)
    yield Lever("half the context", replace(base, lengths=base.lengths.scaled(Fraction(1, 2))))
    if growth is not None:
        yield Lever(f"context x {float(growth):g}", replace(base, lengths=base.lengths.scaled(growth)))
    if base.shared_prefix:
        yield Lever("without the shared prefix", replace(base, shared_prefix=0))
    elif base.model.attentions:
        prefix = base.lengths.mean_tokens // 2
        yield Lever(f"half of the mean shared ({prefix:,} tokens)", replace(base, shared_prefix=prefix))
    yield Lever("contiguous at the maximum, not paged", replace(base, is_paged=False, shared_prefix=0))


def _formats(base: Scenario) -> Iterator[Lever]:
    """The other formats of the cache; a plain one only where the scenario's is none."""
    if not base.model.attentions:
        return
    plain = () if base.kv_format.is_plain else ("bfloat16",)
    quantised = (name for name in FORMATS if not KVFormat.parse(name).is_plain)
    for text in (*plain, _ONE_SCALE, *quantised):
        kv_format = KVFormat.parse(text)
        block_size = math.lcm(
            base.block_size, _tokens_of_a_group(kv_format.k), _tokens_of_a_group(kv_format.v)
        )
        if kv_format != base.kv_format and _holds(base.model, kv_format, block_size):
            suffix = f", blocks of {block_size}" if block_size != base.block_size else ""
            yield Lever(
                f"{_bits(kv_format)} bit: {text}{suffix}",
                replace(base, kv_format=kv_format, block_size=block_size),
            )


def _bits(kv_format: KVFormat) -> str:
    """Bits of a code, of K and of V where those differ."""
    return "/".join(dict.fromkeys(str(part.bits) for part in (kv_format.k, kv_format.v)))


def _tokens_of_a_group(part: Format) -> int:
    """Tokens that share a scale, which a block holds whole groups of."""
    return part.group if part.scaling == "token_group" else 1


def _holds(model: Model, kv_format: KVFormat, block_size: int) -> bool:
    """Whether the rows of all layers can be stored in a format."""
    try:
        for cache, _ in model.attentions:
            kv_format.check(block_size, cache.key_dim, cache.value_dim)
    except ValueError:
        return False
    return True


def _every_head(model: Model) -> Model | None:
    """The model as if each query head had K and V of its own; None where it has."""
    caches: list[tuple[Cache, int]] = []
    for cache, count in model.caches:
        if isinstance(cache, Attention) and cache.bytes_per_token is not None:
            continue
        if isinstance(cache, Attention) and cache.is_latent:
            fields = Fields(model.fields, model.name)
            nope, value = fields.optional_integer("qk_nope_head_dim"), fields.optional_integer("v_head_dim")
            if nope is None or value is None:
                return None
            key = nope + fields.integer("qk_rope_head_dim")
            caches.append((Attention(model.num_query_heads, key, value), count))
        elif isinstance(cache, Attention):
            caches.append((replace(cache, num_kv_heads=model.num_query_heads), count))
        else:
            caches.append((cache, count))
    return None if tuple(caches) == model.caches else replace(model, caches=tuple(caches))
