"""The simulation against a naive one, step by step and request by request."""

import math
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblocks.replay.memory import Admitted, Memory, Refused
from kvblocks.replay.paged import PagedMemory
from kvblocks.replay.reservations import RESERVATIONS, ReservedMemory
from kvblocks.replay.simulate import Engine, Run, _Simulation, simulate
from kvblocks.traces.trace import Trace

from .helpers import make_trace

BLOCK = 4


class NaiveEngine:
    """One step at a time over counts of blocks: what docs/replay.md says, written down as it stands there."""

    def __init__(self, trace: Trace, capacity: int, engine: Engine, watermark: int, max_context: int) -> None:
        self.capacity = capacity
        self.now = 0.0
        self.sums = dict.fromkeys(("allocated", "used", "running", "waiting"), 0.0)
        self.peaks = dict.fromkeys(("allocated", "running"), 0)
        self.first_token: dict[int, float] = {}
        self.queued: dict[int, float] = {}
        self.completed = self.rejected = self.preemptions = self.recomputed = 0
        self.first_oom: float | None = None
        prompt, final = trace.prompt_tokens.tolist(), trace.final_tokens.tolist()
        arrivals = engine.mode == "arrivals"
        assert trace.arrival_s is not None
        times = trace.arrival_s.tolist() if arrivals else [0.0] * len(trace)
        tick = engine.inter_token_s if arrivals else 1.0
        running: list[list[int]] = []  # [request, stored], in order of admission
        preempted: list[list[int]] = []
        waiting: deque[int] = deque()
        ahead = deque(range(len(trace)))
        refused = False

        def blocks(tokens: int) -> int:
            return -(-tokens // BLOCK)

        def free() -> int:
            return capacity - sum(blocks(stored) for _, stored in running)

        while running or preempted or waiting or ahead:
            if not (running or preempted or waiting) and times[ahead[0]] > self.now:
                self.now = times[ahead[0]]
            while ahead and times[ahead[0]] <= self.now:
                waiting.append(ahead.popleft())
            while running and sum(stored % BLOCK == 0 for _, stored in running) > free():
                self.first_oom = self.now if self.first_oom is None else self.first_oom
                preempted.append(running.pop())
                self.preemptions += 1
                refused = True
            for row in running:
                row[1] += 1
            if not running:
                refused = False
            computed, admitted = 0, []
            while (preempted or waiting) and not refused:
                if engine.max_seqs is not None and len(running) >= engine.max_seqs:
                    break
                if engine.step_tokens is not None and computed >= engine.step_tokens:
                    break
                kept = watermark if running else 0
                if preempted:
                    request, stored = preempted[-1]
                    if blocks(stored + 1) > free() - kept:
                        refused = True
                        break
                    preempted.pop()
                    running.append([request, stored + 1])
                    self.recomputed += stored
                    computed += stored
                    continue
                request = waiting[0]
                if final[request] > max_context or blocks(final[request]) > capacity:
                    waiting.popleft()
                    self.rejected += 1
                    continue
                if blocks(prompt[request]) > free() - kept:
                    self.first_oom = self.now if self.first_oom is None else self.first_oom
                    refused = True
                    break
                waiting.popleft()
                running.append([request, prompt[request]])
                computed += prompt[request]
                admitted.append(request)
                self.queued[request] = self.now
            if not running:
                continue
            duration = tick + (computed / engine.prefill_tokens_per_s if arrivals else 0)
            state = {
                "allocated": BLOCK * (capacity - free()),
                "used": sum(stored for _, stored in running),
                "running": len(running),
                "waiting": len(waiting) + len(preempted),
            }
            for name, value in state.items():
                self.sums[name] += value * duration
            self.peaks = {name: max(peak, state[name]) for name, peak in self.peaks.items()}
            self.now += duration
            self.first_token |= dict.fromkeys(admitted, self.now)
            left = [row for row in running if row[1] < final[row[0]]]
            self.completed += len(running) - len(left)
            refused = refused and len(left) == len(running)
            running = left


requests = st.lists(
    st.tuples(
        st.floats(0, 3, allow_subnormal=False),
        st.integers(1, 30),
        st.integers(1, 25),
        st.just(()),
    ),
    min_size=1,
    max_size=14,
).map(sorted)

engines = st.builds(
    Engine,
    mode=st.sampled_from(["arrivals", "saturated"]),
    prefill_tokens_per_s=st.just(256.0),
    inter_token_s=st.just(0.0625),
    step_tokens=st.sampled_from([None, 20]),
    max_seqs=st.sampled_from([None, 3]),
)


@given(requests, engines, st.integers(3, 20), st.sampled_from([0, 0, 2]), st.sampled_from([35, 2**20]))
def test_a_paged_replay_is_that_of_the_naive_engine(
    rows: list[tuple[float, int, int, tuple[int, ...]]],
    engine: Engine,
    capacity: int,
    watermark: int,
    max_context: int,
) -> None:
    # Times on a grid that floats hit exactly, so that both meet an arrival in the same step.
    trace = make_trace([(round(row[0] * 16) / 16, *row[1:]) for row in rows])
    naive = NaiveEngine(trace, capacity, engine, watermark, max_context)
    memory = PagedMemory(trace, BLOCK, capacity, watermark_blocks=watermark)
    run = simulate(trace, memory, engine, max_context)
    account = run.account
    assert run.completed == naive.completed
    assert run.too_long + run.never_fits == naive.rejected
    assert run.preemptions == naive.preemptions
    assert run.recomputed_tokens == naive.recomputed
    assert account.time == pytest.approx(naive.now)
    for name, value in naive.sums.items():
        assert getattr(account, name) == pytest.approx(value), name
    assert account.peak_allocated == naive.peaks["allocated"]
    assert memory.peak_slots == naive.peaks["allocated"]
    assert account.peak_running == naive.peaks["running"]
    for found, expected in ((run.first_token_s, naive.first_token), (run.queued_s, naive.queued)):
        assert {i: float(t) for i, t in enumerate(found) if not math.isnan(t)} == pytest.approx(expected)
    assert (run.first_oom is None) == (naive.first_oom is None)
    if run.first_oom is not None:
        assert run.first_oom.time == pytest.approx(naive.first_oom)
        assert run.first_oom.short_slots > 0
    assert memory.check() == []


class _StepByStep(_Simulation):
    def _steps_alone(self) -> int:
        return 1


def numbers(run: Run) -> dict[str, Any]:
    account = vars(run.account) | {"samples": None, "running_quantiles": None, "stored_quantiles": None}
    arrays = {"first_token_s": run.first_token_s.tolist(), "queued_s": run.queued_s.tolist()}
    return {k: v for k, v in (vars(run) | account | arrays).items() if k not in ("account", "interrupted")}


chains = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 24), st.integers(1, 25), st.integers(0, 2), st.integers(0, 6)),
    min_size=1,
    max_size=14,
)


def chained(rows: list[tuple[float, int, int, int, int]], tokens_per_id: int) -> Trace:
    """Requests whose first few ids are those of one of three conversations."""
    made = []
    fresh = 1000
    for time, prompt, output, family, shared in sorted(rows):
        whole = -(-prompt // tokens_per_id)
        ids = [100 * family + at if at < shared else fresh + at for at in range(whole)]
        fresh += whole
        made.append((round(time * 16) / 16, prompt, output, ids))
    return make_trace(made, tokens_per_id)


@given(
    chains,
    engines,
    st.integers(6, 25),
    st.booleans(),
    st.sampled_from([2, 6, 8]),
    st.sampled_from([None, None, 25]),
)
def test_steps_taken_together_are_the_same_as_one_by_one(
    rows: list[tuple[float, int, int, int, int]],
    engine: Engine,
    capacity: int,
    decoded: bool,
    tokens_per_id: int,
    declared: int | None,
) -> None:
    trace = chained(rows, tokens_per_id)

    def memory() -> PagedMemory:
        return PagedMemory(
            trace, BLOCK, capacity, prefix_cache=True, decoded=decoded, declared_output_tokens=declared
        )

    slow_memory, fast_memory = memory(), memory()
    slow = _StepByStep(trace, slow_memory, engine, None, lambda done: None)
    slow.run()
    fast = simulate(trace, fast_memory, engine)
    assert fast_memory.lookups() == slow_memory.lookups()
    # Nobody makes more than 25 tokens: who declares so is never preempted.
    assert declared is None or fast.preemptions == 0
    expected = numbers(slow.result)
    for name, value in numbers(fast).items():
        assert value == pytest.approx(expected[name], nan_ok=True), name
    assert fast_memory.check() == []
    assert fast_memory.peak_slots == slow_memory.peak_slots


@given(requests, st.sampled_from(list(RESERVATIONS)), st.integers(40, 300), engines)
def test_reservations_waste_what_their_definition_says(
    rows: list[tuple[float, int, int, tuple[int, ...]]], policy: str, capacity: int, engine: Engine
) -> None:
    trace = make_trace([(round(row[0] * 16) / 16, *row[1:]) for row in rows])
    longest = int(trace.final_tokens.max())
    memory = ReservedMemory(trace, policy, longest, capacity)
    run = simulate(trace, memory, replace(engine, mode="saturated"))
    account = run.account
    assert run.completed + run.never_fits == len(trace)
    assert run.preemptions == 0
    assert memory.peak_slots <= capacity
    served = [i for i in range(len(trace)) if not math.isnan(run.queued_s[i])]
    prompt, output, final = (
        a[served].tolist() for a in (trace.prompt_tokens, trace.output_tokens, trace.final_tokens)
    )
    stored = sum(p + s for p, o in zip(prompt, output, strict=True) for s in range(o))
    reserved = sum(RESERVATIONS[policy](p, o, longest) * o for p, o in zip(prompt, output, strict=True))
    at_the_end = sum(f * o for f, o in zip(final, output, strict=True))
    assert (account.used, account.allocated) == (stored, reserved)
    assert account.later == at_the_end - stored
    assert account.never + account.internal == reserved - at_the_end
    assert (account.internal if policy in ("contiguous", "pow2", "oracle") else account.never) == 0


def test_admission_that_reserves_never_preempts() -> None:
    trace = make_trace([(0, 8, 12, ()), (0, 8, 12, ()), (0, 8, 12, ())])
    tight = simulate(trace, PagedMemory(trace, BLOCK, 8), Engine())
    assert tight.preemptions > 0
    memory = PagedMemory(trace, BLOCK, 8, declared_output_tokens=12)
    reserving = simulate(trace, memory, Engine())
    assert (reserving.preemptions, reserving.completed) == (0, 3)
    # One request may become 19 tokens, 5 blocks: two of them do not fit into 8.
    assert reserving.account.peak_running == 1
    assert not PagedMemory(trace, BLOCK, 8, declared_output_tokens=26).fits(0)


def test_swapping_copies_what_recomputing_computes() -> None:
    trace = make_trace([(0, 8, 12, ()), (0, 8, 12, ())])
    base = Engine("arrivals", prefill_tokens_per_s=1e9, inter_token_s=1.0)
    recomputed = simulate(trace, PagedMemory(trace, BLOCK, 8), base)
    swapped = simulate(trace, PagedMemory(trace, BLOCK, 8), replace(base, swap_tokens_per_s=10.0))
    assert recomputed.recomputed_tokens == swapped.swapped_in_tokens == swapped.swapped_out_tokens > 0
    assert swapped.recomputed_tokens == 0
    both_ways = 2 * swapped.swapped_in_tokens / 10.0
    assert swapped.account.time == pytest.approx(recomputed.account.time + both_ways, abs=1e-6)


def test_time_to_first_token_is_queue_and_prefill() -> None:
    trace = make_trace([(0.0, 100, 2, ()), (0.25, 50, 1, ())])
    engine = Engine("arrivals", prefill_tokens_per_s=100.0, inter_token_s=0.5)
    run = simulate(trace, PagedMemory(trace, BLOCK), engine)
    # The first step computes 100 tokens: 1.5 s. The second request is admitted then, and computed in 0.5 + 0.5 s.
    assert run.first_token_s.tolist() == [1.5, 2.5]
    assert run.queued_s.tolist() == [0.0, 1.5]


def test_decoded_blocks_are_hit_by_the_next_turn() -> None:
    turns = [(0.0, 9, 8, [1, 2, 3]), (10.0, 20, 2, [1, 2, 4, 5, 6])]
    trace = make_trace(turns, BLOCK)
    engine = Engine("arrivals", inter_token_s=0.1)
    found = []
    for decoded in (False, True):
        memory = PagedMemory(trace, BLOCK, prefix_cache=True, decoded=decoded)
        simulate(trace, memory, engine)
        found.append(memory.lookups().hit_tokens)
    # The first turn stores 9 + 8 - 1 = 16 tokens: 4 full blocks instead of the 2 of the prompt.
    assert found == [8, 16]


class _Interrupting:
    """A memory whose user loses patience at the third admission."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._admissions = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def admit(self, request: int) -> Admitted | Refused:
        self._admissions += 1
        if self._admissions == 3:
            raise KeyboardInterrupt
        return self._memory.admit(request)


def test_an_interrupted_run_has_what_it_got_so_far() -> None:
    trace = make_trace([(float(i), 8, 2, ()) for i in range(5)])
    run = simulate(trace, _Interrupting(PagedMemory(trace, BLOCK)), Engine("arrivals"))
    assert run.interrupted
    assert run.completed == 2
    assert np.isnan(run.first_token_s[2:]).all()


def test_arrivals_need_times() -> None:
    trace = replace(make_trace([(0, 8, 2, ())]), arrival_s=None)
    with pytest.raises(ValueError, match="has no times of arrival"):
        simulate(trace, PagedMemory(trace, BLOCK), Engine("arrivals"))
