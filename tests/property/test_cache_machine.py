"""Random walks over a `PagedKVCache`, against a model that knows nothing but each sequence's tokens.

The stored "K" of a token is a fingerprint of its namespace and its whole prefix. So whatever was shared, copied,
merged, evicted, preempted, reordered, aborted or rolled back, gathering a sequence must give the fingerprints of its
own history, and nothing else; but where blocks were dropped. What a transfer owns must stay as it was until it ends.
"""

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import kvblocks as kv


def fingerprints(salt: str | None, tokens: list[int]) -> NDArray[np.float32]:
    """One exact float32 a token, that stands for the prefix which ends with it."""
    prefixes = (f"{salt} {tokens[: i + 1]}".encode() for i in range(len(tokens)))
    return np.array([zlib.crc32(prefix) % 2**24 for prefix in prefixes], dtype=np.float32)


@dataclass
class Sequence:
    tokens: list[int]  # known ones, then those in flight
    salt: str | None
    prompt_len: int
    computed: int
    scheduled: int
    in_flight: list[int] = field(default_factory=list)
    prompt: kv.Prompt | None = None  # set while preempted
    holes: set[int] = field(default_factory=set)  # columns
    max_tokens: int | None = None
    max_resident: int | None = None

    @property
    def known(self) -> int:
        return max(self.computed, self.prompt_len)

    def snapshot(self) -> "Sequence":
        """The computed tokens as another sequence."""
        known = self.tokens[: self.known]
        return Sequence(
            known, self.salt, self.prompt_len, self.computed, self.computed, holes=set(self.holes)
        )


@dataclass
class Transfer:
    blocks: list[int]
    slots: NDArray[np.int64]  # computed ones, when it began
    content: NDArray[np.float32]


SALTS = (None, "a", "b")
prompts = st.builds(
    lambda stem, length, tail: [i * stem % 5 for i in range(length)] + tail,
    st.integers(0, 2),
    st.integers(0, 20),
    st.lists(st.integers(0, 1), max_size=6),
)
salts = st.sampled_from([None, None, None, "a", "b"])
admissions = st.fixed_dictionaries(
    {
        "reserve": st.none() | st.integers(0, 30),
        "use_cache": st.sampled_from([True, True, True, False]),
        "recompute_last_hit": st.sampled_from([False, False, False, True]),
        "max_tokens": st.none() | st.none() | st.integers(0, 30),
        "max_resident_blocks": st.none() | st.none() | st.integers(1, 12),
    }
)
MAX_LENGTH = 64
DEFAULTS = {
    "reserve": None,
    "use_cache": True,
    "recompute_last_hit": False,
    "max_tokens": None,
    "max_resident_blocks": None,
}
managers = st.fixed_dictionaries(
    {
        "watermark_blocks": st.integers(0, 2),
        "enable_prefix_cache": st.sampled_from([True, True, True, False]),
        "full_hit": st.sampled_from(["block", "token"]),
        "publish": st.sampled_from(["commit", "schedule"]),
        "merge": st.booleans(),
        "reuse": st.sampled_from(["last_freed", "first_freed"]),
        "algorithm": st.sampled_from(["xxh3", "sha256"]),
    }
)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        capacity=st.integers(3, 20),
        options=managers,
        layout=st.sampled_from(["NHD", "HND"]),
    )
    def build(self, block_size: int, capacity: int, options: dict[str, Any], layout: str) -> None:
        config = kv.CacheConfig(
            2, num_kv_heads=1, head_dim=8, head_dim_v=4, block_size=block_size, layout=layout
        )
        self.cache = kv.PagedKVCache(config, capacity + 1, backend="numpy")
        self.cache.manager = kv.BlockManager(capacity + 1, block_size, **options)
        # A sequence from which blocks were dropped may be longer than the pool.
        self.cache.step = kv.Step(
            self.cache.manager, max_seqs=16, max_tokens=256, max_blocks_per_seq=MAX_LENGTH, depth=2
        )
        self.manager, self.options, self.block_size = self.cache.manager, options, block_size
        self.on_schedule = options["publish"] == "schedule" and options["enable_prefix_cache"]
        for layer in self.cache.layers:
            layer.k.fill(np.nan)
            layer.v.fill(np.nan)
        self.null_block = self.cache.layers[0].k[0].copy()
        self.seqs: dict[int, Sequence] = {}
        self.transfers: dict[int, Transfer] = {}

    def resident(self) -> list[int]:
        return [handle for handle, seq in self.seqs.items() if seq.prompt is None]

    def idle(self) -> list[int]:
        return [handle for handle in self.resident() if not self.seqs[handle].in_flight]

    def draw_some(self, data: st.DataObject, handles: list[int], most: int = 4) -> list[int]:
        return data.draw(st.lists(st.sampled_from(handles), min_size=1, max_size=most, unique=True))

    def admit(
        self, prompt: kv.Prompt, tokens: list[int], salt: str | None, options: dict[str, Any]
    ) -> int | None:
        before = self.manager.stats()
        could = self.manager.can_allocate(prompt, **options)
        cached = self.manager.match_prefix(prompt, recompute_last_hit=options["recompute_last_hit"])
        assert self.manager.stats() == before
        cached *= options["use_cache"]
        answer = self.manager.allocate(prompt, **options)
        assert bool(answer) == bool(could)
        if not isinstance(answer, kv.Allocated):
            assert answer == could
            assert self.manager.stats() == before
            return None
        assert isinstance(could, kv.Ok)
        assert answer.num_cached_tokens == could.num_cached_tokens == cached
        assert answer.num_cached_tokens + answer.num_new_tokens == len(tokens)
        assert not tokens or answer.num_new_tokens >= 1
        assert prompt.handle in (None, answer.handle)
        most, resident = options["max_tokens"], options["max_resident_blocks"]
        if answer.handle in self.seqs:  # it remembers what was declared before
            most = self.seqs[answer.handle].max_tokens if most is None else most
            resident = self.seqs[answer.handle].max_resident if resident is None else resident
        self.seqs[answer.handle] = Sequence(
            list(tokens), salt, len(tokens), cached, cached, max_tokens=most, max_resident=resident
        )
        return answer.handle

    @rule(tokens=prompts, salt=salts, options=admissions)
    def allocate(self, tokens: list[int], salt: str | None, options: dict[str, Any]) -> None:
        prompt = self.manager.prepare(tokens, salt=salt)
        assert prompt.tokens.tolist() == tokens
        self.admit(prompt, tokens, salt, options)

    @rule(tokens=prompts, salt=salts, then=st.sampled_from(["keep", "free", "preempt"]))
    def serve(self, tokens: list[int], salt: str | None, then: str) -> None:
        """A whole request, which leaves blocks in the cache."""
        handle = self.admit(self.manager.prepare(tokens, salt=salt), tokens, salt, DEFAULTS)
        if handle is None:
            return
        self.compute(handle, [])
        if then == "free":
            self.manager.free(handle)
            del self.seqs[handle]
        elif then == "preempt":
            self.give_back(handle)

    @rule(data=st.data(), tokens=prompts, rejected=st.lists(st.integers(0, 6), min_size=2, max_size=4))
    def twins(self, data: st.DataObject, tokens: list[int], rejected: list[int]) -> None:
        """One prompt computed several times in one step, committed in another order, and some of it not accepted."""
        prompt = self.manager.prepare(tokens)
        admitted = [self.admit(prompt, tokens, None, DEFAULTS | {"use_cache": False}) for _ in rejected]
        handles = [handle for handle in admitted if handle is not None]
        self.schedule_rows(handles, [len(tokens) + 1] * len(handles), 0, True, [0])
        running = [handle for handle in handles if self.seqs[handle].in_flight]
        if not running:
            return
        steps = [self.seqs[handle].in_flight[0] for handle in running]
        order = data.draw(st.permutations(range(len(running))))
        counts = [max(steps[row] - rejected[row], 0) for row in order]
        if not self.try_commit([running[row] for row in order], counts, all_ids=False):
            assert self.on_schedule
            assert self.try_commit(running, steps, all_ids=False)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), max_size=6))
    def advance(self, data: st.DataObject, ids: list[int]) -> None:
        for handle in self.draw_some(data, self.idle()):
            self.compute(handle, ids)

    def compute(self, handle: int, ids: list[int]) -> None:
        """Schedule and commit the rest of the known tokens, and `ids`, if there is room."""
        seq = self.seqs[handle]
        self.schedule_rows([handle], [seq.known - seq.scheduled + len(ids)], 0, False, ids)
        if seq.in_flight:
            assert self.try_commit([handle], list(seq.in_flight), all_ids=False)

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), fit=st.booleans())
    def schedule(self, data: st.DataObject, fit: bool) -> None:
        handles = self.draw_some(data, self.resident())
        handles = [handle for handle in handles if len(self.seqs[handle].in_flight) < 8]
        counts = [data.draw(st.integers(0, 12)) for _ in handles]
        ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        self.schedule_rows(handles, counts, data.draw(st.integers(0, 3)), fit, ids)

    def schedule_rows(
        self, handles: list[int], counts: list[int], lookahead: int, fit: bool, ids: list[int]
    ) -> None:
        """Schedule, check the arrays and write the step's K/V; tokens that nobody knows yet become `ids`, in turn."""
        room = [MAX_LENGTH - 3 - self.seqs[handle].scheduled for handle in handles]
        counts = [min(count, most) for count, most in zip(counts, room, strict=True)]
        before = self.manager.stats()
        scheduled = self.cache.schedule(
            handles, counts, lookahead=lookahead, policy="fit" if fit else "all", pad_seqs=6, pad_tokens=64
        )
        assert bool(scheduled) == (scheduled.refusal is None)
        if not scheduled and not fit:
            assert scheduled.num_seqs == 0
            assert self.manager.stats() == before
            return
        step = self.cache.step
        written: list[float] = []
        for row, (handle, count) in enumerate(zip(handles, counts, strict=True)):
            if row == scheduled.num_seqs:
                break
            seq = self.seqs[handle]
            start, end = seq.scheduled, seq.scheduled + count
            missing = end - len(seq.tokens)
            seq.tokens += [ids[i % len(ids)] for i in range(missing)]
            seq.scheduled = end
            seq.in_flight.append(count)
            written += fingerprints(seq.salt, seq.tokens)[start:end].tolist()
            assert step.seq_lens[row] == end
            assert step.positions[len(written) - count : len(written)].tolist() == list(range(start, end))
            table = self.manager.block_table(handle)
            assert step.block_tables[row, : len(table)].tolist() == table.tolist()
            assert (step.block_tables[row, len(table) :] == self.manager.null_block_id).all()
        assert len(written) == scheduled.num_tokens
        assert (step.slot_mapping[len(written) :] == -1).all()
        padded = np.full(len(step.slot_mapping), np.nan, np.float32)
        padded[: len(written)] = written
        k = np.repeat(padded[:, None, None], 8, axis=2)
        for layer in range(2):
            self.cache.write(layer, k + layer, -k[:, :, :4])

    @precondition(lambda self: any(seq.in_flight for seq in self.seqs.values()))
    @rule(data=st.data(), all_ids=st.booleans())
    def commit(self, data: st.DataObject, all_ids: bool) -> None:
        running = [handle for handle, seq in self.seqs.items() if seq.in_flight]
        handles = self.draw_some(data, running)
        counts = []
        for handle in handles:
            steps = self.seqs[handle].in_flight
            # Only the last step in flight may be cut short.
            counts.append(
                steps[0] if len(steps) > 1 else data.draw(st.integers(0, steps[0]) | st.just(steps[0]))
            )
        if not self.try_commit(handles, counts, all_ids):
            # Others have hit what a step published when it was scheduled: it can only be accepted as a whole.
            assert self.on_schedule
            assert self.try_commit(handles, [self.seqs[handle].in_flight[0] for handle in handles], all_ids)

    def try_commit(self, handles: list[int], counts: list[int], all_ids: bool) -> bool:
        ids = []
        for handle, count in zip(handles, counts, strict=True):
            seq = self.seqs[handle]
            end = seq.computed + count
            ids += seq.tokens[seq.computed if all_ids else min(seq.known, end) : end]
        before = self.manager.stats()
        try:
            self.manager.commit(np.array(handles), np.array(counts, np.int32), np.array(ids, np.int32))
        except ValueError:
            assert self.manager.stats() == before
            return False
        for handle, count in zip(handles, counts, strict=True):
            seq = self.seqs[handle]
            del seq.in_flight[0]
            seq.computed += count
            if not seq.in_flight:
                seq.scheduled = seq.computed
                del seq.tokens[seq.known :]
        return True

    @precondition(lambda self: any(seq.in_flight for seq in self.seqs.values()))
    @rule(data=st.data())
    def abort_step(self, data: st.DataObject) -> None:
        handles = self.draw_some(data, [handle for handle, seq in self.seqs.items() if seq.in_flight])
        before = self.manager.stats()
        try:
            self.manager.abort_step(handles)
        except ValueError:
            assert self.on_schedule
            assert self.manager.stats() == before
            return
        for handle in handles:
            seq = self.seqs[handle]
            seq.scheduled -= seq.in_flight.pop()
            del seq.tokens[max(seq.known, seq.scheduled) :]

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), num_children=st.integers(0, 2), written=st.integers(0, 3))
    def fork(self, data: st.DataObject, num_children: int, written: int) -> None:
        handles = self.draw_some(data, self.resident(), 3)
        children = self.manager.fork(handles, num_children).tolist()
        assert len(set(children) - set(self.seqs)) == len(children) == len(handles) * num_children
        for i, child in enumerate(children):
            self.seqs[child] = self.seqs[handles[i // num_children]].snapshot()
        if written:
            self.schedule_rows(children, [written] * len(children), 0, True, [0, 1])

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        handles = self.draw_some(data, self.idle())
        parents = [data.draw(st.integers(0, len(handles) - 1)) for _ in handles]
        self.manager.reorder(handles, parents)
        olds = [self.seqs[handle] for handle in handles]
        for row, parent in enumerate(parents):
            if parent != row:
                old = olds[row]
                self.seqs[handles[row]] = replace(
                    olds[parent].snapshot(), max_tokens=old.max_tokens, max_resident=old.max_resident
                )

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), keep=st.booleans())
    def truncate(self, data: st.DataObject, keep: bool) -> None:
        handle = data.draw(st.sampled_from(self.idle()))
        seq = self.seqs[handle]
        length = data.draw(st.integers(0, seq.known))
        before = self.manager.stats()
        try:
            self.manager.truncate(handle, length, spare="keep" if keep else "free")
        except ValueError:
            assert length % self.block_size > 0
            assert length // self.block_size in seq.holes
            assert self.manager.stats() == before
            return
        del seq.tokens[length:]
        seq.prompt_len = min(seq.prompt_len, length)
        seq.computed = min(seq.computed, length)
        seq.scheduled = min(seq.scheduled, length)
        seq.holes = {column for column in seq.holes if column * self.block_size < length}

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), unpublish=st.booleans())
    def drop_range(self, data: st.DataObject, unpublish: bool) -> None:
        handle = data.draw(st.sampled_from(self.resident()))
        seq = self.seqs[handle]
        start, end = sorted(data.draw(st.tuples(st.integers(0, seq.known), st.integers(0, seq.known))))
        before = self.manager.stats()
        dropped = self.manager.drop_range(handle, start, end, unpublish=unpublish)
        first, last = -(-start // self.block_size), min(end, seq.computed) // self.block_size
        if first < last:
            assert (dropped.start, dropped.end) == (first * self.block_size, last * self.block_size)
            if dropped.end > seq.prompt_len:
                seq.prompt_len = seq.known
            seq.holes |= set(range(first, last))
        else:
            assert dropped.start == dropped.end
        after = self.manager.stats()
        assert (
            dropped.num_blocks
            == before.live_blocks + before.held_blocks - after.live_blocks - after.held_blocks
        )

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), most=st.integers(0, 30))
    def set_max_tokens(self, data: st.DataObject, most: int) -> None:
        most = min(most, self.manager.capacity_blocks * self.manager.block_size)
        for handle in self.draw_some(data, list(self.seqs)):
            self.manager.set_max_tokens(handle, most)
            self.seqs[handle].max_tokens = most

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.sampled_from(list(self.seqs))))

    def give_back(self, handle: int) -> None:
        seq = self.seqs[handle]
        history = seq.tokens[: seq.known]
        for _ in range(2):
            (prompt,) = self.manager.preempt(handle)
            assert prompt.tokens.tolist() == history
            assert prompt.handle == handle
        self.seqs[handle] = Sequence(
            history,
            seq.salt,
            len(history),
            0,
            0,
            prompt=prompt,
            max_tokens=seq.max_tokens,
            max_resident=seq.max_resident,
        )

    @precondition(lambda self: any(seq.prompt for seq in self.seqs.values()))
    @rule(data=st.data(), options=admissions)
    def resume(self, data: st.DataObject, options: dict[str, Any]) -> None:
        waiting = [handle for handle, seq in self.seqs.items() if seq.prompt]
        seq = self.seqs[data.draw(st.sampled_from(waiting))]
        assert seq.prompt is not None
        handle = self.admit(seq.prompt, seq.tokens, seq.salt, options)
        if handle is not None and data.draw(st.booleans()):
            self.compute(handle, [])

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handles = self.draw_some(data, list(self.seqs), 2)
        before = self.manager.stats()
        freed = self.manager.free(handles)
        after = self.manager.stats()
        assert after.live_blocks == before.live_blocks - freed.num_blocks - freed.num_deferred
        assert after.held_blocks == before.held_blocks + freed.num_deferred
        again = self.manager.free(handles, missing_ok=True)
        assert (again.num_blocks, again.num_deferred) == (0, 0)
        for handle in handles:
            del self.seqs[handle]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def begin_transfer(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.resident()))
        table = self.manager.block_table(handle).tolist()
        start, end = sorted(data.draw(st.tuples(st.integers(0, len(table)), st.integers(0, len(table)))))
        transfer = self.manager.begin_transfer(handle, start, end)
        size, computed = self.block_size, self.seqs[handle].computed
        columns = [column for column in range(start, end) if table[column] != self.manager.null_block_id]
        slots = [
            table[column] * size + offset
            for column in columns
            for offset in range(size)
            if column * size + offset < computed
        ]
        blocks = [table[column] for column in columns]
        self.transfers[transfer] = Transfer(blocks, np.array(slots, np.int64), self.stored(slots))

    def stored(self, slots: Any) -> NDArray[np.float32]:
        """K of slots in layer 0."""
        k = self.cache.layers[0].k
        rows = k if self.cache.config.layout == "NHD" else k.transpose(0, 2, 1, 3)
        found: NDArray[np.float32] = rows.reshape(-1, 8)[np.array(slots, np.int64), 7].copy()
        return found

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), end=st.sampled_from(["complete", "fail", "cancel"]))
    def end_transfer(self, data: st.DataObject, end: str) -> None:
        handle = data.draw(st.sampled_from(list(self.transfers)))
        transfer = self.transfers.pop(handle)
        np.testing.assert_array_equal(self.stored(transfer.slots), transfer.content)
        before = self.manager.stats()
        freed = getattr(self.manager, f"{end}_transfer")(handle)
        after = self.manager.stats()
        assert after.held_blocks == before.held_blocks - freed
        assert after.live_blocks == before.live_blocks

    @rule(salt=st.sampled_from(["a", "b", None]), tokens=prompts)
    def forget(self, salt: str | None, tokens: list[int]) -> None:
        """Drop a namespace, or without a salt all that is cached."""
        cached = self.manager.stats().cached_blocks
        if salt is None:
            assert self.manager.reset_prefix_cache() == cached
            assert self.manager.stats().cached_blocks == 0
        else:
            self.manager.drop_namespace(salt=salt)
            assert self.manager.namespace_usage(salt=salt).cached_blocks == 0
            assert self.manager.match_prefix(self.manager.prepare(tokens, salt=salt)) == 0

    @invariant()
    def is_sound(self) -> None:
        assert self.manager.check_integrity() == []
        stats = self.manager.stats()
        total = stats.free_blocks + stats.live_blocks + stats.cached_blocks + stats.held_blocks
        assert total == stats.capacity_blocks
        assert (stats.num_seqs, stats.num_transfers) == (len(self.seqs), len(self.transfers))
        tables = {handle: self.manager.block_table(handle).tolist() for handle in self.seqs}
        named = {handle: [block for block in table if block] for handle, table in tables.items()}
        assert stats.logical_blocks == sum(map(len, named.values()))
        assert stats.promised_blocks == sum(
            max(
                0,
                min(
                    -(-(seq.max_tokens or 0) // self.block_size) - len(tables[handle]),
                    MAX_LENGTH if seq.max_resident is None else seq.max_resident - len(named[handle]),
                ),
            )
            for handle, seq in self.seqs.items()
            if seq.prompt is None
        )
        pending = self.manager.pending_transfers()
        assert dict(pending[:, :2].tolist()) == {
            handle: len(transfer.blocks) for handle, transfer in self.transfers.items()
        }
        if self.options["merge"] and any(seq.in_flight for seq in self.seqs.values()):
            return  # blocks that were merged away may be live, in no table
        live = {block for table in named.values() for block in table}
        assert stats.live_blocks == len(live)
        in_transfers = {block for transfer in self.transfers.values() for block in transfer.blocks}
        assert stats.held_blocks == len(in_transfers - live)
        for salt in SALTS:
            usage = self.manager.namespace_usage(salt=salt)
            handles = [handle for handle, seq in self.seqs.items() if seq.salt == salt]
            assert usage.num_seqs == len(handles)
            own = {block for handle in handles for block in named[handle]}
            assert usage.live_blocks == len(own)
            assert usage.logical_blocks == sum(len(named[handle]) for handle in handles)
            if handles:
                group = self.manager.sequence_usage(handles)
                assert (group.live_blocks, group.shared_blocks, group.private_blocks) == (
                    len(own),
                    0,
                    len(own),
                )
                assert group.reclaimable_blocks == len(own - in_transfers)
                assert (group.used_slots, group.sharing) == (usage.used_slots, usage.sharing)
        for handle, blocks in named.items():
            usage = self.manager.sequence_usage(handle)
            others = {block for other, table in named.items() if other != handle for block in table}
            assert (usage.live_blocks, usage.shared_blocks) == (len(blocks), len(others & set(blocks)))
            assert usage.reclaimable_blocks == len(set(blocks) - others - in_transfers)
            assert usage.allocated_slots == len(blocks) * self.block_size

    @invariant()
    def every_sequence_reads_its_own_history(self) -> None:
        np.testing.assert_array_equal(self.cache.layers[0].k[0], self.null_block)
        for handle, seq in self.seqs.items():
            cursors = self.manager.sequence(handle)
            assert (cursors.num_tokens, cursors.num_computed) == (seq.known, seq.computed)
            assert (cursors.num_scheduled, cursors.is_preempted) == (seq.scheduled, seq.prompt is not None)
            assert self.manager.tokens(handle).tolist() == seq.tokens[: seq.known]
            columns = np.arange(seq.computed) // self.block_size
            seen = ~np.isin(columns, list(seq.holes))
            expected = fingerprints(seq.salt, seq.tokens[: seq.computed])[seen]
            holes = np.flatnonzero(self.manager.block_table(handle) == self.manager.null_block_id)
            assert set(holes.tolist()) == seq.holes
            for layer in range(2):
                k, v = self.cache.gather(handle, layer)
                np.testing.assert_array_equal(k[seen, 0, 7], expected + layer)
                np.testing.assert_array_equal(v[seen, 0, 3], -expected)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.free(list(self.seqs))
        for transfer in self.transfers:
            self.manager.cancel_transfer(transfer)
        stats = self.manager.stats()
        assert (stats.live_blocks, stats.held_blocks, stats.used_slots, stats.num_seqs) == (0, 0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.capacity_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)
