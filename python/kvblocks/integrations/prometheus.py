"""The counters of block managers as Prometheus metrics, read when Prometheus asks and at no other time.

Owns `KVBlocksCollector`. Imports the core and prometheus_client (`pip install 'kvblocks[prometheus]'`).

    REGISTRY.register(KVBlocksCollector({"decode": manager}, namespaces={"base": {}, "acme": {"salt": "acme"}}))

Invariant: every counter of `Stats` and of `Usage` is in one family, whose name ends in its unit. All samples of a
manager come from one snapshot, so that free + live + cached + held is its capacity in every scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias, TypedDict

from kvblocks._core import BlockManager, Stats, Usage

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError:
    raise ImportError(
        "kvblocks.integrations.prometheus needs prometheus_client: pip install 'kvblocks[prometheus]'"
    ) from None

_Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily
_Row: TypeAlias = tuple[list[str], Stats | Usage]


class Namespace(TypedDict, total=False):
    """The keys of a namespace, as `BlockManager.prepare` takes them; none: the default one."""

    adapter: str | bytes | int | bool
    salt: str | bytes | int | bool


class _Metric(NamedTuple):
    """A family: where its values come from, by the value of the label that tells them apart if there is one."""

    name: str
    help: str
    fields: dict[str, str]
    label: str | None = None

    def family(self, labels: list[str]) -> _Family:
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        own = [] if self.label is None else [self.label]
        return kind(f"kvblocks_{self.name}", self.help, labels=[*labels, *own])

    def collect(self, labels: list[str], rows: list[_Row]) -> _Family:
        family = self.family(labels)
        for values, counters in rows:
            for value, field in self.fields.items():
                own = [] if self.label is None else [value]
                family.add_metric([*values, *own], getattr(counters, field))
        return family


def _plain(name: str, field: str, text: str) -> _Metric:
    return _Metric(name, text, {"": field})


# What is counted for the pool and for each namespace.
_USAGE: Final = [
    _plain("live_blocks", "live_blocks", "Blocks that sequences own, shared ones counted once."),
    _plain("cached_blocks", "cached_blocks", "Blocks without an owner that can still be hit."),
    _plain("reclaimable_blocks", "reclaimable_blocks", "Blocks that the next request may have: cached ones."),
    _plain("held_blocks", "held_blocks", "Blocks that only transfers own."),
    _plain("logical_blocks", "logical_blocks", "Blocks named by all block tables together."),
    _plain("promised_blocks", "promised_blocks", "Blocks kept for sequences with a declared maximum."),
    _plain("sequences", "num_seqs", "Sequences that hold a handle, preempted ones included."),
    _plain("used_slots", "used_slots", "Slots of live blocks that hold a computed token."),
    _plain("allocated_slots", "allocated_slots", "Slots of live blocks."),
    _plain("reserved_slots", "reserved_slots", "Slots reserved beyond what is scheduled."),
    _plain(
        "internal_fragmentation_ratio", "internal_fragmentation", "Share of the allocated slots not in use."
    ),
    _plain("sharing_ratio", "sharing", "Logical blocks per live block."),
    _Metric(
        "peak_blocks",
        "Most blocks at one time since the peaks were reset.",
        {"live": "peak_live_blocks", "logical": "peak_logical_blocks"},
        "kind",
    ),
    _plain("prefix_queried_requests_total", "queried_requests", "Admissions that looked the cache up."),
    _plain("prefix_queried_blocks_total", "queried_blocks", "Full blocks looked up by admissions."),
    _plain("prefix_queried_tokens_total", "queried_tokens", "Tokens looked up by admissions."),
    _plain("prefix_hit_requests_total", "hit_requests", "Admissions that found something."),
    _plain("prefix_hit_blocks_total", "hit_blocks", "Blocks found by admissions."),
    _plain("prefix_hit_tokens_total", "hit_tokens", "Tokens found by admissions."),
    _plain("readmit_requests_total", "readmit_requests", "Admissions of preempted sequences."),
    _plain("readmit_queried_blocks_total", "readmit_queried_blocks", "Full blocks looked up by them."),
    _plain("readmit_queried_tokens_total", "readmit_queried_tokens", "Tokens looked up by them."),
    _plain("readmit_hit_requests_total", "readmit_hit_requests", "Those that found something."),
    _plain("readmit_hit_blocks_total", "readmit_hit_blocks", "Blocks found by them."),
    _plain("readmit_hit_tokens_total", "readmit_hit_tokens", "Tokens found by them."),
    _plain(
        "collided_requests_total", "collided_requests", "Admissions that met an equal hash of other content."
    ),
    _plain("collided_blocks_total", "collided_blocks", "Blocks met with an equal hash and other content."),
    _plain("collided_tokens_total", "collided_tokens", "Tokens of those blocks."),
    _plain(
        "evicting_requests_total", "evicting_requests", "Admissions, and rows of steps, that evicted blocks."
    ),
    _plain("evicted_blocks_total", "evicted_blocks", "Cached blocks whose content gave way."),
    _plain("evicted_tokens_total", "evicted_tokens", "Tokens of those blocks."),
    _plain("copied_blocks_total", "copied_blocks", "Copy-on-write copies."),
    _plain("preemptions_total", "preemptions", "Sequences preempted."),
]

_MANAGER: Final = [
    _plain("capacity_blocks", "capacity_blocks", "Blocks that can be allocated."),
    _plain("free_blocks", "free_blocks", "Blocks without an owner and without content."),
    *_USAGE,
    _plain("transfers", "num_transfers", "Transfers that have not ended."),
    _plain("steps_total", "num_steps", "Steps scheduled."),
    _Metric(
        "ended_transfers_total",
        "Transfers that have ended.",
        {
            "completed": "completed_transfers",
            "failed": "failed_transfers",
            "cancelled": "cancelled_transfers",
        },
        "outcome",
    ),
]

_NAMESPACE: Final = [
    metric._replace(name=f"namespace_{metric.name}", help=f"Of a namespace: {metric.help}")
    for metric in _USAGE
]


class KVBlocksCollector(Collector):
    """Exports `stats()` of managers, and the usage of the namespaces that are named.

    managers: by the value of the label `manager`; read anew at each scrape, so entries may come and go. namespaces:
    by the value of the label `namespace`, exported for each manager; name only as many as your Prometheus can bear.
    The totals of a namespace start again from 0 after it was forgotten, see `BlockManager.namespace_usage`.
    """

    def __init__(
        self, managers: Mapping[str, BlockManager], *, namespaces: Mapping[str, Namespace] | None = None
    ) -> None:
        self._managers = managers
        self._namespaces = namespaces or {}

    def describe(self) -> Iterator[_Family]:
        """The families without samples, for the registry to find clashes of names."""
        yield from (metric.family(["manager"]) for metric in _MANAGER)
        yield from (metric.family(["manager", "namespace"]) for metric in _NAMESPACE)

    def collect(self) -> Iterator[_Family]:
        """The families with one sample a manager, or a manager and namespace. O(managers * namespaces)."""
        managers = list(self._managers.items())
        stats: list[_Row] = [([name], manager.stats()) for name, manager in managers]
        usage: list[_Row] = [
            ([name, namespace], manager.namespace_usage(**keys))
            for name, manager in managers
            for namespace, keys in self._namespaces.items()
        ]
        yield from (metric.collect(["manager"], stats) for metric in _MANAGER)
        if usage:
            yield from (metric.collect(["manager", "namespace"], usage) for metric in _NAMESPACE)
