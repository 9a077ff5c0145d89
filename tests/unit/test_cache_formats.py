"""Quantised formats in a `PagedKVCache`: sizes, scales, residuals, forks and sequences that are saved and restored."""

from typing import Any

import numpy as np
import pytest

import kvblocks as kv
from every_format import EVERY_FORMAT
from kvblocks.backends.codecs import decode, encode, per_token
from kvblocks.rotation import rotate

FORMATS = [*EVERY_FORMAT, "kivi2,int8", "float16,int4"]
# A layer with a residual beside one without.
LAYERS_APART = ["kivi2", "int8"]
BACKENDS = ["numpy", "cpu"]
HEADS, DIM, BLOCK_SIZE = 2, 16, 32


def make_cache(
    kv_format: Any, *, backend: str = "numpy", num_layers: int = 2, residual: int = 32, **options: Any
) -> kv.PagedKVCache:
    config = kv.CacheConfig(
        *(num_layers, HEADS, DIM), block_size=BLOCK_SIZE, kv_format=kv_format, residual_tokens=residual
    )
    try:
        cache = kv.PagedKVCache(
            config,
            **({"num_blocks": 24, "max_seqs": 4, "max_tokens": 256, "backend": backend, "seed": 0} | options),
        )
    except ValueError as error:
        if backend == "numpy" or "supported" not in str(error):
            raise
        pytest.skip(f"{backend}: {error}")
    for layer, parts in enumerate(config.formats):
        scales = {name: 0.03 for name, part in (("k", parts.k), ("v", parts.v)) if part.is_static}
        cache.set_scales(layer, **scales)
    return cache


def rows(num_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.random.default_rng(seed).standard_normal((2, num_tokens, HEADS, DIM)).astype(np.float32)
    return k, v


def admit(cache: kv.PagedKVCache, tokens: list[int], **options: Any) -> Any:
    return cache.manager.allocate(cache.manager.prepare(tokens), **options)


def compute(
    cache: kv.PagedKVCache, handle: int, num_new: int, seed: int, tokens: list[int] | None = None
) -> list[np.ndarray]:
    """Schedule, write, attend and commit; the outputs of all layers."""
    assert cache.schedule([handle], num_new)
    outs = []
    for layer in range(len(cache.layers)):
        k, v = rows(num_new, seed + layer)
        cache.write(layer, k, v)
        q = np.random.default_rng(seed).standard_normal((num_new, 4, DIM)).astype(np.float32)
        outs.append(cache.attend(layer, q))
    cache.manager.commit([handle], num_new, tokens)
    return outs


@pytest.mark.parametrize("kv_format", [*FORMATS, LAYERS_APART], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nbytes_is_what_is_held(kv_format: str, backend: str) -> None:
    cache = make_cache(kv_format, backend=backend)
    held = sum(array.nbytes for layer in cache.layers for _, array in layer.named_arrays)
    if cache.residual is not None:
        held += cache.residual.nbytes
        assert cache.residual.nbytes == 4 * cache.config.bytes_per_seq
    assert cache.nbytes == held


@pytest.mark.parametrize("kv_format", FORMATS)
def test_memory_pays_for_scales_and_residuals_first(kv_format: str) -> None:
    cache = make_cache(kv_format)
    same = make_cache(kv_format, num_blocks=None, memory=cache.nbytes)
    less = make_cache(kv_format, num_blocks=None, memory=cache.nbytes - 1)
    assert (same.num_blocks, less.num_blocks) == (24, 23)


def test_memory_that_residuals_use_up() -> None:
    config = make_cache("kivi2").config
    memory = 4 * config.bytes_per_seq + config.bytes_per_block
    with pytest.raises(
        ValueError,
        match=rf"^memory is {memory} bytes, .* beside {4 * config.bytes_per_seq} bytes for .* 4 res",
    ):
        make_cache("kivi2", num_blocks=None, memory=memory)


class TestResidual:
    def test_the_newest_tokens_are_exact_and_groups_are_whole(self) -> None:
        """100 tokens, 32 of residual, groups of 32: 68..99 exact by the rule, 64..67 as their group is not whole."""
        cache = make_cache("kivi2", num_layers=1)
        handle = admit(cache, [0] * 100).handle
        compute(cache, handle, 100, seed=0)
        k, v = rows(100, 0)
        for actual, written in zip(cache.gather(handle, 0), (k, v), strict=True):
            exact = written.astype(np.float16).astype(np.float32)
            same = (actual == exact).all(axis=(1, 2))
            assert same[64:].all()
            assert not same[:64].any()
        codes, scale, zero, _, _ = encode(
            k[:64].astype(np.float16).astype(np.float32), cache.config.formats[0].k
        )
        part = cache.config.formats[0].k
        expected = decode(codes, part, per_token(scale, part), per_token(zero, part))
        np.testing.assert_array_equal(cache.gather(handle, 0)[0][:64], expected)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("kv_format", ["kivi2", "kivi4r"])
    def test_the_first_pass_sees_16_bit_and_a_hit_sees_codes(self, kv_format: str, backend: str) -> None:
        """What a prefix hit changes: the owner attends to what it wrote, the other one to what was stored of it."""
        cache = make_cache(kv_format, backend=backend, num_layers=1)
        plain = make_cache("float16", num_layers=1)
        tokens = list(range(70))
        outs = {
            name: compute(each, admit(each, tokens).handle, 70, 0)[0]
            for name, each in (("q", cache), ("p", plain))
        }
        np.testing.assert_allclose(outs["q"], outs["p"], atol=2e-3)
        answer = admit(cache, tokens)
        assert answer.num_cached_tokens == 64
        assert cache.schedule([answer.handle], 6)
        k, v = rows(70, 0)
        cache.write(0, k[64:], v[64:])
        q = np.random.default_rng(0).standard_normal((70, 4, DIM)).astype(np.float32)
        hit = cache.attend(0, q[64:])
        assert np.abs(hit - outs["p"][64:]).max() > 0.01

    def test_too_few_rows_are_refused_before_anything_happens(self) -> None:
        cache = make_cache("kivi2", residual_seqs=1)
        first, second = (admit(cache, [i] * 40).handle for i in range(2))
        compute(cache, first, 40, seed=0)
        before = cache.manager.stats()
        with pytest.raises(
            RuntimeError, match=r"^1 sequences have a residual and 1 more need one, of 1 in all"
        ):
            cache.schedule([second], 40)
        with pytest.raises(RuntimeError, match="1 more need one"):
            cache.fork([first])
        assert str(cache.manager.stats()) == str(before)
        cache.manager.free([first])
        compute(cache, second, 40, seed=1)

    def test_a_fork_past_the_cache_is_refused(self) -> None:
        cache = make_cache("kivi2")
        parent = admit(cache, [0] * 40).handle
        compute(cache, parent, 40, seed=0)
        [child] = cache.manager.fork([parent])
        with pytest.raises(
            ValueError, match=rf"^sequence {child} has 40 tokens, of which the last 8 are in no residual"
        ):
            cache.schedule([child], 1)

    def test_layers_written_ahead_of_attention(self) -> None:
        """Fine while the residual holds the step, an error that says so where it does not."""
        cache = make_cache("kivi2")
        handle = admit(cache, [0] * 200).handle
        for num_new in (40, 100):
            assert cache.schedule([handle], num_new)
            for layer in range(2):
                cache.write(layer, *rows(num_new, layer))
            q = np.ones((num_new, 4, DIM), np.float32)
            assert cache.attend(1, q).shape == q.shape
            if num_new == 40:
                assert cache.attend(0, q).shape == q.shape
            else:
                with pytest.raises(
                    ValueError, match=r"layer 0 was written before another one, .* 64 tokens: attend to"
                ):
                    cache.attend(0, q)
            cache.manager.commit([handle], num_new)

    def test_attention_before_any_write(self) -> None:
        cache = make_cache("kivi2")
        handle = admit(cache, [0] * 40).handle
        q = np.ones((40, 4, DIM), np.float32)
        with pytest.raises(ValueError, match="no step was scheduled through this cache"):
            cache.attend(0, q)
        assert cache.schedule([handle], 40)
        cache.write(1, *rows(40, 0))
        with pytest.raises(ValueError, match="layer 0 was not written in this step"):
            cache.attend(0, q)

    @pytest.mark.parametrize(
        ("k", "error", "message"),
        [
            (
                np.ones((39, HEADS, DIM), np.float32),
                ValueError,
                r"^k: shape \(39, 2, 16\), expected \(40 or more, 2, 16\)",
            ),
            (np.ones((40, HEADS, 8), np.float32), ValueError, r"^k: shape \(40, 2, 8\)"),
            (np.ones((40, HEADS, DIM)), TypeError, "^k: dtype float64"),
            ([1.0], TypeError, "^k: 'list'"),
        ],
    )
    @pytest.mark.parametrize("kv_format", ["kivi2", "kivi2r"])
    def test_rows_that_do_not_fit(self, kv_format: str, k: Any, error: type[Exception], message: str) -> None:
        cache = make_cache(kv_format)
        assert cache.schedule([admit(cache, [0] * 40).handle], 40)
        with pytest.raises(error, match=message):
            cache.write(0, k, rows(40, 0)[1])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_values_that_float16_does_not_reach(self, dtype: str) -> None:
        """Held at its largest number where the residual is float16; bfloat16 has room for them."""
        config = kv.CacheConfig(1, 1, 8, dtype=dtype, block_size=32, kv_format="kivi4", residual_tokens=32)
        cache = kv.PagedKVCache(config, 4, backend="numpy")
        handle = admit(cache, [0] * 2).handle
        assert cache.schedule([handle], 2)
        k = np.full((2, 1, 8), 2.0**17, np.float32)
        k[1] = -np.inf
        cache.write(0, k, k)
        cache.manager.commit([handle], 2)
        expected = [65504, -65504] if dtype == "float32" else [2.0**17, -np.inf]
        assert cache.gather(handle, 0)[0][:, 0, 0].tolist() == expected

    def test_padding_is_no_token(self) -> None:
        cache, plain = make_cache("kivi4", num_layers=1), make_cache("float16", num_layers=1)
        outs = []
        for each in (cache, plain):
            handle = admit(each, [0] * 50).handle
            assert each.schedule([handle], 50, pad_seqs=3, pad_tokens=64)
            k, v = rows(64, 0)
            each.write(0, k, v)
            outs.append(
                each.attend(0, np.random.default_rng(1).standard_normal((64, 4, DIM)).astype(np.float32))
            )
        np.testing.assert_allclose(outs[0], outs[1], atol=2e-3)
        assert not outs[0][50:].any()


@pytest.mark.parametrize("kv_format", [*FORMATS, LAYERS_APART], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fork_attends_bit_for_bit_as_its_parent(kv_format: str, backend: str) -> None:
    """Child and parent go on with the same rows: once their own way through a block that both fill."""
    cache = make_cache(kv_format, backend=backend)
    parent = admit(cache, [0] * 75).handle
    compute(cache, parent, 75, seed=0)
    [child] = cache.fork([parent])
    for step in range(25):
        outs = [compute(cache, handle, 1, seed=step, tokens=[1]) for handle in (parent, child)]
        for a, b in zip(*outs, strict=True):
            assert a.tobytes() == b.tobytes()
    assert cache.manager.stats().copied_blocks == 1


@pytest.mark.parametrize("kv_format", [*FORMATS, LAYERS_APART], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [75, 96, 20])
def test_a_swapped_sequence_attends_bit_for_bit_as_before(
    kv_format: str, backend: str, num_tokens: int
) -> None:
    cache = make_cache(kv_format, backend=backend)
    handle = admit(cache, [0] * num_tokens).handle
    compute(cache, handle, num_tokens, seed=0)
    [twin] = cache.fork([handle])
    saved = cache.save(handle)
    assert saved.num_tokens == num_tokens
    assert saved.nbytes >= -(-num_tokens // BLOCK_SIZE) * cache.config.bytes_per_block
    cache.manager.free([handle])
    squatter = admit(cache, [9] * 40).handle
    compute(cache, squatter, 40, seed=7)
    again = admit(cache, [0] * num_tokens, use_cache=False).handle
    assert cache.schedule([again], num_tokens)
    cache.restore(again, saved)
    cache.manager.commit([again], num_tokens)
    for step in range(3):
        outs = [compute(cache, each, 20, seed=step, tokens=[1] * 20) for each in (twin, again)]
        for a, b in zip(*outs, strict=True):
            assert a.tobytes() == b.tobytes()
    assert cache.manager.check_integrity() == []


def test_what_cannot_be_restored() -> None:
    cache, other = make_cache("int8"), make_cache("int4")
    handle = admit(cache, [0] * 40).handle
    compute(cache, handle, 40, seed=0)
    saved = cache.save(handle)
    with pytest.raises(ValueError, match=r"^saved from a cache of CacheConfig"):
        other.restore(admit(other, [0] * 40).handle, saved)
    with pytest.raises(ValueError, match=rf"^sequence {handle} has 40 tokens scheduled, 41 were saved$"):
        cache.restore(handle, kv.SavedSequence(cache.config, 41, saved.blocks, [], None))
    statics = [make_cache("fp8_e4m3:head") for _ in range(2)]
    config = statics[0].config
    third = kv.PagedKVCache(config, 24, max_seqs=4, backend="numpy")
    for layer in range(2):
        third.set_scales(layer, k=0.03, v=0.04)
    handle = admit(statics[0], [0] * 40).handle
    compute(statics[0], handle, 40, seed=0)
    saved = statics[0].save(handle)
    again = admit(third, [0] * 40).handle
    assert third.schedule([again], 40)
    with pytest.raises(ValueError, match="other static scales"):
        third.restore(again, saved)


@pytest.mark.parametrize("kv_format", [each for each in FORMATS if "kivi" not in each])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_is_bit_equal_to_a_fresh_run(kv_format: str, backend: str) -> None:
    """Formats without a residual: the same rows in, the same numbers out, whoever computed the prefix."""
    tokens, outs = list(range(100)), []
    for reuse in (False, True):
        cache = make_cache(kv_format, backend=backend)
        if reuse:
            compute(cache, admit(cache, tokens).handle, 100, seed=0)
        answer = admit(cache, tokens)
        assert answer.num_cached_tokens == (96 if reuse else 0)
        assert cache.schedule([answer.handle], answer.num_new_tokens)
        first = answer.num_cached_tokens
        for layer in range(2):
            k, v = rows(100, layer)
            cache.write(layer, k[first:], v[first:])
        cache.manager.commit([answer.handle], answer.num_new_tokens)
        outs += compute(cache, answer.handle, 1, seed=3, tokens=[1])
    assert [out.tobytes() for out in outs[:2]] == [out.tobytes() for out in outs[2:]]


class TestScales:
    def test_by_number_and_by_array(self) -> None:
        config = kv.CacheConfig(2, HEADS, DIM, kv_format="int8:channel,int8:head")
        cache = kv.PagedKVCache(config, 4, backend="numpy")
        with pytest.raises(ValueError, match=r"cache\.k_scale: the static scale of int8:channel is not set"):
            compute(cache, admit(cache, [0] * 5).handle, 5, seed=0)
        scale = np.linspace(0.01, 0.1, HEADS * DIM, dtype=np.float32).reshape(HEADS, DIM)
        cache.set_scales(0, k=scale, v=0.5)
        np.testing.assert_array_equal(cache.layers[0].k_scale, scale)
        assert cache.layers[0].v_scale.tolist() == [0.5, 0.5]
        assert np.isnan(cache.layers[1].k_scale).all()

    @pytest.mark.parametrize(
        ("scales", "message"),
        [
            ({"k": np.ones(HEADS, np.float32)}, r"^k: shape \(2,\), int8:channel needs \(2, 16\)$"),
            ({"k": 0.0}, "^k: expected finite scales > 0$"),
            ({"k": 1.0, "v": 1.0}, "^v: int8 has no static scale$"),
        ],
    )
    def test_that_do_not_fit_change_nothing(self, scales: dict[str, Any], message: str) -> None:
        config = kv.CacheConfig(1, HEADS, DIM, kv_format="int8:channel,int8")
        cache = kv.PagedKVCache(config, 4, backend="numpy")
        with pytest.raises(ValueError, match=message):
            cache.set_scales(0, **scales)
        assert np.isnan(cache.layers[0].k_scale).all()

    def test_are_settled_by_the_first_write(self) -> None:
        cache = make_cache("fp8_e4m3:tensor")
        cache.set_scales(0, k=0.1)
        compute(cache, admit(cache, [0] * 5).handle, 5, seed=0)
        with pytest.raises(ValueError, match=r"^layer 0 has been written with the scales that it has$"):
            cache.set_scales(0, k=0.2)


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 112, 192])
def test_rotation_undoes_itself_and_keeps_products(dim: int) -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 5, 3, dim)).astype(np.float32)
    np.testing.assert_allclose(rotate(rotate(q)), q, atol=1e-5)
    np.testing.assert_allclose((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1), atol=1e-4)
    spread = np.zeros((1, dim), np.float32)
    spread[0, 3] = 1
    assert np.abs(rotate(spread)).max() <= (dim & -dim) ** -0.5 + 1e-6


@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
def test_rotated_formats_give_the_attention_of_the_rows(q_dtype: str) -> None:
    """Out and gather are unrotated: the tail of a short sequence is exact but for 16 bit."""
    cache, plain = (make_cache(kv_format, num_layers=1) for kv_format in ("kivi2r", "float32"))
    q = np.random.default_rng(1).standard_normal((30, 4, DIM)).astype(np.float32)
    outs = []
    for each in (cache, plain):
        handle = admit(each, [0] * 30).handle
        assert each.schedule([handle], 30)
        each.write(0, *rows(30, 0))
        queries = q if q_dtype == "float32" else q.astype(np.float16)
        if q_dtype == "bfloat16":
            queries = (q.view(np.uint32) >> 16).astype(np.uint16)
        given = np.empty_like(queries)
        out = each.attend(0, queries, out=given)
        assert out is given
        outs.append((out.astype(np.uint32) << 16).view(np.float32) if q_dtype == "bfloat16" else out)
        each.manager.commit([handle], 30)
        np.testing.assert_allclose(each.gather(handle, 0)[0], rows(30, 0)[0], atol=0.01)
    np.testing.assert_allclose(
        outs[0], outs[1], atol={"float32": 2e-3, "float16": 4e-3, "bfloat16": 3e-2}[q_dtype]
    )


def test_queries_and_outputs_that_do_not_fit_a_rotated_format() -> None:
    cache = make_cache("kivi2r", num_layers=1)
    assert cache.schedule([admit(cache, [0] * 3).handle], 3)
    cache.write(0, *rows(3, 0))
    q = np.ones((3, 4, DIM), np.float32)
    with pytest.raises(TypeError, match=r"^q: dtype float64, expected float32"):
        cache.attend(0, q.astype(np.float64))
    with pytest.raises(
        ValueError, match=r"^out: float32 of shape \(3, 4, 8\), expected float32 of shape \(3, 4, 16\)$"
    ):
        cache.attend(0, q, out=np.ones((3, 4, 8), np.float32))
    with pytest.raises(ValueError, match=r"^out: float16 of shape"):
        cache.attend(0, q, out=np.ones((3, 4, DIM), np.float16))
