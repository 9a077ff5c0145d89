"""What a prefix hit changes for formats with a residual: a fresh run has seen 16 bit where a hit sees codes.

Run it from the checkout: python benches/prefix_hit.py --windows 4

Of each window of text a first sequence computes the prompt in large steps and goes on in small ones; a second one
hits the prompt's blocks, computes what is left of it, and goes on with the same tokens. The predictions of the tokens
after the prompt are compared, in nats: the fresh run with a float32 cache, the hit with a float32 cache, and the two.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from kvblocks import PagedKVCache
from kvblocks.quality import Model
from kvblocks.quality.model import IDS
from kvblocks.quality.text import cut, own_text
from smollm2.quality import smollm2

WINDOW_TOKENS, PROMPT_TOKENS = 1024, 768
PREFILL_TOKENS, DECODE_TOKENS = 256, 16
F32 = NDArray[np.float32]


def run(model: Model, cache: PagedKVCache, ids: IDS) -> tuple[F32, int]:
    """Log-probabilities of what follows each token after the prompt, and the tokens of the prompt that were hit."""
    answer = cache.manager.allocate(cache.manager.prepare(ids[:PROMPT_TOKENS]))
    assert answer
    logits, at = [], answer.num_cached_tokens
    while at < len(ids):
        step = min(PREFILL_TOKENS, PROMPT_TOKENS - at) if at < PROMPT_TOKENS else DECODE_TOKENS
        assert cache.schedule([answer.handle], step)
        rows = np.arange(step) if at >= PROMPT_TOKENS else np.arange(0)
        logits.append(model.forward(cache, ids[at : at + step], rows))
        known = None if at + step <= PROMPT_TOKENS else ids[at : at + step]
        cache.manager.commit([answer.handle], step, known)
        at += step
    cache.manager.free([answer.handle])
    every = np.concatenate(logits).astype(np.float64)
    every -= every.max(axis=1, keepdims=True)
    return (every - np.log(np.exp(every).sum(axis=1, keepdims=True))).astype(
        np.float32
    ), answer.num_cached_tokens


def divergence(p: F32, q: F32) -> float:
    """Mean KL(p || q) of rows of log-probabilities."""
    return float((np.exp(p.astype(np.float64)) * (p - q)).sum(axis=1).mean())


def main() -> int:
    """Print a row per format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--windows", type=int, default=4, help="of 1,024 tokens (default 4)")
    parser.add_argument("--formats", nargs="+", default=["int8", "kivi4", "kivi4r", "kivi2", "kivi2r"])
    parser.add_argument("--residual-tokens", type=int, default=32)
    parser.add_argument("--backend", default="numpy")
    arguments = parser.parse_args()
    model = smollm2()
    windows, _ = cut(np.array(model.encode(own_text()), np.int64), arguments.windows, WINDOW_TOKENS)
    names = (None, *arguments.formats)
    sums = {name: np.zeros(3) for name in arguments.formats}
    num_hit = 0
    for ids in windows:
        reference: F32 | None = None
        for name in names:
            config = replace(model.config, kv_format=name, residual_tokens=arguments.residual_tokens)
            cache = PagedKVCache(config, 64, backend=arguments.backend, max_seqs=2, max_tokens=PREFILL_TOKENS)
            fresh, _ = run(model, cache, ids)
            if reference is None:
                reference = fresh
                continue
            hit, num_hit = run(model, cache, ids)
            sums[name] += divergence(reference, fresh), divergence(reference, hit), divergence(fresh, hit)
    print(
        f"{len(windows)} windows, prompts of {PROMPT_TOKENS} tokens in steps of {PREFILL_TOKENS}, {num_hit} hit; "
        f"{WINDOW_TOKENS - PROMPT_TOKENS} tokens scored in steps of {DECODE_TOKENS}; mean KL in nats"
    )
    print(f"{'format':<8} {'fresh':>10} {'hit':>10} {'fresh || hit':>13}")
    for name, total in sums.items():
        fresh_kl, hit_kl, between = total / len(windows)
        print(f"{name:<8} {fresh_kl:>10.5f} {hit_kl:>10.5f} {between:>13.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
