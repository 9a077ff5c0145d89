"""Direct calls against the backend that they are planned with, and what a repeated call does and does not do again."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

from gpu.host import HostLibrary
from kernels.emulator import emulated_backend
from kvblocks import gpu
from kvblocks.config import CacheConfig
from kvblocks.gpu import calls, dispatch, libraries
from kvblocks.gpu.plans import Planner
from kvblocks.layout import LayerCache

pytestmark = pytest.mark.cuda


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostLibrary]:
    library = HostLibrary()
    monkeypatch.setitem(libraries._LIBRARIES, np.ndarray, library)
    monkeypatch.setattr(dispatch, "_DISPATCHERS", {})
    return library


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every plan that is made."""
    made: list[Any] = []
    plan = Planner.plan

    def counted(self: Planner, *arguments: Any) -> Any:
        made.append(plan(self, *arguments))
        return made[-1]

    monkeypatch.setattr(Planner, "plan", counted)
    return made


def make_cache(
    kv_format: str = "float32", num_blocks: int = 24, layout: str = "NHD", **sizes: Any
) -> LayerCache:
    sizes = {"num_kv_heads": 2, "head_dim": 32, "block_size": 8} | sizes
    config = CacheConfig(1, kv_format=kv_format, layout=layout, dtype="float16", **sizes)
    (cache,) = emulated_backend().allocate(config, num_blocks)
    return cache


class Seen:
    """An array as a device's: by its interface only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype
        self.__cuda_array_interface__ = array.__array_interface__


class Step:
    """Two sequences: their K, V and Q, and index arrays."""

    def __init__(
        self, seed: int = 0, lens: tuple[int, ...] = (37, 9), num_new: tuple[int, ...] = (1, 3)
    ) -> None:
        rng = np.random.default_rng(seed)
        ids = rng.permutation(np.arange(1, 24))
        self.tables = np.zeros((len(lens), 6), np.int32)
        slots = []
        for row, length in enumerate(lens):
            self.tables[row] = ids[6 * row : 6 * row + 6]
            position = np.arange(length)
            slots.append(self.tables[row][position // 8].astype(np.int64) * 8 + position % 8)
        self.slots = np.concatenate(slots)
        self.k, self.v = rng.standard_normal((2, len(self.slots), 2, 32)).astype(np.float16)
        self.q = rng.standard_normal((sum(num_new), 4, 32)).astype(np.float16)
        self.lens = np.array(lens, np.int32)
        self.starts = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)

    @property
    def index(self) -> tuple[np.ndarray, ...]:
        return self.tables, self.lens, self.starts


FORMATS = ["float32", "float16", "fp8_e4m3", "int8"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_step_is_the_backends(library: HostLibrary, plans: list[Any], kv_format: str, layout: str) -> None:
    """Two steps of one shape through one plan each, in another cache the second time."""
    for seed in range(2):
        step = Step(seed)
        ours, theirs = (make_cache(kv_format, layout=layout) for _ in range(2))
        gpu.write_kv(ours, step.k, step.v, step.slots)
        lse = np.empty((4, 4), np.float32)
        out = gpu.paged_attention(ours, step.q, *step.index, window=20, soft_cap=30.0, lse=lse)
        backend = emulated_backend()
        backend.write(theirs, step.k, step.v, step.slots)
        wanted_lse = np.empty_like(lse)
        wanted = backend.attend(theirs, step.q, *step.index, window=20, soft_cap=30.0, lse=wanted_lse)
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(lse, wanted_lse)
        for (name, a), (_, b) in zip(ours.named_arrays, theirs.named_arrays, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8), err_msg=name)
    assert len(plans) == 2


def test_every_other_call_is_the_backends_too(library: HostLibrary, plans: list[Any]) -> None:
    backend = emulated_backend()
    rng = np.random.default_rng(1)
    for seed in range(2):
        step = Step(seed)
        pool = [make_cache("int8"), make_cache("float16")]
        for cache in pool:
            backend.write(cache, step.k, step.v, step.slots)
        for dtype in ("float32", "bfloat16"):
            for a, b in zip(
                gpu.gather_kv(pool[0], step.tables[0], 37, dtype=dtype),
                backend.gather(pool[0], step.tables[0], 37, dtype=dtype),
                strict=True,
            ):
                np.testing.assert_array_equal(a, b)
        x = (rng.standard_normal((5, 2, 48)) * 400).astype(np.float32)
        for kv_format, scale in (
            ("fp8_e4m3:tensor", 1.0),
            ("int8", "amax"),
            ("fp8_e5m2:head", np.array([2, 3], np.float32)),
        ):
            ours, theirs = gpu.quantize(x, kv_format, scale), backend.quantize(x, kv_format, scale)
            for field in ("codes", "scale", "amax", "num_clipped"):
                np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
            np.testing.assert_array_equal(
                gpu.dequantize(ours.codes, kv_format, ours.scale, dtype="float16"),
                backend.dequantize(theirs.codes, kv_format, theirs.scale, dtype="float16"),
            )
        state = step.q, rng.standard_normal((4, 4)).astype(np.float32)
        other = step.q[::-1], rng.standard_normal((4, 4)).astype(np.float32)
        wanted = backend.merge_states(*state, *other)
        # Rows of a result may stand apart.
        given = np.full((4, 6, 32), 9, np.float16)[:, 1:5], np.full((4, 8), 9, np.float32)[:, ::2]
        for result in (gpu.merge_states(*state, *other), given):
            if result is given:
                returned = gpu.merge_states(*state, *other, out=given[0], lse=given[1])
                assert all(a is b for a, b in zip(returned, given, strict=True))
            for a, b in zip(result, wanted, strict=True):
                np.testing.assert_array_equal(a, b)
        assert (given[0].base[:, [0, 5]] == 9).all()
        assert (given[1].base[:, 1::2] == 9).all()


def test_tables_in_the_form_of_one_list(library: HostLibrary, plans: list[Any]) -> None:
    """Rows of several lengths, an empty one among them, as tables and as a list: the same results."""
    cache = make_cache("float16")
    for seed, lens in enumerate([(37, 9, 0), (8, 16, 33)]):
        step = Step(seed, lens=lens, num_new=(1, 3, 0))
        gpu.write_kv(cache, step.k, step.v, step.slots)
        counts = -(-step.lens // 8)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        indices = np.concatenate([row[:count] for row, count in zip(step.tables, counts, strict=True)])
        indices = np.concatenate([indices, np.full(12 - len(indices), -1, np.int32)])
        last = ((step.lens - (counts - 1) * 8) * (step.lens > 0)).astype(np.int32)
        wanted = emulated_backend().attend(cache, step.q, *step.index, window=20)
        for options in ({}, {"max_blocks": 5}):
            out = gpu.paged_attention_csr(
                cache, step.q, indptr, indices, last, step.starts, window=20, **options
            )
            np.testing.assert_allclose(out, wanted, atol=1e-3)
    assert len(plans) == 4
    with pytest.raises(ValueError, match=r"^kv_indptr: axis 0 \(num_seqs \+ 1\) is 3, expected 4"):
        gpu.paged_attention_csr(cache, step.q, indptr[1:], indices, last, step.starts)
    with pytest.raises(ValueError, match=r"^max_blocks is 13: expected an integer in 0\.\.12"):
        gpu.paged_attention_csr(cache, step.q, indptr, indices, last, step.starts, max_blocks=13)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("indptr", "wrong"),
    [
        ([0, 5, 7, 13], (2, 13)),  # beyond the list
        ([0, 5, 2**31 - 1, 12], (1, 2**31 - 1)),
        ([-3, 5, 7, 12], (0, -3)),
        ([0, 9, 7, 12], (1, 9)),  # above the next
        ([0, 5, 7, -(2**31)], (2, 7)),
    ],
)
def test_lists_that_are_cut_wrongly(dtype: str, indptr: list[int], wrong: tuple[int, int]) -> None:
    """A part that lies outside the list, or ends before it begins, is never followed: its row has no keys."""
    step = Step(lens=(33, 9, 33), num_new=(1, 1, 1))
    cache = make_cache(dtype)
    backend = emulated_backend()
    backend.write(cache, step.k, step.v, step.slots)
    counts = -(-step.lens // 8)
    indices = np.concatenate([row[:count] for row, count in zip(step.tables, counts, strict=True)])
    last = (step.lens - (counts - 1) * 8).astype(np.int32)

    def attend(starts: list[int]) -> np.ndarray:
        return backend.attend_csr(cache, step.q, np.array(starts, np.int32), indices, last, step.starts)

    clean = attend([0, 5, 7, 12])
    assert backend.first_error() is None
    out = attend(indptr)
    row, value = wrong
    assert f"kv_indptr that does not ascend within kv_indices: row {row}, column 0, value" in (
        error := str(backend.first_error())
    )
    assert str(value) in error
    assert not out[row].any()
    for other in range(3):
        if indptr[other : other + 2] == [0, 5, 7, 12][other : other + 2]:
            np.testing.assert_array_equal(out[other], clean[other])


def test_where_merged_states_go() -> None:
    step = Step()
    sums = np.zeros((4, 4), np.float32)
    state = step.q, sums, step.q.copy(), sums.copy()
    backend = emulated_backend()
    for given, error, text in (
        ({"out": step.q}, ValueError, "out and out_a share memory"),
        ({"lse": sums}, ValueError, "lse and lse_a share memory"),
        ({"out": np.zeros((4, 4, 32), np.float32)}, TypeError, "out: dtype float32, out_a has float16"),
        ({"out": np.zeros((4, 4, 64), np.float16)[..., ::2]}, ValueError, "out: strides"),
        ({"lse": np.zeros((4, 5), np.float32)}, ValueError, r"lse: axis 1 \(num_q_heads\) is 5, expected 4"),
    ):
        with pytest.raises(error, match=f"^{text}"):
            backend.merge_states(*state, **given)
    empty = step.q[:0], sums[:0]
    out, lse = np.empty((0, 4, 32), np.float16), np.empty((0, 4), np.float32)
    assert backend.merge_states(*empty, *empty, out=out, lse=lse)[0] is out


@pytest.mark.parametrize("has_head", [True, False], ids=["4-axes", "3-axes"])
@pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3:tensor"])
def test_latents(library: HostLibrary, plans: list[Any], kv_format: str, has_head: bool) -> None:
    """Written by their parts, attended through the kernel that reads them once; two pools of one shape share a plan."""
    rng = np.random.default_rng(0)
    table, lens, starts = np.array([[3, 1]], np.int32), np.array([20], np.int32), np.array([0, 2], np.int32)
    slots = table[0][np.arange(20) // 16].astype(np.int64) * 16 + np.arange(20) % 16
    q = rng.standard_normal((2, 16, 576)).astype(np.float16)
    for _ in range(2):
        shape = (4, 16, 1, 576) if has_head else (4, 16, 576)
        pool = Seen(np.zeros(shape, np.float16 if kv_format == "float16" else np.uint8))
        scale = None if kv_format == "float16" else Seen(np.full(1, 0.01, np.float32))
        cache = gpu.latent_cache(pool, kv_format, scale=scale)
        rows = rng.standard_normal((20, 576)).astype(np.float16)
        gpu.write_latents(cache, rows[:, :512], rows[:, 512:], slots)
        lse = np.empty((2, 16), np.float32)
        out = gpu.mla_decode(cache, q, table, lens, starts, scale=0.05, lse=lse)
        k, _ = gpu.gather_kv(cache, table[0], 20)
        for token, num_keys in ((0, 19), (1, 20)):
            logits = q[token].astype(np.float64) @ k[:num_keys, 0].T * 0.05
            weights = np.exp(logits - logits.max(1, keepdims=True))
            wanted = weights @ k[:num_keys, 0, :512] / weights.sum(1, keepdims=True)
            np.testing.assert_allclose(out[token], wanted, rtol=4e-3, atol=4e-3)
    assert len(plans) == 3
    assert any(name.startswith("mla_decode") for name in library.launcher(0).loaded_names)


def test_latents_that_are_none(library: HostLibrary) -> None:
    step, cache = Step(), make_cache()
    with pytest.raises(ValueError, match=r"^cache: expected latents, of which V is the first part"):
        gpu.mla_decode(cache, step.q, *step.index, scale=1.0)
    with pytest.raises(ValueError, match=r"^cache: expected one that latent_cache made"):
        gpu.write_latents(cache, step.k, step.v, step.slots)
    pool = Seen(np.zeros((4, 16, 576), np.uint8))
    with pytest.raises(
        ValueError, match=r"^kv_format is 'fp8_e4m3': expected a dtype, or scales of a tensor"
    ):
        gpu.latent_cache(pool, "fp8_e4m3")
    for head_dim_v in (576, 512.0):
        with pytest.raises(ValueError, match=rf"^head_dim_v is {head_dim_v}: expected 1\.\.575"):
            gpu.latent_cache(pool, "fp8_e4m3:tensor", head_dim_v=head_dim_v)


def test_blocks_and_slots_of_all_caches(library: HostLibrary, plans: list[Any]) -> None:
    step = Step()
    pool = [make_cache("int8"), make_cache("float16", layout="HND")]
    for cache in pool:
        gpu.write_kv(cache, step.k, step.v, step.slots)
    source = int(step.tables[0, 0])
    for destination in (22, 23):
        gpu.copy_blocks(pool, np.array([[source, destination]], np.int32))
    moves = np.array([[source * 8 + 3, source * 8]], np.int64)
    gpu.move_slots(pool, moves, np.array([0, 1], np.int32))
    for cache in pool:
        k = cache.k_nhd
        np.testing.assert_array_equal(k[22], k[23])
        np.testing.assert_array_equal(k[22, 1:], k[source, 1:])
        np.testing.assert_array_equal(k[source, 0], k[source, 3])
    assert len(plans) == 4


def test_a_pool_of_other_caches_is_another_plan(library: HostLibrary, plans: list[Any]) -> None:
    """The call stores addresses of its pool, so an id that another cache has by then must not find it."""
    copies = np.array([[1, 2]], np.int32)
    for round_ in range(8):
        pool = [make_cache("float16")]
        pool[0].k[...] = round_
        gpu.copy_blocks(pool, copies)
        np.testing.assert_array_equal(pool[0].k[2], pool[0].k[1])
        del pool
        gc.collect()
    assert len(plans) == 8


def test_what_decides_a_plan(library: HostLibrary, plans: list[Any]) -> None:
    step, cache = Step(), make_cache()
    gpu.write_kv(cache, step.k, step.v, step.slots)
    plans.clear()
    wide = np.empty((4, 4, 64), np.float16)
    wide[..., :32] = step.q
    base = gpu.paged_attention(cache, step.q, *step.index)
    assert len(plans) == 1
    for number, (q, options) in enumerate(
        [
            (wide[..., :32], {}),  # other strides
            (step.q.astype(np.float32), {}),  # another dtype
            (step.q, {"scale": 0.5}),
            (step.q, {"lse": np.empty((4, 4), np.float32)}),
            (step.q, {"split_size": 64}),
        ]
    ):
        gpu.paged_attention(cache, q, *step.index, **options)
        gpu.paged_attention(cache, q.copy() if q.flags.c_contiguous else q, *step.index, **options)
        assert len(plans) == 2 + number
    np.testing.assert_array_equal(gpu.paged_attention(cache, step.q, *step.index), base)
    assert len(plans) == 6


def test_a_misaligned_array_is_not_taken_for_an_aligned_one(library: HostLibrary, plans: list[Any]) -> None:
    step, cache = Step(), make_cache("float16")
    gpu.write_kv(cache, step.k, step.v, step.slots)
    wanted = cache.k.copy()
    shifted = np.empty(step.k.size + 1, np.float16)[1:].reshape(step.k.shape)
    shifted[...] = step.k
    assert shifted.ctypes.data % 16 != step.k.ctypes.data % 16
    cache.k[...] = 0
    gpu.write_kv(cache, shifted, step.v, step.slots)
    assert len(plans) == 2
    np.testing.assert_array_equal(cache.k[cache.k != 0], wanted[cache.k != 0])
    assert (cache.k != 0).sum() > step.k.size * 0.99


def test_arrays_that_must_be_copied_are_copied_in_every_call(library: HostLibrary, plans: list[Any]) -> None:
    """Rows whose elements are not neighbours, and a result that is not either: one plan, right twice."""
    cache = make_cache("float16")
    for seed in range(2):
        step = Step(seed)
        gpu.write_kv(cache, step.k, step.v, step.slots)
        q = np.moveaxis(np.ascontiguousarray(np.moveaxis(step.q, 2, 0)), 0, 2)
        out = np.moveaxis(np.empty((32, 4, 4), np.float16), 0, 2)
        assert gpu.paged_attention(cache, q, *step.index, out=out) is out
        np.testing.assert_array_equal(out, emulated_backend().attend(cache, step.q, *step.index))
    assert len(plans) == 2


def test_streams(library: HostLibrary) -> None:
    step, cache = Step(), make_cache()
    gpu.write_kv(cache, step.k, step.v, step.slots)
    gpu.write_kv(cache, step.k, step.v, step.slots, stream=0xBEEF)
    assert library.streams == [0x5EED, 0xBEEF]
    assert library.entered == [0xBEEF]
    with pytest.raises(TypeError, match=r"^stream: str, expected None, an address"):
        gpu.write_kv(cache, step.k, step.v, step.slots, stream="0")
    assert len(library.streams) == 2


def test_partial_results_in_a_workspace(library: HostLibrary) -> None:
    step, cache = Step(lens=(47, 47), num_new=(1, 1)), make_cache()
    gpu.write_kv(cache, step.k, step.v, step.slots)
    out = np.empty_like(step.q)
    small, large = (np.empty(size, np.uint8) for size in (100, 1 << 20))
    many = np.zeros((2, 24), np.int32)
    many[:, :6] = step.tables
    wanted = emulated_backend(split_size=64).attend(cache, step.q, many, step.lens, step.starts)

    with pytest.raises(ValueError, match=r"^workspace: 100 bytes, the call needs \d+ to be sure"):
        gpu.paged_attention(
            cache, step.q, many, step.lens, step.starts, out=out, split_size=64, workspace=Seen(small)
        )
    gpu.paged_attention(
        cache, step.q, many, step.lens, step.starts, out=out, split_size=64, workspace=Seen(large)
    )
    np.testing.assert_array_equal(out, wanted)


def test_a_workspace_is_used_as_one_run_of_bytes(library: HostLibrary) -> None:
    """Rows that lie apart have the bytes of somebody else between them."""
    step, cache = Step(lens=(47, 47), num_new=(1, 1)), make_cache()
    many = np.zeros((2, 24), np.int32)
    apart = np.zeros((1 << 16, 16), np.uint8)[:, :2]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^workspace: strides \(16, 1\) of shape \(65536, 2\)"):
            gpu.paged_attention(
                cache, step.q, many, step.lens, step.starts, split_size=64, workspace=Seen(apart)
            )
    assert not library.streams


def test_tables_as_a_list_take_a_workspace_too(library: HostLibrary) -> None:
    step, cache = Step(), make_cache()
    gpu.write_kv(cache, step.k, step.v, step.slots)
    indptr, indices = np.array([0, 5, 7], np.int32), np.resize(step.tables[:, :5], 24).astype(np.int32)
    indices[5:7] = step.tables[1, :2]
    last = np.array([5, 1], np.int32)
    workspace = np.zeros(1 << 20, np.uint8)
    index = (indptr, indices, last, step.starts)
    out = gpu.paged_attention_csr(cache, step.q, *index, split_size=64, workspace=Seen(workspace))
    assert workspace.any()
    np.testing.assert_allclose(out, emulated_backend().attend(cache, step.q, *step.index), atol=1e-3)


def test_a_result_belongs_to_its_call(library: HostLibrary) -> None:
    """Whoever changes the scale that a call gave him changes no later call."""
    x = np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float32)
    first = gpu.quantize(x, "fp8_e4m3:tensor", 0.5)
    codes = first.codes.copy()
    first.scale[...] = 9
    second = gpu.quantize(x, "fp8_e4m3:tensor", 0.5)
    assert second.scale.tolist() == [0.5]
    np.testing.assert_array_equal(second.codes, codes)


def test_captured_tables_outlive_their_pool(library: HostLibrary) -> None:
    """Also where another call had made the table before: a graph reads it for as long as the graph lives."""
    pool = [make_cache("float16")]
    copies = np.array([[1, 2], [3, 4]], np.int32)
    for count in (1, 2):
        gpu.copy_blocks(pool, copies[:count])
    dispatcher = dispatch.dispatcher_for("copies", copies)
    (tables,) = dispatcher.planner(0)._backend._tables._tables.values()
    (table,) = map(ref, tables.values())
    library.capturing.add(library.current)
    gpu.copy_blocks(pool, copies)
    del pool, tables
    dispatcher._plans.clear()
    gc.collect()
    assert table() is not None


def test_refusals_name_the_argument_and_leave_no_plan(library: HostLibrary, plans: list[Any]) -> None:
    step, cache = Step(), make_cache()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^k: axis 2 \(head_dim\) is 16, expected 32"):
            gpu.write_kv(cache, step.k[..., :16], step.v, step.slots)
        with pytest.raises(TypeError, match=r"^slot_mapping: dtype int32, expected int64"):
            gpu.write_kv(cache, step.k, step.v, step.slots.astype(np.int32))
        with pytest.raises(TypeError, match=r"^cache: list, expected a LayerCache"):
            gpu.write_kv([], step.k, step.v, step.slots)
        with pytest.raises(ValueError, match=r"^dtype is 'float8'"):
            gpu.gather_kv(cache, step.tables[0], 3, dtype="float8")
        with pytest.raises(TypeError, match=r"^cache: NoneType, expected a LayerCache"):
            gpu.write_kv(None, step.k, step.v, step.slots)
        with pytest.raises(TypeError, match=r"^caches: LayerCache, expected a sequence of LayerCache"):
            gpu.copy_blocks(cache, np.zeros((1, 2), np.int32))
        with pytest.raises(TypeError, match=r"^scale is None: expected 'amax', a number or an array"):
            gpu.quantize(step.k, "int8", None)
        with pytest.raises(ValueError, match=r"^k_format is None: expected one of"):
            gpu.quantize(step.k, None, 1.0)
        for split_size in (0, 65, 64.0, "64", True, 2**31):
            with pytest.raises(ValueError, match=r"^split_size is .*: expected a multiple of 64"):
                gpu.paged_attention(cache, step.q, *step.index, split_size=split_size)
        with pytest.raises(ValueError, match=r"^scale is array\(0\.5\): expected 0 or a normal"):
            gpu.paged_attention(cache, step.q, *step.index, scale=np.array(0.5))
        one = np.lib.stride_tricks.as_strided(step.q, strides=(0, *step.q.strides[1:]))
        with pytest.raises(ValueError, match=r"^out: axis 0 has a stride of 0, so its 4 entries are one"):
            gpu.paged_attention(cache, step.q, *step.index, out=one)
    assert library.streams == []
    assert plans == []


def test_wrong_values_are_told_on_request(library: HostLibrary) -> None:
    step, cache = Step(), make_cache()
    assert gpu.first_error(step.q) is None
    slots = step.slots.copy()
    slots[2] = cache.num_slots
    gpu.write_kv(cache, step.k, step.v, slots)
    gpu.write_kv(cache, step.k, step.v, slots)
    told = gpu.first_error(step.q)
    assert (
        told
        == f"a slot of slot_mapping that the cache does not have: row 2, column 0, value {cache.num_slots}"
    )
    assert gpu.first_error(step.q) is None


@pytest.mark.parametrize(("starts", "told"), [([0, 2], 2), ([-1, 1], -1), ([1, 0], 1)])
def test_moves_beyond_their_list_are_not_followed(library: HostLibrary, starts: list[int], told: int) -> None:
    cache = make_cache("float16")
    cache.k[...] = np.arange(cache.k.shape[0]).reshape(-1, 1, 1, 1)
    before = cache.k.copy()
    moves = np.array([[9, 20], [10, 30], [11, 40]], np.int64)[1:2]  # others' numbers on both sides
    gpu.move_slots([cache], moves, np.array(starts, np.int32))
    np.testing.assert_array_equal(cache.k, before)
    assert (
        gpu.first_error(moves)
        == f"a move_start that does not ascend within moves: row 0, column 0, value {told}"
    )


def test_any_thread_may_call(library: HostLibrary) -> None:
    """Threads that share a plan each get the result of their own arrays."""
    cache = make_cache("float16")
    steps = [Step(seed) for seed in range(4)]
    for step in steps:
        emulated_backend().write(cache, step.k, step.v, step.slots)
    wanted = [emulated_backend().attend(cache, step.q, *step.index) for step in steps]
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(10):
            step = steps[number]
            out = gpu.paged_attention(cache, step.q, *step.index)
            if not np.array_equal(out, wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_plans_do_not_pile_up(library: HostLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 3)
    cache, step = make_cache(), Step()
    for length in range(1, 9):
        gpu.gather_kv(cache, step.tables[0], length)
    dispatcher = dispatch.dispatcher_for("q", step.q)
    assert len(dispatcher._plans) == 3
    assert len(dispatcher._known) == 1
    del cache
    gc.collect()
    assert len(dispatcher._known) == 0


def test_every_direct_function_is_tested_here() -> None:
    public = {name for name in gpu.__all__ if getattr(calls, name, None) is getattr(gpu, name)}
    text = Path(__file__).read_text(encoding="utf-8")
    assert len(public) >= 11
    assert {name for name in public if f"gpu.{name}(" not in text} <= {"layer_cache", "warmup"}
