"""Several engines of one model as one, and a turn that outlives each of them.

A session stays with one engine as long as that one lives (its cache has the
session's tokens). Where an engine aborts, breaks off or dies within a turn, the
pool samples on from the prompt and the ids so far, there or elsewhere. It never
repeats a token, and never goes on with an engine that contradicts itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from turnloom.engine.contract import AbortOutcome, Capabilities, Chunk, Engine, PauseMode, Trace
from turnloom.engine.gate import Gate
from turnloom.engine.metrics import CONTINUED
from turnloom.engine.prompts import check_prompt, room
from turnloom.engine.seam import Seam
from turnloom.errors import ConfigError, EngineError, EngineOverloaded, EngineUnavailable
from turnloom.types import Finish, FinishReason, FloatArray, IntArray, Piece, Sampling

log = logging.getLogger("turnloom.engine")

ABORT_SECONDS = 5.0
"""How long a hold waits for aborted requests to come back."""

WHY_CHARS = 200
_REST = 0.5
_LONGEST_REST = 30.0
"""Seconds that an engine which failed is left alone while there are others; doubled with each failure."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a turn goes on with engines that fail: `attempts` more requests in a row without a token, and `seconds` since
    the last one. Where there is no other engine, the wait before each grows from `pause` seconds to `longest`.
    """

    attempts: int = 8
    seconds: float = 120.0
    pause: float = 0.25
    longest: float = 5.0


PATIENCE = Patience()


class _Budget:
    """What is left of a turn's patience."""

    def __init__(self, patience: Patience, clock: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """A token came."""
        self._failed, self._since = 0, self._clock()

    def wait(self, asked: float | None, *, elsewhere: bool) -> float | None:
        """Seconds until the next request; None when there is to be none. `asked` is what the engine itself asked for."""
        own = self._patience
        self._failed += 1
        pause = 0.0 if elsewhere else max(asked or 0.0, min(own.pause * 2 ** (self._failed - 1), own.longest))
        spent = self._clock() - self._since + pause
        return None if self._failed > own.attempts or spent > own.seconds else pause


@dataclass(slots=True)
class _Member:
    engine: Engine
    failures: int = 0
    rests_until: float = 0.0


class Pool:
    """An `Engine` made of `members`, all of one model. Raises ConfigError for none."""

    def __init__(self, members: Sequence[Engine], patience: Patience = PATIENCE) -> None:
        if not members:
            raise ConfigError("a pool needs an engine")
        self._members = [_Member(engine) for engine in members]
        self._patience = patience
        self._found: Capabilities | None = None
        self.gate = Gate()
        self.name = ",".join(engine.name for engine in members)

    @property
    def members(self) -> list[Engine]:
        return [m.engine for m in self._members]

    async def capabilities(self) -> Capabilities:
        """Those of all members that answer: the least context, structured output where all have it.

        Raises EngineUnavailable when none answers, ConfigError where two do not fit together.
        """
        if self._found is None:
            told = await asyncio.gather(*(m.engine.capabilities() for m in self._members), return_exceptions=True)
            for failure in told:
                if isinstance(failure, BaseException) and not isinstance(failure, EngineUnavailable):
                    raise failure
            able = [found for found in told if isinstance(found, Capabilities)]
            if not able:
                raise next(failure for failure in told if isinstance(failure, BaseException))
            self._found = _together(able)
        return self._found

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        """As every engine does, but an abort, a break or a refusal for want of room is the end only when patience is.

        Each request has an id of its own, `rid` and its number in four hex digits.
        """
        able = await self.capabilities()
        check_prompt(prompt, able)
        trace = trace or Trace()
        seam = Seam(prompt, replace(sampling, max_tokens=room(prompt, sampling, able)), trace.end_ids)
        budget = _Budget(self._patience, asyncio.get_running_loop().time)
        why, number = "", 0
        while True:
            member, number = self._choose(routing_key or rid), number + 1
            _begin(trace, seam, member.engine.name, why)
            failure: EngineError | None = None
            try:
                async with aclosing(self._attempt(member, seam, f"{rid}{number:04x}", routing_key, trace, budget)) as chunks:
                    async for chunk in chunks:
                        if chunk.finish is None or chunk.finish.reason is not FinishReason.ABORT:
                            yield chunk
                            if chunk.finish is not None:
                                return
                            continue
                        why = chunk.finish.message or "aborted"
                        if len(chunk.ids):
                            yield replace(chunk, finish=None, versions=())
            except (EngineUnavailable, EngineOverloaded) as error:
                failure, why = error, str(error)
            if (last := seam.over()) is not None:
                yield last
                return
            held = self.gate.shut
            wait = 0.0 if held else budget.wait(getattr(failure, "retry_after", None), elsewhere=self._elsewhere(member, failure))
            if wait is None or seam.constrained:
                if failure is not None:
                    raise failure
                yield seam.end(Finish(FinishReason.ABORT, message=why))
                return
            log.info("turn %s goes on after %d tokens: %s", rid, seam.count, why)
            CONTINUED.inc()
            await asyncio.sleep(wait)

    async def _attempt(
        self, member: _Member, seam: Seam, rid: str, routing_key: str, trace: Trace, budget: _Budget
    ) -> AsyncGenerator[Chunk, None]:
        """One request. Raises what the engine raises; EngineUnavailable as well where the engine is another than the pool's."""
        loop = asyncio.get_running_loop()
        try:
            await self._check(member.engine)
            seam.open()
            await self.gate.wait(trace.timer)
            with self.gate.through(rid, member.engine.name):
                stream = member.engine.sample(seam.prompt, seam.sampling, rid=rid, routing_key=routing_key, trace=trace)
                async with aclosing(stream) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        if len(chunk.ids):
                            budget.renew()
                        yield seam.add(chunk)
            member.failures, member.rests_until = 0, 0.0
        except EngineUnavailable:
            member.failures += 1
            member.rests_until = loop.time() + min(_REST * 2 ** (member.failures - 1), _LONGEST_REST)
            raise

    async def _check(self, engine: Engine) -> None:
        """An engine that was silent when the pool began may be another model's."""
        found = self._found
        assert found is not None, "the pool's own capabilities come first"
        able = await engine.capabilities()
        try:
            _together([found, able])
        except ConfigError as error:
            raise EngineUnavailable(f"{engine.name} does not fit its pool: {error}") from error
        if able.context_length < found.context_length:
            raise EngineUnavailable(f"{engine.name} has a context of {able.context_length}, its pool one of {found.context_length}")

    def _choose(self, key: str) -> _Member:
        """The session's own engine, or the next in the session's own order where that one rests (rendezvous hashing)."""
        now = asyncio.get_running_loop().time()
        order = sorted(self._members, key=lambda m: hashlib.blake2b(f"{key}\n{m.engine.name}".encode()).digest())
        return next((m for m in order if m.rests_until <= now), min(order, key=lambda m: m.rests_until))

    def _elsewhere(self, member: _Member, failure: EngineError | None) -> bool:
        """Whether another engine can take over at once. One that is only busy or has aborted is asked again."""
        now = asyncio.get_running_loop().time()
        return isinstance(failure, EngineUnavailable) and any(m is not member and m.rests_until <= now for m in self._members)

    async def abort(self, rid: str) -> AbortOutcome:
        """Stop the requests of the turn `rid`, or the one request of that id."""
        live = [(r, name) for r, name in self.gate.running.items() if r.startswith(rid)] if rid else []
        return worst([await self._named(name).abort(each) for each, name in live])

    def _named(self, name: str) -> Engine:
        return next(m.engine for m in self._members if m.engine.name == name)

    async def hold(self, mode: PauseMode, seconds: float | None = None) -> int:
        """Let no new request through until `release`. How many still run when it returns.

        `abort` stops those that run: their turns go on after the release. `wait` waits for them, for
        `seconds` at most; `keep` leaves them alone.
        """
        self.gate.close()
        if mode == "abort":
            running = list(self.gate.running.items())
            await asyncio.gather(*(self._named(name).abort(rid) for rid, name in running))
            await self.gate.empty(ABORT_SECONDS if seconds is None else seconds)
        elif mode == "wait":
            await self.gate.empty(seconds)
        return len(self.gate.running)

    def release(self) -> None:
        self.gate.open()

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.gather(*(m.engine.pause(mode) for m in self._members))

    async def resume(self) -> None:
        await asyncio.gather(*(m.engine.resume() for m in self._members))

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        return await self._choose("").engine.prompt_logprobs(sequence, start)

    async def health(self) -> bool:
        """Whether a member is healthy. The first that says so is enough."""
        asked = [asyncio.create_task(m.engine.health()) for m in self._members]
        try:
            return any([await each for each in asyncio.as_completed(asked)])
        finally:
            for each in asked:
                each.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(m.engine.close() for m in self._members))


def _begin(trace: Trace, seam: Seam, engine: str, why: str) -> None:
    """A piece that gave no token leaves no trace but the reason of the next."""
    if trace.pieces and trace.pieces[-1].start == seam.count:
        trace.pieces.pop()
    trace.pieces.append(Piece(seam.count, engine, why[:WHY_CHARS]))


def _together(able: Sequence[Capabilities]) -> Capabilities:
    """Raises ConfigError where engines cannot take turns in one output."""
    first = able[0]
    for other in able[1:]:
        for field in ("vocab_size", "logprob_convention"):
            here, there = getattr(first, field), getattr(other, field)
            if here != there:
                raise ConfigError(f"engines of one pool differ in {field}: {here} and {there}; give each model a pool of its own")
    return replace(first, context_length=min(a.context_length for a in able), structured=all(a.structured for a in able))


def worst(outcomes: Sequence[AbortOutcome]) -> AbortOutcome:
    """What can be said of them all; FAILED of none."""
    for each in (AbortOutcome.FAILED, AbortOutcome.UNVERIFIED):
        if each in outcomes:
            return each
    return AbortOutcome.VERIFIED if outcomes else AbortOutcome.FAILED
