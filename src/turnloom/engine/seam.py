"""One output out of several requests: what is still to be asked for, and how the next one's tokens are joined on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turnloom.engine.contract import Chunk, Trace
from turnloom.types import NO_FLOATS, NO_IDS, Finish, FinishReason, IntArray, Sampling, VersionSpan, ids

_SEED_END = 2**63


class Seam:
    """The output of one turn so far. `sampling.max_tokens` is set: what the first request may sample.

    Every token keeps the logprob and the weight version that came with it. Of a
    request that named its versions chunk by chunk and then broke off, those stand;
    of one that ended, its own spans count.
    """

    def __init__(self, prompt: IntArray, sampling: Sampling) -> None:
        if sampling.max_tokens is None:
            raise ValueError("what may be sampled in all must be known")
        self._prompt = prompt
        self._sampling = sampling
        self._most = sampling.max_tokens
        self._ids: list[IntArray] = []
        self._before: list[VersionSpan] = []
        self._own: list[VersionSpan] = []
        """The spans of earlier requests, and of the one that runs."""
        self._start = 0
        self._last: int | None = None
        self.count = 0
        """Tokens so far."""

    @property
    def constrained(self) -> bool:
        """A grammar that has begun cannot be gone on with: the next request would begin it anew."""
        return bool(self._sampling.json_schema and self.count)

    @property
    def prompt(self) -> IntArray:
        """What the next request goes on from."""
        return ids(np.concatenate([self._prompt, *self._ids])) if self._ids else self._prompt

    @property
    def sampling(self) -> Sampling:
        """What the next request asks for: the tokens that are left, and with a seed other draws than those already made."""
        seed = self._sampling.seed
        return replace(self._sampling, max_tokens=self._most - self.count, seed=None if seed is None else (seed + self.count) % _SEED_END)

    def open(self) -> None:
        """A new request begins."""
        self._before, self._own, self._start = _joined([*self._before, *self._own]), [], self.count

    def add(self, chunk: Chunk) -> Chunk:
        """The chunk as one of the whole output: spans over all tokens so far, since a reader may stop at any; cached tokens are
        those of the first prompt."""
        start = self.count
        if len(chunk.ids):
            self._ids.append(chunk.ids)
            self._last = int(chunk.ids[-1])
            self.count += len(chunk.ids)
            if chunk.version is not None:
                self._own = _joined([*self._own, VersionSpan(chunk.version, start, self.count)])
        if chunk.versions:
            self._own = [VersionSpan(s.version, s.start + self._start, s.end + self._start) for s in chunk.versions]
        cached = 0 if self._start else chunk.cached_tokens
        return replace(chunk, cached_tokens=cached, versions=self._spans())

    def _spans(self) -> tuple[VersionSpan, ...]:
        return tuple(_joined([*self._before, *self._own]))

    def over(self, trace: Trace) -> Chunk | None:
        """The last chunk, where an output that broke off was complete: its last token ends a reply, or was the last allowed,
        or its reader says so."""
        if self._last is not None and self._last in trace.end_ids:
            return self.end(Finish(FinishReason.STOP, matched=self._last))
        if trace.complete:
            return self.end(Finish(FinishReason.STOP))
        return self.end(Finish(FinishReason.LENGTH)) if self.count >= self._most else None

    def end(self, finish: Finish) -> Chunk:
        """A last chunk without tokens."""
        return Chunk(NO_IDS, NO_FLOATS, finish, self._spans())


def _joined(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Neighbours of one version as one span, empty ones left out."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            span = VersionSpan(span.version, joined.pop().start, span.end)
        if span.end > span.start:
            joined.append(span)
    return joined
