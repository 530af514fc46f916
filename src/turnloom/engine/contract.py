"""What every engine promises. Implementations: `sglang`; the embedded server in `local` speaks the same HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from turnloom.types import Finish, FloatArray, IntArray, Sampling, VersionSpan

LOGPROB_SLACK = 1e-5
"""A logprob may exceed 0 by so much: x - logsumexp(x) in float32 errs by about one unit in the last place of x, 8e-6 at |x| = 100."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens only, never cumulative: `ids` and `logprobs` have one length (0 is allowed).

    Exactly one chunk of a stream, the last, carries `finish`. `versions` are
    spans over *all* output tokens so far and come on the last chunk if at all.
    """

    ids: IntArray
    logprobs: FloatArray
    finish: Finish | None = None
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0


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


class AbortOutcome(StrEnum):
    VERIFIED = "verified"
    UNVERIFIED = "unverified"
    FAILED = "failed"


class Engine(Protocol):
    async def capabilities(self) -> Capabilities:
        """What the server is. Cached after the first success. Raises EngineUnavailable."""
        ...

    def sample(self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "") -> AsyncIterator[Chunk]:
        """Sample a continuation of `prompt` [n]. Always streams.

        `rid` is unique, of fixed length. Ids are checked against the vocabulary
        before anything is sent. Logprobs are one finite float per id.

        When the consumer is cancelled or closes the iterator early, the engine's
        work is aborted before the connection is closed; an abort failure is
        logged and counted and never hides the cause.

        Raises EngineRejected, EngineOverloaded, EngineUnavailable, EngineProtocol.
        An engine-side abort is not raised: it is a final chunk with
        FinishReason.ABORT, after whatever tokens came before it.
        """
        ...

    async def abort(self, rid: str) -> AbortOutcome:
        """Stop decoding `rid`. Never raises."""
        ...

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        """Logprobs [n - start] of sequence[start:], each given all ids before it, recomputed by prefill.

        At temperature 1 (raw). `start` is at least 1. Used by `turnloom check --engine`.
        """
        ...

    async def health(self) -> bool: ...

    async def close(self) -> None: ...
