"""A simulated engine: continuous batching of a trace over one KV memory.

Owns `Engine`, `Run` and `simulate`. Imports account, memory, running and trace. Invariant: time moves in steps; each
running request stores one more token a step. Steps in which nobody comes or goes are taken together, and accounted
one by one.

One step: the running requests grow by one token (the newest are preempted where the memory is short); then those that
wait are admitted in order, preempted ones first, until one does not fit; then the step takes its time, in which every
admitted prompt is computed and every request makes one token; then the finished leave.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvblocks.replay.account import Account
from kvblocks.replay.memory import Memory, Refused
from kvblocks.replay.running import Running
from kvblocks.traces.trace import Trace

Mode = Literal["arrivals", "saturated"]
_TOLD_EVERY: Final = 64


@dataclass(frozen=True)
class Engine:
    """The model of time, and limits.

    mode "saturated": all requests wait from the start, and time is counted in steps. "arrivals": they come when the
    trace says; a step takes inter_token_s plus what prompts to compute take at prefill_tokens_per_s. step_tokens: no
    further prompt is admitted in a step that has so many to compute. max_seqs: requests at once. swap_tokens_per_s:
    preempted requests are copied out and in at this rate (None: computed anew).
    """

    mode: Mode = "saturated"
    prefill_tokens_per_s: float = 20_000.0
    inter_token_s: float = 0.03
    step_tokens: int | None = None
    max_seqs: int | None = None
    swap_tokens_per_s: float | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """The first time that memory was short: when, for what, by how much, and what was there."""

    time: float
    kind: Literal["admission", "growth"]
    short_slots: int
    unusable_slots: int
    running: int
    waiting: int
    stored_tokens: int


@dataclass
class Run:
    """What came of one simulation; times in the account's unit, NaN for requests that did not get so far."""

    account: Account
    first_token_s: NDArray[np.float64]
    queued_s: NDArray[np.float64]
    completed: int = 0
    too_long: int = 0
    never_fits: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    skipped_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    first_oom: OutOfMemory | None = None
    interrupted: bool = False


@dataclass
class _State:
    next: int = 0  # The first request that has not been looked at.
    arrived: int = 0  # Requests that have arrived.
    preempted: deque[tuple[int, int, int]] = field(
        default_factory=deque
    )  # (request, handle, stored), newest last.
    refused: bool = False  # The first that waits was refused, and nobody has left since.
    extra_s: float = 0.0  # What the step takes beyond the inter-token time.


def simulate(
    trace: Trace,
    memory: Memory,
    engine: Engine,
    max_context: int | None = None,
    tell: Callable[[int], Any] = lambda done: None,
) -> Run:
    """Serve the trace. Requests of more than max_context stored tokens, and those that never fit, are rejected.

    tell: called now and then with the number of requests that have ended since. A KeyboardInterrupt ends the run,
    which then says so. O(requests * log + steps + work of the memory).
    """
    if engine.mode == "arrivals" and trace.arrival_s is None:
        raise ValueError(f"trace {trace.name} has no times of arrival")
    simulation = _Simulation(trace, memory, engine, max_context, tell)
    try:
        simulation.run()
    except KeyboardInterrupt:
        simulation.result.interrupted = True
    return simulation.result


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        memory: Memory,
        engine: Engine,
        max_context: int | None,
        tell: Callable[[int], Any],
    ) -> None:
        self.trace, self.memory, self.engine, self.tell = trace, memory, engine, tell
        self.max_context = math.inf if max_context is None else max_context
        self.running = Running()
        self.state = _State(arrived=len(trace) if engine.mode == "saturated" else 0)
        self.final = trace.final_tokens
        nothing = np.full(len(trace), math.nan)
        self.result = Run(Account(), nothing, nothing.copy())
        self.told = 0
        self.tick = engine.inter_token_s if engine.mode == "arrivals" else 1.0

    @property
    def now(self) -> float:
        return self.result.account.time

    @property
    def num_waiting(self) -> int:
        return len(self.state.preempted) + self.state.arrived - self.state.next

    def run(self) -> None:
        state, total = self.state, len(self.trace)
        while state.next < total or state.preempted or self.running.n:
            self._arrive()
            if not self.running.n and not self.num_waiting:
                arrival = self.trace.arrival_s
                assert arrival is not None
                self.result.account.idle(float(arrival[state.next]))
                self._arrive()
            self._grow()
            admitted = self._admit()
            if self.running.n:
                self._account(1, self.tick + state.extra_s)
            state.extra_s = 0.0
            self.result.first_token_s[admitted] = self.now
            self._finish()
        self.tell(self._num_ended() - self.told)

    def _arrive(self) -> None:
        if self.trace.arrival_s is not None and self.engine.mode == "arrivals":
            arrived = np.searchsorted(self.trace.arrival_s, self.now, side="right")
            self.state.arrived = max(self.state.arrived, int(arrived))

    def _steps_alone(self) -> int:
        """Steps until somebody may leave or come."""
        if self.num_waiting and not self._is_blocked():
            return 1
        steps = int((self.running.final - self.running.stored).min())
        arrival = self.trace.arrival_s
        if not self.num_waiting and self.state.next < len(self.trace) and arrival is not None:
            until = (float(arrival[self.state.next]) - self.now) / self.tick
            steps = min(steps, 1 + max(0, math.ceil(until)))
        return steps

    def _is_blocked(self) -> bool:
        limit = self.engine.max_seqs
        return self.state.refused or (limit is not None and self.running.n >= limit)

    def _grow(self) -> None:
        while self.running.n:
            steps = self._steps_alone()
            grown = self.memory.grow(self.running, steps)
            if grown:
                self.running.stored[:] += grown
                if grown > 1:
                    self._account(grown, self.tick, grown - 1)
                    self._arrive()
                return
            self._out_of_memory("growth", Refused(self.memory.shortage(self.running)))
            self._preempt()

    def _preempt(self) -> None:
        running, result = self.running, self.result
        row = running.newest()
        request, handle, stored = (
            int(running.request[row]),
            int(running.handle[row]),
            int(running.stored[row]),
        )
        self.memory.preempt(handle)
        self.state.preempted.append((request, handle, stored))
        self.state.refused = True
        running.remove(np.array([row]))
        result.preemptions += 1
        if self.engine.swap_tokens_per_s is not None:
            result.swapped_out_tokens += stored
            self.state.extra_s += stored / self.engine.swap_tokens_per_s

    def _admit(self) -> list[int]:
        """Admit who fits; the requests admitted for the first time."""
        state, engine = self.state, self.engine
        if not self.running.n:
            state.refused = False
        admitted: list[int] = []
        tokens = 0
        while self.num_waiting and not self._is_blocked():
            if engine.step_tokens is not None and tokens >= engine.step_tokens:
                break
            if state.preempted:
                new = self._resume()
            elif self._reject(state.next):
                state.next += 1
                continue
            else:
                new = self._start(admitted)
            if new is None:
                state.refused = True
                break
            tokens += new
        return admitted

    def _reject(self, request: int) -> bool:
        if self.final[request] > self.max_context:
            self.result.too_long += 1
            return True
        if not self.memory.fits(request):
            self.result.never_fits += 1
            return True
        return False

    def _start(self, admitted: list[int]) -> int | None:
        request, result = self.state.next, self.result
        answer = self.memory.admit(request)
        if isinstance(answer, Refused):
            self._out_of_memory("admission", answer)
            return None
        self.state.next += 1
        prompt = int(self.trace.prompt_tokens[request])
        self.running.add(request, answer.handle, prompt, int(self.final[request]), answer.reserved_slots)
        new = prompt - answer.cached_tokens
        result.prefill_tokens += new
        result.skipped_tokens += answer.cached_tokens
        result.queued_s[request] = self.now
        admitted.append(request)
        self._compute(new)
        return new

    def _resume(self) -> int | None:
        request, handle, stored = self.state.preempted[-1]
        answer = self.memory.resume(request, handle)
        if isinstance(answer, Refused):
            self._out_of_memory("admission", answer)
            return None
        self.state.preempted.pop()
        self.running.add(request, answer.handle, stored + 1, int(self.final[request]), answer.reserved_slots)
        lost = stored - answer.cached_tokens
        if self.engine.swap_tokens_per_s is not None:
            self.result.swapped_in_tokens += lost
            self.state.extra_s += lost / self.engine.swap_tokens_per_s
            return 0
        self.result.recomputed_tokens += lost
        self._compute(lost)
        return lost

    def _compute(self, num_tokens: int) -> None:
        if self.engine.mode == "arrivals":
            self.state.extra_s += num_tokens / self.engine.prefill_tokens_per_s

    def _account(self, num_steps: int, duration: float, counted: int | None = None) -> None:
        """Account the first `counted` (default: all) of the last num_steps steps, of this duration each."""
        running = self.running
        counted = num_steps if counted is None else counted
        occupancy = self.memory.occupancy(running, num_steps).head(counted)
        stored = int(running.stored.sum()) - running.n * np.arange(num_steps - 1, -1, -1)
        waiting = np.full(counted, self.num_waiting)
        if counted > 1 and self.engine.mode == "arrivals" and self.trace.arrival_s is not None:
            begin = self.now + duration * np.arange(counted)
            come = np.searchsorted(self.trace.arrival_s, begin, side="right") - self.state.arrived
            waiting += np.maximum(come, 0)
        durations = np.full(counted, duration)
        self.result.account.add(occupancy, stored[:counted], durations, running.n, waiting)

    def _finish(self) -> None:
        rows = np.flatnonzero(self.running.stored == self.running.final)
        if len(rows):
            self.memory.release(self.running.handle[rows])
            self.result.completed += len(rows)
            self.result.output_tokens += int(self.trace.output_tokens[self.running.request[rows]].sum())
            self.running.remove(rows)
            self.state.refused = False
        ended = self._num_ended()
        if ended - self.told >= _TOLD_EVERY:
            self.tell(ended - self.told)
            self.told = ended

    def _num_ended(self) -> int:
        return self.result.completed + self.result.too_long + self.result.never_fits

    def _out_of_memory(self, kind: Literal["admission", "growth"], refused: Refused) -> None:
        if self.result.first_oom is None:
            self.result.first_oom = OutOfMemory(
                self.now,
                kind,
                refused.short_slots,
                refused.unusable_slots,
                self.running.n,
                self.num_waiting,
                int(self.running.stored.sum()),
            )
