"""One session: its row, its tree, its limits, its turns in flight. Commits are durable before they are visible."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from turnloom.core.forks import Decode, compare, explain
from turnloom.core.tree import Pending, Tree
from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Origin, Policy, Unrolled, prompt_crc, unroll
from turnloom.engine.contract import Capabilities, Trace
from turnloom.engine.pool import worst
from turnloom.errors import BadRequest, LimitReached, PromptTooLong, SessionClosed, StoreError
from turnloom.gateway.output import Output
from turnloom.gateway.prompt import Prompt
from turnloom.store.contract import SessionRow, Store
from turnloom.types import MAIN, AbortOutcome, Fork, Outcome, Request, Sampling, Turn

T = TypeVar("T")

log = logging.getLogger("turnloom.gateway")

DRAIN_SECONDS = 5.0
"""How long a finish waits for turns in flight before it cancels them."""


class Session:
    def __init__(self, row: SessionRow, store: Store, tree: Tree | None = None) -> None:
        self.row = row
        self.tree = tree or Tree()
        self._store = store
        self._lock = asyncio.Lock()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self.closing = False
        """Turns in flight are being cancelled by us, not by their clients."""
        self.stopping = False
        """The gateway takes no new turn."""

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @contextmanager
    def turn_slot(self) -> Iterator[None]:
        """Hold a place for the current task's turn. Raises SessionClosed or LimitReached.

        A cancellation that comes because the session is closed leaves as SessionClosed: the client is still there.
        """
        if self.row.status != "open":
            raise SessionClosed("this session is finished; open a new one")
        if self.stopping:
            raise SessionClosed("the gateway is stopping; ask again when it is back")
        limit = self.row.limits.max_turns
        used = len(self.tree.turns) - self.tree.failed + len(self._in_flight)
        if limit is not None and used >= limit:
            raise LimitReached(f"this session has used its {limit} turns")
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.closing:
                raise
            raise SessionClosed("the session was closed while this reply was being made") from None
        finally:
            self._in_flight.discard(task)

    def sampling_for(self, request: Request, prompt: Prompt, engine: Capabilities, choice: int = 0) -> Sampling:
        """The pinned policy with the client's own stop strings, its schema, and the tokens that are left.

        Each further choice of a request has the next seed, else all would be one reply.

        Raises PromptTooLong, and BadRequest where the engine cannot hold a reply to a schema.
        """
        if request.json_schema and not engine.structured:
            raise BadRequest("structured output: this engine has no grammar backend; ask for JSON in the prompt instead")
        if request.json_schema and prompt.reasoning_open:
            raise BadRequest("structured output: this model begins every reply with its reasoning; ask for JSON in the prompt instead")
        prompt_tokens = len(prompt.ids)
        context = min(engine.context_length, self.row.limits.max_context or engine.context_length)
        # One token of the context stays unused: some engines refuse prompt and reply together equal to it.
        room = context - prompt_tokens - 1
        if room < 1:
            raise PromptTooLong(prompt_tokens, context - 2)
        pinned = self.row.sampling
        wishes = [n for n in (request.max_tokens, pinned.max_tokens, room) if n is not None]
        seed = None if pinned.seed is None else (pinned.seed + choice) % 2**63
        return replace(pinned, seed=seed, max_tokens=min(wishes), stop=(*pinned.stop, *request.stop), json_schema=request.json_schema)

    async def commit(self, pending: Pending, output: Output, make: Callable[[int], Turn]) -> Turn:
        """Store the turn, then show it. Raises StoreError, and then nothing has changed."""
        async with self._lock:
            turn = make(len(self.tree.turns))
            delta = self.tree.stage(pending, output.message(), turn)
            await self._store.append(self.row.id, delta)
            self.tree.apply(delta, pending)
            return turn

    async def amend(self, turn_id: str, *, outcome: Outcome | None = None, abort: str | None = None) -> None:
        async with self._lock:
            await self._store.amend(self.row.id, turn_id, outcome=outcome, abort=abort)
            self.tree.amend(turn_id, outcome, abort)

    def settle(self, turn_id: str, aborts: Sequence[Awaitable[AbortOutcome]]) -> None:
        """Write to the turn what comes of its aborts, when that is known."""

        async def settled() -> None:
            outcome = worst([await each for each in aborts])
            if outcome is not AbortOutcome.UNVERIFIED:
                try:
                    await self.amend(turn_id, abort=outcome)
                except (StoreError, KeyError) as error:
                    log.warning("what became of the abort of turn %s could not be written: %s", turn_id, error)

        task = asyncio.create_task(settled())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def settled(self) -> None:
        """Return when all that is still to be known of this session's turns is written."""
        while self._settling:
            await asyncio.wait(self._settling)

    async def update(self, **changes: Any) -> None:
        """Change the session's row, on disk first."""
        async with self._lock:
            row = replace(self.row, **changes)
            await self._store.put_session(row)
            self.row = row

    async def finish(self, reward: float | None = None) -> None:
        """Close, let turns in flight end, cancel those that do not. Finishing again only changes the reward."""
        changes: dict[str, Any] = {"status": "closed"} if self.row.status == "open" else {}
        if reward is not None:
            changes["reward"] = reward
        if changes:
            await self.update(**changes)
        if self._in_flight:
            await asyncio.wait(set(self._in_flight), timeout=DRAIN_SECONDS)
        await self.cancel_in_flight()

    async def cancel_in_flight(self) -> None:
        """Cancel turns in flight and wait until each is on record."""
        late = set(self._in_flight)
        self.closing = bool(late)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        self.closing = False

    def unroll(self, longest: Longest = UNLIMITED, policy: Policy = DEFAULT_TRAINING) -> Unrolled:
        row = self.row
        return unroll(self.tree, Origin(row.id, row.rollout, row.group, row.reward, row.metadata), policy, longest)


@dataclass(slots=True)
class TurnRecorder:
    """Records one turn exactly once. A second call amends the outcome: a delivered turn whose client was gone after all."""

    session: Session
    turn_id: str
    pending: Pending
    prompt: Prompt
    output: Output
    sampling: Sampling
    capabilities: Capabilities
    decode: Decode
    started: float
    clock: Callable[[], float]
    trace: Trace
    turn: Turn | None = None

    async def __call__(self, outcome: Outcome, error: str = "") -> Turn:
        """Runs to its end even when the caller is cancelled, and only then lets the cancellation go on."""
        return await uncancelled(self._record(outcome, error))

    async def _record(self, outcome: Outcome, error: str) -> Turn:
        if self.turn is None:
            self.output.close()
            self.turn = await self.session.commit(self.pending, self.output, lambda index: self._turn(index, outcome, error))
            if self.trace.aborts:
                self.session.settle(self.turn_id, self.trace.aborts)
        elif self.turn.outcome is not outcome:
            await self.session.amend(self.turn_id, outcome=outcome)
            self.turn = self.session.tree.turns[self.turn_id]
        return self.turn

    def _fork(self) -> Fork | None:
        """Why this turn does not simply go on from what is held, seen from the tree it is committed to."""
        tree, pending = self.session.tree, self.pending
        if self.prompt.fork is not None:
            return compare(self.prompt.fork, tree.held(pending.base), self.prompt.ids, self.decode)
        now = tree.prepare(pending.request, pending.keys)
        return explain(tree, replace(now, base=self.prompt.base), self.prompt.ids, self.decode)

    def _turn(self, index: int, outcome: Outcome, error: str) -> Turn:
        output = self.output
        return Turn(
            id=self.turn_id,
            index=index,
            base=self.prompt.base,
            fork=self._fork(),
            appended=self.prompt.appended,
            prompt_len=len(self.prompt.ids),
            prompt_crc=prompt_crc(self.prompt.ids),
            output=output.ids,
            logprobs=output.logprobs,
            finish=output.finish,
            outcome=outcome,
            sampling=self.sampling,
            versions=output.versions,
            calls=output.calls,
            logprob_convention=self.capabilities.logprob_convention,
            model=self.capabilities.model,
            label=self.pending.request.label or MAIN,
            escaped=self.prompt.escaped,
            respelled=self.pending.respelled,
            started=self.started,
            ended=self.clock(),
            error=error,
            pool=self.pending.request.pool,
            pieces=tuple(p for p in self.trace.pieces if p.start < len(output.ids) or not p.start),
            abort=AbortOutcome.UNVERIFIED if self.trace.aborts else "",
            surplus=output.surplus,
            cached_tokens=output.cached_tokens,
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
        log.error("what a cancelled caller was waiting for failed: %s", failure, exc_info=failure)
    raise cancelled
