"""Index arrays on the device follow those of the step, whatever happens between uploads and however late copies run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.host import Queue, QueuedLibrary
from kvblocks import BlockManager
from kvblocks.gpu.steps import DeviceStep

pytestmark = pytest.mark.cuda


class Engine:
    """A manager, its step with a device copy, and sequences that come, grow and go."""

    def __init__(self, num_staged: int = 2) -> None:
        self.queue = Queue()
        self.library = QueuedLibrary(self.queue)
        self.manager = BlockManager(64, 4)
        self.step = DeviceStep(
            self.manager,
            max_seqs=4,
            max_tokens=32,
            max_blocks_per_seq=12,
            num_staged=num_staged,
            transport=self.queue,
            using=self.library,
        )
        self.running: list[int] = []
        # Prompt tokens of each sequence that are still to be scheduled.
        self.waiting: dict[int, np.ndarray] = {}
        self.next_token = 0

    def tokens(self, count: int) -> np.ndarray:
        self.next_token += count
        return np.arange(self.next_token - count, self.next_token)

    def admit(self, num_tokens: int) -> None:
        prompt = self.tokens(num_tokens)
        admitted = self.manager.allocate(self.manager.prepare(prompt), reserve=num_tokens)
        if admitted:
            self.running.append(admitted.handle)
            self.waiting[admitted.handle] = prompt

    def advance(self) -> None:
        """A step of everybody: the whole prompt of who is new, one token of the others."""
        new = [self.waiting.pop(handle, None) for handle in self.running]
        rows = [self.tokens(1) if prompt is None else prompt for prompt in new]
        counts = [len(row) for row in rows]
        if self.step.schedule(self.running, counts):
            self.manager.commit(self.running, counts, np.concatenate(rows))

    def end(self, row: int) -> None:
        handle = self.running.pop(row % len(self.running))
        self.waiting.pop(handle, None)
        self.manager.free([handle])


def same(engine: Engine) -> None:
    step, on_device = engine.step, engine.step.on_device
    num_rows, num_columns = step.block_tables.shape
    np.testing.assert_array_equal(on_device.block_tables[:num_rows, :num_columns], step.block_tables)
    for name in ("slot_mapping", "positions", "seq_lens", "query_start_loc", "copies"):
        wanted = getattr(step, name)
        np.testing.assert_array_equal(getattr(on_device, name)[: len(wanted)], wanted, err_msg=name)


@given(
    st.lists(st.sampled_from(["admit", "advance", "end", "fork", "upload", "run"]), max_size=40), st.randoms()
)
def test_a_device_that_lags_behind_ends_up_the_same(actions: list[str], random: object) -> None:
    engine = Engine()
    for action in actions:
        number = random.randrange(1, 9)  # type: ignore[attr-defined]
        if action == "admit" and len(engine.running) < 4:
            engine.admit(number)
        elif action == "end" and engine.running:
            engine.end(number)
        elif action == "fork" and len(engine.running) in (1, 2, 3) and not engine.waiting:
            engine.running += engine.manager.fork([engine.running[0]]).tolist()
        elif action == "advance" and engine.running:
            engine.advance()
        elif action == "upload":
            engine.step.upload()
        elif action == "run":
            engine.queue.run()
    engine.step.upload()
    engine.queue.run()
    same(engine)


def test_each_consumer_sees_its_own_step() -> None:
    """Uploads behind a device that does nothing: each reader in the queue gets what was uploaded before it."""
    engine = Engine()
    engine.admit(5)
    engine.advance()
    seen, wanted = [], []
    arrays = engine.step.on_device
    for _ in range(40):
        engine.advance()
        engine.step.upload()
        wanted.append(
            (engine.step.seq_lens.copy(), engine.step.slot_mapping.copy(), engine.step.block_tables.copy())
        )
        columns = engine.step.block_tables.shape[1]

        def read(columns: int = columns) -> None:
            seen.append(
                (
                    arrays.seq_lens[:1].copy(),
                    arrays.slot_mapping[:1].copy(),
                    arrays.block_tables[:1, :columns].copy(),
                )
            )

        engine.queue.work.append(read)
    assert len(seen) < 40
    engine.queue.run()
    for ours, theirs in zip(seen, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    assert engine.queue.num_waits == 38


def test_an_upload_is_one_copy_and_one_launch_on_its_stream() -> None:
    engine = Engine()
    engine.admit(9)
    engine.advance()
    engine.step.upload(stream=0xBEEF)
    assert engine.queue.order == [("copy", 0xBEEF), ("launch", 0xBEEF), ("record", 0xBEEF)]
    assert engine.queue.num_waits == 0


def test_addresses_never_change() -> None:
    engine = Engine()
    before = [each.ctypes.data for each in engine.step.on_device]
    assert all(address % 16 == 0 for address in before)
    for _ in range(3):
        engine.admit(7)
        engine.advance()
        engine.step.upload()
    assert [each.ctypes.data for each in engine.step.on_device] == before


def test_a_step_that_is_never_uploaded_does_not_grow() -> None:
    engine = Engine()
    engine.admit(1)
    engine.advance()
    for _ in range(40):
        engine.advance()
    assert len(engine.step._pending) <= 32
    engine.step.upload()
    engine.queue.run()
    same(engine)


def test_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_staged is 0, expected 1 or more"):
        Engine(num_staged=0)
    with pytest.raises(ValueError, match=r"^library is 'jax': expected 'torch' or 'cupy'"):
        DeviceStep(BlockManager(8, 4), library="jax")
