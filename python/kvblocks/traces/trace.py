"""A trace of requests as columns, and the token ids that its hash ids stand for.

Owns `Trace`. Imports NumPy only. Invariant: requests stand in order of arrival, the first at 0 s; every request has at
least one prompt token and one token of output. Memory: 28 bytes a request and 4 bytes a hash id; token ids exist for
one request at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# Nobody's window is longer: a longer request in a file is a broken line.
MAX_TOKENS = 2**24


@dataclass(frozen=True)
class Skipped:
    """What a reader met besides sound rows, so that nothing is dropped in silence.

    bad_lines: rows left out as broken; bad_examples: the first of them, "file:line: field: why". empty_requests: rows
    left out because they have no prompt or no output. out_of_order: rows that stood after a later one and were
    sorted. repeated_ids: rows kept whose request id an earlier row has.
    """

    bad_lines: int = 0
    bad_examples: tuple[str, ...] = ()
    empty_requests: int = 0
    out_of_order: int = 0
    repeated_ids: int = 0


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival.

    arrival_s float64 [n], from 0; None where the source has no times. prompt_tokens, output_tokens int32 [n], each
    >= 1. ids int32 [starts[n]]: request i has the hash ids ids[starts[i]:starts[i + 1]], dense from 0, each of
    tokens_per_id tokens; the last one may stand for a shorter rest. tokens_per_id is 0 where the source has none.
    session int32 [n], or None: requests of one conversation have the same number.
    """

    name: str
    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    tokens_per_id: int
    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    session: NDArray[np.int32] | None = None
    skipped: Skipped = field(default_factory=Skipped)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def final_tokens(self) -> NDArray[np.int64]:
        """Tokens stored at the last step of each request [n]: prompt + output - 1, as the last is never stored."""
        return self.prompt_tokens.astype(np.int64) + self.output_tokens - 1

    @cached_property
    def num_ids(self) -> int:
        """Distinct hash ids; also the first token id that none of them is."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    def own_token(self, request: int) -> int:
        """The token id that stands for whatever no other request shares with this one."""
        return self.num_ids + request

    def tokens(self, request: int, num_tokens: int | None = None) -> NDArray[np.int32]:
        """Token ids [num_tokens] of a request, of its prompt by default; a new array. O(tokens).

        Every token of a hash id is that id: a manager's digests are chained, so equal chains of ids, and they alone,
        are equal blocks. What the ids do not cover, the output included, is `own_token`.
        """
        if num_tokens is None:
            num_tokens = int(self.prompt_tokens[request])
        own = self.own_token(request)
        if not self.tokens_per_id:
            return np.full(num_tokens, own, np.int32)
        chain = self.ids[self.starts[request] : self.starts[request + 1]]
        covered = min(len(chain) * self.tokens_per_id, int(self.prompt_tokens[request]), num_tokens)
        tokens = np.repeat(chain[: -(-covered // self.tokens_per_id)], self.tokens_per_id)[:covered]
        if covered == num_tokens:
            return tokens
        return np.concatenate([tokens, np.full(num_tokens - covered, own, np.int32)])

    def in_order(self) -> Trace:
        """The same requests sorted by arrival, equal times as they stood, and the first at 0 s."""
        if self.arrival_s is None or not len(self):
            return self
        order = np.argsort(self.arrival_s, kind="stable")
        arrival = self.arrival_s[order]
        lengths = np.diff(self.starts)[order]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        place = np.arange(starts[-1]) - np.repeat(starts[:-1] - self.starts[order], lengths)
        return replace(
            self,
            arrival_s=arrival - arrival[0],
            prompt_tokens=self.prompt_tokens[order],
            output_tokens=self.output_tokens[order],
            ids=self.ids[place],
            starts=starts,
            session=None if self.session is None else self.session[order],
        )

    def scaled(self, rate: float) -> Trace:
        """The same requests, `rate` times as many a second."""
        return self if self.arrival_s is None else replace(self, arrival_s=self.arrival_s / rate)

    def successors(self) -> NDArray[np.int64]:
        """For each request the later one whose prompt goes on from its prompt and output, or -1 [n].

        That is the first later request which has all of its full hash ids and is at least as long as prompt and output
        together; of the same session where sessions are known, else only where the last of those ids was new in this
        request, so that a common system prompt makes no conversation. It is what a trace without output ids allows: an
        upper bound, as a chat template may change or drop the reply. O(hash ids).
        """
        found = np.full(len(self), -1, np.int64)
        if not self.tokens_per_id:
            return found
        requests = np.repeat(np.arange(len(self)), np.diff(self.starts))
        key = self.ids.astype(np.int64)
        if self.session is not None:
            key += self.session[requests].astype(np.int64) * self.num_ids
        order = np.argsort(key, kind="stable")
        same = key[order][1:] == key[order][:-1]
        following = np.full(len(key), -1)
        following[order[:-1][same]] = order[1:][same]
        is_first = np.ones(len(key), bool)
        is_first[order[1:][same]] = False
        end = self.prompt_tokens.astype(np.int64) + self.output_tokens
        last_full = self.starts[:-1] + self.prompt_tokens // self.tokens_per_id - 1
        for request in np.flatnonzero(last_full >= self.starts[:-1]).tolist():
            last = last_full[request]
            if self.session is None and not is_first[last]:
                continue
            at = following[last]
            while at >= 0 and self.prompt_tokens[requests[at]] < end[request]:
                at = following[at]
            if at >= 0:
                later = requests[at]
                chain = self.ids[self.starts[request] : last + 1]
                start = self.starts[later]
                if np.array_equal(self.ids[start : start + len(chain)], chain):
                    found[request] = later
        return found

    def truncated(self, max_context: int) -> Trace:
        """Prompts without their oldest tokens, so that prompt + output - 1 <= max_context where that is possible.

        Whole hash ids are dropped, from the front. The rest is another prefix: it shares nothing with the longer
        prompt it was cut from.
        """
        excess = np.maximum(self.final_tokens - max_context, 0)
        if self.tokens_per_id:
            cut_ids = -(-excess // self.tokens_per_id)
            excess = cut_ids * self.tokens_per_id
        possible = (excess < self.prompt_tokens) & (excess > 0)
        if not possible.any():
            return self
        prompt = np.where(possible, self.prompt_tokens - excess, self.prompt_tokens).astype(np.int32)
        if not self.tokens_per_id:
            return replace(self, prompt_tokens=prompt)
        lengths = np.diff(self.starts)
        cut = np.where(possible, cut_ids, 0)
        place = np.arange(len(self.ids)) - np.repeat(self.starts[:-1], lengths)
        return replace(
            self,
            prompt_tokens=prompt,
            ids=self.ids[place >= np.repeat(cut, lengths)],
            starts=np.concatenate([[0], np.cumsum(lengths - cut)]),
        )
