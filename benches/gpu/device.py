"""What runs on the card: ceilings, the cases, graphs, the host's cost of a call, and the others beside them.

Owns `Bench`. Imports torch, kvblocks.gpu and cases. Inputs rotate over more memory than the second-level cache holds;
figures are medians over events on the device, or of the host's clock where a host's cost is meant.
"""

import importlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvblocks import gpu
from kvblocks.formats import KVFormat
from kvblocks.gpu import torch_ops

from .cases import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, Case

ROTATED_BYTES = 512 << 20
_STORED = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def median_us(calls: Sequence[Callable[[], object]], *, rounds: int = 20) -> float:
    """Median device time of one call, each round taking the next of the calls, as one graph a call."""
    stream = torch.cuda.Stream()
    graphs = []
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        graphs.append(graph)
    times = []
    with torch.cuda.stream(stream):
        for number in range(3 + rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graphs[number % len(graphs)].replay()
            end.record(stream)
            end.synchronize()
            if number >= 3:
                times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


class Pool:
    """A pool of one layer with random contents, tables that scatter its blocks, and a batch of queries."""

    def __init__(self, kv_format: str, num_seqs: int, seq_len: int, seed: int = 0) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        blocks_per_seq = math.ceil(seq_len / BLOCK_SIZE)
        num_blocks = num_seqs * blocks_per_seq + 1
        part = KVFormat.parse(kv_format).k
        shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)

        def storage() -> Any:
            values = torch.empty(shape, dtype=_STORED[part.name], device="cuda")
            bits = values.view(torch.int8).view(num_blocks, -1)
            for first in range(0, num_blocks, 4096):
                some = bits[first : first + 4096]
                # Exponents near 1 for the floating-point formats: no NaN, no infinity.
                drawn = torch.randint(0, 64, some.shape, generator=generator, device="cuda", dtype=torch.int8)
                some.copy_(drawn)
            return values

        self.k, self.v = storage(), storage()
        scale_shape = part.scale_shape(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.scales = [
            None if scale_shape is None else torch.full(scale_shape, 0.02, device="cuda") for _ in range(2)
        ]
        self.cache = gpu.layer_cache(
            self.k, self.v, kv_format, k_scale=self.scales[0], v_scale=self.scales[1]
        )
        order = torch.randperm(num_blocks - 1, generator=generator, device="cuda", dtype=torch.int32) + 1
        self.tables = order.view(num_seqs, blocks_per_seq).contiguous()
        self.lens = torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
        self.q = torch.randn(
            num_seqs, NUM_Q_HEADS, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16
        )
        self.out = torch.empty_like(self.q)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return int(self.k.nbytes + self.v.nbytes)

    def decode(self) -> Any:
        """One attention call."""
        return gpu.paged_attention(self.cache, self.q, self.tables, self.lens, self.starts, out=self.out)


def is_alive() -> bool:
    """Whether this process still has its device, which a kernel that faulted would have taken from it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def ceilings() -> dict[str, float]:
    """Bytes a second of a copy (read and written) and of a read."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").fill_(1)
    target = torch.empty_like(source)
    copy_us = median_us([lambda: target.copy_(source)], rounds=11)
    floats = source.view(torch.float32)
    read_us = median_us([lambda: floats.sum()], rounds=11)
    return {
        "copy_bytes_per_s": 2 * source.nbytes / copy_us * 1e6,
        "read_bytes_per_s": source.nbytes / read_us * 1e6,
    }


def run_case(case: Case) -> float:
    """Microseconds of a case."""
    if case.call == "copy":
        return _copy_blocks(case.num_seqs, case.seq_len)
    if case.call == "write":
        return _write(case)
    first = Pool(case.kv_format, case.num_seqs, case.seq_len)
    copies = max(1, math.ceil(ROTATED_BYTES / first.nbytes))
    pools = [first, *(Pool(case.kv_format, case.num_seqs, case.seq_len, seed) for seed in range(1, copies))]
    return median_us([pool.decode for pool in pools], rounds=2 * len(pools) + 19)


def _write(case: Case) -> float:
    pools = [Pool(case.kv_format, 1, case.seq_len, seed) for seed in range(16)]
    calls = []
    for pool in pools:
        k, v = torch.randn(2, case.seq_len, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        position = torch.arange(case.seq_len, device="cuda")
        slots = pool.tables[0][position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE

        def call(pool: Pool = pool, k: Any = k, v: Any = v, slots: Any = slots) -> None:
            gpu.write_kv(pool.cache, k, v, slots)

        calls.append(call)
    return median_us(calls, rounds=48)


def _copy_blocks(num_blocks: int, num_layers: int) -> float:
    shape = (2 * num_blocks + 1, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pool = []
    for _ in range(num_layers):
        k, v = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        pool.append(gpu.layer_cache(k, v, "bfloat16"))
    ids = torch.arange(1, num_blocks + 1, dtype=torch.int32, device="cuda")
    copies = torch.stack([ids, ids + num_blocks], dim=1).contiguous()
    return median_us([lambda: gpu.copy_blocks(pool, copies)], rounds=15)


def others(case: Case) -> dict[str, float]:
    """Microseconds of FlashInfer or of torch's attention over contiguous K and V, on the same shapes."""
    if case.call != "decode" or case.kv_format != "bfloat16":
        return {}
    pool = Pool(case.kv_format, case.num_seqs, case.seq_len)
    found = {}
    k, v = (
        each[1:].view(case.num_seqs, case.seq_len, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)
        for each in (pool.k, pool.v)
    )
    q = pool.q[:, :, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    found["torch SDPA, contiguous"] = median_us([lambda: attention(q, k, v, enable_gqa=True)], rounds=15)
    try:
        flashinfer: Any = importlib.import_module("flashinfer")
    except ImportError:
        return found
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    per_seq = pool.tables.shape[1]
    indptr = torch.arange(case.num_seqs + 1, dtype=torch.int32, device="cuda") * per_seq
    last = torch.full((case.num_seqs,), BLOCK_SIZE, dtype=torch.int32, device="cuda")
    sizes = NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE
    wrapper.plan(indptr, pool.tables.view(-1), last, *sizes, q_data_type=torch.bfloat16)
    found["FlashInfer"] = median_us([lambda: wrapper.run(pool.q, (pool.k, pool.v))], rounds=15)
    return found


def graph_check() -> str:
    """One captured step, replayed with other tables, lengths and inputs: "ok", or how it differs from eager calls."""
    pool = Pool("bfloat16", 8, 1024)
    k, v = torch.randn(2, 8, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    slots = torch.full((8,), -1, dtype=torch.int64, device="cuda")

    def step() -> None:
        gpu.write_kv(pool.cache, k, v, slots)
        pool.decode()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for round_ in range(8):
        torch.manual_seed(round_)
        pool.lens.copy_(torch.randint(0, 1025, (8,), dtype=torch.int32))
        pool.tables.copy_(pool.tables[torch.randperm(8, device="cuda")].clone())
        last = (pool.lens.long() - 1).clamp(min=0)
        block = pool.tables.gather(1, (last // BLOCK_SIZE)[:, None]).long()[:, 0]
        slots.copy_(torch.where(pool.lens > 0, block * BLOCK_SIZE + last % BLOCK_SIZE, -1))
        pool.q.normal_()
        k.normal_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        replayed = pool.out.clone()
        pool.out.fill_(float("nan"))
        step()
        torch.cuda.synchronize()
        if not torch.equal(replayed, pool.out):
            return f"round {round_} differs by {(replayed - pool.out).abs().max().item()}"
        if pool.out[pool.lens == 0].abs().sum().item() != 0:
            return f"round {round_}: an empty row is not 0"
    error = gpu.first_error(pool.q)
    return error or "ok"


def host_us() -> dict[str, float]:
    """The host's cost of one attention call (decode and combination) on a device that keeps up, and of its operator."""
    pool = Pool("bfloat16", 4, 2048)
    arguments = (pool.q, pool.k, pool.v, None, None, pool.tables, pool.lens, pool.starts, "bfloat16")
    costs = {}
    for name, call in (
        ("direct", pool.decode),
        ("operator", lambda: torch_ops.paged_attention(*arguments)),
    ):
        rounds = []
        for _ in range(21):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            rounds.append((time.perf_counter() - start) / 50 * 1e6)
        costs[name] = statistics.median(rounds)
    return costs
