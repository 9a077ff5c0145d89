"""Random walks over a cache whose newest tokens stand in a residual, against a model that keeps every token apart.

The model knows of each token what it was when it was written, in 16 bit, and whether the residual still has it; of each
block what its codes stood for when it was filled. From these it says which value every query must see.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvblocks as kv
from conformance import reference
from kvblocks.backends import get_backend
from kvblocks.backends.codecs import decode, encode, per_token

NUM_LAYERS, BLOCK_SIZE, RESIDUAL, DIM = 2, 32, 20, 8
SLOTS = RESIDUAL + BLOCK_SIZE
MAX_LENGTH = 180
LAYERS = range(NUM_LAYERS)


@dataclass
class Sequence:
    tokens: list[int]
    # Per layer and token ever written: K and V [2, 1, DIM] as the residual has them, None where it has lost them. What
    # is beyond num_computed was cut or rolled back.
    exact: list[list[np.ndarray | None]] = field(default_factory=lambda: [[] for _ in LAYERS])
    num_computed: int = 0
    was_scheduled: bool = False
    prompt: kv.Prompt | None = None  # while preempted

    def snapshot(self, num_known: int) -> "Sequence":
        exact = [list(layer) for layer in self.exact]
        return Sequence(self.tokens[:num_known], exact, self.num_computed, self.was_scheduled)


class ResidualMachine(RuleBasedStateMachine):
    kv_format = "kivi2"
    backend = "numpy"
    tolerance = 1e-5  # of an output, against its size or 0.1, whichever is more

    def __init__(self) -> None:
        super().__init__()
        config = kv.CacheConfig(
            NUM_LAYERS, 1, DIM, block_size=BLOCK_SIZE, kv_format=self.kv_format, residual_tokens=RESIDUAL
        )
        self.cache = kv.PagedKVCache(config, 40, backend=self.backend, max_seqs=8, residual_seqs=8, seed=0)
        self.manager = self.cache.manager
        self.parts = config.formats[0]
        self.sequences: dict[int, Sequence] = {}
        self.blocks: list[dict[int, np.ndarray]] = [{} for _ in LAYERS]  # id -> what its codes stand for
        self.rng = np.random.default_rng(0)

    @property
    def running(self) -> list[int]:
        return [handle for handle, seq in self.sequences.items() if seq.prompt is None]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.running))

    @precondition(lambda self: len(self.sequences) < 5)
    @rule(kind=st.integers(0, 1), length=st.integers(1, 120))
    def admit(self, kind: int, length: int) -> None:
        """Prompts of a kind are prefixes of each other, so that they hit each other's blocks."""
        tokens = [kind] * length
        answer = self.manager.allocate(self.manager.prepare(tokens))
        if answer:
            cached = answer.num_cached_tokens
            self.sequences[answer.handle] = Sequence(tokens, [[None] * cached for _ in LAYERS], cached)

    def schedule(self, handles: list[int], counts: list[int], *, append: bool = False) -> list[int] | None:
        """Schedule at once, or the first row and then the others; the first token that each row sees exactly."""
        num_first = 1 if append else len(handles)
        if not self.cache.schedule(handles[:num_first], counts[:num_first]):
            return None
        firsts = self.settle(handles[:num_first])
        if num_first < len(handles):
            if not self.cache.schedule(handles[1:], counts[1:], append=True):
                self.manager.abort_step(handles[:1])
                return None
            # The rows before are prepared again, which changes nothing.
            assert self.settle(handles[:1]) == firsts
            firsts += self.settle(handles[1:])
        return firsts

    def settle(self, handles: list[int]) -> list[int]:
        """Bring the model to what the residual of rows that were scheduled has."""
        begins = [self.sequences[handle].num_computed for handle in handles]
        for src, dst in self.cache.step.copies.tolist():
            for blocks in self.blocks:
                if src in blocks:
                    blocks[dst] = blocks[src]
        firsts = []
        for handle, begin in zip(handles, begins, strict=True):
            seq, table = self.sequences[handle], self.manager.block_table(handle)
            seq.exact = [exact[:begin] if begin <= len(exact) else [None] * begin for exact in seq.exact]
            seq.was_scheduled = True
            at = begin // BLOCK_SIZE
            suffixes = [first_of_suffix(exact) for exact in seq.exact]
            for layer, first in zip(LAYERS, suffixes, strict=True):
                for token in range(at * BLOCK_SIZE, first):
                    value = self.blocks[layer][int(table[at])][:, token - at * BLOCK_SIZE]
                    seq.exact[layer][token] = value.astype(np.float16).astype(np.float32)
            start = min(max(suffixes), at * BLOCK_SIZE)
            for exact in seq.exact:
                exact[:start] = [None] * start
            firsts.append(max(start, max(0, begin - RESIDUAL) // BLOCK_SIZE * BLOCK_SIZE))
        return firsts

    def write(self, layer: int, handles: list[int], counts: list[int]) -> np.ndarray:
        """Write random rows, into the cache, and token by token into the model; K and V in 16 bit."""
        kv_rows = self.rng.standard_normal((2, sum(counts), 1, DIM)).astype(np.float32)
        self.cache.write(layer, *kv_rows)
        kv_rows = kv_rows.astype(np.float16).astype(np.float32)
        row = 0
        for handle, count in zip(handles, counts, strict=True):
            seq, table = self.sequences[handle], self.manager.block_table(handle)
            exact = seq.exact[layer]
            begin, end = len(exact), len(exact) + count
            values = exact + list(kv_rows[:, row : row + count].swapaxes(0, 1))
            row += count
            for block in range(begin // BLOCK_SIZE, end // BLOCK_SIZE):
                whole = np.stack(values[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE], axis=1)
                self.blocks[layer][int(table[block])] = self.restored(whole)
            gone = max(0, end - SLOTS)
            seq.exact[layer] = [None] * gone + values[gone:]
        return kv_rows

    def restored(self, whole: np.ndarray) -> np.ndarray:
        """What is read back of the K and V [2, BLOCK_SIZE, 1, DIM] of a block."""
        parts = []
        for values, part in zip(whole, (self.parts.k, self.parts.v), strict=True):
            codes, scale, zero, _, _ = encode(values, part)
            zero = None if zero is None else per_token(zero, part)
            parts.append(decode(codes, part, per_token(scale, part), zero))
        return np.stack(parts)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), attend_late=st.booleans(), append=st.booleans())
    def step(self, data: st.DataObject, attend_late: bool, append: bool) -> None:
        handles = data.draw(st.lists(st.sampled_from(self.running), min_size=1, max_size=3, unique=True))
        counts = []
        for handle in handles:
            seq = self.sequences[handle]
            count = data.draw(st.sampled_from([1, 1, 2, 31, 32, 33, 70]))
            count = min(count, MAX_LENGTH - seq.num_computed)
            seq.tokens += [2] * max(0, seq.num_computed + count - len(seq.tokens))
            counts.append(count)
        if 0 in counts:
            return
        firsts = self.schedule(handles, counts, append=append)
        if firsts is None:
            return
        # Each query sees the step's own tokens exactly, older ones as the residual or the blocks have them.
        seen: list[list[tuple[np.ndarray, np.ndarray]]] = []
        fits = all(
            self.sequences[handle].num_computed + count - first <= SLOTS
            for handle, count, first in zip(handles, counts, firsts, strict=True)
        )
        order = [*LAYERS] if attend_late and fits else []
        for layer in LAYERS:
            old = [
                self.seen_before(handle, layer, first) for handle, first in zip(handles, firsts, strict=True)
            ]
            new = self.write(layer, handles, counts)
            ends = np.cumsum([0, *counts])
            seen.append(
                [
                    tuple(
                        np.concatenate([o, n])
                        for o, n in zip(old[i], new[:, ends[i] : ends[i + 1]], strict=True)
                    )
                    for i in range(len(handles))
                ]
            )
            if not order:
                self.check_attention(layer, counts, seen[layer])
        for layer in order:
            self.check_attention(layer, counts, seen[layer])
        tokens = []
        for handle, count in zip(handles, counts, strict=True):
            seq = self.sequences[handle]
            tokens += seq.tokens[seq.num_computed : seq.num_computed + count]
            seq.num_computed += count
        self.manager.commit(handles, counts, tokens)

    def seen_before(self, handle: int, layer: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of the tokens before a step as its queries see them, exactly from token `first` on."""
        seq, table = self.sequences[handle], self.manager.block_table(handle)
        values = [
            seq.exact[layer][token]
            if token >= first
            else self.blocks[layer][int(table[token // BLOCK_SIZE])][:, token % BLOCK_SIZE]
            for token in range(seq.num_computed)
        ]
        both = np.array(values, np.float64).reshape(-1, 2, 1, DIM)
        return both[:, 0], both[:, 1]

    def check_attention(
        self, layer: int, counts: list[int], seen: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        q = self.rng.standard_normal((sum(counts), 2, DIM)).astype(np.float32)
        out = self.cache.attend(layer, q)
        # The last query of a row sees everything, the first one the least.
        for row, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
            k, v = seen[row]
            for query in {end - count, end - 1}:
                expected, _ = reference.attend_query(
                    q[query].astype(np.float64), k, v, len(k) - (end - 1 - query)
                )
                np.testing.assert_allclose(
                    out[query], expected, rtol=self.tolerance, atol=self.tolerance / 10
                )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.sampled_from([1, 33, 70]), num_layers=st.integers(0, NUM_LAYERS))
    def abort(self, data: st.DataObject, count: int, num_layers: int) -> None:
        """A step that ends after some of its layers were written."""
        handle = self.pick(data)
        seq = self.sequences[handle]
        count = min(count, MAX_LENGTH - seq.num_computed)
        if count < 1 or self.schedule([handle], [count]) is None:
            return
        for layer in range(num_layers):
            self.write(layer, [handle], [count])
        self.manager.abort_step([handle])

    @precondition(lambda self: self.running and len(self.sequences) < 5)
    @rule(data=st.data(), num_children=st.integers(1, 2))
    def fork(self, data: st.DataObject, num_children: int) -> None:
        parent = self.pick(data)
        seq = self.sequences[parent]
        if seq.num_computed == 0:
            return
        for child in self.cache.fork([parent], num_children).tolist():
            self.sequences[child] = seq.snapshot(self.manager.sequence(child).num_tokens)

    @precondition(lambda self: len(self.running) > 1)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        handles = self.running
        parents = data.draw(
            st.lists(st.integers(0, len(handles) - 1), min_size=len(handles), max_size=len(handles))
        )
        self.cache.reorder(handles, np.array(parents, np.int32))
        old = [self.sequences[handle] for handle in handles]
        for handle, parent in zip(handles, parents, strict=True):
            self.sequences[handle] = old[parent].snapshot(self.manager.sequence(handle).num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        seq = self.sequences[handle]
        length = data.draw(st.integers(0, seq.num_computed))
        if not seq.was_scheduled:
            length = length // BLOCK_SIZE * BLOCK_SIZE
        self.manager.truncate([handle], [length])
        seq.tokens, seq.num_computed = seq.tokens[:length], length

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        [self.sequences[handle].prompt] = self.manager.preempt([handle])

    @rule()
    def resume(self) -> None:
        for seq in self.sequences.values():
            if seq.prompt is None or len(seq.prompt) == 0:
                continue
            answer = self.manager.allocate(seq.prompt)
            if answer:
                seq.prompt = None
                seq.num_computed = answer.num_cached_tokens

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.sequences)))
        del self.sequences[handle]
        self.manager.free([handle])

    @invariant()
    def gather_shows_what_is_kept(self) -> None:
        for handle in self.running:
            seq, table = self.sequences[handle], self.manager.block_table(handle)
            for layer in LAYERS:
                k, v = self.cache.gather(handle, layer)
                for token in {0, seq.num_computed - 1} if seq.num_computed else ():
                    written = seq.exact[layer]
                    exact = written[token] if token < len(written) else None
                    block = self.blocks[layer].get(int(table[token // BLOCK_SIZE]))
                    allowed = [] if exact is None else [exact]
                    allowed += [] if block is None else [block[:, token % BLOCK_SIZE]]
                    assert any(
                        (k[token] == value[0]).all() and (v[token] == value[1]).all() for value in allowed
                    )
        assert self.manager.check_integrity() == []


def first_of_suffix(exact: list[np.ndarray | None]) -> int:
    """The first of the tokens from which on none is lost."""
    return max((token + 1 for token, value in enumerate(exact) if value is None), default=0)


class MixedMachine(ResidualMachine):
    """K in groups of tokens, V by the token."""

    kv_format = "kivi4,int8"


class CpuMachine(ResidualMachine):
    """The same in float32."""

    backend = "cpu"
    tolerance = 1e-4


HAS_KERNELS = "kivi2" in get_backend("cpu").supported().k_formats

TestKivi2 = ResidualMachine.TestCase
TestMixed = MixedMachine.TestCase
TestCpu = pytest.mark.skipif(not HAS_KERNELS, reason="cpu refuses kivi2")(CpuMachine.TestCase)
TestKivi2.settings = TestMixed.settings = TestCpu.settings = settings(
    stateful_step_count=30, report_multiple_bugs=False
)
