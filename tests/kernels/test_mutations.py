"""Bugs planted in the sources, of the kinds that GPU kernels have: the tests must notice every one.

A probe is a few launches under several schedules, checked as the other tests check them; it must pass on the sources as
they are and fail on each planted bug.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conformance import test_formats
from conformance.harness import Harness
from conformance.scene import load, make_scene, rows_close
from kernels import test_nonfinite
from kernels.emulator import CUDA, EmulatedLauncher, HostMemory, KernelFaultError
from kernels.test_latents import make_latents
from kvblocks.backends.device import DeviceBackend
from kvblocks.backends.numpy import NumpyBackend
from kvblocks.config import CacheConfig
from kvblocks.layout import LayerCache

pytestmark = pytest.mark.cuda

# The status of a process whose probe failed.
CAUGHT = 3

SCHEDULES = ("forward", "greedy", "greedy_reverse")


def backends(folder: Path) -> list[DeviceBackend]:
    return [
        DeviceBackend("mutant", EmulatedLauncher(schedule, folder=folder), HostMemory())
        for schedule in SCHEDULES
    ]


def attend(folder: Path, **config) -> None:
    options = {"sinks": np.array([-3, -1, 0, 0.5, 4, -np.inf], np.float32)}
    for backend in backends(folder):
        scene = make_scene(Harness("mutant", make=lambda backend=backend: backend), **config)
        scene.check()
        scene.check(window=37, **options)


def decode(folder: Path) -> None:
    attend(folder, dims=(64, 64), dtype="float16", seq_lens=(200, 0, 33, 700), block_size=24)


def prefill(folder: Path) -> None:
    attend(folder, dims=(64, 64), dtype="bfloat16", seq_lens=(200, 130), query_lens=(90, 20), block_size=3)


def scaled(folder: Path) -> None:
    """FP8 with scales of tokens, where an early key of large values has a scale of its own; then of heads."""
    for backend in backends(folder):
        given = Harness("mutant", make=lambda backend=backend: backend)
        for kv_format in ("fp8_e4m3", "fp8_e4m3:head"):
            options = {"dims": (64, 64), "seq_lens": (200, 0, 33), "q_dtype": "float16", "block_size": 16}
            test_formats.check(*test_formats.make_scene(given, kv_format, **options))


def infinities(folder: Path) -> None:
    for backend in backends(folder):
        given = Harness("mutant", make=lambda backend=backend: backend)
        scene = make_scene(given, dims=(64, 64), dtype="float16", **test_nonfinite.LENS)
        test_nonfinite.poison(scene, "float16")
        test_nonfinite.check(scene)


def latents(folder: Path) -> None:
    for backend in backends(folder):
        given = Harness("mutant", make=lambda backend=backend: backend)
        for kv_format in ("float16", "fp8_e4m3"):
            scene = make_latents(given, kv_format, num_heads=16, seq_lens=(130, 33), query_lens=(3, 1))
            out, _ = scene.attend(scale=0.02)
            rows_close(load(out), scene.expected(scale=0.02)[0], 1e-3)


def simt(folder: Path) -> None:
    attend(folder, dims=(40, 24), seq_lens=(200, 0, 33, 700), block_size=24)


def write_fp8(folder: Path) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 9, 2, 64)).astype(np.float32) * 3
    slots = np.array([3, 17, -1, 40, 5, 6, 9, 33, 2])
    config = CacheConfig(1, 2, 64, kv_format="fp8_e4m3", layout="HND")

    def inner(pool: LayerCache) -> LayerCache:
        """The three blocks in the middle of five; what lies beside them is compared too."""
        arrays = {name: array[1:4] for name, array in pool.named_arrays}
        return LayerCache(format="fp8_e4m3", block_size=16, layout="HND", **arrays)

    for backend in backends(folder):
        pools = [maker.allocate(config, 5)[0] for maker in (backend, NumpyBackend())]
        for pool, maker in zip(pools, (backend, NumpyBackend()), strict=True):
            for _, array in pool.named_arrays:
                array.view(np.uint8).fill(0xFF)
            maker.write(inner(pool), k, v, slots)
        for (_, actual), (_, wanted) in zip(*(pool.named_arrays for pool in pools), strict=True):
            assert actual.tobytes() == wanted.tobytes()


def far_blocks(folder: Path) -> None:
    """Blocks 2^31 bytes apart, the first of them in the middle: a 32-bit offset stays within the pool, and is wrong."""
    apart = 2**31
    pool = np.zeros(5 * apart + 4096, np.uint8)
    base = pool[2 * apart :].view(np.float16)
    cache = LayerCache(
        *(np.lib.stride_tricks.as_strided(base[at:], (3, 4, 1, 8), (apart, 16, 16, 2)) for at in (0, 256)),
        "float16",
        4,
        "NHD",
    )
    k = np.ones((1, 1, 8), np.float16)
    for backend in backends(folder):
        cache.k[2] = 0
        backend.write(cache, k, k, np.array([9]))
        assert (cache.k[2, 1] == 1).all()


def copies(folder: Path) -> None:
    for backend in backends(folder):
        (cache,) = backend.allocate(CacheConfig(1, 3, 40, dtype="float16"), 6)
        cache.k[...] = np.arange(cache.k.size).reshape(cache.k.shape) % 2039
        before = cache.k.copy()
        backend.copy_blocks([cache], np.array([[1, 4], [2, 0]], np.int32))
        before[[4, 0]] = before[[1, 2]]
        assert cache.k.tobytes() == before.tobytes()


MMA = "paged_attention_mma.cu"
ATTENTION = "include/kvblocks/attention.cuh"
TILES = "include/kvblocks/tiles.cuh"
FRAGMENTS = "include/kvblocks/fragments.cuh"
# name: (probe, file, the text as it is, the bug)
MUTATIONS: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    "no barrier after the wait": (
        decode,
        MMA,
        "copy_async_wait<1>();\n            sync_block();",
        "copy_async_wait<1>();",
    ),
    "no barrier at the end of a tile": (
        decode,
        MMA,
        "sync_block(); // nobody reads this stage, its addresses or the flag any more",
        "",
    ),
    "no barrier before the warps are merged": (decode, MMA, "sync_block();\n        store(", "store("),
    "wait off by one": (decode, MMA, "copy_async_wait<1>();", "copy_async_wait<2>();"),
    "a copy that nobody commits": (decode, MMA, "load(0, 0);\n        copy_async_commit();", "load(0, 0);"),
    "the matrix of V not transposed": (
        decode,
        FRAGMENTS,
        "load_matrix_x4_transposed(fragment, row + t * 16",
        "load_matrix_x4(fragment, row + t * 16",
    ),
    "matrices of K in another order": (
        decode,
        FRAGMENTS,
        "g * 16 + matrix / 2 * 8 + lane % 8",
        "g * 16 + matrix % 2 * 8 + lane % 8",
    ),
    "rows of K at a stride that is not theirs": (
        decode,
        FRAGMENTS,
        "fragment, k + key * stride + step * 32",
        "fragment, k + key * (stride - 16) + step * 32",
    ),
    "misaligned copies": (
        decode,
        TILES,
        "from + offset + piece * 16",
        "from + offset + piece * 16 + 2",
    ),
    "a tail that is not masked": (decode, MMA, "is_key && is_visible(params, rows[half], key)", "true"),
    "a causal mask off by one": (prefill, ATTENTION, "key <= row.position &&", "key <= row.position + 1 &&"),
    "a window off by one": (
        prefill,
        ATTENTION,
        "row.position - key < params.window",
        "row.position - key <= params.window",
    ),
    "addresses from the table of another tile": (
        decode,
        MMA,
        "load(next_table, stage ^ 1);",
        "load(table, stage ^ 1);",
    ),
    "a maximum that is not shared by the row": (
        decode,
        MMA,
        "highest_now[0] = max_f32(highest_now[0], shuffle_xor(highest_now[0], other));",
        "",
    ),
    "results that are not rescaled": (decode, MMA, "results[t][0] *= shrink[0];", ""),
    "an early return before a barrier": (
        simt,
        "paged_attention_simt.cu",
        "    sync_block();\n    for (i32 r = 0; r < tile.num_rows; ++r) {",
        "    if (warp == 3) return;\n    sync_block();\n    for (i32 r = 0; r < tile.num_rows; ++r) {",
    ),
    "a shuffle in a divergent branch": (
        simt,
        "paged_attention_simt.cu",
        "            for (i32 other = 1; other < lanes; other *= 2) {",
        "            for (i32 other = 1; other < lanes && slots[d] >= 0; other *= 2) {",
    ),
    "a split that is counted twice": (
        decode,
        ATTENTION,
        "const i64 begin = static_cast<i64>(block_z()) * split;",
        "const i64 begin = static_cast<i64>(block_z()) * (split - 64);",
    ),
    "partial results of another split": (
        decode,
        "combine_splits.cu",
        "params.partial_out[(split * num_rows + index) * params.head_dim_v + dim]",
        "params.partial_out[index * params.head_dim_v + dim]",
    ),
    "a reduction that stops short": (
        write_fp8,
        "include/kvblocks/chunk.cuh",
        "for (i32 other = 1; other < lanes; other *= 2) {",
        "for (i32 other = 1; other < lanes / 2; other *= 2) {",
    ),
    "a negative slot that is written": (
        write_fp8,
        "write_kv.cu",
        "&& !is_skipped(slot) && !is_outside",
        "&& !is_outside",
    ),
    "strides of the other layout": (
        write_fp8,
        "include/kvblocks/paged.cuh",
        "return block * paged.block_stride + token * paged.token_stride + head * paged.head_stride",
        "return block * paged.block_stride + token * paged.head_stride + head * paged.token_stride",
    ),
    "a 32-bit offset": (
        far_blocks,
        "include/kvblocks/paged.cuh",
        "return block * paged.block_stride + token",
        "return static_cast<i32>(block * paged.block_stride) + token",
    ),
    "a dropped scale of K": (scaled, MMA, "product * (factors[half] * k_scale)", "product * factors[half]"),
    "a dropped scale of V": (scaled, MMA, "v_scale *= keys.v_scale[index] / v_now;", ""),
    "a dropped scale of a head": (scaled, MMA, "value * finish.factor * v_scale,", "value * finish.factor,"),
    "the wrong dims of a pair of bytes": (
        scaled,
        FRAGMENTS,
        "return k < 8 ? k / 2 * 4 + k % 2",
        "return k < 8 ? k",
    ),
    "an infinity for a row that does not see it": (
        infinities,
        TILES,
        "is_seen[1] ? value : 0.0f",
        "value",
    ),
    "no barrier before infinities are cleared": (
        infinities,
        MMA,
        "P::keys_of_warp, stage_v(stage));\n                    sync_block();",
        "P::keys_of_warp, stage_v(stage));",
    ),
    "infinities that are looked for where all rows see all keys only": (
        infinities,
        TILES,
        "return last_key > tile.oldest_query ||",
        "return last_key < tile.oldest_query ||",
    ),
    "no barrier after the maxima of warps": (
        latents,
        "mla_decode.cu",
        "sync_block(); // the maxima of the group's four warps are there",
        "",
    ),
    "the scales of another tile's latents": (
        latents,
        "mla_decode.cu",
        "const KeyTable<mla_keys>& keys = tables[table];",
        "const KeyTable<mla_keys>& keys = tables[next_table];",
    ),
    "a copy that misses its tail": (
        copies,
        "copy_blocks.cu",
        "if (first + i * step < num_units) {",
        "if (first + (i + 1) * step < num_units) {",
    ),
}


@pytest.mark.parametrize(
    "probe",
    [decode, prefill, scaled, infinities, latents, simt, write_fp8, far_blocks, copies],
    ids=lambda probe: probe.__name__,
)
def test_the_probes_pass_on_the_sources_as_they_are(probe: Callable[[Path], None]) -> None:
    probe(CUDA)


def run_probe(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a probe in a process of its own: a planted bug writes where it likes. Its status is CAUGHT if it failed."""
    code = "import sys; from kernels import test_mutations as t; from pathlib import Path; "
    code += "sys.exit(t.status_of(getattr(t, sys.argv[1]), Path(sys.argv[2])))"
    return subprocess.run(
        [sys.executable, "-c", code, name, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def status_of(probe: Callable[[Path], None], folder: Path) -> int:
    """CAUGHT if the probe fails on the sources in `folder`, else 0."""
    try:
        probe(folder)
    except (AssertionError, KernelFaultError):
        return CAUGHT
    return 0


def test_a_probe_that_passes_catches_nothing() -> None:
    run = run_probe("copies", CUDA)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str, tmp_path: Path) -> None:
    probe, file, text, bug = MUTATIONS[name]
    folder = tmp_path / "cuda"
    shutil.copytree(CUDA, folder)
    source = (folder / file).read_text()
    assert source.count(text) == 1, f"{file} has changed: {text!r} is there {source.count(text)} times"
    (folder / file).write_text(source.replace(text, bug))
    run = run_probe(probe.__name__, folder)
    # A write beyond an array may be found by nobody but the allocator of the process, which ends it.
    assert run.returncode == CAUGHT or run.returncode < 0, run.stderr
