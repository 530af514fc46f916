"""One session: its row, its tree, its limits, its turns in flight. Commits are durable before they are visible."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from turnloom.core.records import Pending
from turnloom.core.retry import Answers, Identity, gone_on
from turnloom.core.tree import Tree
from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Origin, Policy, Unrolled, unroll
from turnloom.counters import swallowed
from turnloom.engine.contract import Capabilities
from turnloom.engine.pool import worst
from turnloom.errors import BadRequest, LimitReached, PromptTooLong, SessionClosed, StoreError
from turnloom.gateway.live import Live
from turnloom.gateway.prompt import Prompt
from turnloom.store.contract import SessionRow, Store
from turnloom.types import AbortOutcome, Message, Outcome, Request, Sampling, Turn

log = logging.getLogger("turnloom.gateway")

DRAIN_SECONDS = 5.0
"""How long a finish waits for turns in flight before it cancels them."""


class Session:
    def __init__(self, row: SessionRow, store: Store, tree: Tree | None = None) -> None:
        self.row = row
        self.tree = tree or Tree()
        self.answers = Answers(self.tree.turns.values())
        self.live: dict[tuple[str, int], Live] = {}
        """Turns that are being made, by what they answer."""
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

    def make(self, asked: Identity | None, number: int, work: Callable[[Live], Awaitable[object]]) -> Live:
        """Begin a turn that answers `asked`; until it ends, who asks the same finds it."""
        live = Live(asked, number)
        if asked is not None:
            self.live[asked.place] = live
        live.start(work, self._made)
        return live

    def _made(self, live: Live) -> None:
        if live.asked is not None and self.live.get(live.asked.place) is live:
            del self.live[live.asked.place]

    @contextmanager
    def turn_slot(self, *, new: bool = True) -> Iterator[None]:
        """Hold a place for the current task's turn. Raises SessionClosed or LimitReached. A turn that is not `new` is on record already.

        A cancellation that comes because the session is closed leaves as SessionClosed: the client is still there.
        """
        if self.row.status != "open":
            raise SessionClosed("this session is finished; open a new one")
        if self.stopping:
            raise SessionClosed("the gateway is stopping; ask again when it is back")
        limit = self.row.limits.max_turns
        used = len(self.tree.turns) - self.tree.failed + len(self._in_flight)
        if new and limit is not None and used >= limit:
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

    def begin(self, turn_id: str, started: float) -> None:
        """A turn is being made: should the gateway be killed, that is known."""
        self._store.begin(self.row.id, turn_id, started)

    async def commit(self, pending: Pending, reply: Message, make: Callable[[int], Turn]) -> Turn:
        """Store the turn, then show it. Raises StoreError, and then nothing has changed."""
        async with self._lock:
            turn = make(len(self.tree.turns))
            delta = self.tree.stage(pending, reply, turn)
            try:
                await self._store.append(self.row.id, delta)
            except StoreError:
                self._store.cancel(self.row.id, turn.id)
                raise
            self.tree.apply(delta, pending)
            self.answers.add(turn)
            return turn

    async def replace(self, turn: Turn, reply: Message) -> bool:
        """Put a turn that was gone on with in the place of its beginning; False where another turn goes on from that by now.

        Raises StoreError, and then nothing has changed.
        """
        async with self._lock:
            if gone_on(self.tree, turn):
                return False
            await self._store.replace(self.row.id, turn, reply)
            self.tree.replace(turn, reply)
            self.answers.add(turn)
            return True

    def acknowledge(self, turn_id: str) -> None:
        """Its client has all of it."""
        self._store.acknowledge(self.row.id, turn_id)
        self.tree.amend(turn_id, acknowledged=True)

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
                    swallowed(log, "gateway.settle", "what became of the abort of turn %s could not be written: %s", turn_id, error)

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
        await self.drain(DRAIN_SECONDS)
        await self.cancel_in_flight()

    async def drain(self, seconds: float) -> None:
        """Let turns in flight come to their end, for so long at most. New ones are kept out by others."""
        if seconds > 0 and self._in_flight:
            await asyncio.wait(set(self._in_flight), timeout=seconds)

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
