"""An engine in memory for tests of a pool: what each request gets is laid down step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from turnloom.engine.contract import AbortOutcome, Capabilities, Chunk, PauseMode, Trace
from turnloom.errors import EngineError
from turnloom.types import Finish, FinishReason, FloatArray, IntArray, Sampling, VersionSpan, floats, ids

ABLE = Capabilities("m", 1000, 100, "raw")
STOP = Finish(FinishReason.STOP)

Step = Chunk | EngineError | asyncio.Event
"""What comes next: tokens, the end of the stream in an error, or a wait that ends with the event or with an abort."""


def some(*tokens: int, finish: Finish | None = None, version: str | None = None, versions: Sequence[VersionSpan] = ()) -> Chunk:
    """Tokens whose logprobs follow from them."""
    return Chunk(ids(tokens), floats([-t / 128 for t in tokens]), finish, tuple(versions), version=version)


def aborted(*tokens: int) -> Chunk:
    return some(*tokens, finish=Finish(FinishReason.ABORT, message="Aborted"))


@dataclass
class Asked:
    prompt: list[int]
    sampling: Sampling
    rid: str
    routing_key: str


@dataclass
class Member:
    """`plan` holds the steps of each request in turn; after the last one all go as it. `able` is raised where it is an error."""

    name: str = "one"
    plan: list[list[Step]] = field(default_factory=list)
    able: Capabilities | EngineError = ABLE
    healthy: bool | asyncio.Event = True
    deaf: asyncio.Event | None = None
    """Until it is set, a request is on its way, and no abort reaches it."""
    asked: list[Asked] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """Pauses and resumes."""
    refuses: EngineError | None = None
    """What a pause or a resume raises."""
    forgotten: int = 0
    closed: int = 0
    """Streams that were left before their end."""
    live: dict[str, asyncio.Event] = field(default_factory=dict)

    async def capabilities(self) -> Capabilities:
        if isinstance(self.able, EngineError):
            raise self.able
        return self.able

    def forget(self) -> None:
        self.forgotten += 1

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        self.asked.append(Asked(prompt.tolist(), sampling, rid, routing_key))
        if self.deaf is not None:
            await self.deaf.wait()
        stopped = self.live[rid] = asyncio.Event()
        try:
            for step in self.plan[min(len(self.asked), len(self.plan)) - 1]:
                if isinstance(step, EngineError):
                    raise step
                if isinstance(step, asyncio.Event):
                    await _either(step, stopped)
                if stopped.is_set():
                    yield aborted()
                    return
                if isinstance(step, Chunk):
                    yield step
        except GeneratorExit:
            self.closed += 1
            raise
        finally:
            del self.live[rid]

    async def abort(self, rid: str) -> AbortOutcome:
        self.aborts.append(rid)
        if (stopped := self.live.get(rid)) is None:
            return AbortOutcome.UNVERIFIED
        stopped.set()
        return AbortOutcome.VERIFIED

    async def pause(self, mode: PauseMode) -> None:
        self._tell(mode)

    async def resume(self) -> None:
        self._tell("resume")

    def _tell(self, words: str) -> None:
        self.told.append(words)
        if self.refuses is not None:
            raise self.refuses

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        if isinstance(self.able, EngineError):
            raise self.able
        return floats([-t / 128 for t in sequence[start:].tolist()])

    async def health(self) -> bool:
        return await self.healthy.wait() if isinstance(self.healthy, asyncio.Event) else self.healthy

    async def close(self) -> None:
        self.told.append("close")


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
