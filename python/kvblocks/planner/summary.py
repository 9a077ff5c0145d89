"""The answers to one question as plain values: what is printed, plotted and written as JSON.

Owns the schema of `kvblocks plan --json`, which docs/planner.md describes. Names end in their unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvblocks.formats import KVFormat
from kvblocks.planner.footprint import layer_block_bytes
from kvblocks.planner.levers import Lever, attention_name
from kvblocks.planner.model import Attention, State
from kvblocks.planner.plan import Scenario
from kvblocks.planner.weights import Weights


@dataclass(frozen=True)
class Question:
    """A scenario, and what else is asked about it.

    gpu_name and nominal_gb: the card as people name it, None where only its bytes are known. target_users: on all
    GPUs. price_per_hour: of one GPU, in any currency. assumed: terms of the budget that nobody gave or measured.
    """

    scenario: Scenario
    weights: Weights
    gpu_name: str | None = None
    nominal_gb: Fraction | None = None
    target_users: int | None = None
    price_per_hour: float | None = None
    assumed: tuple[str, ...] = ()


def summarise(question: Question, levers: Sequence[Lever]) -> dict[str, Any]:
    """All answers, as JSON has them."""
    scenario = question.scenario
    model, budget = scenario.model, scenario.budget
    fits = budget.cache_bytes > 0
    full_users = scenario.users_per_replica(scenario.lengths.max_tokens)
    return {
        "model": {
            "name": model.name,
            "model_type": model.model_type,
            "attention": attention_name(model),
            "num_layers": model.num_layers,
            "num_layers_with_cache": model.num_owners,
            "dtype": model.dtype,
            "max_context_tokens": model.max_context,
            "assumed": dict(model.assumed),
        },
        "gpus": {
            "name": question.gpu_name,
            "num_gpus": scenario.num_gpus,
            "num_ranks": scenario.num_ranks,
            "num_replicas": scenario.num_replicas,
        },
        "cache": {
            "kv_format": str(scenario.kv_format),
            "block_size_tokens": scenario.block_size,
            "caches": [_cache(scenario, cache, count) for cache, count in model.caches],
            "bytes_per_token": float(scenario.footprint.bytes_per_token(0)),
            "bytes_per_token_beyond_windows": float(scenario.footprint.bytes_per_token()),
            "bytes_per_sequence": scenario.footprint.sequence_bytes,
            "static_bytes": scenario.footprint.static_bytes,
        },
        "budget": {
            "total_bytes": budget.total_bytes,
            "utilisation": float(budget.utilisation),
            "free_bytes": budget.free_bytes,
            "usable_bytes": budget.usable_bytes,
            **{f"{name}_bytes": num_bytes for name, num_bytes in budget.deductions()},
            "assumed": list(question.assumed),
            "weights_total_bytes": question.weights.num_bytes,
            "weights_source": question.weights.source,
            "cache_bytes": budget.cache_bytes,
            "short_by_bytes": 0 if fits else -budget.cache_bytes,
        },
        "lengths": {"source": scenario.lengths.source, "shared_prefix_tokens": scenario.shared_prefix},
        "users": [_users(question, name, tokens) for name, tokens in scenario.lengths.rows()],
        "users_fit_99_percent_of_the_time": scenario.users_by_chance(0.99),
        "pools": [
            {
                "span_tokens": pool.span,
                "num_layers": pool.num_layers,
                "bytes_per_block": pool.bytes_per_block,
                "num_blocks": num_blocks if fits else 0,
            }
            for pool, num_blocks in zip(
                scenario.footprint.pools,
                scenario.pool_blocks(full_users, scenario.lengths.max_tokens),
                strict=True,
            )
        ],
        "target": None if question.target_users is None else _target(question, question.target_users),
        "context_beyond_weights_tokens": scenario.context_beyond_weights(),
        "levers": [_lever(lever) for lever in levers],
        "readings": readings(question),
    }


def readings(question: Question) -> list[dict[str, Any]]:
    """The division that people do in their heads, in the ways in which "GB" is read: no reserves, no blocks.

    Empty where the card has no size in gigabytes.
    """
    size, scenario = question.nominal_gb, question.scenario
    if size is None:
        return []
    weights = scenario.budget.weights_bytes
    user = scenario.footprint.token_bytes(scenario.lengths.max_tokens)
    giga, gibi, most = Fraction(10**9), Fraction(2**30), Fraction(9, 10)
    gigabytes_of_weights, gibibytes_of_user = weights / giga, user / gibi
    card = f"{float(size):g}"
    in_gigabytes = f"({card} - {float(gigabytes_of_weights):.4g}) / {float(gibibytes_of_user):.4g}"
    cases = [
        (
            f"all in GB, a GiB taken for a GB: {in_gigabytes}",
            (size - gigabytes_of_weights) / gibibytes_of_user,
        ),
        (f"bytes, a card of {card} GB", (size * giga - weights) / user),
        (f"bytes, a card of {card} GiB", (size * gibi - weights) / user),
        (f"bytes, 90 % of {card} GB", (size * giga * most - weights) / user),
        (f"bytes, 90 % of {card} GiB", (size * gibi * most - weights) / user),
    ]
    return [{"reading": name, "users": max(0, int(users // 1))} for name, users in cases]


def formula(cache: Attention | State, count: int, scenario: Scenario) -> str:
    """The term of one kind of layer, with its numbers, in bytes on one GPU."""
    if isinstance(cache, State):
        parts = " + ".join(
            f"{part.bytes_per_rank(scenario.num_ranks):,} B {part.name}" for part in cache.parts
        )
        return f"{count} x ({parts})"
    if cache.bytes_per_token is not None:
        return f"{count} x {cache.bytes_per_token} B"
    heads = cache.heads_per_rank(scenario.num_ranks)
    key = _row(scenario.kv_format, cache.key_dim, 0)
    rows = f"({key} + {_row(scenario.kv_format, cache.value_dim, 1)})" if cache.value_dim else f"({key})"
    block = layer_block_bytes(cache, scenario.kv_format, scenario.block_size, scenario.num_ranks)
    scales = Fraction(block, scenario.block_size) - _code_bytes(cache, heads, scenario.kv_format)
    text = f"{rows} x {heads} head{'s' * (heads > 1)}" + (f" + {float(scales):g} B scales" if scales else "")
    return f"{count} x ({text})" if scales else f"{count} x {text}"


def _row(kv_format: KVFormat, dim: int, part: int) -> str:
    """The stored bytes of a row, as its elements and their size."""
    format_ = (kv_format.k, kv_format.v)[part]
    return f"{dim} x {format_.bits / 8:g} B"


def _code_bytes(cache: Attention, heads: int, kv_format: KVFormat) -> Fraction:
    """Bytes of a token's codes in one layer, without scales."""
    return Fraction(heads * (cache.key_dim * kv_format.k.bits + cache.value_dim * kv_format.v.bits), 8)


def _cache(scenario: Scenario, cache: Attention | State, count: int) -> dict[str, Any]:
    if isinstance(cache, State):
        return {
            "kind": cache.kind,
            "num_layers": count,
            "formula": formula(cache, count, scenario),
            "bytes_per_sequence": count * cache.bytes_per_rank(scenario.num_ranks),
        }
    block = layer_block_bytes(cache, scenario.kv_format, scenario.block_size, scenario.num_ranks)
    return {
        "kind": cache.kind,
        "num_layers": count,
        "span_tokens": cache.span,
        "kv_heads_per_gpu": cache.heads_per_rank(scenario.num_ranks),
        "formula": formula(cache, count, scenario),
        "bytes_per_token": float(Fraction(count * block, scenario.block_size)),
    }


def _users(question: Question, name: str, tokens: int) -> dict[str, Any]:
    scenario = question.scenario
    users = scenario.users(tokens)
    cost = question.price_per_hour
    return {
        "lengths": name,
        "context_tokens": tokens,
        "blocks_per_user": [pool.blocks(tokens) for pool in scenario.footprint.pools],
        "bytes_per_user": scenario.footprint.sequence_total(tokens),
        "own_bytes_per_user": scenario.bytes_per_user(tokens),
        "users": users,
        "cost_per_user_hour": cost * scenario.num_gpus / users if cost is not None and users else None,
    }


def _target(question: Question, users: int) -> dict[str, Any]:
    scenario = question.scenario
    context = scenario.context(users)
    per_replica = -(-users // scenario.num_replicas)
    needed = scenario.bytes_for(per_replica, scenario.lengths.max_tokens)
    return {
        "users": users,
        "context_tokens": context,
        "fits_at_full": context is None or context >= scenario.lengths.max_tokens,
        "needed_bytes": needed,
        "gpus_for_full": scenario.gpus_for(users, scenario.lengths.max_tokens),
        "short_by_bytes": max(0, needed - scenario.budget.cache_bytes),
    }


def _lever(lever: Lever) -> dict[str, Any]:
    scenario = lever.scenario
    lengths = scenario.lengths
    return {
        "lever": lever.name,
        "bytes_per_token": float(scenario.footprint.bytes_per_token(0)),
        "bytes_per_user_at_full": scenario.bytes_per_user(lengths.max_tokens),
        "users_at_full": scenario.users(lengths.max_tokens),
        "users_at_p95": scenario.users(lengths.p95_tokens),
        "users_at_mean": scenario.users(lengths.mean_tokens),
    }
