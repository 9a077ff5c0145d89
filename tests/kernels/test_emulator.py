"""The emulator itself: what it reports, and that it reports nothing else."""

from pathlib import Path

import numpy as np
import pytest

from kernels.emulator import CUDA, SCHEDULES, EmulatedLauncher, KernelFaultError
from kvblocks.kernels.specs import Instance, Kernel

pytestmark = pytest.mark.cuda

RECORD = np.dtype([("input", np.uint64), ("output", np.uint64)], align=True)
THREADS = 128

KERNEL = """
#include "kvblocks/device_compat.cuh"
namespace kvb {{
struct Params {{ const u32* input; u32* output; }};
}}
KVB_KERNEL(test_kernel, kvb::Params, 128, 1) {{
    using namespace kvb;
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    const i32 thread = thread_index();
    const i32 next = (thread + 33) % 128;
    (void)shared, (void)next;
    {body}
}}
"""


class Bench:
    """Kernels of a few lines over 128 words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "include").symlink_to(CUDA / "include")
        self.input = np.arange(THREADS, dtype=np.uint32) * 3 + 7
        self.output = np.zeros(THREADS, np.uint32)

    def run(
        self, body: str, *, schedule: str = "forward", seed: int = 0, grid: tuple[int, int, int] = (1, 1, 1)
    ):
        (self.folder / "test.cu").write_text(KERNEL.format(body=body))
        launcher = EmulatedLauncher(schedule, seed, self.folder)
        function = launcher.load(Instance(Kernel("test.cu", "test_kernel", THREADS, RECORD)))
        params = np.zeros((), RECORD)
        params["input"], params["output"] = self.input.ctypes.data, self.output.ctypes.data
        launcher.launch(function, grid, THREADS, 4096, params, 0)
        return self.output.copy()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_orders_threads_in_every_schedule(bench: Bench, schedule: str) -> None:
    body = "shared[thread] = params.input[thread]; sync_block(); params.output[thread] = shared[next];"
    np.testing.assert_array_equal(bench.run(body, schedule=schedule), np.roll(bench.input, -33))


def test_a_missing_barrier_shows(bench: Bench) -> None:
    """Shared memory starts as 0xFF, and no schedule lets all threads write before one reads."""
    body = "shared[thread] = params.input[thread]; params.output[thread] = shared[next];"
    for schedule in SCHEDULES:
        assert (bench.run(body, schedule=schedule) == 0xFFFFFFFF).any()


def test_a_barrier_that_is_missing_at_the_end_of_a_loop_shows_in_greedy_schedules(bench: Bench) -> None:
    body = """
    u32 sum = 0;
    for (u32 i = 0; i < 4; ++i) {
        shared[thread] = params.input[thread] + i;
        sync_block();
        sum += shared[next];
    }
    params.output[thread] = sum;"""
    expected = np.roll(bench.input, -33) * 4 + 6
    wrong = [name for name in SCHEDULES if (bench.run(body, schedule=name) != expected).any()]
    assert {"greedy", "greedy_reverse"} <= set(wrong)


def test_warps_exchange_through_collectives(bench: Bench) -> None:
    lanes = bench.input.reshape(4, 32)
    body = "params.output[thread] = shuffle_xor(params.input[thread], 5);"
    np.testing.assert_array_equal(bench.run(body).reshape(4, 32), lanes[:, np.arange(32) ^ 5])
    body = "params.output[thread] = count_lanes(params.input[thread] % 2 == 0);"
    np.testing.assert_array_equal(
        bench.run(body).reshape(4, 32), np.tile((lanes % 2 == 0).sum(1)[:, None], 32)
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (thread % 32 < 16) { shuffle_xor(1u, 1); } else { sync_warp(); }",
            "warp diverged: lane 0 at shuffle_xor, lane 16 at sync_warp",
        ),
        (
            "if (thread % 32 < 16) { shuffle_xor(1u, 1); }",
            r"warp diverged: threads 0\.\.15 at shuffle_xor, threads 16\.\.31 exited",
        ),
        (
            "if (thread < 32) { return; } sync_block();",
            r"deadlock: threads 0\.\.31 exited, threads 32\.\.127 at sync_block",
        ),
        (
            "if (thread < 40) { sync_block(); }",
            r"warp diverged: threads 0\.\.39 at sync_block, threads 40\.\.127 exited",
        ),
        ("load16(params.input + 1);", r"load16: misaligned address \(block 0,0,0, thread 0\)"),
        ("copy_async(shared + 1, params.input, 16);", "copy_async: misaligned address in shared memory"),
        ("copy_async(shared + 1024, params.input, 16);", "copy_async: the target is outside shared memory"),
        ("copy_async(shared, params.input, 16); copy_async_commit();", "exit with asynchronous copies"),
    ],
)
def test_faults_are_named(bench: Bench, body: str, message: str) -> None:
    for schedule in ("forward", "greedy"):
        with pytest.raises(KernelFaultError, match=message):
            bench.run(body, schedule=schedule)
    # And the emulator is as good as new.
    np.testing.assert_array_equal(bench.run("params.output[thread] = params.input[thread];"), bench.input)


ASYNC = """
    if (thread < 32) {{
        copy_async(shared + 4 * thread, params.input + 4 * thread, thread == 31 ? 0 : 16);
        copy_async_commit();
        copy_async(shared + 128 + 4 * thread, params.input + 4 * thread, 16);
        copy_async_commit();
    }}
    if (thread < 32) {{ {wait} }}
    sync_block();
    params.output[thread] = shared[thread + {first}];
    sync_block();
    copy_async_wait<0>();
"""


def test_asynchronous_copies_land_at_their_wait_and_are_poison_before(bench: Bench) -> None:
    landed = bench.input.copy()
    landed[124:] = 0
    np.testing.assert_array_equal(bench.run(ASYNC.format(wait="copy_async_wait<1>();", first=0)), landed)
    assert (bench.run(ASYNC.format(wait="copy_async_wait<1>();", first=128)) == 0xFFFFFFFF).all()
    assert (bench.run(ASYNC.format(wait="copy_async_wait<2>();", first=0)) == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(
        bench.run(ASYNC.format(wait="copy_async_wait<0>();", first=128)), bench.input
    )


def test_a_random_schedule_is_its_seed(bench: Bench) -> None:
    """The order in which threads come to an atomic."""
    body = "sync_warp(); params.output[thread] = atomic_add(params.output + 127, thread == 127 ? 0 : 1);"
    runs = []
    for seed in (1, 1, 2):
        bench.output[:] = 0
        runs.append(bench.run(body, schedule="random", seed=seed).tolist())
    assert runs[0] == runs[1] != runs[2]


def test_a_grid_runs_every_block(bench: Bench) -> None:
    body = """
    const i32 block = block_x() + 3 * (block_y() + 5 * block_z());
    if (thread == 0) { params.output[block] = 1 + grid_x() * grid_y() * grid_z(); }"""
    for schedule in SCHEDULES:
        bench.output[:] = 0
        out = bench.run(body, schedule=schedule, grid=(3, 5, 2))
        assert (out[:30] == 31).all()
        assert not out[30:].any()
