"""Quantised caches: where codes, scales and zeros stand, and that attention is that of the values they stand for.

The scenes place every element by the definition of the storage, from the arithmetic that `test_quantize` has proven;
whatever no token owns is left as NaN bytes, scales included.
"""

from typing import Any

import numpy as np
import pytest

from conformance.harness import Harness
from conformance.scene import (
    JUNK_IDS,
    NAN_BYTES,
    TOLERANCE,
    Scene,
    element,
    fill,
    load,
    rows_close,
    snapshot,
    store,
)
from every_format import EVERY_FORMAT
from kvblocks.backends import Tail
from kvblocks.backends.codecs import amax_of, decode, encode, scale_of
from kvblocks.config import CacheConfig
from kvblocks.formats import Format, KVFormat
from kvblocks.layout import LayerCache

QUANTISED = [each for each in EVERY_FORMAT if not KVFormat.parse(each).is_plain]
MIXED = [
    "int8:channel,fp8_e4m3:head",
    "bfloat16,int4",
    "kivi2,float16",
    "float32,kivi4",
    "int4,int8",
]
FORMATS = [*QUANTISED, *MIXED]
LAYOUTS = ("NHD", "HND")


def supports(harness: Harness, kv_format: str) -> None:
    """Skip what the backend's table leaves out, having seen that it is refused by name."""
    parts, table = KVFormat.parse(kv_format), harness.backend.supported()
    listed = str(parts.k) in table.k_formats and str(parts.v) in table.v_formats
    if listed and (table.mixed or parts.k.name == parts.v.name):
        return
    with pytest.raises(ValueError, match=r"^(k_format|v_format|kv_format) is .*: supported"):
        harness.backend.allocate(CacheConfig(1, 2, 64, block_size=32, kv_format=kv_format), 2)
    pytest.skip(f"{harness.name} refuses {kv_format}")


def static_scale(part: Format, values: np.ndarray) -> np.ndarray | None:
    """A scale that fits most of the values and clips a few."""
    return scale_of(amax_of(values * np.float32(0.9), part), part) if part.is_static else None


class Stored:
    """One part of a sequence as it is stored: tokens whose codes and scales are placed one by one."""

    def __init__(self, values: np.ndarray, part: Format, scale: np.ndarray | None) -> None:
        self.part, self.scale, self.zero = part, None, None
        if part.is_plain:
            self.codes = store(values, part.name)
            self.restored = load(self.codes)
            return
        self.codes, self.scale, self.zero, _, _ = encode(np.asarray(values, np.float32), part, scale)
        if part.scaling == "token_group":
            self.scale, self.zero = (np.repeat(each, part.group, axis=0) for each in (self.scale, self.zero))
        self.restored = decode(self.codes, part, self.scale, self.zero).astype(np.float64)

    def place(
        self, arrays: dict[str, np.ndarray], name: str, cache: LayerCache, token: int, slot: int
    ) -> None:
        arrays[name][element(cache, slot)] = self.codes[token]
        if self.part.is_plain or self.part.is_static:
            return
        block, offset = divmod(slot, cache.block_size)
        if self.part.scaling == "token_group":
            offset //= self.part.group
        arrays[f"{name}_scale"][block, offset] = self.scale[token]
        if self.zero is not None:
            arrays[f"{name}_zero"][block, offset] = self.zero[token]


def make_rows(num_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """K [num_tokens, 2, 16] and V [num_tokens, 2, 24]."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((num_tokens, 2, 16)).astype(np.float32) * 2,
        rng.standard_normal((num_tokens, 2, 24)).astype(np.float32),
    )


def make_scene(
    harness: Harness,
    kv_format: str,
    *,
    seq_lens: tuple[int, ...] = (0, 1, 15, 32, 33, 70),
    query_lens: tuple[int, ...] | None = None,
    q_dtype: str = "float32",
    layout: str = "NHD",
    block_size: int = 32,
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (16, 24),
    pad_tokens: int = 0,
    rows: list[tuple[np.ndarray, np.ndarray]] | None = None,
    fill_byte: int = NAN_BYTES,
) -> tuple[Scene, Tail | None]:
    """Random sequences in a poisoned quantised pool; those whose groups span tokens end in a tail of float16."""
    rng = np.random.default_rng(0)
    (num_q_heads, num_kv_heads), (head_dim, head_dim_v) = heads, dims
    query_lens = query_lens or (1,) * len(seq_lens)
    config = CacheConfig(
        1, num_kv_heads, head_dim, head_dim_v, block_size=block_size, layout=layout, kv_format=kv_format
    )
    needs = [-(-num_tokens // block_size) for num_tokens in seq_lens]
    num_blocks = 1 + sum(needs) + 3
    (cache,) = harness.backend.allocate(config, num_blocks)
    fill(harness, cache, fill_byte)
    arrays = {name: harness.to_host(array).copy() for name, array in cache.named_arrays}
    parts = (("k", cache.format.k), ("v", cache.format.v))
    if rows is None:
        rows = [
            (
                rng.standard_normal((num_tokens, num_kv_heads, head_dim)).astype(np.float32) * 2,
                rng.standard_normal((num_tokens, num_kv_heads, head_dim_v)).astype(np.float32),
            )
            for num_tokens in seq_lens
        ]
    static = [
        static_scale(part, np.concatenate([each[i] for each in rows])) for i, (_, part) in enumerate(parts)
    ]
    for (name, _), scale in zip(parts, static, strict=True):
        if scale is not None:
            arrays[f"{name}_scale"][...] = scale

    ids = rng.permutation(np.arange(1, num_blocks))
    tables = rng.choice(JUNK_IDS, (len(seq_lens), max(needs, default=0) + 2))
    sequences, tails = [], []
    for row, values in enumerate(rows):
        blocks, ids = ids[: needs[row]], ids[needs[row] :]
        tables[row, : len(blocks)] = blocks
        num_stored = seq_lens[row]
        if cache.format.has_residual:
            num_stored = num_stored // block_size * block_size
            tables[row, num_stored // block_size :] = rng.choice(JUNK_IDS)
        seen = []
        for (name, part), of_part, scale in zip(parts, values, static, strict=True):
            stored = Stored(of_part[:num_stored], part, scale)
            for token in range(num_stored):
                slot = int(blocks[token // block_size]) * block_size + token % block_size
                stored.place(arrays, name, cache, token, slot)
            newest = of_part[num_stored:].astype(np.float16)
            seen.append((np.concatenate([stored.restored, newest.astype(np.float64)]), newest))
        sequences.append((seen[0][0], seen[1][0]))
        tails.append((seen[0][1], seen[1][1]))
    for name, array in cache.named_arrays:
        array[...] = harness.to_device(arrays[name])
    scene = Scene(
        harness,
        cache,
        store(rng.standard_normal((sum(query_lens) + pad_tokens, num_q_heads, head_dim)), q_dtype),
        q_dtype,
        tables.astype(np.int32),
        np.array(seq_lens, np.int32),
        np.concatenate([[0], np.cumsum(query_lens, dtype=np.int64)]).astype(np.int32),
        sequences,
    )
    if not cache.format.has_residual:
        return scene, None
    starts = np.cumsum([0, *(len(k) for k, _ in tails)]).astype(np.int32)
    device = harness.to_device
    k, v = (np.concatenate([each[i] for each in tails]) for i in range(2))
    return scene, Tail(device(k), device(v), device(starts))


def check(scene: Scene, tail: Tail | None, **options: Any) -> None:
    """Compare with the reference over what is stored; q's dtype is the only one that rounds."""
    given = options if tail is None else options | {"tail": tail}
    out, lse = scene.attend(**given)
    expected, expected_lse = scene.expected(**options)
    rows_close(load(out), expected, TOLERANCE[scene.q_dtype])
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", FORMATS)
class TestAttend:
    def test_decode(self, harness: Harness, kv_format: str, layout: str) -> None:
        supports(harness, kv_format)
        check(*make_scene(harness, kv_format, layout=layout))

    def test_prefill_and_decode_with_every_option(
        self, harness: Harness, kv_format: str, layout: str
    ) -> None:
        supports(harness, kv_format)
        scene, tail = make_scene(
            harness, kv_format, layout=layout, seq_lens=(70, 3, 0, 40), query_lens=(9, 3, 0, 1), pad_tokens=2
        )
        check(scene, tail)
        options = {
            "scale": 0.3,
            "window": 21,
            "soft_cap": 5.0,
            "sinks": np.linspace(-2, 1, 6, dtype=np.float32),
            "alibi_slopes": np.linspace(0.01, 0.3, 6, dtype=np.float32),
        }
        check(scene, tail, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_what_no_token_owns_does_not_matter(harness: Harness, kv_format: str, layout: str) -> None:
    """Bit for bit the same over a pool of NaN bytes, codes and scales alike, of zeros, and of the largest codes."""
    supports(harness, kv_format)
    outs = []
    for byte in (0xFF, 0x00, 0x7B):
        scene, tail = make_scene(
            harness, kv_format, layout=layout, seq_lens=(1, 15, 16, 17, 33), fill_byte=byte
        )
        outs.append([array.tobytes() for array in scene.attend(**({} if tail is None else {"tail": tail}))])
    assert outs[0] == outs[1] == outs[2]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_empty_sequences_change_nothing_for_the_others(harness: Harness, kv_format: str) -> None:
    """Rows of a batch with empty ones in between, bit for bit as in a batch of one."""
    supports(harness, kv_format)
    rows = [make_rows(num_tokens, seed) for seed, num_tokens in enumerate((5, 0, 0, 37))]
    together, tail = make_scene(harness, kv_format, seq_lens=(5, 0, 0, 37), rows=rows)
    out, lse = together.attend(**({} if tail is None else {"tail": tail}))
    assert not out[1:3].any()
    assert np.isneginf(lse[1:3]).all()
    if KVFormat.parse(kv_format).k.is_static or KVFormat.parse(kv_format).v.is_static:
        return  # the scales of a scene are those of all its rows
    for row in (0, 3):
        alone, tail = make_scene(harness, kv_format, seq_lens=(len(rows[row][0]),), rows=[rows[row]])
        alone.q = together.q[row : row + 1]
        for actual, expected in zip(
            alone.attend(**({} if tail is None else {"tail": tail})), (out, lse), strict=True
        ):
            assert actual[0].tobytes() == expected[row].tobytes()


@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_format", EVERY_FORMAT)
def test_every_query_dtype_over_every_format(harness: Harness, kv_format: str, q_dtype: str) -> None:
    supports(harness, kv_format)
    check(*make_scene(harness, kv_format, q_dtype=q_dtype, seq_lens=(40,), query_lens=(2,)))


@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize("dims", [(8, 8), (80, 80), (96, 64), (64, 128), (192, 128)])
def test_head_dims(harness: Harness, kv_format: str, dims: tuple[int, int]) -> None:
    supports(harness, kv_format)
    check(*make_scene(harness, kv_format, dims=dims, seq_lens=(40,), query_lens=(3,)))


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8", "int8:channel,int8", "int4"])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 64, 256])
def test_block_sizes(harness: Harness, kv_format: str, block_size: int) -> None:
    supports(harness, kv_format)
    check(*make_scene(harness, kv_format, block_size=block_size))


@pytest.mark.parametrize("kv_format", ["kivi4", "kivi2", "kivi2r"])
@pytest.mark.parametrize("block_size", [32, 64, 96])
def test_block_sizes_of_whole_groups(harness: Harness, kv_format: str, block_size: int) -> None:
    supports(harness, kv_format)
    check(*make_scene(harness, kv_format, block_size=block_size, seq_lens=(1, 64, 200), query_lens=(1, 5, 5)))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (12, 2), (8, 8)])
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "int8:head", "int4", "kivi2"])
def test_groups_of_heads(harness: Harness, kv_format: str, heads: tuple[int, int]) -> None:
    supports(harness, kv_format)
    check(*make_scene(harness, kv_format, heads=heads, seq_lens=(40,)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_gather_is_exact(harness: Harness, kv_format: str, layout: str) -> None:
    """Bit for bit what the codes stand for, and nothing of the slots beyond the sequence."""
    supports(harness, kv_format)
    scene, tail = make_scene(harness, kv_format, layout=layout, seq_lens=(64, 17))
    for row, (k, v) in enumerate(scene.sequences):
        num_tokens = int(scene.seq_lens[row]) if tail is None else int(scene.seq_lens[row]) // 32 * 32
        table = harness.to_device(scene.block_tables[row])
        gathered = harness.backend.gather(scene.cache, table, num_tokens)
        for actual, expected in zip(map(harness.to_host, gathered), (k, v), strict=True):
            assert actual.dtype == np.float32
            np.testing.assert_array_equal(actual, expected[:num_tokens].astype(np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_write_stores_what_the_specification_says(harness: Harness, kv_format: str, layout: str) -> None:
    """The whole pool, byte by byte: the same as placed by hand, everything else untouched."""
    supports(harness, kv_format)
    rng = np.random.default_rng(1)
    num_tokens = 64 if KVFormat.parse(kv_format).has_residual else 50
    rows = make_rows(num_tokens, seed=1)
    scene, _ = make_scene(harness, kv_format, layout=layout, seq_lens=(num_tokens,), rows=[rows])
    expected = snapshot(harness, scene.cache)
    fill(harness, scene.cache)
    columns, offsets = np.divmod(np.arange(num_tokens), 32)
    slots = scene.block_tables[0, columns].astype(np.int64) * 32 + offsets
    order = rng.permutation(num_tokens)
    slots = np.insert(slots[order], 7, -1)
    k, v = (np.insert(each[order], 7, np.nan, axis=0) for each in rows)
    device = harness.to_device
    harness.backend.write(scene.cache, device(k), device(v), device(slots))
    assert snapshot(harness, scene.cache) == expected


@pytest.mark.parametrize("kv_format", ["kivi2", "kivi4r", "kivi2r,int8"])
@pytest.mark.usefixtures("checks_values")
def test_a_group_of_tokens_is_written_as_a_whole(harness: Harness, kv_format: str) -> None:
    supports(harness, kv_format)
    (cache,) = harness.backend.allocate(CacheConfig(1, 1, 8, block_size=32, kv_format=kv_format), 3)
    fill(harness, cache)
    before = snapshot(harness, cache)
    rows = harness.to_device(np.ones((33, 1, 8), np.float32))
    for slots, named in ((np.arange(31), "31|15"), (np.arange(16, 48), "16|16"), (np.arange(33), "1")):
        if kv_format == "kivi2r,int8" and len(slots) == 32:
            continue  # two groups of 16
        with pytest.raises(
            ValueError, match=rf"^slot_mapping: slots .* are a group of .*, and ({named}) of them are named"
        ):
            harness.backend.write(cache, rows, rows, harness.to_device(slots))
    assert snapshot(harness, cache) == before


@pytest.mark.usefixtures("checks_values")
@pytest.mark.parametrize(
    "kv_format", ["fp8_e4m3:tensor", "fp8_e5m2:head", "int8:channel,int8", "float16,int8:head"]
)
def test_static_scales_have_to_be_set(harness: Harness, kv_format: str) -> None:
    supports(harness, kv_format)
    (cache,) = harness.backend.allocate(CacheConfig(1, 2, 8, block_size=4, kv_format=kv_format), 3)
    rows = harness.to_device(np.ones((1, 2, 8), np.float32))
    slot = harness.to_device(np.array([5]))
    with pytest.raises(ValueError, match=r"^cache\.(k|v)_scale: the static scale of .* is not set"):
        harness.backend.write(cache, rows, rows, slot)
    for name, array in cache.named_arrays:
        if "scale" in name and array.shape[0] != 3:
            array[...] = 1
    harness.backend.write(cache, rows, rows, slot)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_two_sequences_do_not_know_each_other(harness: Harness, kv_format: str) -> None:
    """Groups end with a sequence: one a thousand times as large leaves the codes of the other as they are."""
    supports(harness, kv_format)
    parts = KVFormat.parse(kv_format)
    if parts.k.is_static or parts.v.is_static:
        pytest.skip("static scales are shared by definition")
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 32, 2, 16)).astype(np.float32)
    device, written = harness.to_device, []
    for factor in (0, 1000):
        (cache,) = harness.backend.allocate(CacheConfig(1, 2, 16, block_size=32, kv_format=kv_format), 3)
        fill(harness, cache)
        both = [device(np.concatenate([rows, rows * factor])) for rows in (k, v)]
        harness.backend.write(cache, *both, device(np.arange(32, 96)))
        written.append([harness.to_host(array)[1].tobytes() for array in cache.block_arrays])
    assert written[0] == written[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_copied_block_takes_its_scales_along(harness: Harness, kv_format: str, layout: str) -> None:
    supports(harness, kv_format)
    scene, tail = make_scene(harness, kv_format, layout=layout, seq_lens=(70,))
    before = scene.attend(**({} if tail is None else {"tail": tail}))
    table = scene.block_tables[0]
    spare = sorted({*range(1, scene.cache.num_blocks)} - {*table[:3].tolist()})[:2]
    copies = np.array([[table[0], spare[0]], [table[1], spare[1]]], np.int32)
    harness.backend.copy_blocks([scene.cache], harness.to_device(copies))
    scene.block_tables[0, :2] = spare
    after = scene.attend(**({} if tail is None else {"tail": tail}))
    assert [array.tobytes() for array in after] == [array.tobytes() for array in before]


class TestTail:
    """Keys beside a cache of any format: the same result as if they stood in it."""

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("cut", [0, 1, 16, 39, 40])
    def test_over_a_plain_cache(self, harness: Harness, dtype: str, cut: int) -> None:
        scene, _ = make_scene(harness, dtype, seq_lens=(40, 0, 3), query_lens=(7, 0, 1), q_dtype=dtype)
        self.needs_tail(harness)
        # Row 0 from token `cut` on, row 2 as a whole.
        k, v = (
            np.concatenate([store(scene.sequences[0][i][cut:], dtype), store(scene.sequences[2][i], dtype)])
            for i in range(2)
        )
        starts = np.array([0, 40 - cut, 40 - cut, 43 - cut], np.int32)
        scene.block_tables[0, -(-cut // 32) :] = -1
        scene.block_tables[2] = -1
        device = harness.to_device
        for window in (None, 1, 12, 39):
            options = {} if window is None else {"window": window}
            check(scene, Tail(device(k), device(v), device(starts)), **options)

    @pytest.mark.parametrize(
        ("starts", "message"),
        [
            ([0, 5], r"tail.start_loc: axis 0 \(num_seqs \+ 1\) is 2, expected 3"),
            ([1, 5, 5], "tail.start_loc: from 1 to 5, expected from 0 to at most the 8 rows"),
            ([0, 5, 9], "tail.start_loc: from 0 to 9, expected from 0 to at most the 8 rows"),
            ([0, 8, 5], "tail.start_loc: row 1 has -3 keys, seq_lens gives it 3 in all"),
            ([0, 1, 8], "tail.start_loc: row 1 has 7 keys, seq_lens gives it 3 in all"),
        ],
    )
    @pytest.mark.usefixtures("checks_values")
    def test_that_does_not_fit(self, harness: Harness, starts: list[int], message: str) -> None:
        self.needs_tail(harness)
        scene, _ = make_scene(harness, "float32", seq_lens=(40, 3))
        device = harness.to_device
        rows = device(np.ones((8, 2, 16), np.float32)), device(np.ones((8, 2, 24), np.float32))
        with pytest.raises(ValueError, match=message):
            scene.attend(tail=Tail(*rows, device(np.array(starts, np.int32))))

    @pytest.mark.usefixtures("host_arrays")
    def test_of_other_arrays(self, harness: Harness) -> None:
        self.needs_tail(harness)
        scene, _ = make_scene(harness, "float32", seq_lens=(40, 3))
        k, v = np.ones((8, 2, 16), np.float32), np.ones((8, 2, 24), np.float32)
        starts = np.array([0, 5, 8], np.int32)
        with pytest.raises(TypeError, match="tail: tuple, expected a Tail"):
            scene.attend(tail=(k, v, starts))
        with pytest.raises(TypeError, match=r"tail\.v: dtype float64"):
            scene.attend(tail=Tail(k, v.astype(np.float64), starts))
        with pytest.raises(ValueError, match=r"tail\.k: axis 2 \(head_dim\) is 24, expected 16"):
            scene.attend(tail=Tail(v, v, starts))
        with pytest.raises(TypeError, match=r"tail\.start_loc: dtype int64, expected int32"):
            scene.attend(tail=Tail(k, v, starts.astype(np.int64)))

    def needs_tail(self, harness: Harness) -> None:
        if "tail" not in harness.backend.supported().features:
            pytest.skip(f"{harness.name} refuses a tail")


def test_a_tail_is_refused_by_name(harness: Harness) -> None:
    if "tail" in harness.backend.supported().features:
        pytest.skip(f"{harness.name} takes a tail")
    scene, _ = make_scene(harness, "float32", seq_lens=(3,))
    rows = np.ones((1, 2, 16), np.float32), np.ones((1, 2, 24), np.float32)
    with pytest.raises(ValueError, match="feature is 'tail': supported are"):
        scene.attend(tail=Tail(*rows, np.array([0, 1], np.int32)))


@pytest.mark.parametrize("kv_format", ["fp8_e4m3:tensor", "fp8_e4m3", "int8", "int4"])
def test_long_sums_keep_their_precision(harness: Harness, kv_format: str) -> None:
    """131,072 keys: equal weights of equal values, and one key that stands out by 20."""
    supports(harness, kv_format)
    num_keys, special, device = 131_072, 77_777, harness.to_device
    k, v = np.zeros((num_keys, 1, 8), np.float32), np.ones((num_keys, 1, 8), np.float32)
    k[special] = 20
    q = np.zeros((1, 1, 8), np.float32)
    for peak, expected in ((0, 1.0), (1, 1 / (1 + (num_keys - 1) * np.exp(-20)))):
        config = CacheConfig(1, 1, 8, block_size=256, kv_format=kv_format)
        (cache,) = harness.backend.allocate(config, num_keys // 256)
        for name in ("k_scale", "v_scale"):
            if KVFormat.parse(kv_format).k.is_static:
                getattr(cache, name)[...] = 1
        q[..., 0] = peak
        if peak:
            v[:] = 0
            v[special] = 1
        harness.backend.write(cache, device(k), device(v), device(np.arange(num_keys)))
        out = harness.backend.attend(
            cache,
            device(q),
            device(np.arange(num_keys // 256, dtype=np.int32)[None]),
            device(np.array([num_keys], np.int32)),
            device(np.array([0, 1], np.int32)),
            scale=1.0,
        )
        np.testing.assert_allclose(harness.to_host(out), expected, atol=1e-4)


@pytest.mark.parametrize("layer", [0, 1, 15, 29])
@pytest.mark.parametrize("kv_format", QUANTISED)
def test_values_of_a_real_model(harness: Harness, real_kv, layer: int, kv_format: str) -> None:
    """Recorded keys and values in shuffled blocks: attention is that of what the format makes of them."""
    supports(harness, kv_format)
    data = np.load(real_kv / "smollm2_qkv_512.npz")
    q, k, v = (data[f"{name}{layer}"].transpose(1, 0, 2).astype(np.float32) for name in "qkv")
    scene, tail = make_scene(
        harness,
        kv_format,
        seq_lens=(500,),
        query_lens=(4,),
        layout=LAYOUTS[layer % 2],
        block_size=64,
        heads=(9, 3),
        dims=(64, 64),
        rows=[(k[:500], v[:500])],
    )
    scene.q = np.ascontiguousarray(q[496:500])
    check(scene, tail, scale=float(data[f"scale{layer}"]))
