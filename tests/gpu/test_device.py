"""What only a device can show: streams, captures, tensors of torch, transfers; skipped where there is none."""

import gc
from typing import Any

import numpy as np
import pytest

from kvblocks import BlockManager, gpu
from kvblocks.backends import get_backend
from kvblocks.config import CacheConfig

pytestmark = pytest.mark.gpu

FORMATS = ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


class Layer:
    """One layer's pool as torch tensors, beside a cache of the reference with the same contents."""

    def __init__(self, torch: Any, kv_format: str, seed: int = 0) -> None:
        self.torch = torch
        self.config = CacheConfig(
            1, 2, 64, block_size=16, kv_format=kv_format, dtype="bfloat16", layout="NHD"
        )
        (self.reference,) = get_backend("numpy").allocate(self.config, 12)
        fp8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16}
        dtype = fp8.get(self.reference.format.k.name)
        tensors = {}
        for name, array in self.reference.named_arrays:
            array.view(np.uint8).fill(0xFF)
            tensor = torch.from_numpy(array).cuda()
            tensors[name] = tensor.view(dtype) if name in "kv" and dtype is not None else tensor
        self.tensors = tensors
        self.cache = gpu.layer_cache(tensors.pop("k"), tensors.pop("v"), kv_format, **tensors)
        rng = np.random.default_rng(seed)
        self.tables = rng.permutation(np.arange(1, 11)).reshape(2, 5).astype(np.int32)
        self.lens, self.starts = np.array([70, 33], np.int32), np.array([0, 1, 4], np.int32)
        slots = [
            self.tables[row][np.arange(length) // 16].astype(np.int64) * 16 + np.arange(length) % 16
            for row, length in enumerate(self.lens)
        ]
        self.slots = np.concatenate(slots)
        self.k, self.v = rng.standard_normal((2, len(self.slots), 2, 64)).astype(np.float16)
        self.q = rng.standard_normal((4, 8, 64)).astype(np.float16)

    def on_device(self, *names: str) -> tuple[Any, ...]:
        return tuple(self.torch.from_numpy(getattr(self, name)).cuda() for name in names)

    def expected(self) -> np.ndarray:
        backend = get_backend("numpy")
        backend.write(self.reference, self.k, self.v, self.slots)
        return backend.attend(self.reference, self.q, self.tables, self.lens, self.starts)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_torchs_own_tensors(torch: Any, kv_format: str) -> None:
    layer = Layer(torch, kv_format)
    gpu.write_kv(layer.cache, *layer.on_device("k", "v", "slots"))
    out = gpu.paged_attention(layer.cache, *layer.on_device("q", "tables", "lens", "starts"))
    assert (out.dtype, out.device.type) == (torch.float16, "cuda")
    np.testing.assert_allclose(out.float().cpu().numpy(), layer.expected(), atol=4e-3, rtol=4e-3)
    assert gpu.first_error(out) is None


def test_work_stays_behind_its_stream(torch: Any) -> None:
    """A producer on a stream of its own that takes its time: the call on that stream sees what it made."""
    layer = Layer(torch, "float16")
    k, v, slots = layer.on_device("k", "v", "slots")
    gpu.write_kv(layer.cache, k, v, slots)  # compiled and loaded
    torch.cuda.synchronize()
    late = torch.zeros_like(k)
    stream = torch.cuda.Stream()
    for named in (False, True):
        late.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(k)
            if not named:
                gpu.write_kv(layer.cache, late, v, slots)
        if named:
            gpu.write_kv(layer.cache, late, v, slots, stream=stream)
        stream.synchronize()
        (block, offset) = divmod(int(layer.slots[0]), 16)
        written = torch.as_tensor(layer.cache.k, device="cuda")[block, offset]
        assert torch.equal(written, k[0])


def test_one_graph_serves_other_lengths_and_tables(torch: Any) -> None:
    layer = Layer(torch, "float16")
    k, v, slots, q, tables, lens, starts = layer.on_device("k", "v", "slots", "q", "tables", "lens", "starts")
    gpu.write_kv(layer.cache, k, v, slots)
    eager = gpu.paged_attention(layer.cache, q, tables, lens, starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu.paged_attention(layer.cache, q, tables, lens, starts)
    for lengths in ((70, 33), (1, 3), (0, 16), (80, 17)):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        tables.copy_(tables.flip(0).clone())
        graph.replay()
        wanted = gpu.paged_attention(layer.cache, q, tables, lens, starts)
        assert torch.equal(out, wanted)
    assert eager.shape == out.shape


def test_tensors_that_are_dropped_at_once(torch: Any) -> None:
    layer = Layer(torch, "float16")
    index = layer.on_device("tables", "lens", "starts")
    gpu.write_kv(layer.cache, *layer.on_device("k", "v", "slots"))
    (q,) = layer.on_device("q")
    wanted = gpu.paged_attention(layer.cache, q, *index)
    for _ in range(100):
        out = gpu.paged_attention(layer.cache, q.clone(), *index)
        gc.collect()
        torch.empty_like(q).fill_(float("nan"))
        assert torch.equal(out, wanted)


def test_a_capture_by_cupy_in_a_workspace() -> None:
    cupy = pytest.importorskip("cupy")
    backend = get_backend("cupy")
    config = CacheConfig(1, 2, 64, block_size=16, dtype="float16")
    (cache,) = backend.allocate(config, 1026)
    rng = cupy.random.default_rng(0)
    q = rng.standard_normal((1, 8, 64), dtype=cupy.float32).astype(cupy.float16)
    for pool in (cache.k, cache.v):
        pool[...] = rng.standard_normal(pool.shape, dtype=cupy.float32)
    tables = cupy.arange(1, 1025, dtype=cupy.int32)[None]
    lens, starts = cupy.array([16000], cupy.int32), cupy.array([0, 1], cupy.int32)
    out, workspace = cupy.empty_like(q), cupy.empty(1 << 24, cupy.uint8)
    wanted = gpu.paged_attention(cache, q, tables, lens, starts)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gpu.paged_attention(cache, q, tables, lens, starts, out=out, workspace=workspace)
        stream.synchronize()
        out.fill(0)
        stream.begin_capture()
        gpu.paged_attention(cache, q, tables, lens, starts, out=out, workspace=workspace)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert bool((out == wanted).all())


def test_operators_under_torch_compile(torch: Any) -> None:
    from kvblocks.gpu import torch_ops

    layer = Layer(torch, "fp8_e4m3")
    gpu.write_kv(layer.cache, *layer.on_device("k", "v", "slots"))
    q, *index = layer.on_device("q", "tables", "lens", "starts")
    parts = [torch.as_tensor(each, device="cuda") for each in (layer.cache.k, layer.cache.v)]
    scales = [layer.tensors[name] for name in ("k_scale", "v_scale")]

    def attend(q: Any) -> Any:
        out, _ = torch_ops.paged_attention(q * 1, *parts, *scales, *index, "fp8_e4m3")
        return out + 0

    wanted = gpu.paged_attention(layer.cache, q, *index)
    assert torch.equal(torch.compile(attend, fullgraph=True)(q), wanted)


def test_blocks_swapped_out_and_in(torch: Any) -> None:
    layer = Layer(torch, "int8")
    gpu.write_kv(layer.cache, *layer.on_device("k", "v", "slots"))
    q, *index = layer.on_device("q", "tables", "lens", "starts")
    wanted = gpu.paged_attention(layer.cache, q, *index)
    swapper = gpu.Swapper([layer.cache], gpu.pinned_pool(layer.config, 4))
    blocks = np.array([[int(layer.tables[0, 0]), 1], [int(layer.tables[1, 1]), 3]], np.int32)
    swapper.swap_out(blocks).wait()
    k = torch.as_tensor(layer.cache.k, device="cuda")
    for block in blocks[:, 0].tolist():
        k[block].zero_()
    assert not torch.equal(gpu.paged_attention(layer.cache, q, *index), wanted)
    swapper.swap_in(blocks).wait()
    assert torch.equal(gpu.paged_attention(layer.cache, q, *index), wanted)


def test_index_arrays_behind_a_slow_device(torch: Any) -> None:
    """Uploads that a busy device has not read yet: each reader sees its own."""
    manager = BlockManager(600, 4)
    step = gpu.DeviceStep(manager, max_seqs=4, max_tokens=64, max_blocks_per_seq=600)
    prompt = np.arange(5)
    handle = manager.allocate(manager.prepare(prompt), reserve=5).handle
    step.schedule([handle], [5])
    manager.commit([handle], [5], prompt)
    step.upload()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    seen, wanted = [], []
    for token in range(64):
        step.schedule([handle], [1])
        manager.commit([handle], [1], np.array([token]))
        step.upload()
        columns = step.block_tables.shape[1]
        seen.append((step.on_device.seq_lens[:1].clone(), step.on_device.block_tables[:1, :columns].clone()))
        wanted.append((step.seq_lens.copy(), step.block_tables.copy()))
    for ours, theirs in zip(seen, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.cpu().numpy(), b)


def test_wrong_values_never_fault(torch: Any) -> None:
    layer = Layer(torch, "float16")
    gpu.write_kv(layer.cache, *layer.on_device("k", "v", "slots"))
    q, tables, lens, starts = layer.on_device("q", "tables", "lens", "starts")
    for wrong in (12, -5, 2**31 - 1):
        bad = tables.clone()
        bad[0, 1] = wrong
        gpu.paged_attention(layer.cache, q, bad, lens, starts)
        assert gpu.first_error(q) == (
            f"a block of block_tables that the cache does not have: row 0, column 1, value {wrong}"
        )
    gpu.paged_attention(layer.cache, q, tables, lens * 100, starts)
    assert "a length in seq_lens beyond the row's table" in (gpu.first_error(q) or "")
    assert gpu.first_error(q) is None
