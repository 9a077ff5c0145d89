"""What the cases share: an engine in a few words, the state of a manager as one value, and random walks.

Owns `Engine`, `state`, `Walk` and `needs`, the formats that a backend takes. Sizes are in blocks where they are called
capacity, else in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest

import kvblocks as kv


class Engine:
    """A manager of `capacity` allocatable blocks and a step, and what an engine does with both."""

    def __init__(
        self, capacity: int, block_size: int, *, max_seqs: int = 16, max_tokens: int = 4096, **options: Any
    ) -> None:
        null_block = options.get("null_block", True)
        self.manager = kv.BlockManager(capacity + null_block, block_size, **options)
        # A sequence from which blocks were dropped may be longer than the pool.
        columns = max(capacity, 64)
        self.step = kv.Step(
            self.manager, max_seqs=max_seqs, max_tokens=max_tokens, max_blocks_per_seq=columns
        )

    def ask(self, tokens: Iterable[int], reserve: int | None = None, **options: Any) -> Any:
        """The answer of `allocate`: `Allocated`, `Later` or `Never`."""
        keys = {name: options.pop(name) for name in ("adapter", "salt", "media") if name in options}
        return self.manager.allocate(self.manager.prepare(list(tokens), **keys), reserve, **options)

    def admit(self, tokens: Iterable[int], reserve: int | None = None, **options: Any) -> int:
        """The handle of an admitted request."""
        answer = self.ask(tokens, reserve, **options)
        assert isinstance(answer, kv.Allocated), answer
        return answer.handle

    def compute(self, handle: int, num_new: int | None = None) -> None:
        """Schedule and commit the next `num_new` known tokens of a sequence, all by default."""
        cursors = self.manager.sequence(handle)
        if num_new is None:
            num_new = cursors.num_tokens - cursors.num_scheduled
        assert self.step.schedule(handle, num_new)
        self.manager.commit(handle, num_new)

    def decode(self, handle: int, ids: Iterable[int]) -> None:
        """Schedule and commit tokens whose ids are not known before, one step each."""
        for token in ids:
            assert self.step.schedule(handle, 1)
            self.manager.commit(handle, 1, [token])

    def serve(self, tokens: Iterable[int], ids: Iterable[int] = (), **options: Any) -> int:
        """A request admitted and computed, and `ids` decoded."""
        handle = self.admit(tokens, **options)
        self.compute(handle)
        self.decode(handle, ids)
        return handle

    def cache(self, tokens: Iterable[int], **options: Any) -> list[int]:
        """Leave a prompt's full blocks in the cache; returns the block ids it had."""
        handle = self.serve(tokens, **options)
        blocks = self.table(handle)
        self.manager.free(handle)
        return blocks

    def hits(self, tokens: Iterable[int], **keys: Any) -> int:
        """Tokens that an admission would find cached."""
        return self.manager.match_prefix(self.manager.prepare(list(tokens), **keys))

    def table(self, handle: int) -> list[int]:
        """Block ids of a sequence."""
        return self.manager.block_table(handle).tolist()

    def pool(self) -> tuple[int, int, int, int]:
        """Free, live, cached and held blocks; checked to be the whole pool, and the manager to be sound."""
        stats = self.manager.stats()
        counts = (stats.free_blocks, stats.live_blocks, stats.cached_blocks, stats.held_blocks)
        assert sum(counts) == stats.capacity_blocks
        assert self.manager.check_integrity() == []
        return counts


def state(
    manager: kv.BlockManager, handles: Iterable[int] = (), salts: Iterable[Any] = (None,)
) -> tuple[Any, ...]:
    """All that can be seen of a manager, as one value to compare: equal before and after a refused call."""
    seqs = [
        (
            handle,
            repr(manager.sequence(handle)),
            manager.block_table(handle).tolist(),
            manager.tokens(handle).tolist(),
        )
        for handle in handles
    ]
    return (
        repr(manager.stats()),
        seqs,
        [repr(manager.namespace_usage(salt=salt)) for salt in salts],
        repr(manager.fragmentation()),
        manager.pending_transfers().tolist(),
        manager.series().tolist(),
        manager.check_integrity(),
    )


Operation = tuple[str, int, int]
VERBS = (
    "admit", "admit", "admit", "compute", "compute", "draft", "schedule", "commit", "abort", "fork", "reorder",
    "truncate", "drop", "preempt", "resume", "free", "free", "begin", "end", "declare", "reset", "forget",
)  # fmt: skip


class Walk:
    """A walk over the verbs: the operation (verb, a, b) means the same on every manager that walked the same way.

    Every call may be refused, or be a ValueError where the verb does not apply; both leave no trace.
    """

    SALTS = (None, "a", "b")

    def __init__(self, engine: Engine) -> None:
        self.engine, self.manager = engine, engine.manager
        self.handles: list[int] = []
        self.histories: dict[int, kv.Prompt] = {}
        self.transfers: list[int] = []
        self.steps: dict[int, list[int]] = {}  # tokens of the steps in flight

    def prompt(self, a: int, b: int) -> kv.Prompt:
        """One of few prompts, so that they share prefixes and diverge."""
        tokens = [i * (a % 3) % 5 for i in range(b % 21)] + [a % 2] * (a % 4)
        return self.manager.prepare(tokens, salt=self.SALTS[max(0, a % 5 - 2)])

    def options(self, a: int, b: int) -> dict[str, Any]:
        """One of all ways to admit a prompt."""
        return {
            "reserve": (None, b % 24, None, a % 9)[a % 4],
            "use_cache": b % 7 != 0,
            "recompute_last_hit": b % 5 == 0,
            "max_tokens": a % 30 if b % 3 == 0 else None,
            "max_resident_blocks": 1 + a % 6 if b % 4 == 1 else None,
        }

    def resident(self) -> list[int]:
        """Sequences that hold blocks."""
        return [handle for handle in self.handles if handle not in self.histories]

    def batch(self, a: int, b: int) -> list[int]:
        """Up to three resident sequences."""
        resident = self.resident()
        return list(dict.fromkeys(resident[i % len(resident)] for i in (a, b, a + b)))[: 1 + a % 3]

    def state(self) -> tuple[Any, ...]:
        """See `state`."""
        return state(self.manager, self.handles, self.SALTS)

    def take(self, operation: Operation) -> None:
        """Do one operation, as far as it applies."""
        verb, a, b = operation
        if verb in ("admit", "reset", "forget", "end", "resume") or self.resident():
            getattr(self, verb)(a, b)

    def admit(self, a: int, b: int) -> None:
        if len(self.handles) < 8:
            answer = self.manager.allocate(self.prompt(a, b), **self.options(a, b))
            if isinstance(answer, kv.Allocated):
                self.handles.append(answer.handle)

    def is_long(self, handle: int) -> bool:
        """Whether a sequence should not grow any more, since the step has so many columns only."""
        return self.manager.sequence(handle).num_scheduled > 48

    def compute(self, a: int, b: int) -> None:
        """Schedule and commit the rest of the known tokens, and some more."""
        handle = self.batch(a, b)[0]
        if not self.steps.get(handle):
            cursors = self.manager.sequence(handle)
            more = 0 if self.is_long(handle) else b % 4
            num_new = cursors.num_tokens - cursors.num_scheduled + more
            if self.engine.step.schedule(handle, num_new):
                self.manager.commit(handle, num_new, [a % 2] * more)

    def draft(self, a: int, b: int) -> None:
        """Schedule new tokens, some of which are rejected."""
        handle = self.batch(a, b)[0]
        cursors = self.manager.sequence(handle)
        idle = not self.steps.get(handle) and cursors.num_computed == cursors.num_tokens
        if idle and not self.is_long(handle):
            num_new = 1 + a % 6
            if self.engine.step.schedule(handle, num_new, lookahead=b % 3):
                accepted = b % (num_new + 1)
                self.manager.commit(handle, accepted, [a % 2] * accepted)

    def schedule(self, a: int, b: int) -> None:
        few = [handle for handle in self.batch(a, b) if len(self.steps.get(handle, [])) < 3]
        handles = [handle for handle in few if not self.is_long(handle)]
        counts = [(a + i) % 7 for i in range(len(handles))]
        policy: Literal["all", "fit"] = "fit" if a % 2 else "all"
        scheduled = self.engine.step.schedule(handles, counts, lookahead=b % 4, policy=policy)
        for handle, count in list(zip(handles, counts, strict=True))[: scheduled.num_seqs]:
            self.steps.setdefault(handle, []).append(count)

    def commit(self, a: int, b: int) -> None:
        """Accept the oldest step of each sequence of the batch."""
        for handle in self.batch(a, b):
            if self.steps.get(handle):
                count = self.steps[handle].pop(0)
                cursors = self.manager.sequence(handle)
                unknown = max(0, cursors.num_computed + count - cursors.num_tokens)
                self.manager.commit(handle, count, [b % 2] * unknown)

    def abort(self, a: int, b: int) -> None:
        handles = self.batch(a, b)
        if self.misuse(self.manager.abort_step, handles):
            for handle in handles:
                self.steps[handle].pop()

    def fork(self, a: int, b: int) -> None:
        if len(self.handles) < 6:
            self.handles += self.manager.fork(self.batch(a, b)[:2], b % 2).tolist()

    def reorder(self, a: int, b: int) -> None:
        handles = self.batch(a, b)
        self.misuse(self.manager.reorder, handles, [(b + i) % len(handles) for i in range(len(handles))])

    def truncate(self, a: int, b: int) -> None:
        handle = self.batch(a, b)[0]
        length = b % (self.manager.sequence(handle).num_tokens + 1)
        self.misuse(self.manager.truncate, handle, length, spare=("free", "keep")[a % 2])

    def drop(self, a: int, b: int) -> None:
        handle = self.batch(a, b)[0]
        end = b % (self.manager.sequence(handle).num_tokens + 1)
        self.manager.drop_range(handle, a % (end + 1), end, unpublish=bool(a % 2))

    def preempt(self, a: int, b: int) -> None:
        for prompt in self.manager.preempt(self.batch(a, b)):
            assert prompt.handle is not None
            self.histories[prompt.handle] = prompt
            self.steps.pop(prompt.handle, None)

    def resume(self, a: int, b: int) -> None:
        waiting = [handle for handle in self.handles if handle in self.histories]
        if waiting:
            handle = waiting[a % len(waiting)]
            if self.manager.allocate(self.histories[handle], **self.options(a, b)):
                del self.histories[handle]

    def free(self, a: int, b: int) -> None:
        handles = self.batch(a, b)
        self.manager.free(handles)
        for handle in handles:
            self.steps.pop(handle, None)
        self.handles = [handle for handle in self.handles if handle not in handles]

    def begin(self, a: int, b: int) -> None:
        handle = self.batch(a, b)[0]
        columns = self.manager.sequence(handle).num_blocks
        start = a % (columns + 1)
        self.transfers.append(self.manager.begin_transfer(handle, start, start + b % (columns - start + 1)))

    def end(self, a: int, b: int) -> None:
        if self.transfers:
            end = (self.manager.complete_transfer, self.manager.fail_transfer, self.manager.cancel_transfer)
            end[b % 3](self.transfers.pop(a % len(self.transfers)))

    def declare(self, a: int, b: int) -> None:
        most = self.manager.capacity_blocks * self.manager.block_size
        self.manager.set_max_tokens(self.batch(a, b), min(b % 30, most))

    def reset(self, a: int, b: int) -> None:
        self.manager.reset_prefix_cache()

    def forget(self, a: int, b: int) -> None:
        self.manager.drop_namespace(salt=self.SALTS[1 + a % 2])

    def misuse(self, verb: Callable[..., object], *arguments: Any, **options: Any) -> bool:
        """Call a verb that may not apply: then nothing may have changed."""
        before = self.state()
        try:
            verb(*arguments, **options)
        except ValueError:
            assert self.state() == before
            return False
        return True

    def finish(self) -> None:
        """End everything; nothing may be left."""
        self.manager.free(self.handles)
        for transfer in self.transfers:
            self.manager.cancel_transfer(transfer)
        stats = self.manager.stats()
        assert (stats.live_blocks, stats.held_blocks, stats.used_slots, stats.num_seqs) == (0, 0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.capacity_blocks
        assert self.manager.check_integrity() == []


OPTIONS: dict[str, tuple[Any, ...]] = {
    "full_hit": ("block", "token"),
    "publish": ("commit", "schedule"),
    "merge": (False, True),
    "reuse": ("last_freed", "first_freed"),
}


def takes(backend: kv.Backend, kv_format: str) -> bool:
    part, table = kv.KVFormat.parse(kv_format), backend.supported()
    return str(part.k) in table.k_formats and str(part.v) in table.v_formats


def needs(backend: kv.Backend, kv_format: str) -> None:
    if not takes(backend, kv_format):
        pytest.skip(f"{backend.name} refuses {kv_format}")
