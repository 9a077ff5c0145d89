"""Whole kernels through the interpreter of PTX: what they compute, and what they ask of memory. And its own faults."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from conformance import test_formats
from conformance.harness import Harness
from conformance.scene import make_scene, store
from kernels.emulator import CUDA, HostMemory, emulated_backend
from kernels.ptx.launcher import PtxLauncher
from kernels.ptx.program import PtxError
from kernels.test_emulator import KERNEL, RECORD, THREADS
from kernels.test_latents import make_latents
from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.config import CacheConfig
from kvblocks.kernels.specs import Instance, Kernel

pytestmark = pytest.mark.cuda

# With the instructions of FP8; without, where warps run one after the other.
ARCHS = ("compute_90", "compute_80")
NUMPY = NumpyBackend()


class AlignedMemory(HostMemory):
    """Arrays that start where a device's allocator would start them: at multiples of 256 bytes."""

    def empty(self, shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        room = np.full(size + 256, 0xFF, np.uint8)
        return room[-room.ctypes.data % 256 :][:size].view(dtype).reshape(shape)

    def zeros(self, shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array


def harness(arch: str, *, measure: bool = False) -> tuple[Harness, PtxLauncher]:
    launcher = PtxLauncher(arch, measure=measure, greedy=arch == "compute_80")
    backend = DeviceBackend("ptx", launcher, AlignedMemory())
    return Harness("ptx", make=lambda: backend), launcher


# --- What kernels compute.


@pytest.mark.parametrize(
    "config",
    [
        {"dims": (64, 64), "dtype": "float16", "block_size": 24},
        {"dims": (128, 128), "dtype": "bfloat16", "layout": "HND"},
        {
            "dims": (64, 64),
            "dtype": "bfloat16",
            "block_size": 3,
            "query_lens": (0, 0, 4, 70),
            "pad_tokens": 2,
        },
        {"dims": (40, 24), "dtype": "float32", "block_size": 24},
        {"dims": (64, 64), "dtype": "float16", "heads": (2, 2)},
    ],
    ids=["decode", "decode-hnd", "prefill", "float32", "one-query-head"],
)
def test_attention(config: dict) -> None:
    """Against float64, several splits among the rows, with and without the options."""
    scene = make_scene(harness("compute_90")[0], seq_lens=(0, 1, 33, 150), **config)
    scene.check()
    num_heads = scene.q.shape[1]
    scene.check(
        window=37,
        soft_cap=4.0,
        sinks=np.linspace(-2, 1, num_heads, dtype=np.float32),
        alibi_slopes=np.linspace(0.01, 0.3, num_heads, dtype=np.float32),
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e4m3:head", "fp8_e5m2", "int8", "int8:channel,int8"])
def test_attention_over_8_bits(arch: str, kv_format: str) -> None:
    given, _ = harness(arch)
    for dims in ((64, 64), (16, 24)):
        scene = test_formats.make_scene(
            given, kv_format, dims=dims, seq_lens=(70, 0, 33), q_dtype="float16", block_size=16
        )
        test_formats.check(*scene)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "kv_format", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int8:channel,int8"]
)
def test_write_and_gather(arch: str, layout: str, kv_format: str) -> None:
    """Bit for bit what the specification stores, everything else untouched; the same back."""
    given, _ = harness(arch)
    test_formats.test_gather_is_exact(given, kv_format, layout)
    test_formats.test_write_stores_what_the_specification_says(given, kv_format, layout)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("part", ["fp8_e4m3", "fp8_e4m3:head", "fp8_e5m2:tensor", "int8"])
def test_quantize(arch: str, part: str) -> None:
    """Codes, scales and the report of what was clipped."""
    backend = harness(arch)[0].backend
    x = np.random.default_rng(0).standard_normal((7, 3, 40)).astype(np.float32) * 9
    x[2, 1, :5] = np.nan, np.inf, -np.inf, 0.0, -0.0
    actual, expected = (each.quantize(x, part, "amax") for each in (backend, NUMPY))
    for name in ("codes", "scale", "amax", "num_clipped"):
        assert getattr(actual, name).tobytes() == getattr(expected, name).tobytes(), name
    restored = [each.dequantize(actual.codes, part, actual.scale) for each in (backend, NUMPY)]
    np.testing.assert_array_equal(*restored)  # a NaN is the canonical one on a device


@pytest.mark.parametrize("arch", ARCHS)
def test_copies_moves_and_merges(arch: str) -> None:
    backend = harness(arch)[0].backend
    rng = np.random.default_rng(1)
    for layout in ("NHD", "HND"):
        caches = backend.allocate(CacheConfig(2, 3, 40, dtype="float16", layout=layout), 6)
        for cache in caches:
            cache.k[...] = store(rng.standard_normal(cache.k.shape), "float16")
        before = [cache.k.copy() for cache in caches]
        backend.copy_blocks(caches, np.array([[1, 4], [2, 0]], np.int32))
        for cache, k in zip(caches, before, strict=True):
            k[[4, 0]] = k[[1, 2]]
            assert cache.k.tobytes() == k.tobytes()
        backend.move_slots(caches, np.array([[3, 70], [70, 5]], np.int64), np.array([0, 2], np.int32))
        for cache, k in zip(caches, before, strict=True):
            rows = k if layout == "NHD" else k.swapaxes(1, 2)
            rows[70 // 16, 70 % 16] = rows[0, 3]
            rows[0, 5] = rows[70 // 16, 70 % 16]
            assert cache.k.tobytes() == k.tobytes()
    states = [
        (
            rng.standard_normal((5, 6, 24)).astype(np.float32),
            rng.standard_normal((5, 6)).astype(np.float32) * 4,
        )
        for _ in range(2)
    ]
    states[0][1][0], states[1][1][:2] = -np.inf, -np.inf
    actual, expected = (each.merge_states(*states[0], *states[1]) for each in (backend, NUMPY))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_emulator_agrees_bit_for_bit_where_nothing_is_approximate() -> None:
    """Sums of small integers over keys of equal weight: no rounding, so the order of sums does not show."""
    config = CacheConfig(1, 1, 64, dtype="float16", block_size=16)
    rng = np.random.default_rng(2)
    outs = []
    for backend in (harness("compute_90")[0].backend, emulated_backend()):
        rng = np.random.default_rng(2)
        (cache,) = backend.allocate(config, 5)
        cache.k[...] = 0
        cache.v[...] = rng.integers(-8, 9, cache.v.shape)
        q = store(rng.standard_normal((2, 4, 64)), "float16")
        tables = np.array([[0, 1, 2, 3], [4, 0, 0, 0]], np.int32)
        outs.append(
            backend.attend(cache, q, tables, np.array([64, 16], np.int32), np.array([0, 1, 2], np.int32))
        )
    assert outs[0].tobytes() == outs[1].tobytes()
    assert outs[0].any()


# --- What kernels ask of memory.


@pytest.mark.parametrize(
    ("kv_format", "dims", "query_lens"),
    [
        ("float16", (64, 64), (1, 1)),
        ("bfloat16", (128, 128), (1, 1)),
        ("float16", (192, 128), (1, 1)),
        ("fp8_e4m3", (128, 128), (1, 1)),
        ("int8", (64, 64), (1, 1)),
        ("bfloat16", (64, 64), (40, 3)),
    ],
)
def test_attention_reads_keys_in_whole_sectors_and_matrices_without_conflicts(
    kv_format: str, dims: tuple[int, int], query_lens: tuple[int, ...]
) -> None:
    """K and V: every byte of the 32-byte sectors that a warp asks for is used, as 16-byte copies."""
    given, launcher = harness("compute_90", measure=True)
    q_dtype = "bfloat16" if kv_format == "bfloat16" else "float16"
    scene, _ = test_formats.make_scene(
        given,
        kv_format,
        dims=dims,
        seq_lens=(128, 192),
        query_lens=query_lens,
        q_dtype=q_dtype,
        block_size=16,
    )
    scene.attend()
    copies = launcher.measured("cp", "async")
    assert sum(each.requests for _, each in copies) >= 64
    for instruction, traffic in copies:
        assert traffic.num_bytes == 32 * traffic.sectors, instruction.text
    # K and V once for all query heads of a group, and once more for each further tile of rows.
    num_bytes = sum(int(n) * 2 * sum(dims) * scene.cache.k.dtype.itemsize for n in scene.seq_lens)
    copied = sum(traffic.num_bytes for _, traffic in copies)
    assert copied == num_bytes if query_lens == (1, 1) else num_bytes <= copied <= 5 * num_bytes
    matrices = launcher.measured("ldmatrix")
    assert sum(each.requests for _, each in matrices) >= 64
    stores = launcher.measured("st", "shared")
    assert sum(each.requests for _, each in stores) >= 64
    for instruction, traffic in [*matrices, *stores]:
        assert traffic.passes == traffic.fewest_passes, f"{instruction.place}: {instruction.text}"


@pytest.mark.parametrize("kv_format", ["bfloat16", "fp8_e4m3:tensor"])
def test_latents_are_read_once_and_without_conflicts(kv_format: str) -> None:
    given, launcher = harness("compute_90", measure=True)
    scene = make_latents(
        given,
        kv_format,
        num_heads=16,
        q_dtype="bfloat16" if kv_format == "bfloat16" else None,
        seq_lens=(70,),
    )
    scene.attend(scale=0.02)
    copies = [traffic for _, traffic in launcher.measured("cp", "async")]
    assert sum(each.num_bytes for each in copies) == 70 * 576 * scene.cache.k.itemsize
    assert all(each.num_bytes == 32 * each.sectors for each in copies)
    shared = [*launcher.measured("ldmatrix"), *launcher.measured("st", "shared")]
    assert len(shared) >= 40
    for instruction, traffic in shared:
        assert traffic.passes == traffic.fewest_passes, f"{instruction.place}: {instruction.text}"


@pytest.mark.parametrize("kv_format", ["float16", "fp8_e4m3:tensor", "int8"])
def test_writes_fill_whole_sectors(kv_format: str) -> None:
    """Rows of 16-bit K and V: read and stored as vectors, every byte of every sector used."""
    given, launcher = harness("compute_90", measure=True)
    (cache,) = given.backend.allocate(CacheConfig(1, 2, 128, kv_format=kv_format), 3)
    for name, array in cache.named_arrays:
        array[...] = 1 if name.endswith("_scale") else 0
    memory = AlignedMemory()
    k, v = memory.zeros((8, 2, 128), np.float16), memory.zeros((8, 2, 128), np.float16)
    k[...], v[...] = np.random.default_rng(3).standard_normal((2, 8, 2, 128))
    given.backend.write(cache, k, v, np.arange(17, 25))
    width = 4 if kv_format == "float16" else 2
    vectors = [
        item
        for name in ("ld", "st")
        for item in launcher.measured(
            name, "global", f"v{width}" if name == "st" and width == 4 else "global"
        )
        if item[1].num_bytes >= 8 * 2 * 128
    ]
    assert len(vectors) >= 2
    for instruction, traffic in vectors:
        assert traffic.num_bytes == 32 * traffic.sectors, instruction.text


def test_a_stride_that_is_not_odd_shows_as_conflicts(tmp_path: Path) -> None:
    """The measure itself: rows of K at a multiple of 128 bytes stand in the same banks."""
    folder = tmp_path / "cuda"
    (folder / "include").parent.mkdir(parents=True)
    (folder / "include").symlink_to(CUDA / "include")
    (folder / "test.cu").write_text(
        KERNEL.format(
            body="""
            u32 fragment[4];
            const u8* row = shared_memory() + thread % 32 * 128 % 4096;
            load_matrix_x4(fragment, row);
            params.output[thread] = fragment[0];
            store16(params.output + 4 * (thread % 16 * 2), Vec16{});"""
        )
    )
    launcher = PtxLauncher(measure=True, folder=folder)
    run(launcher)
    ((_, matrices),) = launcher.measured("ldmatrix")
    assert (matrices.requests, matrices.passes, matrices.fewest_passes) == (4, 4 * 4 * 8, 4 * 4)
    ((_, stores),) = launcher.measured("st", "v4")
    assert stores.num_bytes * 2 == 32 * stores.sectors


# --- Faults that the interpreter finds.


def run(launcher: PtxLauncher) -> np.ndarray:
    """The kernel test.cu of the launcher's folder, over 128 threads and words."""
    given, out = np.arange(THREADS, dtype=np.uint32), AlignedMemory().zeros((THREADS,), np.uint32)
    params = np.zeros((), RECORD)
    params["input"], params["output"] = given.ctypes.data, out.ctypes.data
    function = launcher.load(Instance(Kernel("test.cu", "test_kernel", THREADS, RECORD)))
    launcher.launch(function, (1, 1, 1), THREADS, 4096, params, 0)
    return out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (thread >= 32) { sync_block(); }",
            "deadlock, 32 threads have ended, others wait at device_compat.cuh:[0-9]+ in test.cu:12: bar.sync 0",
        ),
        ("if (thread % 32 < 16) { params.output[0] = shuffle_xor(7u, 1); }", "deadlock, .* shfl.sync"),
        ("store16(params.output + 1, Vec16{});", "misaligned address in block 0,0,0, thread 0"),
        ("params.output[i64(1) << 44] = 1;", "global address 0x.* is out of range in block 0,0,0, thread 0"),
        ("shared[1000 + thread] = 1;", "shared address 0x1000 is out of range in block 0,0,0, thread 24"),
        ("copy_async(shared + 4 * thread, params.input, 16); copy_async_commit();", "that nothing waits for"),
        ("params.output[thread] = u32(float(thread) * 0.5);", "unknown"),
    ],
)
def test_faults_are_named(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "include").symlink_to(CUDA / "include")
    (tmp_path / "test.cu").write_text(KERNEL.format(body=body))
    with pytest.raises(PtxError, match=message):
        run(PtxLauncher(folder=tmp_path))


def test_missing_barriers_show_as_poison(tmp_path: Path) -> None:
    """The last warp's threads are ahead only as far as they can be: nothing is read before it is written by luck."""
    (tmp_path / "include").symlink_to(CUDA / "include")
    (tmp_path / "test.cu").write_text(
        KERNEL.format(
            body="""
            if (thread >= 64) { shared[thread] = 1; }
            copy_async(shared + 512 + 4 * (thread % 32), params.input + 4 * (thread % 32), 16);
            copy_async_commit();
            params.output[thread] = shared[512 + thread];
            copy_async_wait<0>();"""
        )
    )
    assert (run(PtxLauncher(folder=tmp_path)) == 0xFFFFFFFF).all()
