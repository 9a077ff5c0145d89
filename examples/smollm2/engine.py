"""A small continuous-batching engine over `PagedKVCache`: read it to write your own.

Owns: which requests run, how many tokens each computes in a step, and the tokens they have. It keeps no block
id: what a step needs stands in the arrays that `cache.schedule` fills. May import: kvblocks, model, request.
Invariant: the sequence admitted first makes progress in every step, so every request ends.

Policies, each a few lines below, each yours to change:
- Admission is first come, first served, and takes blocks for the whole prompt. The prompt is then computed in
  chunks, since a step computes at most `max_tokens` tokens; sequences that only decode are served first.
- When the running sequences outgrow the pool, the one admitted last gives its blocks back and goes to the
  front of the queue. On its return its tokens are computed again, less what the prefix cache still holds.
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
from smollm2.request import Event, Failed, Finished, Request, RequestError, Token, choose


@dataclass(eq=False)
class Seq:
    """One line of tokens: a request's prompt, then what one of its samples adds.

    num_computed <= num_known <= len(tokens): those whose K/V is in the cache, those whose ids the manager has
    been told, and all. A token just sampled is neither computed nor known before the step that schedules it.
    """

    request: Request
    sample: int
    tokens: list[int]
    prompt: Prompt  # what `allocate` takes: from `prepare` at first, from `preempt` after a preemption
    rng: np.random.Generator
    seats: int = 1  # sequences that this one will be once its prompt is computed and forked
    handle: int = -1  # of the manager, from the first admission on
    num_computed: int = 0
    num_known: int = 0

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
        """Take a step's counters in, before its finished sequences give their blocks back."""
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

    def add(self, request: Request) -> None:
        """Queue a request, hashing its prompt once. Raises RequestError if it could never be served."""
        tokens = list(request.prompt)
        prompt = self.manager.prepare(tokens)
        if problem := self._problem(request, prompt):
            raise RequestError(f"request {request.id}: {problem}")
        rng = np.random.default_rng([request.seed, 0])
        self._waiting.append(Seq(request, 0, tokens, prompt, rng, seats=request.num_samples))

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting or running."""
        return not self._waiting and not self._running

    def run(self) -> Iterator[Event]:
        """Step until idle; yields what happens as it happens."""
        while not self.idle:
            yield from self.step()

    def close(self) -> None:
        """End every request where it stands; all blocks go back to the pool."""
        self.manager.free([seq.handle for seq in (*self._running, *self._waiting) if seq.handle >= 0])
        self._running.clear()
        self._waiting.clear()

    def step(self) -> list[Event]:
        """One forward pass over a mixed batch of prompt chunks and decoding sequences; what came of it."""
        events: list[Event] = []
        batch = self._schedule(events)
        if not batch:
            return events
        seqs, counts = [seq for seq, _ in batch], [count for _, count in batch]
        ids = [token for seq, n in batch for token in seq.tokens[seq.num_computed : seq.num_computed + n]]
        hidden = self.model.forward(ids, self.cache.step.positions, self._attention)
        self._commit(batch)
        self.metrics.steps += 1
        self.metrics.computed_tokens += len(ids)

        # Logits are needed only where a sequence has no token left to compute.
        last_rows = np.cumsum(counts) - 1
        ready = [i for i, seq in enumerate(seqs) if seq.num_left == 0]
        logits = self.model.logits(hidden[last_rows[ready]])
        samples = [(seq, row) for i, row in zip(ready, logits, strict=True) for seq in self._fork(seqs[i])]
        self.metrics.observe(self.manager.stats(), len(self._running))
        for seq, row in samples:
            self._advance(seq, self._sampler(row, seq), events)
        return events

    def _attention(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        # Write first: a token attends to itself and to the tokens of its chunk before it.
        self.cache.write(layer, k, v)
        out: F32 = self.cache.attend(layer, q)
        return out

    def _schedule(self, events: list[Event]) -> list[tuple[Seq, int]]:
        """Choose this step's sequences and their numbers of tokens; make room; fill the step's arrays."""
        budget, batch = self.max_tokens, []
        for seq in sorted(self._running, key=lambda seq: seq.num_left > 1):
            if count := min(seq.num_left, budget):
                batch.append((seq, count))
                budget -= count
        while budget and (admitted := self._admit(events)):
            count = min(admitted.num_left, budget)
            batch.append((admitted, count))
            budget -= count

        while batch:
            answer = self.cache.schedule([seq.handle for seq, _ in batch], [count for _, count in batch])
            if answer:
                break
            victim = self._running.pop()
            batch = [(seq, count) for seq, count in batch if seq is not victim]
            if self._running:
                self._preempt(victim)
            else:
                # `add` has made sure that one sequence fits: what it lacks is held outside this engine.
                self._fail(victim, answer.refusal, events)
        return batch

    def _admit(self, events: list[Event]) -> Seq | None:
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
                seq.num_known = seq.prompt.num_tokens
                self._running.append(seq)
                return seq
            self._fail(seq, answer, events)
        return None

    def _preempt(self, seq: Seq) -> None:
        [seq.prompt] = self.manager.preempt([seq.handle])
        seq.num_computed = 0
        self._waiting.appendleft(seq)

    def _commit(self, batch: list[tuple[Seq, int]]) -> None:
        """Tell the manager what was computed, and the ids it has not seen (a prompt's came by `allocate`)."""
        new_ids = []
        for seq, count in batch:
            new_ids += seq.tokens[max(seq.num_computed, seq.num_known) : seq.num_computed + count]
            seq.num_computed += count
            seq.num_known = max(seq.num_computed, seq.num_known)
        self.manager.commit([seq.handle for seq, _ in batch], [count for _, count in batch], new_ids)

    def _fork(self, seq: Seq) -> list[Seq]:
        """All samples of a request whose prompt has just been computed; else the sequence alone."""
        if seq.seats == 1:
            return [seq]
        handles = self.manager.fork([seq.handle], seq.seats - 1)
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
                num_known=seq.num_known,
            )
            for sample, handle in enumerate(handles, start=1)
        ]
        after = self._running.index(seq) + 1
        self._running[after:after] = children
        return [seq, *children]

    def _advance(self, seq: Seq, token: int, events: list[Event]) -> None:
        """Append a sampled token; end the sequence if that was its last."""
        seq.tokens.append(token)
        self.metrics.sampled_tokens += 1
        request, tokens = seq.request, seq.tokens[len(seq.request.prompt) :]
        events.append(Token(request.id, seq.sample, token))
        if token in request.stop_ids or len(tokens) == request.max_new_tokens:
            reason: Literal["stop", "length"] = "stop" if token in request.stop_ids else "length"
            events.append(Finished(request.id, seq.sample, reason, tokens))
            self._running.remove(seq)
            self.manager.free([seq.handle])

    def _fail(self, seq: Seq, refusal: object, events: list[Event]) -> None:
        if seq.handle >= 0:
            self.manager.free([seq.handle])
        message = f"refused although nothing else runs ({refusal}): are blocks held outside the engine?"
        # Before its fork, a sequence stands for all samples of its request.
        samples = range(seq.sample, seq.sample + seq.seats)
        events += [Failed(seq.request.id, sample, message) for sample in samples]

    def _problem(self, request: Request, prompt: Prompt) -> str | None:
        """Why a request can never be served, if it cannot."""
        if not request.prompt or request.max_new_tokens < 1:
            return "needs a prompt and max_new_tokens >= 1"
        if not 1 <= request.num_samples <= self.max_seqs:
            return f"{request.num_samples} samples, but this engine runs 1 to {self.max_seqs} at once"
        wanted = f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new ones"
        # The last token sampled is never computed.
        num_tokens = len(request.prompt) + request.max_new_tokens - 1
        if num_tokens > self.model.config.context_length:
            return f"{wanted} exceed the model's context of {self.model.config.context_length} tokens"
        answer = self.manager.can_allocate(prompt, num_tokens)
        if isinstance(answer, Never):
            need = f"{answer.need_blocks} blocks of {self.manager.block_size} tokens"
            has = f"the pool has {answer.capacity_blocks}: enlarge it or ask for fewer"
            return f"{wanted} need {need}, but {has}"
        return None
