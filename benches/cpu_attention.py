"""Speed of the `cpu` backend beside a read of the same memory, the NumPy backend and, where installed, torch.

Run it from the checkout on an idle machine: python benches/cpu_attention.py

Decoding is 8 sequences of 2,048 tokens in shuffled blocks of 16 (32 where groups are of tokens), 32 query and 8 K/V
heads of 128, on queries of the cache's dtype (bfloat16 for formats). Prefill is 512 queries on 2,048 keys. Conversions
are of 2^22 elements, or of 2^22 of K and as many of V.
Every figure is the best of `--repeat` runs, and its ratios are to references that ran in turn with it.
The NumPy backend is measured on one sequence, as it takes seconds for all.
"""

import argparse
import importlib
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from kvblocks._core import cpu_read_all, cpu_read_blocks, cpu_simd
from kvblocks.backends.cpu import CpuBackend
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.config import CacheConfig
from kvblocks.formats import parse_format
from kvblocks.layout import LayerCache, from_float32

NUM_SEQS, NUM_KEYS, NUM_QUERIES = 8, 2048, 512
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
NUM_ELEMENTS = 1 << 22
DECODED = ["float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "kivi4", "kivi2"]
CONVERTED = ["fp8_e4m3:head", "int8", "int4", "kivi4", "kivi2"]


def best(repeat: int, *calls: Callable[[], object]) -> list[float]:
    """Seconds of each call, the best of some runs in turn."""
    seconds = [float("inf")] * len(calls)
    for _ in range(repeat):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds[index] = min(seconds[index], time.perf_counter() - start)
    return seconds


def block_size_of(kv_format: str) -> int:
    """The block size that a format is measured with."""
    part = parse_format(kv_format, "k")
    return max(BLOCK_SIZE, part.group) if part.scaling == "token_group" else BLOCK_SIZE


def filled(kv_format: str, num_seqs: int) -> tuple[LayerCache, NDArray[np.int32]]:
    """A written cache of one layer, and shuffled tables."""
    rng = np.random.default_rng(0)
    block_size = block_size_of(kv_format)
    num_blocks = num_seqs * NUM_KEYS // block_size + 1
    config = CacheConfig(1, NUM_KV_HEADS, HEAD_DIM, block_size=block_size, kv_format=kv_format)
    backend = CpuBackend()
    (cache,) = backend.allocate(config, num_blocks)
    rows = rng.standard_normal((cache.num_slots, NUM_KV_HEADS, HEAD_DIM), np.float32)
    backend.write(cache, rows, rows, np.arange(len(rows)))
    return cache, rng.permutation(np.arange(1, num_blocks, dtype=np.int32)).reshape(num_seqs, -1)


def decode(kv_format: str, num_threads: int, repeat: int) -> list[float]:
    """Seconds of a step, of two reads of its working set, and of a step on two blocks over and over.

    The reads are plain ones: of each array from end to end, and of its blocks in the order of the tables, as a step has
    to read them. What is read over and over is in the second-level cache, so that is what the arithmetic takes.
    """
    cache, tables = filled(kv_format, NUM_SEQS)
    backend = CpuBackend(num_threads=num_threads)
    q = np.random.default_rng(1).standard_normal((NUM_SEQS, NUM_Q_HEADS, HEAD_DIM), np.float32)
    q_own = from_float32(q, "float32" if kv_format == "float32" else "bfloat16")
    lens, starts = np.full(NUM_SEQS, NUM_KEYS, np.int32), np.arange(NUM_SEQS + 1, dtype=np.int32)
    words = [array.reshape(-1).view(np.uint8) for _, array in cache.named_arrays]
    floats = [part[: part.size // 4 * 4].view(np.float32) for part in words]
    # What has no part in each block is read whole: scales of heads or channels.
    block_lens = [
        part.size // cache.num_blocks if part.size % cache.num_blocks == 0 else 0 for part in floats
    ]
    in_order, how = tables.reshape(-1), (backend.simd, num_threads)
    return best(
        repeat,
        lambda: backend.attend(cache, q_own, tables, lens, starts),
        lambda: [cpu_read_all(part, how) for part in floats],
        lambda: [
            cpu_read_blocks(part, block_len, in_order, how) if block_len else cpu_read_all(part, how)
            for part, block_len in zip(floats, block_lens, strict=True)
        ],
        lambda: backend.attend(cache, q_own, tables % 2 + 1, lens, starts),
    )


def print_decode(threads: list[int], repeat: int) -> None:
    """A row per format and number of threads."""
    print(f"{'decode':20}{'tokens/s':>10}{'GB/s':>7}{'of a read':>11}{'of its blocks':>15}", end="")
    print(f"{'of bfloat16 in tokens/s':>25}{'GB/s from a cache':>19}")
    num_bytes = {name: filled(name, 1)[0].nbytes * NUM_SEQS for name in DECODED}
    for num_threads in threads:
        measured = {name: decode(name, num_threads, repeat) for name in DECODED}
        for name, (step, read, read_blocks, cached) in measured.items():
            print(
                f"{name:11}{num_threads} threads{NUM_SEQS / step:10,.0f}{num_bytes[name] / step / 1e9:7.1f}"
                f"{read / step:10.2f}x{read_blocks / step:14.2f}x{measured['bfloat16'][0] / step:24.2f}x"
                f"{num_bytes[name] / cached / 1e9:19.1f}"
            )


def print_instructions(repeat: int) -> None:
    """Tokens a second with each set of instructions: one that falls far behind calls what should be inlined."""
    sets = cpu_simd()
    print("decode, 1 thread     tokens/s with " + "".join(f"{name:>12}" for name in sets))
    for kv_format in DECODED:
        cache, tables = filled(kv_format, NUM_SEQS)
        q = np.random.default_rng(1).standard_normal((NUM_SEQS, NUM_Q_HEADS, HEAD_DIM), np.float32)
        q_own = from_float32(q, "float32" if kv_format == "float32" else "bfloat16")
        lens, starts = np.full(NUM_SEQS, NUM_KEYS, np.int32), np.arange(NUM_SEQS + 1, dtype=np.int32)
        line = f"{kv_format:35}"
        for name in sets:
            backend = CpuBackend(num_threads=1, simd=name)
            (step,) = best(repeat, partial(backend.attend, cache, q_own, tables, lens, starts))
            line += f"{NUM_SEQS / step:12,.0f}"
        print(line)


def print_numpy(repeat: int) -> None:
    """The specification on one sequence."""
    cache, tables = filled("float32", 1)
    q = np.ones((1, NUM_Q_HEADS, HEAD_DIM), np.float32)
    args = (cache, q, tables, np.array([NUM_KEYS], np.int32), np.array([0, 1], np.int32))
    cpu = CpuBackend(num_threads=1)
    ours, theirs = best(repeat, lambda: cpu.attend(*args), lambda: NumpyBackend().attend(*args))
    print(f"decode of one float32 sequence, 1 thread: {theirs / ours:.1f} times as fast as NumPy")


def print_prefill(dtype: str, threads: list[int], repeat: int, torch: ModuleType | None) -> None:
    """Beside torch on contiguous K and V with their heads repeated, whose mask is bottom-right as well."""
    cache, tables = filled(dtype, 1)
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((NUM_QUERIES, NUM_Q_HEADS, HEAD_DIM), np.float32)
    q = from_float32(rows, dtype)
    args = (cache, q, tables, np.array([NUM_KEYS], np.int32), np.array([0, NUM_QUERIES], np.int32))
    for num_threads in threads:
        backend = CpuBackend(num_threads=num_threads)
        calls: list[Callable[[], object]] = [partial(backend.attend, *args)]
        if torch is not None:
            torch.set_num_threads(num_threads)
            k, v = (
                torch.from_numpy(part).to(getattr(torch, dtype)).permute(1, 0, 2)[None]
                for part in backend.gather(cache, tables[0], NUM_KEYS)
            )
            mask = torch.ones(NUM_QUERIES, NUM_KEYS, dtype=torch.bool).tril(NUM_KEYS - NUM_QUERIES)
            attend = partial(
                torch.nn.functional.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True
            )
            theirs_q = torch.from_numpy(rows).to(getattr(torch, dtype)).permute(1, 0, 2)[None]
            calls.append(partial(attend, theirs_q, k, v))
        ours, *theirs = best(repeat, *calls)
        beside = "".join(f", {seconds / ours:.2f}x of torch" for seconds in theirs)
        print(f"prefill in {dtype}, {num_threads} threads: {ours * 1e3:.0f} ms{beside}")


def print_conversion(repeat: int) -> None:
    """GB of float32 a second, one thread; each call in turn with a copy of one float32 array to another."""
    print("conversion           write   gather  quantize  dequantize   GB/s of float32 (of a copy)")
    backend = CpuBackend(num_threads=1)
    num_slots = NUM_ELEMENTS // (NUM_KV_HEADS * HEAD_DIM)
    rows = np.random.default_rng(3).standard_normal((num_slots, NUM_KV_HEADS, HEAD_DIM), np.float32)
    slots, copied = np.arange(num_slots), np.zeros_like(rows)
    for name in CONVERTED:
        part, block_size = parse_format(name, "k"), block_size_of(name)
        config = CacheConfig(1, NUM_KV_HEADS, HEAD_DIM, block_size=block_size, kv_format=name)
        (cache,) = backend.allocate(config, num_slots // block_size)
        if part.is_static:
            for array in (cache.k_scale, cache.v_scale):
                assert array is not None
                array.fill(0.01)
        table = np.arange(cache.num_blocks, dtype=np.int32)
        scale = 0.01 if part.is_static else "amax"
        encoded = backend.quantize(rows, part, scale)
        assert encoded.scale is not None
        calls: list[tuple[Callable[[], object], int]] = [
            (partial(backend.write, cache, rows, rows, slots), 2),
            (partial(backend.gather, cache, table, num_slots), 2),
            (partial(backend.quantize, rows, part, scale), 1),
            (partial(backend.dequantize, encoded.codes, part, encoded.scale, encoded.zero), 1),
        ]
        line = f"{name:16}"
        for call, parts in calls:
            seconds, copy = best(repeat, call, partial(np.copyto, copied, rows))
            line += f"{parts * rows.nbytes / seconds / 1e9:7.1f} ({parts * copy / seconds:.2f})"
        print(line)


def main() -> None:
    """Measure what is asked for, all by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="(default 1 2)")
    parser.add_argument("--repeat", type=int, default=7, help="runs of which the best counts (default 7)")
    args = parser.parse_args()
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        torch = None
    print(
        f"instructions: {CpuBackend().simd}; torch: {'not installed' if torch is None else torch.__version__}"
    )
    print_decode(args.threads, args.repeat)
    print_instructions(args.repeat)
    print_numpy(args.repeat)
    for dtype in ("float32", "bfloat16"):
        print_prefill(dtype, args.threads, args.repeat, torch)
    print_conversion(args.repeat)


if __name__ == "__main__":
    main()
