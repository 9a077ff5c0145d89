"""Every wrapper of device_compat.cuh three ways: its host twin, its device branch as PTX, and what the manual says.

The same kernel of wrappers.cu runs in the emulator and in the interpreter of PTX, for a device with the instructions of
FP8 and for one without. Both must give what NumPy and ml_dtypes compute, bit for bit where the operation is exact.
"""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kernels.emulator import CUDA, EmulatedLauncher
from kernels.ptx.launcher import PtxLauncher
from kernels.ptx.program import PtxError
from kvblocks.kernels.specs import Instance, Kernel

pytestmark = pytest.mark.cuda

SOURCE = Path(__file__).with_name("wrappers.cu")
RECORD = np.dtype([("input", np.uint64), ("output", np.uint64), ("num_in", np.int32), ("num_out", np.int32)])
NAN16, NAN32 = np.uint16(0x7FFF), np.uint32(0x7FFFFFFF)
# The first device has the instructions of FP8, the second not, and runs warp after warp; the third has another
# compiler.
MACHINES = ("host", "compute_90", "compute_80", "compute_120")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cuda/ folder with the kernels of this test."""
    path = tmp_path_factory.mktemp("cuda")
    (path / "include").symlink_to(CUDA / "include")
    (path / SOURCE.name).write_text(SOURCE.read_text())
    return path


Run = Callable[..., np.ndarray]


@pytest.fixture(params=MACHINES)
def run(request: pytest.FixtureRequest, folder: Path) -> Run:
    """What `runner` gives, on a host or for a device."""
    if request.param == "host":
        return runner(EmulatedLauncher(folder=folder))
    return runner(PtxLauncher(request.param, greedy=request.param == "compute_80", folder=folder))


def runner(launcher: EmulatedLauncher | PtxLauncher) -> Run:
    """A function of a kernel, its input [threads, words] and num_out that gives the output [threads, num_out]."""

    def run_kernel(
        name: str,
        given: np.ndarray,
        num_out: int = 1,
        *,
        block: int = 64,
        grid: tuple[int, int, int] | None = None,
    ) -> np.ndarray:
        given = np.asarray(given)
        given = given.astype(np.uint32, copy=False) if given.dtype.kind in "ui" else given.view(np.uint32)
        given = np.ascontiguousarray(given.reshape(len(given), -1))
        threads = -(-len(given) // block) * block
        # 16-byte aligned rows of whole blocks; what lies behind the input is the input's first row.
        memory = np.zeros(threads * given.shape[1] + 4, np.uint32)
        source = memory[-(memory.ctypes.data // 4) % 4 :][: threads * given.shape[1]].reshape(threads, -1)
        source[:] = given[0]
        source[: len(given)] = given
        room = np.zeros(threads * num_out + 4, np.uint32)
        output = room[-(room.ctypes.data // 4) % 4 :][: threads * num_out].reshape(threads, num_out)
        output[:] = 0xDEADBEEF
        params = np.zeros((), RECORD)
        params["input"], params["output"] = source.ctypes.data, output.ctypes.data
        params["num_in"], params["num_out"] = given.shape[1], num_out
        function = launcher.load(Instance(Kernel(SOURCE.name, f"test_{name}", block, RECORD)))
        launcher.launch(function, grid or (threads // block, 1, 1), block, block * 32, params, 0)
        return output[: len(given)].copy()

    return run_kernel


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.reshape(expected.shape), expected.view(np.uint32))


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2**32, shape, np.uint32)


def all_floats() -> np.ndarray:
    """All float16 and all bfloat16 as float32, and the floats at and beside the midpoints between them."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    brains = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    midpoints = [halves + np.uint32(step) for step in (1, 0xFFF, 0x1000, 0x1001)]
    midpoints += [brains + np.uint32(step) for step in (1, 0x7FFF, 0x8000, 0x8001)]
    return np.concatenate([halves, brains, *midpoints]).view(np.float32)


def half_bits(values: np.ndarray, dtype: type = np.float16) -> np.ndarray:
    """Of results of instructions, whose NaN is the canonical one."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(values), NAN16, values.astype(dtype).view(np.uint16)).astype(np.uint32)


def pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high << np.uint32(16)


# --- Where a thread is, barriers, exchange between lanes.


def test_positions(run: Run) -> None:
    out = run("positions", np.zeros(3 * 5 * 2 * 64, np.uint32), 8, grid=(3, 5, 2)).reshape(2, 5, 3, 64, 8)
    z, y, x, thread = np.indices(out.shape[:-1])
    for index, expected in enumerate((thread, 64, x, y, z, 3, 5, 2)):
        np.testing.assert_array_equal(out[..., index], np.broadcast_to(expected, out.shape[:-1]))


def test_barriers(run: Run) -> None:
    given = words(np.random.default_rng(0), 4, 64)
    out = run("barrier", given.reshape(-1), 2).reshape(4, 64, 2)
    np.testing.assert_array_equal(out[..., 0], given[:, ::-1])
    np.testing.assert_array_equal(out[..., 1], given[:, ::-1][:, np.arange(64) ^ 9] + np.uint32(1))


def test_shuffle_xor(run: Run) -> None:
    given = words(np.random.default_rng(1), 32, 32)
    mask = np.arange(32)[:, None]
    out = run("shuffle", np.stack([given, np.broadcast_to(mask, given.shape)], -1).reshape(-1, 2), 2)
    out = out.reshape(32, 32, 2)
    lane = np.arange(32)
    np.testing.assert_array_equal(out[..., 0], np.take_along_axis(given, lane ^ mask, 1))
    np.testing.assert_array_equal(out[..., 1], given[:, lane ^ 16])


def test_a_collective_waits_for_lanes_that_come_by_another_way(run: Run) -> None:
    given = words(np.random.default_rng(2), 64, 2)
    given[:, 1] %= 9
    values = given[:, 0].copy()
    for step in range(9):
        goes_on = (np.arange(64) % 2 == 1) & (given[:, 1] > step)
        values = np.where(goes_on, values * np.uint32(5) + np.uint32(1), values)
    same(run("shuffle_after_divergence", given), values[np.arange(64) ^ 1])


def test_count_lanes(run: Run) -> None:
    given = words(np.random.default_rng(3), 8, 32)
    given[0], given[1] = 0, 1
    same(run("count", given.reshape(-1)), (given & 1).sum(1, dtype=np.uint32).repeat(32))


def test_atomics(run: Run) -> None:
    given = words(np.random.default_rng(4), 4, 64)
    out = run("atomics", given.reshape(-1), 5).reshape(4, 64, 5)
    np.testing.assert_array_equal(out[..., 0], given.sum(1, dtype=np.uint32)[:, None].repeat(64, 1))
    np.testing.assert_array_equal(out[..., 1], given.max(1)[:, None].repeat(64, 1))
    np.testing.assert_array_equal(out[..., 2] >> 16, np.full((4, 64), 7))
    np.testing.assert_array_equal(out[..., 3], np.maximum(np.where(given % 2 == 0, given, 7), 3))
    np.testing.assert_array_equal(out[..., 4], np.full((4, 64), 7))


# --- Memory.


def test_vectors(run: Run) -> None:
    given = words(np.random.default_rng(5), 64, 8)
    same(run("vectors", given, 8), np.roll(given, 4, axis=1))


def test_asynchronous_copies(run: Run) -> None:
    given = words(np.random.default_rng(6), 64, 8)
    expected = given.copy()
    expected[np.arange(64) % 3 == 0, 4:] = 0
    same(run("copies", given, 8), expected[np.arange(64) ^ 1])


def test_an_asynchronous_copy_is_poison_before_its_wait(run: Run) -> None:
    given = words(np.random.default_rng(7), 64, 4)
    same(run("copies_too_early", given), np.full(64, 0xFFFFFFFF, np.uint32))


# --- Matrices: the tables of lanes of the PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix", written out.


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_shared_memory(run: Run, transposed: bool) -> None:
    rng = np.random.default_rng(8)
    elements = rng.integers(0, 2**16, (2, 32, 8), np.uint16)  # two warps, their rows
    order = np.stack([rng.permutation(32) for _ in range(2)])
    given = np.concatenate(
        [elements.reshape(64, 8).view(np.uint32), order.reshape(64, 1).astype(np.uint32)], 1
    )
    # 16-byte rows stand every 8 words.
    given = np.concatenate([given, np.zeros((64, 3), np.uint32)], 1)
    out = run("matrices_transposed" if transposed else "matrices", given, 4).reshape(2, 32, 4)
    for warp in range(2):
        for lane in range(32):
            for matrix in range(4):
                rows = elements[warp][order[warp][8 * matrix : 8 * matrix + 8]]
                if transposed:
                    rows = rows.T
                low, high = rows[lane // 4][2 * (lane % 4) : 2 * (lane % 4) + 2]
                assert out[warp, lane, matrix] == int(low) | int(high) << 16


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_products_of_matrices(run: Run, name: str) -> None:
    dtype = np.float16 if name == "f16" else ml_dtypes.bfloat16
    rng = np.random.default_rng(9)
    # Small integers: every order of summation gives the same.
    a, b = (rng.integers(-60, 61, shape).astype(np.float32) for shape in ((2, 16, 16), (2, 16, 8)))
    c = rng.integers(-1000, 1001, (2, 16, 8)).astype(np.float32)
    halves_a, halves_b = (m.astype(dtype).view(np.uint16).astype(np.uint32) for m in (a, b))
    given = np.zeros((2, 32, 10), np.uint32)
    places = np.zeros((32, 4, 2), np.int64)
    for lane in range(32):
        group, in_group = lane >> 2, lane % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            column = in_group * 2 + (i & 1) + (0 if i < 4 else 8)
            given[:, lane, i // 2] |= halves_a[:, row, column] << np.uint32(16 * (i % 2))
        for i in range(4):
            row = in_group * 2 + (i & 1) + (0 if i < 2 else 8)
            given[:, lane, 4 + i // 2] |= halves_b[:, row, group] << np.uint32(16 * (i % 2))
            places[lane, i] = (group if i < 2 else group + 8), in_group * 2 + (i & 1)
            given[:, lane, 6 + i] = c[:, places[lane, i, 0], places[lane, i, 1]].view(np.uint32)
    out = run(f"products_{name}", given.reshape(64, 10), 4).reshape(2, 32, 4)
    expected = (a @ b + c)[:, places[..., 0], places[..., 1]]
    same(out, expected)


# --- Arithmetic and conversions.


def ulps(actual: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The distance in units of the last place of the exact result, as float64."""
    unit = np.spacing(np.maximum(np.abs(exact), 2.0**-126).astype(np.float32)).astype(np.float64)
    return np.abs(actual.astype(np.float64) - exact) / unit


@pytest.mark.parametrize(
    ("name", "exact", "limit"), [("exp2", np.exp2, 2), ("log", np.log, 2), ("tanh", np.tanh, 3)]
)
def test_functions(run: Run, name: str, exact: Callable, limit: float) -> None:
    x = all_floats()[::7]
    actual = run(name, x, block=1024).view(np.float32)[:, 0]
    with np.errstate(all="ignore"):
        expected = exact(x.astype(np.float64))
        rounded = expected.astype(np.float32)
    if name == "exp2":
        rounded[np.abs(rounded) < 2.0**-126] = 0
    special = ~np.isfinite(rounded) | (rounded == 0)
    np.testing.assert_array_equal(actual[special & ~np.isnan(rounded)], rounded[special & ~np.isnan(rounded)])
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(rounded))
    assert special.sum() > 1000
    assert ulps(actual[~special], expected[~special]).max() <= limit


def test_round_to_int(run: Run) -> None:
    x = np.concatenate([all_floats()[::3], np.arange(-300, 301, dtype=np.float32) / 2])
    with np.errstate(invalid="ignore"):
        exact = np.where(np.isnan(x), 0, np.clip(np.rint(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1))
    same(run("round", x, block=1024), exact.astype(np.int64).astype(np.int32))


def test_max_f32(run: Run) -> None:
    edges = np.array(
        [-np.inf, -3.5, -1, -1e-40, -0.0, 0, 1e-40, 1, 3.5, np.inf, np.nan], np.float32
    )  # ascending
    a, b = np.indices((11, 11)).reshape(2, -1)
    # A number is larger than a NaN.
    larger = np.where(np.maximum(a, b) < 10, np.maximum(a, b), np.minimum(a, b))
    expected = np.where(larger == 10, NAN32, edges.view(np.uint32)[larger])
    same(run("max", np.stack([edges[a], edges[b]], 1)), expected)


def test_permute_bytes(run: Run) -> None:
    given = words(np.random.default_rng(10), 4096, 3)
    given[:, 2] &= 0x7777  # beyond it, bits repeat the sign, which no kernel uses
    both = np.concatenate([given[:, :1], given[:, 1:2]], 1).copy().view(np.uint8)
    picked = [both[np.arange(4096), given[:, 2] >> np.uint32(4 * i) & np.uint32(7)] for i in range(4)]
    same(run("permute", given, block=1024), np.stack(picked, 1).copy().view(np.uint32)[:, 0])


def test_f16_to_f32(run: Run) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float32)
    same(run("from_f16", bits, block=1024), np.where(np.isnan(values), NAN32, values.view(np.uint32)))


def test_f32_to_16_bits(run: Run) -> None:
    x = all_floats()
    same(run("to_16_bits", x, block=1024), pair(half_bits(x), half_bits(x, ml_dtypes.bfloat16)))


def test_f32_to_pairs(run: Run) -> None:
    x = all_floats()[::5]
    y = np.roll(x, 12345)
    expected = [pair(half_bits(x, dtype), half_bits(y, dtype)) for dtype in (np.float16, ml_dtypes.bfloat16)]
    same(run("to_pairs", np.stack([x, y], 1), 2, block=1024), np.stack(expected, 1))


def test_arithmetic_of_pairs(run: Run) -> None:
    bits = words(np.random.default_rng(11), 2**16, 2)
    bits[: 2**12] &= 0x83FF83FF  # denormal numbers
    low, high = (
        (bits >> np.uint32(s)).astype(np.uint16).view(np.float16).astype(np.float64) for s in (0, 16)
    )
    with np.errstate(all="ignore"):
        products = pair(half_bits(low[:, 0] * low[:, 1]), half_bits(high[:, 0] * high[:, 1]))
        differences = pair(half_bits(low[:, 0] - low[:, 1]), half_bits(high[:, 0] - high[:, 1]))
    same(run("pairs", bits, 2, block=1024), np.stack([products, differences], 1))


def test_f32_to_fp8(run: Run) -> None:
    """By the instruction where there is one, and by bit operations."""
    x = all_floats()

    def codes(dtype: type, largest: float) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            bits = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
        return np.where(np.isnan(x), np.uint8(0x7F), bits)

    both = np.stack([codes(ml_dtypes.float8_e4m3fn, 448), codes(ml_dtypes.float8_e5m2, 57344)], 1)
    same(run("to_fp8", x, block=1024), np.concatenate([both, both], 1).view(np.uint32)[:, 0])


def test_e4m3x2_to_f16x2(run: Run) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    low, high = (
        half_bits((bits >> np.uint16(s)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
        for s in (0, 8)
    )
    same(run("from_fp8", bits, 2, block=1024), pair(low, high)[:, None].repeat(2, 1))


# --- That the tests would notice: bugs in the device's branch, which no host ever runs.


COMPAT = "include/kvblocks/device_compat.cuh"
# name: (test, the text as it is, the bug)
MUTATIONS: dict[str, tuple[Callable[[Run], None], str, str]] = {
    "halves of a pair exchanged": (
        test_f32_to_pairs,
        '"f"(high), "f"(low));\n    return y;\n}\nKVB_DEVICE u32',
        '"f"(low), "f"(high));\n    return y;\n}\nKVB_DEVICE u32',
    ),
    "truncation in place of rounding": (test_f32_to_16_bits, "cvt.rn.bf16.f32", "cvt.rz.bf16.f32"),
    "fp8 of the wrong kind": (test_f32_to_fp8, "cvt.rn.satfinite.e5m2x2.f32", "cvt.rn.satfinite.e4m3x2.f32"),
    "fp8 in the upper byte": (
        test_f32_to_fp8,
        'asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(0.0f), "f"(x));',
        'asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(y) : "f"(0.0f), "f"(x));',
    ),
    "rounding towards zero": (test_round_to_int, "cvt.rni.s32.f32", "cvt.rzi.s32.f32"),
    "matrices that are not transposed": (
        partial(test_matrices_of_shared_memory, transposed=True),
        "x4.trans.shared",
        "x4.shared",
    ),
    "operands of a product in another order": (
        partial(test_products_of_matrices, name="f16"),
        '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));\n}\n// The same with bfloat16.',
        '"r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b0), "r"(b1));\n}\n// The same with bfloat16.',
    ),
    "words of a vector in another order": (
        test_vectors,
        '"st.global.v4.b32 [%0], {%1, %2, %3, %4};"',
        '"st.global.v4.b32 [%0], {%2, %1, %3, %4};"',
    ),
    "a copy that reads what it must not": (test_asynchronous_copies, '"r"(num_valid)', '"r"(16)'),
    "a wait that is one short": (test_asynchronous_copies, '"n"(pending)', '"n"(pending + 1)'),
    "a shuffle of half a warp": (
        test_shuffle_xor,
        "return __shfl_xor_sync(0xFFFFFFFFu, value, lane_mask);\n}\nKVB_DEVICE u32",
        "return __shfl_xor_sync(0xFFFFFFFFu, value, lane_mask, 16);\n}\nKVB_DEVICE u32",
    ),
    "a barrier that is none": (test_barriers, "    __syncthreads();", ""),
    "a maximum that takes signs for numbers": (test_max_f32, "return fmaxf(a, b);", "return a > b ? a : b;"),
    "arguments exchanged": (test_permute_bytes, "__byte_perm(a, b, selector)", "__byte_perm(b, a, selector)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_in_the_device_branch_is_caught(name: str, tmp_path: Path) -> None:
    test, text, bug = MUTATIONS[name]
    shutil.copytree(CUDA, tmp_path, dirs_exist_ok=True)
    shutil.copy(SOURCE, tmp_path)
    source = (tmp_path / COMPAT).read_text()
    assert source.count(text) == 1, f"{text!r} is there {source.count(text)} times"
    (tmp_path / COMPAT).write_text(source.replace(text, bug))
    with pytest.raises((AssertionError, PtxError)):
        test(runner(PtxLauncher("compute_90", greedy=True, folder=tmp_path)))


# --- That nothing is left out.


def test_every_wrapper_has_a_kernel_and_every_kernel_a_test() -> None:
    compat = re.sub(r"//[^\n]*", "", (CUDA / "include" / "kvblocks" / "device_compat.cuh").read_text())
    wrappers = set(re.findall(r"^KVB_(?:DEVICE|INLINE) [\w\* ]+?\*?(\w+)\(", compat, re.MULTILINE))
    assert len(wrappers) >= 40
    source = SOURCE.read_text()
    left = {name for name in wrappers if not re.search(rf"\b{name}(?:<\d>)?\(|MULTIPLY\({name}\)", source)}
    assert left == set()
    kernels = set(re.findall(r"^TEST\((\w+)\)|^KVB_KERNEL\(test_(\w+)", source, re.MULTILINE))
    names = {one or other for one, other in kernels}
    assert len(names) >= 20
    tests = Path(__file__).read_text()
    literal = names - {"products_f16", "products_bf16"}
    assert {name for name in literal if f'"{name}"' not in tests} == set()
