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
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from turnloom.counters import swallowed
from turnloom.engine.contract import AbortOutcome, Capabilities, Chunk, Engine, PauseMode, Trace
from turnloom.engine.gate import Clock, Gate
from turnloom.engine.metrics import CONTINUED
from turnloom.engine.patience import PATIENCE, Budget, Member, Patience
from turnloom.engine.prompts import check_prompt, room
from turnloom.engine.seam import Seam
from turnloom.errors import ConfigError, EngineOverloaded, EngineUnavailable
from turnloom.types import NO_FLOATS, NO_IDS, Finish, FinishReason, FloatArray, IntArray, Piece, Sampling

__all__ = ["ABORT_SECONDS", "CHECK_SECONDS", "PATIENCE", "WHY_CHARS", "Patience", "Pool", "worst"]

log = logging.getLogger("turnloom.engine")

ABORT_SECONDS = 5.0
"""How long a hold waits for aborted requests to come back."""

WHY_CHARS = 200
_AGAIN = 0.25
"""Seconds until a request that still runs is told to stop again: it may have been on its way to its engine."""

CHECK_SECONDS = 5.0
"""How long a turn waits for an engine to say what it is, where there are others."""


@dataclass(slots=True)
class _Turn:
    """One output that is being sampled."""

    rid: str
    routing_key: str
    seam: Seam
    trace: Trace
    budget: Budget
    clock: Clock
    requests: int = 0
    stopped: bool = False
    """Someone asked for its end."""


class Pool:
    """An `Engine` made of `members`, all of one model. Raises ConfigError for none, and for two of one name."""

    def __init__(self, members: Sequence[Engine], patience: Patience = PATIENCE) -> None:
        if not members:
            raise ConfigError("a pool needs an engine")
        names = [engine.name for engine in members]
        if len(set(names)) < len(names):
            raise ConfigError(f"an engine is named twice: {', '.join(names)}")
        self._members = [Member(engine) for engine in members]
        self._patience = patience
        self._found: Capabilities | None = None
        self._turns: dict[str, _Turn] = {}
        self._stops: set[asyncio.Task[AbortOutcome]] = set()
        self.gate = Gate()
        self.name = ",".join(names)

    @property
    def members(self) -> list[Engine]:
        return [m.engine for m in self._members]

    async def capabilities(self) -> Capabilities:
        """What the members have in common; those that are silent are looked at when they are first asked. Cached."""
        if self._found is None:
            told = await asyncio.gather(*(m.engine.capabilities() for m in self._members), return_exceptions=True)
            for failure in told:
                if isinstance(failure, BaseException) and not isinstance(failure, _NOT_NOW):
                    raise failure
            able = [found for found in told if isinstance(found, Capabilities)]
            if not able:
                raise next(failure for failure in told if isinstance(failure, BaseException))
            together = _together(able)
            for member, found in zip(self._members, told, strict=True):
                if isinstance(found, Capabilities):
                    _note(member, found, together)
            self._found = together
        return self._found

    def forget(self) -> None:
        self._found = None
        for member in self._members:
            member.engine.forget()

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        """As every engine does, but an abort, a break or a refusal for want of room is the end only when patience is.

        Each request has an id of its own, `rid` and its number in four hex digits.
        """
        able = await self.capabilities()
        check_prompt(prompt, able)
        trace = trace or Trace()
        seam = Seam(prompt, replace(sampling, max_tokens=room(prompt, sampling, able)))
        budget = Budget(self._patience, monotonic)
        with self.gate.watch(trace.timer) as clock, self._known(_Turn(rid, routing_key, seam, trace, budget, clock)) as turn:
            why = ""
            while True:
                await self._let_through(turn)
                member, failure = self._choose(routing_key or rid), None
                _begin(trace, seam, member.engine.name, why)
                why = "the stream ended without a finish reason"
                try:
                    async with aclosing(self._attempt(member, turn)) as chunks:
                        async for chunk in chunks:
                            if chunk.finish is None or chunk.finish.reason is not FinishReason.ABORT:
                                yield chunk
                                if chunk.finish is not None:
                                    return
                                continue
                            why = chunk.finish.message or "aborted"
                            if len(chunk.ids):
                                yield replace(chunk, finish=None)
                except _NOT_NOW as error:
                    failure, why = error, str(error)
                wait = self._goes_on(turn, member)
                if wait is None:
                    if failure is not None and not turn.stopped and seam.over(trace) is None:
                        raise failure
                    yield seam.over(trace) or seam.end(Finish(FinishReason.ABORT, message=why))
                    return
                log.info("turn %s goes on after %d tokens: %s", rid, seam.count, why)
                CONTINUED.inc()
                trace.waited += wait
                await asyncio.sleep(wait)

    def _goes_on(self, turn: _Turn, member: Member) -> float | None:
        """Seconds until the next request; None when there is none: the reply is whole, or cannot be gone on with, or patience is over."""
        if turn.stopped or turn.seam.over(turn.trace) is not None or turn.seam.constrained:
            return None
        if self.gate.shut:
            return 0.0
        now, following = monotonic(), self._choose(turn.routing_key or turn.rid)
        free = any(m is not member and m.rests_until <= now for m in self._members)
        elsewhere = following is not member and following.rests_until <= now
        return turn.budget.wait(max(following.asked_until - now, 0.0), at_once=elsewhere, counts=not free)

    @contextmanager
    def _known(self, turn: _Turn) -> Iterator[_Turn]:
        self._turns[turn.rid] = turn
        try:
            yield turn
        finally:
            del self._turns[turn.rid]

    async def _let_through(self, turn: _Turn) -> bool:
        """Whether it had to wait."""
        since = monotonic()
        held = await self.gate.wait(turn.clock)
        if held:
            turn.trace.waited += monotonic() - since
            turn.budget.renew()
        return held

    async def _attempt(self, member: Member, turn: _Turn) -> AsyncGenerator[Chunk, None]:
        """One request. Raises what the engine raises; EngineUnavailable as well where the engine is another than the pool's."""
        seam = turn.seam
        try:
            await self._check(member)
            # Again: the gate may have been shut while the engine was asked, and nothing must come between it and the request.
            while await self._let_through(turn):
                await self._check(member)
            if turn.stopped:
                yield _STOPPED
                return
            seam.open()
            before = seam.count
            turn.requests += 1
            rid = f"{turn.rid}{turn.requests:04x}"
            with self.gate.through(rid, member.engine.name):
                stream = member.engine.sample(seam.prompt, seam.sampling, rid=rid, routing_key=turn.routing_key, trace=turn.trace)
                async with aclosing(stream) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        if len(chunk.ids):
                            turn.budget.renew()
                        chunk = seam.add(chunk)
                        if seam.count > before or (chunk.finish and chunk.finish.reason is not FinishReason.ABORT):
                            member.answered()
                        yield chunk
            if seam.count == before and not (turn.stopped or self.gate.shut):
                # Aborted, or just over, with nothing given, and nobody here wanted that.
                member.refused(monotonic())
        except EngineUnavailable:
            member.failed(monotonic())
            member.engine.forget()
            raise
        except EngineOverloaded as error:
            member.refused(monotonic(), error.retry_after)
            raise

    async def _check(self, member: Member) -> None:
        """An engine that was silent when the pool began, or failed since, may be another model's; any other has said what it is."""
        found, name = await self.capabilities(), member.engine.name
        try:
            async with asyncio.timeout(CHECK_SECONDS if len(self._members) > 1 else None):
                able = await member.engine.capabilities()
        except TimeoutError as error:
            raise EngineUnavailable(f"{name} does not say what it is") from error
        if able == member.fits:
            return
        # One that was here before may be back with a newer checkpoint, in a folder of its own.
        like = able if member.fits is None else replace(able, tokenizer=found.tokenizer)
        try:
            _together([found, like])
        except ConfigError as error:
            log.warning("%s is not used: %s", name, error)
            raise EngineUnavailable(f"{name} does not fit its pool: {error}") from error
        if able.context_length < found.context_length:
            log.warning("%s is not used: its context of %d is less than the pool's", name, able.context_length)
            raise EngineUnavailable(f"{name} has a context of {able.context_length}, its pool one of {found.context_length}")
        _note(member, able, found)

    def _order(self, key: str) -> list[Member]:
        """The session's own order (rendezvous hashing): what joins, leaves or rests changes the place of no other."""
        return sorted(self._members, key=lambda m: hashlib.blake2b(f"{key}\n{m.engine.name}".encode()).digest())

    def _choose(self, key: str) -> Member:
        """The session's own engine, or the next in its order where that one rests; where all rest, the first that is to wake."""
        now, order = monotonic(), self._order(key)
        return next((m for m in order if m.rests_until <= now), min(order, key=lambda m: m.wakes))

    async def abort(self, rid: str) -> AbortOutcome:
        """Stop the turn `rid`, which then ends as aborted, one that is held as soon as it is let go; or its one request of that id."""
        turn = self._turns.get(rid)
        if turn is not None:
            turn.stopped = True
        live = [(each, name) for each, name in self.gate.running.items() if rid and each.startswith(rid)]
        if turn is not None and not live:
            return AbortOutcome.VERIFIED
        return worst([await self._named(name).abort(each) for each, name in live])

    def _named(self, name: str) -> Engine:
        return next(m.engine for m in self._members if m.engine.name == name)

    async def hold(self, mode: PauseMode, seconds: float | None = None) -> int:
        """Let no new request through until `release`. How many still run when it returns, at a release at the latest.

        `abort` stops those that run: their turns go on after the release. `wait` waits for them, both for
        `seconds` at most. `keep` leaves them alone, and the time of their turns stands still.
        """
        self.gate.close()
        if mode == "abort":
            await self._stop_all(ABORT_SECONDS if seconds is None else seconds)
        elif mode == "wait":
            await self.gate.empty(seconds)
        else:
            self.gate.freeze()
        return len(self.gate.running)

    async def _stop_all(self, seconds: float) -> None:
        """Tell every request that runs to stop, until none does and what came of it is known."""
        end, stops = monotonic() + seconds, set[asyncio.Task[AbortOutcome]]()
        while self.gate.shut and (self.gate.running or stops):
            stops |= {asyncio.create_task(self._named(name).abort(rid)) for rid, name in self.gate.running.items()}
            self._stops |= stops
            for stop in stops:
                stop.add_done_callback(self._stops.discard)
            if (left := end - monotonic()) <= 0:
                return
            stops = (await asyncio.wait(stops, timeout=min(_AGAIN, left)))[1]
            await self.gate.empty(min(_AGAIN, left))

    def release(self) -> None:
        self.gate.open()

    async def pause(self, mode: PauseMode) -> None:
        """Every member; then the time of turns stands still, as they do. Raises what the first that cannot raises."""
        told = await asyncio.gather(*(m.engine.pause(mode) for m in self._members), return_exceptions=True)
        if None in told:
            self.gate.freeze()
        _raise(told)

    async def resume(self) -> None:
        """Every member, whatever becomes of the others. Raises what the first that cannot raises."""
        told = await asyncio.gather(*(m.engine.resume() for m in self._members), return_exceptions=True)
        self.gate.thaw()
        _raise(told)

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        """By the first member that can be reached."""
        *others, last = self._order("")
        for member in others:
            try:
                return await member.engine.prompt_logprobs(sequence, start)
            except _NOT_NOW as error:
                swallowed(log, "engine.prompt_logprobs", "%s computes no logprobs: %s", member.engine.name, error, level=logging.INFO)
        return await last.engine.prompt_logprobs(sequence, start)

    async def health(self) -> bool:
        """Whether a member is healthy: the first that says so is enough. None is asked while requests are held: they are safe here."""
        if self.gate.shut:
            return True
        asked = [asyncio.create_task(m.engine.health()) for m in self._members]
        try:
            for each in asyncio.as_completed(asked):
                if await each:
                    return True
            return False
        finally:
            for task in asked:
                task.cancel()

    async def close(self) -> None:
        _raise(await asyncio.gather(*(m.engine.close() for m in self._members), return_exceptions=True))


_NOT_NOW = (EngineUnavailable, EngineOverloaded)
"""What an engine raises that may work later, or elsewhere."""

_STOPPED = Chunk(NO_IDS, NO_FLOATS, Finish(FinishReason.ABORT, message="stopped"))


def _raise(told: Sequence[BaseException | None]) -> None:
    for failure in told:
        if failure is not None:
            raise failure


def _begin(trace: Trace, seam: Seam, engine: str, why: str) -> None:
    """A piece that gave no token leaves no trace but the reason of the next."""
    if trace.pieces and trace.pieces[-1].start == seam.count:
        trace.pieces.pop()
    trace.pieces.append(Piece(seam.count, engine, why[:WHY_CHARS]))


def _note(member: Member, able: Capabilities, pool: Capabilities) -> None:
    """It fits. One and the same model may have two names, as where its path differs between machines; two models must not pass unseen."""
    member.fits = able
    if able.model != pool.model:
        log.warning(
            "%s has the model %r, its pool has %r: if these are not the same, replies are made of both; give each a pool of its own",
            member.engine.name,
            able.model,
            pool.model,
        )


def _together(able: Sequence[Capabilities]) -> Capabilities:
    """What holds of all; what one does not say may be as another says. Raises ConfigError where they cannot take turns in one output."""
    known: dict[str, Any] = {}
    for name in ("vocab_size", "logprob_convention"):
        said = list(dict.fromkeys(value for each in able if (value := getattr(each, name)) is not None))
        if len(said) > 1:
            raise ConfigError(f"engines of one pool differ in {name}: {said[0]} and {said[1]}; give each model a pool of its own")
        known[name] = said[0] if said else None
    tokenizers = [each.tokenizer for each in able if each.tokenizer]
    for other in tokenizers[1:]:
        if _last(other) != _last(tokenizers[0]):
            raise ConfigError(f"engines of one pool differ in tokenizer: {tokenizers[0]} and {other}; give each model a pool of its own")
    known["tokenizer"] = tokenizers[0] if tokenizers else None
    context, structured = min(a.context_length for a in able), all(a.structured for a in able)
    return replace(able[0], context_length=context, structured=structured, **known)


def _last(name: str) -> str:
    """Where a model is a folder, its path may differ between machines."""
    return name.rstrip("/").rpartition("/")[2]


def worst(outcomes: Sequence[AbortOutcome]) -> AbortOutcome:
    """What can be said of them all; FAILED of none."""
    for each in (AbortOutcome.FAILED, AbortOutcome.UNVERIFIED):
        if each in outcomes:
            return each
    return AbortOutcome.VERIFIED if outcomes else AbortOutcome.FAILED
