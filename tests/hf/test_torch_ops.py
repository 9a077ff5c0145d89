"""The operators of torch: schemas, fake versions and tracing, with the CPU versions as what they must agree with."""

import datetime as dt
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvblocks.backends import get_backend
from kvblocks.config import CacheConfig

pytestmark = pytest.mark.hf

torch = pytest.importorskip("torch")
FORMATS = ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2:head", "int8"]
STORED = {"fp8_e4m3": torch.uint8, "fp8_e5m2:head": torch.uint8}
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(scope="module")
def ops() -> Any:
    from kvblocks.gpu import torch_ops

    return torch_ops


def pool(kv_format: str, layout: str = "NHD", num_blocks: int = 8) -> tuple[Any, ...]:
    """k_cache, v_cache, k_scale, v_scale as an engine has them."""
    (cache,) = get_backend("numpy").allocate(
        CacheConfig(1, 2, 32, block_size=4, kv_format=kv_format, layout=layout, dtype="bfloat16"), num_blocks
    )
    fp8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16}
    tensors = []
    for part, array in ((cache.format.k, cache.k), (cache.format.v, cache.v)):
        array.view(np.uint8).fill(0)
        tensor = torch.from_numpy(array)
        tensors.append(tensor.view(fp8[part.name]) if part.name in fp8 else tensor)
    scales = [None if each is None else torch.from_numpy(each) for each in (cache.k_scale, cache.v_scale)]
    for scale in scales:
        if scale is not None:
            scale.fill_(0.05)
    return (*tensors, *scales)


def step(seed: int = 0) -> tuple[Any, ...]:
    """k, v, slots; q, tables, lens, starts."""
    torch.manual_seed(seed)
    k, v = torch.randn(2, 9, 2, 32).to(torch.bfloat16)
    q = torch.randn(3, 4, 32).to(torch.bfloat16)
    tables = torch.tensor([[3, 1, 5, 0]], dtype=torch.int32)
    position = torch.arange(9)
    slots = tables[0, position // 4].long() * 4 + position % 4
    lens, starts = torch.tensor([9], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    return k, v, slots, q, tables, lens, starts


@pytest.mark.parametrize(("kv_format", "layout"), [*((each, "NHD") for each in FORMATS), ("int8", "HND")])
def test_write_and_attention(ops: Any, kv_format: str, layout: str) -> None:
    caches, (k, v, slots, q, *index) = pool(kv_format, layout), step()
    # opcheck multiplies its arguments, which FP8 cannot: it is given the bytes.
    given = tuple(
        each if each is None or each.itemsize > 1 else each.view(STORED.get(kv_format, each.dtype))
        for each in caches
    )
    torch.library.opcheck(ops.write_kv, (k, v, slots, *given, kv_format, layout), test_utils=CHECKS)
    ops.write_kv(k, v, slots, *caches, kv_format, layout)
    arguments = (q, *given, *index, kv_format, layout)
    torch.library.opcheck(ops.paged_attention, arguments, {"window": 7, "soft_cap": 20.0}, test_utils=CHECKS)
    out, lse = torch.ops.kvblocks.paged_attention(q, *caches, *index, kv_format, layout)
    assert (out.dtype, out.shape, lse.shape) == (torch.bfloat16, (3, 4, 32), (3, 4))
    # Against torch's own attention over what is stored.
    keys, values = torch.ops.kvblocks.gather_kv(*caches, index[0][0], 9, kv_format, layout)
    mask = torch.arange(9)[None] <= torch.arange(6, 9)[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1),
        keys.transpose(0, 1).repeat_interleave(2, 0),
        values.transpose(0, 1).repeat_interleave(2, 0),
        attn_mask=mask,
    ).transpose(0, 1)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)


def test_the_other_operators(ops: Any) -> None:
    caches, (k, v, slots, q, *index) = pool("int8"), step()
    ops.write_kv(k, v, slots, *caches, "int8")
    torch.library.opcheck(ops.gather_kv, (*caches, index[0][0], 7, "int8"), test_utils=CHECKS)
    lists = [[each] for each in caches]
    copies = torch.tensor([[3, 6]], dtype=torch.int32)
    torch.library.opcheck(ops.copy_blocks, (*lists, copies, "int8"), test_utils=CHECKS)
    ops.copy_blocks(*lists, copies, "int8")
    assert torch.equal(caches[0][6], caches[0][3])
    assert torch.equal(caches[2][6], caches[2][3])
    out, lse = ops.paged_attention(q, *caches, *index, "int8")
    torch.library.opcheck(ops.merge_states, (out, lse, out, lse), test_utils=CHECKS)
    merged, merged_lse = ops.merge_states(out, lse, out, lse)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse + np.log(2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kv_format", "layout"), [("int8", "NHD"), ("float16", "HND")])
def test_moves_of_slots(ops: Any, kv_format: str, layout: str) -> None:
    """In their order, scales included; a negative slot skips the move."""
    caches, (k, v, slots, *_) = pool(kv_format, layout), step()
    ops.write_kv(k, v, slots, *caches, kv_format, layout)
    lists = [[] if each is None else [each] for each in caches]
    moves = torch.tensor([[12, 30], [30, 31], [-1, 12], [13, -1]])
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    checked = (*lists, moves, starts, kv_format, layout)
    torch.library.opcheck(ops.move_slots, checked, test_utils=CHECKS)
    ops.move_slots(*checked)
    for array in (each for each in caches if each is not None):
        rows = array.transpose(1, 2) if layout == "HND" and array.ndim == 4 else array
        assert torch.equal(rows[7, 2], rows[3, 0])
        assert torch.equal(rows[7, 3], rows[3, 0])
    with pytest.raises(ValueError, match="moves: slot 32, expected below the cache's 32 slots"):
        ops.move_slots(*lists, moves + 1, starts, kv_format, layout)
    with pytest.raises(TypeError, match="moves: dtype int32, expected int64"):
        ops.move_slots(*lists, moves.int(), starts, kv_format, layout)


@pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3:tensor"])
def test_latents(ops: Any, kv_format: str) -> None:
    torch.manual_seed(0)
    dtype, scale = (torch.float16, None) if kv_format == "float16" else (torch.uint8, torch.tensor([0.02]))
    latents = torch.zeros(4, 4, 576, dtype=dtype)
    compressed, rotary = torch.randn(6, 512).half(), torch.randn(6, 64).half()
    slots = torch.tensor([8, 9, 10, 11, 4, 5])
    given = compressed, rotary, slots, latents, scale, kv_format
    torch.library.opcheck(ops.write_latents, given, test_utils=CHECKS)
    ops.write_latents(*given)
    q = torch.randn(2, 16, 576).half()
    index = (
        torch.tensor([[2, 1]], dtype=torch.int32),
        *(torch.tensor(each, dtype=torch.int32) for each in ([6], [0, 2])),
    )
    checked = q, latents, scale, *index, kv_format, 0.05
    torch.library.opcheck(ops.mla_decode, checked, test_utils=CHECKS)
    out, lse = torch.ops.kvblocks.mla_decode(*checked)
    stored = latents if scale is None else latents.view(torch.float8_e4m3fn).float() * scale
    rows = stored.float().view(16, 576)[slots]
    logits = torch.einsum("qhd,kd->hqk", q.float(), rows) * 0.05
    logits[:, 0, 5] = -torch.inf
    wanted = torch.einsum("hqk,kd->qhd", logits.softmax(-1), rows[:, :512])
    torch.testing.assert_close(out.float(), wanted, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, logits.logsumexp(-1).T, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kv_format", ["fp8_e4m3:tensor", "fp8_e5m2:head", "int8"])
def test_quantize(ops: Any, kv_format: str) -> None:
    x = torch.randn(5, 2, 32) * 100
    # opcheck's look at mutation multiplies arguments and results, which FP8 cannot.
    checks = CHECKS if kv_format == "int8" else CHECKS[1:]
    torch.library.opcheck(ops.quantize, (x, None, kv_format), test_utils=checks)
    codes, scale, amax, num_clipped = ops.quantize(x, None, kv_format)
    torch.library.opcheck(ops.quantize, (x, scale, kv_format), test_utils=checks)
    torch.library.opcheck(ops.dequantize, (codes, scale, kv_format), test_utils=checks)
    values = ops.dequantize(codes, scale, kv_format)
    torch.testing.assert_close(amax, x.abs().amax(dim=(0, 2)))
    assert num_clipped.tolist() == [0, 0]
    torch.testing.assert_close(values, x, rtol=0.13, atol=1.5)
    if kv_format.startswith("fp8"):
        torch.testing.assert_close(codes.float() * scale.reshape(1, -1, 1), values)


class Layer(torch.nn.Module):
    """What an engine's attention layer does with its pool."""

    def forward(
        self, k: Any, v: Any, slots: Any, q: Any, tables: Any, lens: Any, starts: Any, *pool: Any
    ) -> Any:
        torch.ops.kvblocks.write_kv(k * 2, v, slots, *pool, None, None, "float16")
        out, _ = torch.ops.kvblocks.paged_attention(q, *pool, None, None, tables, lens, starts, "float16")
        return out + 1


def test_compiled_in_one_graph(ops: Any) -> None:
    k_cache, v_cache, *_ = pool("float16")
    arguments = step()
    wanted = Layer()(*arguments, k_cache, v_cache)
    written = k_cache.clone()
    k_cache.zero_()
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments, k_cache, v_cache), wanted)
    assert torch.equal(k_cache, written)


def test_exported(ops: Any) -> None:
    k_cache, v_cache, *_ = pool("float16")
    arguments = (*step(), k_cache, v_cache)
    program = torch.export.export(Layer(), arguments)
    called = {str(node.target) for node in program.graph.nodes if "kvblocks" in str(node.target)}
    assert called == {"kvblocks.write_kv.default", "kvblocks.paged_attention.default"}
    torch.testing.assert_close(program.module()(*arguments), Layer()(*arguments))


def test_traced_for_a_gpu_that_is_not_there(ops: Any) -> None:
    """Fake tensors carry the device: shapes, dtypes and strides of a GPU's results are known without one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(3, 4, 192, dtype=torch.float16, device="cuda")
        k_cache = torch.empty(8, 4, 2, 192, dtype=torch.float16, device="cuda")
        v_cache = torch.empty(8, 4, 2, 128, dtype=torch.float16, device="cuda")
        tables = torch.empty(1, 4, dtype=torch.int32, device="cuda")
        lens, starts = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (1, 2))
        out, lse = torch.ops.kvblocks.paged_attention(
            q, k_cache, v_cache, None, None, tables, lens, starts, "float16"
        )
        codes, scale, *_ = torch.ops.kvblocks.quantize(q, None, "fp8_e4m3")
    assert (out.shape, out.dtype, out.device.type) == ((3, 4, 128), torch.float16, "cuda")
    assert (lse.shape, lse.dtype) == ((3, 4), torch.float32)
    assert (codes.dtype, scale.shape) == (torch.float8_e4m3fn, (3, 4))


def test_tensors_of_a_call_are_looked_at_at_once() -> None:
    """Addresses, and a signature that tells apart whatever makes another plan, and nothing else."""
    from kvblocks._core import look_at_tensors

    def look(*tensors: Any) -> tuple[list[int], bytes]:
        return look_at_tensors(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, tensors)

    a, b = (torch.zeros(6, 4, 8, dtype=torch.bfloat16) for _ in range(2))
    addresses, signature = look(a, None, a[1:], b)
    assert addresses == [a.data_ptr(), 0, a[1:].data_ptr(), b.data_ptr()]
    assert look(b, None, b[1:], a)[1] == signature
    others = [
        a.view(torch.float16),
        a[:3],
        a[..., :4],
        a.transpose(0, 1),
        torch.zeros(6 * 4 * 8 + 1, dtype=torch.bfloat16)[1:].view(6, 4, 8),
        a.view(torch.uint8),
        torch.zeros(6, 4, 8, dtype=torch.float8_e4m3fn),
        torch.zeros(6, 4, 8, dtype=torch.float8_e5m2),
        torch.zeros(1),
        torch.zeros(()),
        torch.zeros(0),
    ]
    signatures = {look(each)[1] for each in [a, *others]}
    assert len(signatures) == 1 + len(others)
    assert look(a, None)[1] != look(None, a)[1]
    for stranger in (3, np.zeros(3), torch.nn.Parameter(torch.zeros(2))):
        with pytest.raises(TypeError, match="expected tensors of one type"):
            look(a, stranger)
    with pytest.raises(ValueError, match="incorrect name"):
        look_at_tensors(dt.datetime_CAPI, torch.Tensor, (a,))


def test_what_measures_the_host_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls through torch's own tensors, plans and launches, with an empty driver."""
    from benches.gpu import host

    from kvblocks.gpu import dispatch, libraries

    monkeypatch.setattr(libraries, "_LIBRARIES", {})
    monkeypatch.setattr(dispatch, "_DISPATCHERS", {})
    costs = host.measure(rounds=2, repeats=2)
    assert len(costs) >= 4
    assert all(cost > 0 for cost in costs.values())
    (dispatcher,) = dispatch._DISPATCHERS.values()
    assert len(dispatcher._plans) == 3


def test_refusals_are_the_backends(ops: Any) -> None:
    caches, (k, v, slots, *_) = pool("float16"), step()
    with pytest.raises(TypeError, match="slot_mapping: dtype int32, expected int64"):
        ops.write_kv(k, v, slots.int(), *caches, "float16")


def test_every_operator_is_checked(ops: Any) -> None:
    names = re.findall(r'custom_op\(\s*"kvblocks::(\w+)"', Path(ops.__file__).read_text())
    assert len(names) >= 7
    tested = Path(__file__).read_text()
    checked = set(re.findall(r"opcheck\(\s*ops\.(\w+),", tested))
    assert checked == set(names)


def test_operators_name_what_is_wrong(ops: Any) -> None:
    k, v = torch.zeros(6, 4, 2, 16), torch.zeros(6, 4, 2, 16)
    moves = torch.tensor([[8, 9]])
    for starts in ([0, 2], [-1, 1], [1, 0]):
        with pytest.raises(ValueError, match=r"^move_start is .*: expected to ascend within 0\.\.1"):
            ops.move_slots([k], [v], [], [], moves, torch.tensor(starts, dtype=torch.int32), "float32")
    ops.move_slots([k], [v], [], [], moves, torch.empty(0, dtype=torch.int32), "float32")
    with pytest.raises(ValueError, match=r"^v_caches: 0 tensors, k_caches has 1"):
        ops.copy_blocks([k], [], [], [], torch.tensor([[1, 2]], dtype=torch.int32), "float32")
    with pytest.raises(ValueError, match=r"^kv_format is 'kivi2': expected a format of 8 bits"):
        ops.quantize(torch.zeros(32, 2, 32), None, "kivi2")


def test_codes_with_a_scale_for_each_channel(ops: Any) -> None:
    x = torch.randn(32, 2, 32)
    codes, scale, amax, _ = ops.quantize(x, None, "int8:channel")
    assert (codes.dtype, scale.shape) == (torch.int8, (2, 32))
    torch.testing.assert_close(
        ops.dequantize(codes, scale, "int8:channel"), x, atol=float(amax.max()) / 250, rtol=0
    )
