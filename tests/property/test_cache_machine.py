"""Random walks over a `PagedKVCache`, against a model that knows nothing but each sequence's tokens.

The stored "K" of a token is a fingerprint of its whole prefix. So whatever was shared, copied, evicted, preempted or
rolled back, gathering a sequence must give the fingerprints of its own history, and nothing else.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import kvblocks as kv


def fingerprints(tokens: list[int]) -> NDArray[np.float32]:
    """One exact float32 a token, that stands for the prefix which ends with it."""
    return np.array(
        [zlib.crc32(str(tokens[: i + 1]).encode()) % 2**24 for i in range(len(tokens))], dtype=np.float32
    )


@dataclass
class Sequence:
    tokens: list[int]  # known ones, then those in flight
    prompt_len: int
    computed: int
    scheduled: int
    in_flight: list[int] = field(default_factory=list)
    prompt: kv.Prompt | None = None  # set while preempted

    @property
    def known(self) -> int:
        return max(self.computed, self.prompt_len)


prompts = st.builds(
    lambda stem, length, tail: [i * stem % 5 for i in range(length)] + tail,
    st.integers(0, 2),
    st.integers(0, 20),
    st.lists(st.integers(0, 1), max_size=6),
)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        capacity=st.integers(3, 20),
        watermark=st.integers(0, 2),
        caching=st.booleans(),
        layout=st.sampled_from(["NHD", "HND"]),
    )
    def build(self, block_size: int, capacity: int, watermark: int, caching: bool, layout: str) -> None:
        config = kv.CacheConfig(
            2, num_kv_heads=1, head_dim=8, head_dim_v=4, block_size=block_size, layout=layout
        )
        self.cache = kv.PagedKVCache(
            config,
            capacity + 1,
            backend="numpy",
            enable_prefix_cache=caching,
            watermark_blocks=watermark,
            max_seqs=16,
            max_tokens=256,
        )
        self.manager = self.cache.manager
        for layer in self.cache.layers:
            layer.k.fill(np.nan)
            layer.v.fill(np.nan)
        self.null_block = self.cache.layers[0].k[0].copy()
        self.seqs: dict[int, Sequence] = {}

    def resident(self) -> list[int]:
        return [handle for handle, seq in self.seqs.items() if seq.prompt is None]

    def admit(self, prompt: kv.Prompt, tokens: list[int], reserve: int | None) -> None:
        before = self.manager.stats()
        could = self.manager.can_allocate(prompt, reserve)
        assert self.manager.stats() == before
        cached = self.manager.match_prefix(prompt)
        answer = self.manager.allocate(prompt, reserve)
        assert bool(answer) == bool(could)
        if not isinstance(answer, kv.Allocated):
            assert answer == could
            assert self.manager.stats() == before
            return
        assert isinstance(could, kv.Ok)
        assert answer.num_cached_tokens == could.num_cached_tokens == cached
        assert answer.num_cached_tokens + answer.num_new_tokens == len(tokens)
        assert not tokens or answer.num_new_tokens >= 1
        assert prompt.handle in (None, answer.handle)
        self.seqs[answer.handle] = Sequence(list(tokens), len(tokens), cached, cached)

    @rule(tokens=prompts, reserve=st.none() | st.integers(0, 30))
    def allocate(self, tokens: list[int], reserve: int | None) -> None:
        prompt = self.manager.prepare(tokens)
        assert prompt.tokens.tolist() == tokens
        self.admit(prompt, tokens, reserve)

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), fit=st.booleans())
    def schedule(self, data: st.DataObject, fit: bool) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.resident()), min_size=1, max_size=4, unique=True))
        counts = [data.draw(st.integers(0, 12)) for _ in handles]
        lookahead = data.draw(st.integers(0, 3))
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
            seq.tokens += [data.draw(st.integers(0, 1)) for _ in range(missing)]
            seq.scheduled = end
            seq.in_flight.append(count)
            written += fingerprints(seq.tokens)[start:end].tolist()
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
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        running = [handle for handle, seq in self.seqs.items() if seq.in_flight]
        handles = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        counts, ids = [], []
        for handle in handles:
            seq = self.seqs[handle]
            step = seq.in_flight.pop(0)
            # Only the last step in flight may be cut short.
            count = step if seq.in_flight else data.draw(st.integers(0, step) | st.just(step))
            counts.append(count)
            end = seq.computed + count
            ids += seq.tokens[min(seq.known, end) : end]
            seq.computed = end
            if not seq.in_flight:
                seq.scheduled = end
                del seq.tokens[seq.known :]
        self.manager.commit(np.array(handles), np.array(counts, np.int32), np.array(ids, np.int32))

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), num_children=st.integers(0, 2))
    def fork(self, data: st.DataObject, num_children: int) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.resident()), min_size=1, max_size=3, unique=True))
        children = self.manager.fork(handles, num_children).tolist()
        assert len(set(children) - set(self.seqs)) == len(children) == len(handles) * num_children
        for i, child in enumerate(children):
            parent = self.seqs[handles[i // num_children]]
            computed = parent.computed
            known = parent.tokens[: parent.known]
            self.seqs[child] = Sequence(known, parent.prompt_len, computed, computed)

    @precondition(lambda self: any(not self.seqs[handle].in_flight for handle in self.resident()))
    @rule(data=st.data(), keep=st.booleans())
    def truncate(self, data: st.DataObject, keep: bool) -> None:
        idle = [handle for handle in self.resident() if not self.seqs[handle].in_flight]
        handle = data.draw(st.sampled_from(idle))
        seq = self.seqs[handle]
        length = data.draw(st.integers(0, seq.known))
        self.manager.truncate(handle, length, spare="keep" if keep else "free")
        del seq.tokens[length:]
        seq.prompt_len = min(seq.prompt_len, length)
        seq.computed = min(seq.computed, length)
        seq.scheduled = min(seq.scheduled, length)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.seqs)))
        seq = self.seqs[handle]
        history = seq.tokens[: seq.known]
        for _ in range(2):
            (prompt,) = self.manager.preempt(handle)
            assert prompt.tokens.tolist() == history
            assert prompt.handle == handle
        self.seqs[handle] = Sequence(history, len(history), 0, 0, prompt=prompt)

    @precondition(lambda self: any(seq.prompt for seq in self.seqs.values()))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        waiting = [handle for handle, seq in self.seqs.items() if seq.prompt]
        handle = data.draw(st.sampled_from(waiting))
        seq = self.seqs[handle]
        assert seq.prompt is not None
        self.admit(seq.prompt, seq.tokens, None)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handles = data.draw(st.lists(st.sampled_from(list(self.seqs)), min_size=1, unique=True))
        before = self.manager.stats()
        freed = self.manager.free(handles)
        assert self.manager.stats().live_blocks == before.live_blocks - freed
        assert self.manager.free(handles, missing_ok=True) == 0
        for handle in handles:
            del self.seqs[handle]

    @invariant()
    def is_sound(self) -> None:
        assert self.manager.check_integrity() == []
        stats = self.manager.stats()
        total = stats.free_blocks + stats.live_blocks + stats.cached_blocks + stats.held_blocks
        assert total == stats.capacity_blocks
        assert stats.num_seqs == len(self.seqs)
        tables = [self.manager.block_table(handle).tolist() for handle in self.seqs]
        assert stats.logical_blocks == sum(map(len, tables))
        assert stats.live_blocks == len({block for table in tables for block in table})

    @invariant()
    def every_sequence_reads_its_own_history(self) -> None:
        np.testing.assert_array_equal(self.cache.layers[0].k[0], self.null_block)
        for handle, seq in self.seqs.items():
            cursors = self.manager.sequence(handle)
            assert (cursors.num_tokens, cursors.num_computed) == (seq.known, seq.computed)
            assert (cursors.num_scheduled, cursors.is_preempted) == (seq.scheduled, seq.prompt is not None)
            assert self.manager.tokens(handle).tolist() == seq.tokens[: seq.known]
            expected = fingerprints(seq.tokens[: seq.computed])
            for layer in range(2):
                k, v = self.cache.gather(handle, layer)
                np.testing.assert_array_equal(k[:, 0, 7], expected + layer)
                np.testing.assert_array_equal(v[:, 0, 3], -expected)

    def teardown(self) -> None:
        self.manager.free(list(self.seqs))
        stats = self.manager.stats()
        assert (stats.live_blocks, stats.used_slots, stats.num_seqs) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.capacity_blocks


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)
