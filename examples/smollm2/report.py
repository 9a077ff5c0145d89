"""What a run of the engine cost and what paging saved, as lines of text.

Owns: the wording and the arithmetic of the report. May import: kvblocks, engine, request.
Invariant: every number is derived from the manager's counters and the cache's configuration, none is assumed.
"""

from __future__ import annotations

from kvblocks import CacheConfig
from smollm2.engine import Engine
from smollm2.request import counted


def report(engine: Engine, config: CacheConfig, *, prefix_cache: bool, seconds: float) -> tuple[str, bool]:
    """The report of a closed engine, and whether every block came home."""
    metrics, now = engine.metrics, engine.manager.stats()
    problems = engine.manager.check_integrity()
    home = now.live_blocks == 0 and not problems
    peak = metrics.peak or now
    peak_bytes = peak.live_blocks * config.bytes_per_block
    context = engine.model.config.context_length
    contiguous = metrics.peak_seqs * context * config.bytes_per_token
    hit = now.hit_tokens / max(now.queried_tokens, 1)
    again = now.readmit_hit_tokens / max(now.readmit_queried_tokens, 1)

    rows = {
        "sequences": f"{metrics.peak_seqs} at once at the most",
        "peak use": f"{peak.live_blocks:,} of {counted(now.capacity_blocks, 'block')}, {_mb(peak_bytes)} "
        f"(a block: {counted(config.block_size, 'token')}, {config.bytes_per_block:,} bytes)",
        "contiguous": f"{_mb(contiguous)} if each had reserved its {context:,} tokens of context"
        + (f": {contiguous / peak_bytes:.0f} times as much" if peak_bytes else ""),
        "sharing": f"saved {counted(metrics.peak_saved_blocks, 'block')} at once at the most, "
        f"{_mb(metrics.peak_saved_blocks * config.bytes_per_block)}",
        "prefix cache": f"hits for {hit:.1%} of the prompt tokens ({now.hit_tokens:,} of "
        f"{now.queried_tokens:,}; {now.hit_requests:,} of {counted(now.queried_requests, 'request')})"
        if prefix_cache
        else "off",
        "fragmentation": f"{peak.internal_fragmentation:.1%} of the peak's slots held no token",
        "copies": f"{counted(now.copied_blocks, 'block')} copied on write",
        "preemptions": f"{now.preemptions}"
        + (f"; the prefix cache still held {again:.1%} of their tokens" if prefix_cache and again else ""),
        "speed": f"{counted(metrics.sampled_tokens, 'token')} in {seconds:.1f} s: "
        f"{metrics.sampled_tokens / max(seconds, 1e-9):.1f} tokens/s "
        f"({counted(metrics.computed_tokens, 'token')} computed in {counted(metrics.steps, 'step')})",
        "returned": f"every block came home: 0 in use, {now.free_blocks} free, {now.cached_blocks} cached"
        if home
        else f"NOT every block came home: {now.live_blocks} in use; {'; '.join(problems) or 'pool is sound'}",
    }
    if config.has_residual:
        residual = _mb(config.bytes_per_seq)
        rows["residual"] = f"{residual} a sequence: its newest tokens in 16 bit, beside the blocks"
    return "\n".join(f"  {name:<14} {text}" for name, text in rows.items()), home


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
