"""Area R: the binding. Whatever is passed, only the documented errors come out, and the manager stays sound."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvblocks as kv
from kvblocks._core import StepBuffers

from .helpers import Engine, state

DOCUMENTED = (ValueError, TypeError, kv.KVBlocksError)

# Arguments are drawn as functions of a scene, since handles and prompts are among them.
Draw = Callable[["Scene"], Any]


class Scene:
    """A manager with sequences in several states, and buffers."""

    def __init__(self) -> None:
        self.engine = Engine(12, 2, max_seqs=4, max_tokens=16)
        self.manager = self.engine.manager
        self.foreign = kv.BlockManager(4, 2).prepare([1])
        self.handles: list[int] = []
        self.fill()

    def fill(self) -> None:
        """Make what is missing of: one computed, one in flight, one preempted, one that is gone, a transfer."""
        if self.manager.stats().num_seqs > 6:
            self.manager.free(self.handles, missing_ok=True)
        for transfer in self.manager.pending_transfers()[:, 0].tolist():
            self.manager.cancel_transfer(transfer)
        self.manager.free(self.handles, missing_ok=True)
        answers: list[Any] = [self.engine.ask(range(n, n + 3)) for n in range(3)]
        gone: Any = self.engine.ask([9])
        self.handles = [answer.handle for answer in (*answers, gone)]
        computed, in_flight, preempted = self.handles[:3]
        self.engine.compute(computed)
        self.engine.step.schedule(in_flight, 2)
        (self.prompt,) = self.manager.preempt(preempted)
        self.manager.free(gone.handle)
        self.transfer = self.manager.begin_transfer(computed)


SPECIAL_INTS = (
    -(2**80),
    -(2**63) - 1,
    -(2**63),
    -1,
    0,
    1,
    2,
    3,
    7,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**80,
)
ARRAYS = (
    np.zeros(2, np.float32),
    np.array([np.nan]),
    np.arange(3, dtype=np.int64),
    np.arange(3, dtype=np.int32),
    np.arange(3, dtype=np.uint32),
    np.arange(6, dtype=np.int32)[::2],
    np.array([-1, 2**40]),
    np.array(3, np.int64),
    np.zeros((2, 2), np.int64),
    np.zeros(0, np.int64),
    np.zeros(0, np.int32),
    np.array([True]),
    np.array(["a"]),
    np.array([1, None], object),
    np.arange(3, dtype=">i8"),
    np.arange(3, dtype=np.int8),
    np.frombuffer(np.arange(3, dtype=np.int64).tobytes(), np.int64),  # read-only
)
junk: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(SPECIAL_INTS),
    st.integers(-3, 20),
    st.floats(),
    st.none(),
    st.booleans(),
    st.sampled_from(["", "a", "all", "fit", "keep", "sha256", "\ud800", b"", b"x" * 16, b"x" * 32]),
    st.lists(st.sampled_from(SPECIAL_INTS) | st.integers(0, 5), max_size=3),
    st.lists(st.tuples(st.sampled_from(["x", b"", 1]), st.integers(-1, 9), st.integers(-1, 9)), max_size=2),
    st.sampled_from(ARRAYS),
    st.builds(object),
    st.just({}),
)
arguments: st.SearchStrategy[Draw] = st.one_of(
    junk.map(lambda value: lambda scene: value),
    st.integers(0, 3).map(lambda i: lambda scene: scene.handles[i]),
    st.lists(st.integers(0, 3), max_size=3).map(lambda i: lambda scene: np.array(scene.handles)[i]),
    st.integers(0, 3).map(lambda i: lambda scene: scene.handles[i] ^ 1 << 32),
    st.sampled_from(["prompt", "foreign", "transfer", "manager"]).map(
        lambda name: lambda scene: getattr(scene, name)
    ),
)
KEYWORDS = {
    "prepare": ("adapter", "salt", "media"),
    "match_prefix": ("recompute_last_hit",),
    "can_allocate": ("reserve", "use_cache", "recompute_last_hit", "max_tokens", "max_resident_blocks"),
    "allocate": ("reserve", "use_cache", "recompute_last_hit", "max_tokens", "max_resident_blocks"),
    "commit": ("tokens",),
    "truncate": ("spare",),
    "drop_range": ("unpublish",),
    "free": ("missing_ok",),
    "namespace_usage": ("adapter", "salt"),
    "drop_namespace": ("adapter", "salt"),
    "schedule": ("lookahead", "policy", "pad_seqs", "pad_tokens", "append"),
    "block_hashes": ("seed", "algorithm", "parent", "adapter", "salt", "media"),
    "BlockManager": (
        "enable_prefix_cache", "watermark_blocks", "null_block", "seed", "algorithm", "full_hit", "publish", "merge",
        "reuse", "series_every", "series_len",
    ),
}  # fmt: skip
VERBS = sorted(
    name for name in dir(kv.BlockManager) if callable(getattr(kv.BlockManager, name)) and name[0] != "_"
)


def functions(scene: Scene) -> dict[str, Callable[..., Any]]:
    """Everything that can be called, by name."""
    return {
        **{name: getattr(scene.manager, name) for name in VERBS},
        "schedule": scene.engine.step.schedule,
        "pack": scene.engine.step.pack,
        "csr": scene.engine.step.csr,
        "unpack": kv.PackedStep.unpack,
        "layout": StepBuffers.layout,
        "block_hashes": kv.block_hashes,
        "BlockManager": kv.BlockManager,
        "StepBuffers": StepBuffers,
    }


NAMES = sorted(functions(Scene()))
calls = st.sampled_from(NAMES).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(arguments, max_size=4),
        st.dictionaries(st.sampled_from((*KEYWORDS.get(name, ()), "nonsense")), arguments, max_size=2),
        st.booleans(),
    )
)


def test_p140_everything_that_can_be_called_is_tried() -> None:
    assert len(VERBS) >= 30
    assert set(KEYWORDS) <= set(NAMES)


@given(st.lists(calls, min_size=1, max_size=25))
def test_p140_wrong_arguments_only_ever_raise_the_documented_errors(
    calls: list[tuple[str, list[Draw], dict[str, Draw], bool]],
) -> None:
    scene = Scene()
    for name, args, keywords, aim in calls:
        values = [draw(scene) for draw in args]
        if aim:  # a right first argument, so that the others are looked at
            first = {"allocate": scene.prompt, "can_allocate": scene.prompt}.get(name, scene.handles[0])
            values = [first, *values]
        options = {key: draw(scene) for key, draw in keywords.items()}
        before = (scene.manager.stats(), state(scene.manager))
        try:
            functions(scene)[name](*values, **options)
        except DOCUMENTED:
            assert (scene.manager.stats(), state(scene.manager)) == before
        assert scene.manager.check_integrity() == []
        if scene.manager.stats() != before[0]:
            scene.fill()


def test_p140_the_size_of_a_block_never_changes() -> None:
    engine = Engine(8, 4)
    handle = engine.serve(range(6))
    for length in range(6, -1, -1):
        engine.manager.truncate(handle, length)
        assert engine.manager.block_size == 4
        assert len(engine.table(handle)) == -(-length // 4)
        assert engine.pool()[0] == 8 - -(-length // 4) - engine.pool()[2]
    engine.decode(handle, range(32))
    assert len(engine.table(handle)) == 8


def test_p140_a_handle_that_was_never_given_out_names_nothing() -> None:
    engine = Engine(8, 4)
    handle = engine.serve(range(6))
    transfer = engine.manager.begin_transfer(handle)
    before = state(engine.manager, [handle])
    for bit in range(63):
        for call in (
            lambda wrong=handle ^ 1 << bit: engine.manager.sequence(wrong),
            lambda wrong=handle ^ 1 << bit: engine.manager.free(wrong),
            lambda wrong=transfer ^ 1 << bit: engine.manager.cancel_transfer(wrong),
        ):
            with pytest.raises(kv.StaleHandleError):
                call()
    for wrong in (0, 1, -1, 2**63 - 1, -(2**63)):
        with pytest.raises(kv.StaleHandleError):
            engine.manager.free(wrong)
    assert state(engine.manager, [handle]) == before


class Reentrant:
    """A sequence of ints that asks the manager something whenever it is read, in another thread."""

    def __init__(self, manager: kv.BlockManager, numbers: list[int]) -> None:
        self.manager, self.numbers = manager, numbers

    def __iter__(self) -> Iterator[int]:
        answered = threading.Event()
        thread = threading.Thread(target=lambda: (self.manager.stats(), answered.set()))
        thread.start()
        # A manager that holds its lock while it reads its arguments would never answer.
        if not answered.wait(timeout=10):
            self.numbers = []
        return iter(self.numbers)


VERBS_OF_BATCHES: dict[str, Callable[[Engine, Any], object]] = {
    "prepare": lambda engine, handles: engine.manager.prepare(handles),
    "commit": lambda engine, handles: engine.manager.commit(handles, 0),
    "abort_step": lambda engine, handles: engine.manager.abort_step(handles),
    "fork": lambda engine, handles: engine.manager.fork(handles),
    "reorder": lambda engine, handles: engine.manager.reorder(handles, [0]),
    "truncate": lambda engine, handles: engine.manager.truncate(handles, 6),
    "move_slots": lambda engine, handles: engine.manager.move_slots(handles, 0, []),
    "set_max_tokens": lambda engine, handles: engine.manager.set_max_tokens(handles, 6),
    "preempt": lambda engine, handles: engine.manager.preempt(handles),
    "reclaimable": lambda engine, handles: engine.manager.reclaimable(handles),
    "free": lambda engine, handles: engine.manager.free(handles),
    "schedule": lambda engine, handles: engine.step.schedule(handles, 1),
}


@pytest.mark.parametrize("verb", sorted(VERBS_OF_BATCHES))
def test_arguments_are_read_before_the_lock_is_taken(verb: str) -> None:
    engine = Engine(8, 4)
    handle = engine.serve(range(6))
    if verb in ("commit", "abort_step"):
        engine.step.schedule(handle, 0)
    handles = Reentrant(engine.manager, [handle])
    if verb == "prepare":
        handles.numbers = [1, 2]
    with contextlib.suppress(kv.KVBlocksError):
        VERBS_OF_BATCHES[verb](engine, handles)
    assert handles.numbers, "the manager held its lock while it read its arguments"


class Overwriting:
    """A sequence of ints that writes to an array when it is read."""

    def __init__(self, numbers: list[int], array: np.ndarray[Any, Any], wrong: int) -> None:
        self.numbers, self.array, self.wrong = numbers, array, wrong

    def __iter__(self) -> Iterator[int]:
        self.array[:] = self.wrong
        return iter(self.numbers)


def test_handles_and_counts_are_those_at_the_call() -> None:
    engine = Engine(8, 4)
    handle = engine.serve(range(6))
    handles, num_new = np.array([handle]), np.array([2], np.int32)
    for array, wrong in ((handles, -1), (num_new, -1)):
        kept = array.copy()
        assert engine.step.schedule(handles, num_new, lookahead=Overwriting([0], array, wrong))  # type: ignore[arg-type]
        assert array[0] == wrong
        array[:] = kept
        engine.manager.commit(handles, num_new, Overwriting([1, 2], array, wrong))  # type: ignore[arg-type]
        array[:] = kept
    assert engine.manager.tokens(handle).tolist() == [*range(6), 1, 2, 1, 2]


def test_arrays_of_a_step_are_good_as_arguments() -> None:
    engine = Engine(16, 4)
    handles = [engine.serve(range(2)), engine.serve(range(3))]
    assert engine.step.schedule(handles, [1, 2])
    # [0, 1, 3], then [1, 2] of it, which this step overwrites.
    assert engine.step.schedule(handles, engine.step.query_start_loc[:2], lookahead=engine.step.seq_lens)
    assert engine.step.query_start_loc.tolist() == [0, 0, 1]
    assert [engine.manager.sequence(handle).num_reserved for handle in handles] == [6, 11]


def test_arrays_that_no_copy_has_memory_for_are_refused() -> None:
    manager = kv.BlockManager(8, 4)
    for call in (
        lambda: manager.free(np.broadcast_to(np.int64(1), 2**50)),
        lambda: manager.commit([1], np.broadcast_to(np.int32(1), 2**50)),
        lambda: manager.prepare(np.broadcast_to(np.int32(1), 2**50)),
    ):
        with pytest.raises(MemoryError, match="has 1125899906842624 entries: no memory for a copy"):
            call()


def test_wrong_items_are_named_and_errors_of_theirs_kept() -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("broken")

    manager = kv.BlockManager(8, 4)
    wrong: Any
    for wrong, text in (([1, None], r"tokens\[1\] is a NoneType"), ([1, 2, 3.0], r"tokens\[2\] is a float")):
        with pytest.raises(TypeError, match=text + ", expected an int"):
            manager.prepare(wrong)
    wrong = [Broken()]
    with pytest.raises(RuntimeError, match="broken"):
        manager.prepare(wrong)
