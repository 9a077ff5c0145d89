"""The pool finds of a real trace what exact LRU finds, no more and no less."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
mooncake = SimpleNamespace(**runpy.run_path(str(ROOT / "benches/benchmarks/mooncake.py")))


@pytest.fixture(scope="module")
def trace() -> Path:
    path: Path | None = mooncake.trace_path()
    if path is None:
        pytest.skip("KVBLOCKS_TRACES names no folder with the Mooncake conversation trace")
    return path


# The larger pools of the list are a benchmark, `quality.Mooncake`: they take several seconds each.
@pytest.mark.parametrize("num_blocks", [65_536, 262_144])
def test_hit_rate_of_the_mooncake_trace(trace: Path, num_blocks: int) -> None:
    prompts = mooncake.read_prompts(trace)
    assert len(prompts) == mooncake.NUM_PROMPTS
    rate = mooncake.hit_rate(prompts, num_blocks)
    assert rate == pytest.approx(mooncake.HIT_RATES[num_blocks], abs=0.0005)
