"""One turn's record: written once with its outcome, amended when more comes to be known, or put in the place of its own beginning."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from turnloom.core.forks import Decode, compare, explain
from turnloom.core.records import Pending
from turnloom.core.unroll import prompt_crc
from turnloom.counters import SWALLOWED
from turnloom.engine.contract import Trace
from turnloom.gateway.output import Output
from turnloom.gateway.prompt import Prompt
from turnloom.gateway.session import Session
from turnloom.types import MAIN, AbortOutcome, Fork, ForkKind, Outcome, Piece, Sampling, Turn

T = TypeVar("T")

log = logging.getLogger("turnloom.gateway")

CAME_AGAIN = "its client left, and came again"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known of a turn before it is sampled. `before` is what is on record of it, where it was begun earlier."""

    turn_id: str
    started: float
    pending: Pending
    prompt: Prompt
    sampling: Sampling
    model: str
    logprob_convention: str
    choice: int
    before: Turn | None = None


@dataclass(slots=True)
class TurnRecorder:
    """A second call amends the outcome: of a delivered turn whose client was gone after all, or of one that was found again."""

    session: Session
    plan: Plan
    output: Output
    decode: Decode
    clock: Callable[[], float]
    trace: Trace
    new_id: Callable[[], str]
    turn: Turn | None = None

    async def __call__(self, outcome: Outcome, error: str = "") -> Turn:
        """Runs to its end even when the caller is cancelled, and only then lets the cancellation go on. Raises StoreError."""
        return await uncancelled(self._record(outcome, error))

    async def _record(self, outcome: Outcome, error: str) -> Turn:
        if self.turn is None:
            self.output.close()
            if self.plan.before is not None:
                self.turn = await self._go_on(self.plan.before, outcome, error)
            else:
                self.turn = await self._commit(lambda index: self._turn(index, outcome, error))
            if self.trace.aborts:
                self.session.settle(self.turn.id, self.trace.aborts)
        elif self.turn.outcome is not outcome and not self.turn.acknowledged:
            await self.session.amend(self.turn.id, outcome=outcome)
            self.turn = self.session.tree.turns[self.turn.id]
        return self.turn

    async def _commit(self, make: Callable[[int], Turn]) -> Turn:
        return await self.session.commit(self.plan.pending, self.output.message(), make)

    async def _go_on(self, before: Turn, outcome: Outcome, error: str) -> Turn:
        """The whole in the place of its beginning; a turn of its own where another has gone on from the beginning meanwhile."""
        output, start = self.output, len(before.output)
        if len(output.ids) < start:  # It ended before it was given all of its own beginning, which stands.
            return before
        pieces = [Piece(p.start + start, p.engine, p.why or CAME_AGAIN) for p in self.trace.pieces]
        turn = replace(
            before,
            output=output.ids,
            logprobs=output.logprobs,
            finish=output.finish,
            outcome=outcome,
            versions=output.versions,
            calls=output.calls,
            pieces=(*before.pieces, *self._used(pieces)),
            abort=AbortOutcome.UNVERIFIED if self.trace.aborts else before.abort,
            surplus=before.surplus + output.surplus,
            ended=self.clock(),
            error=error,
        )
        if await self.session.replace(turn, output.message()):
            return turn
        fork = Fork(ForkKind.RESAMPLED, len(self.plan.pending.request.messages), f"gone on with from the beginning of turn {before.id}")
        return await self._commit(lambda index: replace(turn, id=self.new_id(), index=index, fork=fork))

    def _fork(self) -> Fork | None:
        """Why this turn does not simply go on from what is held, seen from the tree it is committed to."""
        tree, pending, prompt = self.session.tree, self.plan.pending, self.plan.prompt
        if prompt.fork is not None:
            return compare(prompt.fork, tree.held(pending.base), prompt.ids, self.decode)
        now = tree.prepare(pending.request, pending.keys)
        return explain(tree, replace(now, base=prompt.base), prompt.ids, self.decode)

    def _used(self, pieces: list[Piece]) -> tuple[Piece, ...]:
        return tuple(p for p in pieces if p.start < len(self.output.ids) or not p.start)

    def _turn(self, index: int, outcome: Outcome, error: str) -> Turn:
        plan, output = self.plan, self.output
        prompt, request = plan.prompt, plan.pending.request
        return Turn(
            id=plan.turn_id,
            index=index,
            base=prompt.base,
            fork=self._fork(),
            appended=prompt.appended,
            prompt_len=len(prompt.ids),
            prompt_crc=prompt_crc(prompt.ids),
            output=output.ids,
            logprobs=output.logprobs,
            finish=output.finish,
            outcome=outcome,
            sampling=plan.sampling,
            versions=output.versions,
            calls=output.calls,
            logprob_convention=plan.logprob_convention,
            model=plan.model,
            label=request.label or MAIN,
            escaped=prompt.escaped,
            respelled=plan.pending.respelled,
            started=plan.started,
            ended=self.clock(),
            error=error,
            pool=request.pool,
            pieces=self._used(self.trace.pieces),
            abort=AbortOutcome.UNVERIFIED if self.trace.aborts else "",
            surplus=output.surplus,
            cached_tokens=output.cached_tokens,
            fingerprint=request.fingerprint,
            idempotency=request.idempotency,
            choice=plan.choice,
            reasoning_open=prompt.reasoning_open,
        )


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end. A cancellation that comes meanwhile is raised after it, never into it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if (failure := task.exception()) is not None:
        SWALLOWED.labels("gateway.record").inc()
        log.error("what a cancelled caller was waiting for failed: %s", failure, exc_info=failure)
    raise cancelled
