"""A small continuous-batching engine over `PagedKVCache`: read it to write your own.

Owns: which requests run, how many tokens each computes in a step, and the tokens they have. It keeps no block
id: what a step needs stands in the arrays that `cache.schedule` fills. May import: kvblocks, model, request.
Invariant: the sequence admitted first makes progress in every step, so every request ends; and a step that
raises has changed nothing but who waits and who runs, so that the next one computes the same tokens.

Policies, each a few lines below, each yours to change:
- Admission is first come, first served, and takes blocks for the whole prompt. The prompt is then computed in
  chunks, since a step computes at most `max_tokens` tokens; sequences that only decode are served first.
- When the running sequences outgrow the pool, the one admitted last gives its blocks back and goes to the
  front of the queue. On its return its tokens are computed again, less what the prefix cache still holds.
  (`allocate(.., max_tokens=..)` would promise each its room instead: no preemptions, and fewer at once.)
- The samples of a request share its prompt's blocks by `fork`, and then are sequences like any other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvblocks import Allocated, Later, Never, PagedKVCache, Prompt, Stats
from smollm2.model import F32, Llama
from smollm2.request import (
    Event,
    Failed,
    Finished,
    Request,
    RequestError,
    Token,
    check,
    choose,
    counted,
)


@dataclass(eq=False)
class Seq:
    """One line of tokens: a request's prompt, then what one of its samples adds.

    The K/V of the first `num_computed` tokens is in the cache. A token just sampled is not computed before the
    step that schedules it.
    """

    request: Request
    sample: int
    tokens: list[int]
    prompt: Prompt  # what `allocate` takes: from `prepare` at first, from `preempt` after a preemption
    rng: np.random.Generator
    seats: int = 1  # sequences that this one will be once its prompt is computed and forked
    handle: int = -1  # of the manager, from the first admission on
    num_computed: int = 0

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed


@dataclass
class Metrics:
    """What the engine saw of itself; `peak` are the pool's counters in the step with the most live blocks."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    peak_seqs: int = 0
    peak_saved_blocks: int = 0  # by sharing, in the step where it saved most
    peak: Stats | None = None

    def observe(self, stats: Stats, num_seqs: int) -> None:
        """Take in what a step of `num_seqs` sequences has, before any of them forks or gives its blocks back."""
        self.peak_seqs = max(self.peak_seqs, num_seqs)
        self.peak_saved_blocks = max(self.peak_saved_blocks, stats.logical_blocks - stats.live_blocks)
        if self.peak is None or stats.live_blocks > self.peak.live_blocks:
            self.peak = stats


class Engine:
    """Serves requests on one model and one cache, up to `max_seqs` sequences and `max_tokens` tokens a step.

    The cache's own `max_seqs` and `max_tokens` must be no smaller. Its watermark keeps blocks from admissions
    for the growth of what is running; a few save preemptions. `sampler(logits, seq)` may replace `choose`.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedKVCache,
        *,
        max_seqs: int = 16,
        max_tokens: int = 64,
        sampler: Callable[[F32, Seq], int] | None = None,
    ) -> None:
        if not 1 <= max_seqs <= max_tokens:
            # Else decoding could use up every step and a prompt would wait for ever.
            raise ValueError(f"expected 1 <= max_seqs <= max_tokens, got {max_seqs} and {max_tokens}")
        self.model, self.cache, self.manager = model, cache, cache.manager
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        self.metrics = Metrics()
        self._sampler = sampler or (lambda logits, seq: choose(logits, seq.request, seq.rng))
        self._waiting: deque[Seq] = deque()
        self._running: list[Seq] = []  # in order of admission
        self._events: list[Event] = []  # not handed out yet

    def add(self, request: Request) -> None:
        """Queue a request, hashing its prompt once. Raises RequestError if it could never be served."""
        tokens = check(request, self.model.config.vocab_size)
        prompt = self.manager.prepare(tokens)
        if problem := self._problem(request, prompt):
            raise RequestError(f"request {request.id}: {problem}")
        rng = np.random.default_rng([request.seed, 0])
        self._waiting.append(Seq(request, 0, tokens, prompt, rng, seats=request.num_samples))

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting or running, and all that happened has been told."""
        return not self._waiting and not self._running and not self._events

    def run(self) -> Iterator[Event]:
        """Step until idle; yields what happens as it happens."""
        while not self.idle:
            yield from self.step()

    def close(self) -> None:
        """End every request where it stands; all blocks go back to the pool."""
        self.manager.free([seq.handle for seq in (*self._running, *self._waiting) if seq.handle >= 0])
        self._running.clear()
        self._waiting.clear()
        self._events.clear()

    def step(self) -> list[Event]:
        """One forward pass over a mixed batch of prompt chunks and decoding sequences; what came of it."""
        if batch := self._schedule():
            self._compute(batch)
        events, self._events = self._events, []
        return events

    def _compute(self, batch: list[tuple[Seq, int]]) -> None:
        """Compute what is scheduled, commit it, and sample the next tokens."""
        seqs, counts = [seq for seq, _ in batch], [count for _, count in batch]
        handles = [seq.handle for seq in seqs]
        ids = [token for seq, n in batch for token in seq.tokens[seq.num_computed : seq.num_computed + n]]
        # Logits are needed only where a sequence has no token left to compute.
        ready = [i for i, (seq, count) in enumerate(batch) if seq.num_left == count]
        last_rows = np.cumsum(counts) - 1
        try:
            hidden = self.model.forward(ids, self.cache.step.positions, self._attention)
            logits = self.model.logits(hidden[last_rows[ready]])
        except BaseException:
            self.manager.abort_step(handles)
            raise
        self.manager.commit(handles, counts, ids)
        for seq, count in batch:
            seq.num_computed += count
        self.metrics.steps += 1
        self.metrics.computed_tokens += len(ids)
        self.metrics.observe(self.manager.stats(), len(batch))
        samples = [(seq, row) for i, row in zip(ready, logits, strict=True) for seq in self._fork(seqs[i])]
        for seq, row in samples:
            self._sample(seq, row)

    def _attention(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        # Write first: a token attends to itself and to the tokens of its chunk before it.
        self.cache.write(layer, k, v)
        out: F32 = self.cache.attend(layer, q)
        return out

    def _schedule(self) -> list[tuple[Seq, int]]:
        """Choose this step's sequences and their numbers of tokens; make room; fill the step's arrays."""
        budget, batch = self.max_tokens, []
        for seq in sorted(self._running, key=lambda seq: seq.num_left > 1):
            if count := min(seq.num_left, budget):
                batch.append((seq, count))
                budget -= count
        while budget and (admitted := self._admit()):
            count = min(admitted.num_left, budget)
            batch.append((admitted, count))
            budget -= count

        while batch:
            answer = self.cache.schedule([seq.handle for seq, _ in batch], [count for _, count in batch])
            if answer:
                break
            victim = self._running[-1]
            batch = [(seq, count) for seq, count in batch if seq is not victim]
            if len(self._running) > 1:
                self._preempt(victim)
            else:
                self._refuse(victim, answer.refusal)
        return batch

    def _admit(self) -> Seq | None:
        """Admit the head of the queue, if there are seats and blocks for it."""
        while self._waiting:
            seq = self._waiting[0]
            if sum(other.seats for other in self._running) + seq.seats > self.max_seqs:
                return None
            answer = self.manager.allocate(seq.prompt)
            if isinstance(answer, Later) and self._running:
                return None  # its blocks come when a running sequence ends
            self._waiting.popleft()
            if isinstance(answer, Allocated):
                seq.handle, seq.num_computed = answer.handle, answer.num_cached_tokens
                self._running.append(seq)
                return seq
            self._refuse(seq, answer)
        return None

    def _preempt(self, seq: Seq) -> None:
        self._running.remove(seq)
        [seq.prompt] = self.manager.preempt([seq.handle])
        seq.num_computed = 0
        self._waiting.appendleft(seq)

    def _fork(self, seq: Seq) -> list[Seq]:
        """All samples of a request whose prompt has just been computed; else the sequence alone."""
        if seq.seats == 1:
            return [seq]
        handles = self.cache.fork([seq.handle], seq.seats - 1)
        seq.seats = 1
        children = [
            Seq(
                seq.request,
                sample,
                list(seq.tokens),
                seq.prompt,
                np.random.default_rng([seq.request.seed, sample]),
                handle=int(handle),
                num_computed=seq.num_computed,
            )
            for sample, handle in enumerate(handles, start=1)
        ]
        after = self._running.index(seq) + 1
        self._running[after:after] = children
        return [seq, *children]

    def _sample(self, seq: Seq, logits: F32) -> None:
        """Append a token to a sequence, or end the sequence if the sampler gives none."""
        try:
            token = int(self._sampler(logits, seq))
            if not 0 <= token < len(logits):
                raise ValueError(f"{token} is no token id")
        except Exception as error:  # noqa: BLE001 - whatever a sampler raises is the matter of one request
            self._fail(seq, f"no token could be sampled: {error!r}")
            return
        seq.tokens.append(token)
        self.metrics.sampled_tokens += 1
        request, tokens = seq.request, seq.tokens[len(seq.request.prompt) :]
        self._events.append(Token(request.id, seq.sample, token))
        if token in request.stop_ids or len(tokens) == request.max_new_tokens:
            reason: Literal["stop", "length"] = "stop" if token in request.stop_ids else "length"
            self._events.append(Finished(request.id, seq.sample, reason, tokens))
            self._end(seq)

    def _refuse(self, seq: Seq, refusal: object) -> None:
        # `add` has made sure that one sequence fits: what it lacks is held outside this engine.
        self._fail(
            seq, f"refused although nothing else runs ({refusal}): are blocks held outside the engine?"
        )

    def _fail(self, seq: Seq, message: str) -> None:
        # Before its fork, a sequence stands for all samples of its request.
        samples = range(seq.sample, seq.sample + seq.seats)
        self._events += [Failed(seq.request.id, sample, message) for sample in samples]
        self._end(seq)

    def _end(self, seq: Seq) -> None:
        if seq in self._running:
            self._running.remove(seq)
        if seq.handle >= 0:
            self.manager.free([seq.handle])

    def _problem(self, request: Request, prompt: Prompt) -> str | None:
        """Why a request can never be served, if it cannot."""
        if any(seq.request.id == request.id for seq in (*self._waiting, *self._running)):
            return "a request of this id has not ended yet"
        if request.num_samples > self.max_seqs:
            return f"{request.num_samples} samples, but this engine runs 1 to {self.max_seqs} at once"
        wanted = f"{counted(len(prompt), 'prompt token')} and {request.max_new_tokens:,} new"
        # The last token sampled is never computed.
        num_tokens = len(prompt) + request.max_new_tokens - 1
        if num_tokens > self.model.config.context_length:
            return (
                f"{wanted} exceed the model's context of {counted(self.model.config.context_length, 'token')}"
            )
        answer = self.manager.can_allocate(prompt, num_tokens)
        if isinstance(answer, Never):
            need = f"{counted(answer.need_blocks, 'block')} of {counted(self.manager.block_size, 'token')}"
            has = f"the pool has {answer.capacity_blocks}: enlarge it or ask for fewer"
            return f"{wanted} need {need}, but {has}"
        return None
