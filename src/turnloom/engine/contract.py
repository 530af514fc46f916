"""What every engine promises: `sglang`, `vllm`, `llama_server`; `local` starts a server of its own, `pool` makes one of several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy.typing as npt

from turnloom.types import AbortOutcome, Finish, FloatArray, IntArray, Piece, Sampling, VersionSpan

__all__ = ["LOGPROB_SLACK", "AbortOutcome", "Capabilities", "Chunk", "Engine", "PauseMode", "Trace"]

LOGPROB_SLACK = 1e-5
"""A logprob may exceed 0 by so much: x - logsumexp(x) in float32 errs by about one unit in the last place of x, 8e-6 at |x| = 100."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens only, never cumulative: `ids` and `logprobs` have one length (0 is allowed).

    Exactly one chunk of a stream, the last, carries `finish`. `version` is the
    weight version of these tokens, where the engine names it chunk by chunk;
    `versions` are spans over *all* output tokens of the stream so far, on the last
    chunk if an engine gives them at all: then they are what counts. `arrays` are what else an
    engine gives per new token (experts chosen, say): their first dimension is
    the length of `ids`, the rest is not looked at.
    """

    ids: IntArray
    logprobs: FloatArray
    finish: Finish | None = None
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    version: str | None = None
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`logprob_convention` is "raw" (before temperature) or "temperature" (after it).

    `structured`: it can hold a reply to a JSON Schema.
    """

    model: str
    context_length: int
    vocab_size: int | None
    logprob_convention: str
    weight_version: str | None = None
    tokenizer: str | None = None
    structured: bool = False


PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests that run when an engine is paused: they end as aborted, they are waited for, or they stand still and go on."""


@dataclass(slots=True)
class Trace:
    """What became of one turn's requests to its engines, written while it is sampled.

    `aborts` are those whose work was stopped before its end: each comes to be known
    after the stream is over. `timer` is the turn's time limit, which stands still
    while the engines are paused.
    """

    pieces: list[Piece] = field(default_factory=list)
    aborts: list[Awaitable[AbortOutcome]] = field(default_factory=list)
    timer: asyncio.Timeout | None = None
    end_ids: frozenset[int] = frozenset()
    """Ids that end a reply: nothing is sampled after one, whether or not the engine lived to say that it stopped."""
    waited: float = 0.0
    """Seconds that it waited for a held pool, and for an engine to have room."""
    complete: bool = False
    """The reader has the whole reply, a stop string is complete: where the engine gives out now, no other goes on."""


class Engine(Protocol):
    name: str
    """Where it is, for people and records: its URL without credentials."""

    async def capabilities(self) -> Capabilities:
        """What the server is. Cached after the first success. Raises EngineUnavailable."""
        ...

    def forget(self) -> None:
        """Drop what is cached of the server: it failed, and may come back as another. Requests that run are left alone."""
        ...

    def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        """Sample a continuation of `prompt` [n]. Always streams.

        `rid` is unique, of fixed length. Ids are checked against the vocabulary
        before anything is sent. Logprobs are one finite float per id.

        When the consumer is cancelled or closes the iterator early, the engine's
        work is aborted before the connection is closed, and looked after until it
        is known to be gone. That goes on by itself: closing does not wait for it,
        and `trace` gets what comes of it. An abort failure is logged and counted
        and never hides the cause.

        Raises EngineRejected, EngineOverloaded, EngineUnavailable, EngineProtocol.
        An engine-side abort is not raised: it is a final chunk with
        FinishReason.ABORT, after whatever tokens came before it.
        """
        ...

    async def abort(self, rid: str) -> AbortOutcome:
        """Stop decoding `rid`; its stream, where someone reads it, ends as aborted. Never raises."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Make the server itself hold its work. Raises EngineError where it cannot."""
        ...

    async def resume(self) -> None:
        """Let a paused server go on. Raises EngineError where it cannot."""
        ...

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        """Logprobs [n - start] of sequence[start:], each given all ids before it, recomputed by prefill.

        At temperature 1 (raw). `start` is at least 1. Used by `turnloom check --engine`.
        """
        ...

    async def health(self) -> bool: ...

    async def close(self) -> None:
        """Returns when every abort that was begun has come to its end."""
        ...
