"""The Prometheus collector: nothing is missing, kinds and units are right, and a scrape is one snapshot."""

import subprocess
import sys

import pytest

import kvblocks as kv

pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install 'kvblocks[prometheus]'")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvblocks.integrations.prometheus import _MANAGER, _NAMESPACE, KVBlocksCollector

WITHOUT_CLIENT = """
import sys
sys.modules["prometheus_client"] = None
import kvblocks.integrations.nano_vllm
import kvblocks.integrations.prometheus
"""


def busy_manager(**options: int) -> kv.BlockManager:
    """Every counter but the collisions' has moved."""
    manager = kv.BlockManager(13, 4, **options)
    step = kv.Step(manager, max_seqs=4, max_tokens=64)

    def run(handles: list[int], num_new: int, tokens: list[int] | None = None) -> None:
        assert step.schedule(handles, num_new)
        manager.commit(handles, num_new, tokens)

    def admit(tokens: list[int], salt: str | None = None) -> int:
        answer = manager.allocate(manager.prepare(tokens, salt=salt), max_tokens=len(tokens) + 4)
        assert isinstance(answer, kv.Allocated)
        run([answer.handle], answer.num_new_tokens)
        return answer.handle

    manager.free(admit(list(range(100, 144))))
    manager.reset_peaks()
    first = admit(list(range(10)))
    again = admit([*range(9), 77], salt="acme")
    (prompt,) = manager.preempt(again)
    assert manager.allocate(prompt)
    manager.free(again)
    admit([*range(9), 78])
    (child,) = manager.fork(first).tolist()
    run([first, child], 1, [5, 6])
    for end in (manager.complete_transfer, manager.fail_transfer, manager.cancel_transfer):
        end(manager.begin_transfer(first))
    manager.begin_transfer(child)
    manager.free(child)
    assert manager.allocate(manager.prepare([1, 2, 3], salt="acme"), max_tokens=8)
    return manager


def scrape(collector: KVBlocksCollector) -> dict[str, Metric]:
    """The families as Prometheus reads them, by name."""
    registry = CollectorRegistry()
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {family.name: family for family in families}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    family = families[name.removesuffix("_total")]
    (sample,) = (s for s in family.samples if s.name == name and labels.items() <= s.labels.items())
    return sample.value


def fields(counters: type) -> list[str]:
    return sorted(name for name in vars(counters) if not name.startswith("_"))


def test_no_field_is_missing_and_none_is_there_twice() -> None:
    assert len(fields(kv.Stats)) >= 41
    assert sorted(field for metric in _MANAGER for field in metric.fields.values()) == fields(kv.Stats)
    assert len(fields(kv.Usage)) >= 34
    assert set(fields(kv.Usage)) < set(fields(kv.Stats))
    assert sorted(field for metric in _NAMESPACE for field in metric.fields.values()) == fields(kv.Usage)


def test_all_fields_are_exported_with_their_values() -> None:
    manager = busy_manager()
    stats = manager.stats()
    moved = {field for field in fields(kv.Stats) if getattr(stats, field)}
    assert set(fields(kv.Stats)) - moved == {
        "collided_requests", "collided_blocks", "collided_tokens", "free_blocks"
    }  # fmt: skip
    families = scrape(KVBlocksCollector({"only": manager}))
    assert len(families) == len(_MANAGER)
    for metric in _MANAGER:
        for label, field in metric.fields.items():
            labels = {metric.label: label} if metric.label else {}
            assert value(families, f"kvblocks_{metric.name}", manager="only", **labels) == getattr(
                stats, field
            )


def test_kinds_and_units() -> None:
    families = scrape(KVBlocksCollector({"only": kv.BlockManager(4, 4)}, namespaces={"base": {}}))
    assert len(families) == len(_MANAGER) + len(_NAMESPACE)
    totals = {"steps", "preemptions", "ended_transfers"}
    for name, family in families.items():
        short = name.removeprefix("kvblocks_").removeprefix("namespace_")
        counts = short in totals or short.endswith(
            ("_requests", "_tokens", "evicted_blocks", "copied_blocks", "collided_blocks")
        )
        counts |= short.startswith(("prefix_", "readmit_"))
        assert family.type == ("counter" if counts else "gauge"), name
        assert all(sample.name == name + "_total" * counts for sample in family.samples)
        unit = short.rpartition("_")[2]
        plural = {"sequences", "transfers", "steps", "preemptions"}
        assert unit in {"blocks", "slots", "tokens", "requests", "ratio"} | plural, name
        assert family.documentation.endswith(".")


def test_peaks_and_transfers_are_told_apart_by_a_label() -> None:
    manager = busy_manager()
    families = scrape(KVBlocksCollector({"a": manager}))
    stats = manager.stats()
    assert value(families, "kvblocks_peak_blocks", kind="live") == stats.peak_live_blocks
    assert value(families, "kvblocks_peak_blocks", kind="logical") == stats.peak_logical_blocks
    assert stats.peak_live_blocks < stats.peak_logical_blocks
    for outcome in ("completed", "failed", "cancelled"):
        assert value(families, "kvblocks_ended_transfers_total", outcome=outcome) == 1


def test_several_managers_come_and_go() -> None:
    managers = {"prefill": kv.BlockManager(5, 4), "decode": kv.BlockManager(9, 16)}
    collector = KVBlocksCollector(managers)
    families = scrape(collector)
    assert value(families, "kvblocks_capacity_blocks", manager="prefill") == 4
    assert value(families, "kvblocks_capacity_blocks", manager="decode") == 8
    managers["draft"] = kv.BlockManager(3, 1)
    del managers["prefill"]
    samples = scrape(collector)["kvblocks_capacity_blocks"].samples
    assert {sample.labels["manager"]: sample.value for sample in samples} == {"decode": 8, "draft": 2}


def test_named_namespaces_are_exported_for_each_manager() -> None:
    managers = {"busy": busy_manager(), "idle": kv.BlockManager(3, 1)}
    families = scrape(
        KVBlocksCollector(managers, namespaces={"base": {}, "acme": {"salt": "acme"}, "none": {"adapter": 7}})
    )
    for name, manager in managers.items():
        for namespace, usage in {
            "base": manager.namespace_usage(),
            "acme": manager.namespace_usage(salt="acme"),
            "none": manager.namespace_usage(adapter=7),
        }.items():
            for metric in _NAMESPACE:
                for label, field in metric.fields.items():
                    labels = {"manager": name, "namespace": namespace}
                    labels |= {metric.label: label} if metric.label else {}
                    exported = value(families, f"kvblocks_{metric.name}", **labels)
                    assert exported == getattr(usage, field)
    assert (
        value(families, "kvblocks_namespace_prefix_hit_tokens_total", manager="busy", namespace="base") == 8
    )
    assert value(families, "kvblocks_namespace_sequences", manager="busy", namespace="acme") == 1


def test_a_scrape_is_one_snapshot_of_a_manager() -> None:
    families = scrape(KVBlocksCollector({"a": busy_manager()}))
    states = [value(families, f"kvblocks_{state}_blocks") for state in ("free", "live", "cached", "held")]
    assert states[3] > 0
    assert sum(states) == value(families, "kvblocks_capacity_blocks") == 12


def test_a_second_collector_in_one_registry_is_refused() -> None:
    registry = CollectorRegistry()
    registry.register(KVBlocksCollector({}))
    with pytest.raises(ValueError, match="kvblocks_capacity_blocks"):
        registry.register(KVBlocksCollector({}))


def test_without_prometheus_client_one_line_names_the_command() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_CLIENT], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1
    last = run.stderr.splitlines()[-1]
    assert last == (
        "ImportError: kvblocks.integrations.prometheus needs prometheus_client: "
        "pip install 'kvblocks[prometheus]'"
    )
