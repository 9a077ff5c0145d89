"""Wrong arguments: an error that names the argument, the axis and both numbers, and nothing written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.harness import Harness
from conformance.scene import Scene, make_scene, misaligned, snapshot
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

INT32_MAX = 2**31 - 1
Change = Callable[[dict[str, Any]], Any]


def with_entry(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    """A copy of an array with one entry replaced."""
    array = array.copy()
    array[index] = value
    return array


class TestAttend:
    """The scene: 3 rows of 33, 0 and 20 keys, 2 of them with 4 queries; 6 query heads, 2 key heads."""

    def refuse(self, harness: Harness, changes: Change, error: type[Exception], message: str) -> None:
        scene = make_scene(harness, seq_lens=(33, 0, 20), query_lens=(4, 1, 4), dims=(16, 24))
        num_blocks = scene.cache.num_blocks
        assert num_blocks == 9
        arguments: dict[str, Any] = {
            "q": scene.q,
            "block_tables": scene.block_tables,
            "seq_lens": scene.seq_lens,
            "query_start_loc": scene.query_start_loc,
            "out": np.full((9, 6, 24), 123, np.float32),
            "lse": np.full((9, 6), 123, np.float32),
        }
        out, lse = arguments["out"], arguments["lse"]
        before = snapshot(harness, scene.cache)
        arguments |= changes(arguments)
        device = {
            name: harness.to_device(value) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        with pytest.raises(error, match=message):
            harness.backend.attend(scene.cache, **device)
        assert (harness.to_host(out) == 123).all()
        assert (harness.to_host(lse) == 123).all()
        assert snapshot(harness, scene.cache) == before

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (lambda a: {"q": a["q"][:, 0]}, ValueError, r"q: 2 axes, expected 3"),
            (lambda a: {"q": a["q"][:, :, :15]}, ValueError, r"q: axis 2 \(head_dim\) is 15, expected 16"),
            (lambda a: {"q": a["q"][:, :5]}, ValueError, r"q: axis 1 \(num_q_heads\) is 5, .* 2 "),
            (lambda a: {"q": a["q"][:, :0]}, ValueError, r"q: axis 1 \(num_q_heads\) is 0, .* 2 "),
            (lambda a: {"q": a["q"].astype(np.float64)}, TypeError, r"q: dtype float64, expected"),
            (lambda a: {"out": a["out"][:8]}, ValueError, r"out: axis 0 \(num_tokens\) is 8, expected 9"),
            (lambda a: {"out": a["out"][:, :3]}, ValueError, r"out: axis 1 \(num_q_heads\) is 3, expected 6"),
            (
                lambda a: {"out": a["out"][:, :, :16]},
                ValueError,
                r"out: axis 2 \(head_dim_v\) is 16, expected 24",
            ),
            (lambda a: {"out": a["out"].astype(np.float16)}, TypeError, r"out: dtype float16, q has float32"),
            (lambda a: {"lse": a["lse"][:8]}, ValueError, r"lse: axis 0 \(num_tokens\) is 8, expected 9"),
            (
                lambda a: {"lse": a["lse"].astype(np.float64)},
                TypeError,
                r"lse: dtype float64, expected float32",
            ),
            (
                lambda a: {"block_tables": a["block_tables"].astype(np.int64)},
                TypeError,
                r"block_tables: dtype int64, expected int32",
            ),
            (
                lambda a: {"block_tables": a["block_tables"][:2]},
                ValueError,
                r"block_tables: axis 0 \(num_seqs\) is 2, expected 3",
            ),
            (
                lambda a: {"block_tables": a["block_tables"][0]},
                ValueError,
                r"block_tables: 1 axes, expected 2",
            ),
            (
                lambda a: {"seq_lens": a["seq_lens"].astype(np.int64)},
                TypeError,
                r"seq_lens: dtype int64, expected int32",
            ),
            (lambda a: {"seq_lens": a["seq_lens"][:, None]}, ValueError, r"seq_lens: 2 axes, expected 1"),
            (
                lambda a: {"query_start_loc": a["query_start_loc"].astype(np.uint32)},
                TypeError,
                r"query_start_loc: dtype uint32, expected int32",
            ),
            (
                lambda a: {"query_start_loc": a["query_start_loc"][:3]},
                ValueError,
                r"query_start_loc: axis 0 \(num_seqs \+ 1\) is 3, expected 4",
            ),
            (lambda a: {"scale": np.nan}, ValueError, r"scale is nan"),
            (lambda a: {"scale": np.inf}, ValueError, r"scale is inf"),
            (lambda a: {"scale": "big"}, ValueError, r"scale is 'big'"),
            (lambda a: {"window": 0}, ValueError, r"window is 0: expected an integer >= 1"),
            (lambda a: {"window": -1}, ValueError, r"window is -1"),
            (lambda a: {"window": 2.5}, ValueError, r"window is 2.5"),
            (lambda a: {"window": True}, ValueError, r"window is True"),
            (lambda a: {"soft_cap": 0.0}, ValueError, r"soft_cap is 0.0"),
            (lambda a: {"soft_cap": -3}, ValueError, r"soft_cap is -3"),
            (lambda a: {"soft_cap": np.nan}, ValueError, r"soft_cap is nan"),
            # Numbers that float32 makes 0, infinite or coarse.
            (
                lambda a: {"soft_cap": 1e39},
                ValueError,
                r"soft_cap is 1e\+39: expected a normal float32 number > 0",
            ),
            (lambda a: {"soft_cap": 1.7e308}, ValueError, r"soft_cap is 1.7e\+308"),
            (lambda a: {"soft_cap": 1e-46}, ValueError, r"soft_cap is 1e-46"),
            (lambda a: {"soft_cap": 1e-40}, ValueError, r"soft_cap is 1e-40"),
            (lambda a: {"soft_cap": 10**400}, ValueError, r"soft_cap is 10{400}:"),
            (lambda a: {"soft_cap": True}, ValueError, r"soft_cap is True"),
            (
                lambda a: {"scale": 1e39},
                ValueError,
                r"scale is 1e\+39: expected 0 or a normal float32 number",
            ),
            (lambda a: {"scale": -1e-40}, ValueError, r"scale is -1e-40"),
            (lambda a: {"scale": 10**400}, ValueError, r"scale is 10{400}:"),
            (lambda a: {"window": -(2**100)}, ValueError, r"window is -1267650600228229401496703205376"),
            (lambda a: {"sinks": np.zeros(6)}, TypeError, r"sinks: dtype float64, expected float32"),
            (
                lambda a: {"sinks": np.zeros(2, np.float32)},
                ValueError,
                r"sinks: axis 0 \(num_q_heads\) is 2, expected 6",
            ),
            (
                lambda a: {"alibi_slopes": np.zeros((6, 1), np.float32)},
                ValueError,
                r"alibi_slopes: 2 axes, expected 1",
            ),
        ],
    )
    def test_shapes_dtypes_and_options(self, harness: Harness, changes: Change, error, message: str) -> None:
        self.refuse(harness, changes, error, message)

    @pytest.mark.usefixtures("checks_values")
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                lambda a: {"block_tables": with_entry(a["block_tables"], (2, 1), 9)},
                r"block_tables: row 2, column 1 is block 9, the cache has 9 blocks",
            ),
            (
                lambda a: {"block_tables": with_entry(a["block_tables"], (0, 2), -5)},
                r"block_tables: row 0, column 2 is block -5, the cache has 9 blocks",
            ),
            (
                lambda a: {"block_tables": with_entry(a["block_tables"], (2, 0), INT32_MAX)},
                rf"block_tables: row 2, column 0 is block {INT32_MAX}, the cache has 9 blocks",
            ),
            (
                lambda a: {"block_tables": with_entry(a["block_tables"], (0, 0), -1)},
                r"block_tables: row 0, column 0 is block -1, the cache has 9 blocks",
            ),
            # With a window of 2 the first of the 4 queries of row 2 sees keys 15 and 16, in both blocks.
            (
                lambda a: {"block_tables": with_entry(a["block_tables"], (2, 0), -1), "window": 2},
                r"block_tables: row 2, column 0 is block -1",
            ),
            (
                lambda a: {"seq_lens": np.array([33, 0, 81], np.int32)},
                r"seq_lens: row 2 is 81, its table of 5 blocks of 16 holds 0\.\.80 tokens",
            ),
            (lambda a: {"seq_lens": np.array([-1, 0, 20], np.int32)}, r"seq_lens: row 0 is -1, "),
            (
                lambda a: {"seq_lens": np.array([33, 0, 3], np.int32)},
                r"query_start_loc: row 2 has 4 queries, seq_lens gives it 3 keys",
            ),
            (
                lambda a: {"query_start_loc": np.array([1, 4, 5, 9], np.int32)},
                r"query_start_loc: row 0 starts at 1, expected 0",
            ),
            (
                lambda a: {"query_start_loc": np.array([0, 4, 3, 9], np.int32)},
                r"query_start_loc: row 1 starts at 4 and ends before that, at 3",
            ),
            (
                lambda a: {"query_start_loc": np.array([0, 4, 5, 10], np.int32)},
                r"query_start_loc: row 2 ends at 10, q has 9 tokens",
            ),
            (
                lambda a: {"sinks": np.array([0, 0, np.nan, 0, 0, 0], np.float32)},
                r"sinks: head 2 is nan, expected a finite number",
            ),
            (lambda a: {"sinks": np.full(6, np.inf, np.float32)}, r"sinks: head 0 is inf"),
            (lambda a: {"alibi_slopes": np.full(6, -np.inf, np.float32)}, r"alibi_slopes: head 0 is -inf"),
        ],
    )
    def test_values(self, harness: Harness, changes: Change, message: str) -> None:
        self.refuse(harness, changes, ValueError, message)

    def test_a_block_that_no_key_needs_may_be_anything(self, harness: Harness) -> None:
        scene = make_scene(harness, seq_lens=(33, 0, 20), query_lens=(4, 1, 4))
        scene.block_tables[2, 0] = -1
        out, _ = scene.attend(window=1)
        assert np.isfinite(out).all()

    @pytest.mark.usefixtures("host_arrays")
    def test_read_only_outputs(self, harness: Harness) -> None:
        scene = make_scene(harness)
        if not isinstance(scene.cache.k, np.ndarray):
            pytest.skip("device arrays cannot be read-only")
        for name, array in (("out", np.zeros((6, 6, 16), np.float32)), ("lse", np.zeros((6, 6), np.float32))):
            array.flags.writeable = False
            with pytest.raises(ValueError, match=f"{name}: the array is read-only"):
                run(scene, **{name: array})

    @pytest.mark.usefixtures("host_arrays")
    def test_outputs_that_overlap_inputs(self, harness: Harness) -> None:
        scene = make_scene(harness)
        if not isinstance(scene.cache.k, np.ndarray):
            pytest.skip("the memory of device arrays is not compared")
        before = scene.q.copy()
        with pytest.raises(ValueError, match="out and q share memory"):
            run(scene, out=scene.q)
        with pytest.raises(ValueError, match=r"lse and cache\.v share memory"):
            run(scene, lse=scene.cache.v[:6, 0, 0, :6])
        both = np.zeros((6, 6, 16), np.float32)
        with pytest.raises(ValueError, match="out and lse share memory"):
            run(scene, out=both, lse=both[:, :, 0])
        scene.seq_lens = both[0, 0, :6].view(np.int32)
        with pytest.raises(ValueError, match="out and seq_lens share memory"):
            run(scene, out=both)
        np.testing.assert_array_equal(scene.q, before)

    @pytest.mark.usefixtures("host_arrays")
    def test_misaligned_outputs(self, harness: Harness) -> None:
        scene = make_scene(harness)
        for name, shape in (("out", (6, 6, 16)), ("lse", (6, 6))):
            array = misaligned(np.zeros(shape, np.float32))
            with pytest.raises(
                ValueError, match=f"^{name}: the array is misaligned, .* multiples of 4 bytes"
            ):
                run(scene, **{name: array})
            assert not array.any()

    @pytest.mark.parametrize("value", [[[1.0]], None, "q"])
    def test_things_that_are_no_arrays(self, harness: Harness, value: object) -> None:
        self.refuse(harness, lambda _: {"q": value}, TypeError, "q: .*expected a")
        self.refuse(harness, lambda _: {"seq_lens": value}, TypeError, "seq_lens: .*expected a")

    @pytest.mark.usefixtures("host_arrays")
    def test_bfloat16_of_another_package_is_told_how(self, harness: Harness) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        self.refuse(
            harness,
            lambda a: {"q": a["q"].astype(ml_dtypes.bfloat16)},
            TypeError,
            r"q: dtype bfloat16.*uint16",
        )


def run(scene: Scene, **arguments: Any) -> Any:
    return scene.harness.backend.attend(
        scene.cache, scene.q, scene.block_tables, scene.seq_lens, scene.query_start_loc, **arguments
    )


class TestWrite:
    """The cache: 4 blocks of 4 tokens, 2 heads, K rows of 8 and V rows of 5 elements."""

    def refuse(self, harness: Harness, changes: Change, error: type[Exception], message: str) -> None:
        (cache,) = harness.backend.allocate(CacheConfig(1, 2, 8, 5, block_size=4), 4)
        cache.k[...] = cache.v[...] = 7
        before = snapshot(harness, cache)
        arguments: dict[str, Any] = {
            "k": np.ones((5, 2, 8), np.float32),
            "v": np.ones((5, 2, 5), np.float32),
            "slot_mapping": np.arange(5),
        }
        arguments |= changes(arguments)
        with pytest.raises(error, match=message):
            harness.backend.write(cache, *map(harness.to_device, arguments.values()))
        assert snapshot(harness, cache) == before

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (lambda a: {"k": a["k"][:4]}, ValueError, r"k: axis 0 \(num_tokens\) is 4, slot_mapping has 5"),
            (lambda a: {"v": a["v"][:4]}, ValueError, r"v: axis 0 \(num_tokens\) is 4, slot_mapping has 5"),
            (lambda a: {"k": a["k"][:, :1]}, ValueError, r"k: axis 1 \(num_kv_heads\) is 1, expected 2"),
            (lambda a: {"v": a["v"][:, :1]}, ValueError, r"v: axis 1 \(num_kv_heads\) is 1, expected 2"),
            (lambda a: {"v": a["k"]}, ValueError, r"v: axis 2 \(head_dim\) is 8, expected 5"),
            (lambda a: {"k": a["v"]}, ValueError, r"k: axis 2 \(head_dim\) is 5, expected 8"),
            (lambda a: {"k": a["k"].reshape(5, 16)}, ValueError, r"k: 2 axes, expected 3"),
            (lambda a: {"k": a["k"].astype(np.float64)}, TypeError, r"k: dtype float64, expected"),
            (lambda a: {"v": a["v"].astype(np.int32)}, TypeError, r"v: dtype int32, expected"),
            (
                lambda a: {"slot_mapping": np.arange(5, dtype=np.int32)},
                TypeError,
                r"slot_mapping: dtype int32, expected int64",
            ),
            (lambda a: {"slot_mapping": np.arange(5)[None]}, ValueError, r"slot_mapping: 2 axes, expected 1"),
        ],
    )
    def test_shapes_and_dtypes(self, harness: Harness, changes: Change, error, message: str) -> None:
        self.refuse(harness, changes, error, message)

    @pytest.mark.usefixtures("checks_values")
    @pytest.mark.parametrize(
        ("slots", "message"),
        [
            ([0, 1, 16, 2, 3], r"slot_mapping: row 2 is slot 16, .* 16 slots"),
            ([0, 1, 2, 3, 2**62], rf"slot_mapping: row 4 is slot {2**62}, .* 16 slots"),
            ([0, -2, 2, 3, 4], r"slot_mapping: row 1 is slot -2, "),
            ([-(2**63), -1, 2, 3, 4], rf"slot_mapping: row 0 is slot {-(2**63)}, "),
            ([5, -1, -1, 6, 5], r"slot_mapping: rows 0 and 4 both name slot 5"),
        ],
    )
    def test_slots(self, harness: Harness, slots: list[int], message: str) -> None:
        self.refuse(harness, lambda _: {"slot_mapping": np.array(slots)}, ValueError, message)

    @pytest.mark.usefixtures("host_arrays")
    def test_arrays_that_overlap(self, harness: Harness) -> None:
        (cache,) = harness.backend.allocate(CacheConfig(1, 2, 8, block_size=4), 4)
        cache.k[...] = cache.v[...] = 7
        k, v = np.ones((2, 4, 2, 8), np.float32)
        with pytest.raises(ValueError, match=r"^k and cache\.k share memory"):
            harness.backend.write(cache, cache.k[0], v, np.arange(4))
        with pytest.raises(ValueError, match=r"^v and cache\.k share memory"):
            harness.backend.write(cache, k, cache.k[0], np.arange(4))
        slots = cache.v.reshape(-1)[:8].view(np.int64)
        slots[:] = range(4)
        with pytest.raises(ValueError, match=r"^slot_mapping and cache\.v share memory"):
            harness.backend.write(cache, k, v, slots)
        same = LayerCache(cache.k, cache.k, "float32", 4, "NHD")
        with pytest.raises(ValueError, match=r"^cache\.k and cache\.v share memory"):
            harness.backend.write(same, k, v, np.arange(4))
        assert (cache.k == 7).all()

    @pytest.mark.parametrize("name", ["k", "v"])
    @pytest.mark.usefixtures("host_arrays")
    def test_read_only_storage(self, harness: Harness, name: str) -> None:
        """The other array of the cache must not have been written when this one is refused."""
        (cache,) = harness.backend.allocate(CacheConfig(1, 2, 8, 5, block_size=4), 4)
        cache.k[...] = cache.v[...] = 7
        getattr(cache, name).flags.writeable = False
        k, v = np.ones((4, 2, 8), np.float32), np.ones((4, 2, 5), np.float32)
        for call in (
            lambda: harness.backend.write(cache, k, v, np.arange(4)),
            lambda: harness.backend.copy_blocks([cache], np.array([[0, 1]], np.int32)),
        ):
            with pytest.raises(ValueError, match=rf"^cache\.{name}: the array is read-only"):
                call()
        assert (cache.k == 7).all()
        assert (cache.v == 7).all()


class TestCopyBlocks:
    @pytest.mark.parametrize(
        ("copies", "error", "message"),
        [
            (np.array([[1, 2]]), TypeError, r"copies: dtype int64, expected int32"),
            (np.array([1, 2], np.int32), ValueError, r"copies: 1 axes, expected 2"),
            (np.array([[1, 2, 3]], np.int32), ValueError, r"copies: axis 1 \(src, dst\) is 3, expected 2"),
        ],
    )
    def test_shapes_and_dtypes(self, harness: Harness, copies: np.ndarray, error, message: str) -> None:
        self.refuse(harness, copies, error, message)

    @pytest.mark.usefixtures("checks_values")
    @pytest.mark.parametrize(
        ("copies", "message"),
        [
            ([[1, 2], [3, 4]], r"copies: row 1 is 3 -> 4, the cache has 4 blocks"),
            ([[1, 2], [-1, 3]], r"copies: row 1 is -1 -> 3, the cache has 4 blocks"),
            ([[0, 2], [1, 2]], r"copies: rows 0 and 1 both name destination block 2"),
            ([[0, 2], [2, 3]], r"copies: row 0 has block 2 as destination, another row as source"),
            ([[1, 1]], r"copies: row 0 has block 1 as destination"),
        ],
    )
    def test_values(self, harness: Harness, copies: list[list[int]], message: str) -> None:
        self.refuse(harness, np.array(copies, np.int32), ValueError, message)

    def refuse(self, harness: Harness, copies: np.ndarray, error: type[Exception], message: str) -> None:
        caches = harness.backend.allocate(CacheConfig(2, 2, 8, block_size=4), 4)
        for cache in caches:
            cache.k[...] = cache.v[...] = np.nan
            cache.k[0] = 1
        before = snapshot(harness, *caches)
        with pytest.raises(error, match=message):
            harness.backend.copy_blocks(caches, harness.to_device(copies))
        assert snapshot(harness, *caches) == before


class TestGather:
    @pytest.mark.parametrize(
        ("table", "seq_len", "error", "message"),
        [
            (np.array([1, 2]), 5, TypeError, r"block_table: dtype int64, expected int32"),
            (np.array([[1, 2]], np.int32), 5, ValueError, r"block_table: 2 axes, expected 1"),
            (np.array([1, 2], np.int32), 9, ValueError, r"seq_len is 9: .* 0\.\.8, the tokens of 2 blocks"),
            (np.array([1, 2], np.int32), -1, ValueError, r"seq_len is -1"),
            (np.array([1, 2], np.int32), 2.0, ValueError, r"seq_len is 2.0"),
        ],
    )
    def test_shapes_and_dtypes(self, harness: Harness, table, seq_len, error, message: str) -> None:
        self.refuse(harness, table, seq_len, error, message)

    @pytest.mark.usefixtures("checks_values")
    def test_values(self, harness: Harness) -> None:
        for block in (-1, 4, INT32_MAX):
            table = np.array([1, block], np.int32)
            message = rf"block_table: column 1 is block {block}, the cache has 4 blocks"
            self.refuse(harness, table, 5, ValueError, message)

    def refuse(self, harness: Harness, table, seq_len, error: type[Exception], message: str) -> None:
        (cache,) = harness.backend.allocate(CacheConfig(1, 2, 8, block_size=4), 4)
        with pytest.raises(error, match=message):
            harness.backend.gather(cache, harness.to_device(table), seq_len)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (lambda a: {"out_a": a["out_a"][0]}, ValueError, r"out_a: 2 axes, expected 3"),
        (lambda a: {"out_b": a["out_b"][:2]}, ValueError, r"out_b: axis 0 \(num_tokens\) is 2, expected 3"),
        (
            lambda a: {"out_b": a["out_b"].astype(np.float16)},
            TypeError,
            r"out_b: dtype float16, out_a has float32",
        ),
        (
            lambda a: {"lse_a": a["lse_a"][:, :1]},
            ValueError,
            r"lse_a: axis 1 \(num_q_heads\) is 1, expected 2",
        ),
        (
            lambda a: {"lse_b": a["lse_b"].astype(np.float64)},
            TypeError,
            r"lse_b: dtype float64, expected float32",
        ),
    ],
)
def test_merge_states(harness: Harness, changes: Change, error, message: str) -> None:
    out, lse = np.zeros((3, 2, 8), np.float32), np.zeros((3, 2), np.float32)
    arguments = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse}
    arguments |= changes(arguments)
    with pytest.raises(error, match=message):
        harness.backend.merge_states(*map(harness.to_device, arguments.values()))


class TestAllocate:
    @pytest.mark.parametrize("num_blocks", [0, -1, 2**31, 2.0, True])
    def test_number_of_blocks(self, harness: Harness, num_blocks: object) -> None:
        with pytest.raises(ValueError, match="num_blocks is"):
            harness.backend.allocate(CacheConfig(1, 1, 8), num_blocks)

    @pytest.mark.parametrize("block_size", [1, 3, 16, 24, 448, 1600])
    def test_block_size_is_taken_or_refused_with_the_list(self, harness: Harness, block_size: int) -> None:
        config = CacheConfig(1, 1, 8, block_size=block_size)
        supported = harness.backend.supported().block_sizes
        if supported is None or block_size in supported:
            assert harness.backend.allocate(config, 2)[0].block_size == block_size
        else:
            with pytest.raises(ValueError, match=f"block_size is {block_size}: supported are "):
                harness.backend.allocate(config, 2)


@pytest.mark.usefixtures("host_arrays")
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda array: array[..., ::2], "axis 3 has a stride of 8 bytes, expected 4"),
        (lambda array: array[::-1], "axis 0 has a stride of -256 bytes, expected at least 32"),
        (lambda array: array[:, :, ::-1], "axis 2 has a stride of -32 bytes, expected at least 32"),
        (
            lambda array: np.broadcast_to(array[:1], array.shape),
            "axis 0 has a stride of 0 bytes, expected at",
        ),
        (
            lambda array: np.lib.stride_tricks.as_strided(array, strides=(64, 64, 32, 4)),
            "axis 1 has a stride of 64 bytes, expected at least 192",
        ),
        (misaligned, "the array is misaligned, expected elements at multiples of 4 bytes"),
    ],
    ids=["elements apart", "blocks backwards", "heads backwards", "one block", "overlapping", "misaligned"],
)
@pytest.mark.usefixtures("host_arrays")
def test_storage_that_backends_do_not_take(harness: Harness, name: str, view, message: str) -> None:
    arrays = {"k": np.zeros((3, 4, 2, 8), np.float32), "v": np.zeros((3, 4, 2, 8), np.float32)}
    arrays[name] = view(arrays[name])
    cache = LayerCache(**arrays, format="float32", block_size=4, layout="NHD")
    k, v = (np.ones((1, 2, array.shape[3]), np.float32) for array in arrays.values())
    q, one = np.ones((1, 2, k.shape[2]), np.float32), np.array([1], np.int32)
    for call in (
        lambda: harness.backend.write(cache, k, v, np.array([0])),
        lambda: harness.backend.attend(cache, q, one[None], one, np.array([0, 1], np.int32)),
        lambda: harness.backend.gather(cache, one, 1),
        lambda: harness.backend.copy_blocks([cache], np.array([[1, 2]], np.int32)),
    ):
        with pytest.raises(ValueError, match=rf"^cache\.{name}: {message}"):
            call()
    assert not cache.k.any()
    assert not cache.v.any()


def test_pool_of_another_block_size(harness: Harness) -> None:
    """Slots made for blocks of 16 tokens must not be decoded in a pool of 4-token blocks."""
    (cache,) = harness.backend.allocate(CacheConfig(1, 2, 8, block_size=4), 4)
    with pytest.raises(ValueError, match=r"k: axis 1 \(block_size\) is 4, the cache has 16"):
        LayerCache(cache.k, cache.v, "float32", 16, "NHD")


@pytest.mark.usefixtures("host_arrays")
def test_cache_of_another_kind(harness: Harness) -> None:
    scene = make_scene(harness)
    with pytest.raises(TypeError, match="cache: ndarray, expected a LayerCache"):
        harness.backend.write(scene.cache.k, scene.q, scene.q, np.arange(6))
