"""A session from open to dropped: who holds it in memory, which turns are in flight, what closes it, its rewards. It makes no turn."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypedDict, Unpack

from turnloom.core.credit import Reward, RewardRule, merged_reward
from turnloom.core.tree import Tree
from turnloom.counters import swallowed
from turnloom.errors import BadRequest, EngineUnavailable, NotFound, SessionClosed, StoreError
from turnloom.gateway import limits
from turnloom.gateway.admin_bodies import FinishBody, RewardBody
from turnloom.gateway.opening import checked
from turnloom.store.contract import SessionRow, Store, Usage
from turnloom.wire.fields import shown

log = logging.getLogger("turnloom.gateway")

DRAIN_SECONDS = 5.0
"""How long a finish waits for turns in flight before it cancels them."""


class Keeper(Protocol):
    """Who keeps sessions in memory, and hears what becomes of one."""

    def woke(self, session_id: str) -> None:
        """Somebody uses it from now on."""
        ...

    def rested(self, session_id: str) -> None:
        """Nobody uses it any more, and all that it was to write is written."""
        ...

    def closed(self, why: str) -> None:
        """One that was open is not any more: `SessionRow.ended` says why."""
        ...

    def refused(self, limit: str) -> None:
        """A request was turned away at this limit."""
        ...

    def rewarded(self) -> None: ...


@dataclass(slots=True)
class _Slot:
    """One turn in flight. `turn` is its id once it is known."""

    new: bool
    turn: str = ""


@dataclass(slots=True, eq=False)
class _Places:
    """What is held for the new turns of one request, and not taken up yet."""

    left: int


_ADMITTED: ContextVar[_Places | None] = ContextVar("turnloom_places", default=None)
"""The places of the request whose context this is. Its turns run in tasks of their own, which take their context from its."""


class Keeping(TypedDict, total=False):
    """How a session is kept: what the store says of it, the clock, who keeps it in memory, and how many seconds a finish
    waits for turns in flight (DRAIN_SECONDS where it is None). Without a keeper it lives as long as somebody has it."""

    usage: Usage
    clock: Callable[[], float]
    keeper: Keeper
    drain: float | None


class Lifecycle:
    """What is true of a session whatever its turns say."""

    def __init__(self, row: SessionRow, store: Store, tree: Tree | None = None, **kept: Unpack[Keeping]) -> None:
        usage = kept.get("usage", Usage())
        self.row = row
        self.tree = tree or Tree()
        self.touched = usage.touched or row.created
        """When its last turn ended, or it was opened, in Unix seconds."""
        self.interrupted = usage.interrupted
        """Turns that were being made when a gateway was killed."""
        self.evicted = False
        """It has left memory: another object may stand for it by now, and this one takes no work any more."""
        self._tokens = sum(len(turn.output) for turn in self.tree.turns.values())
        self._bytes = usage.bytes
        self._store = store
        self._clock = kept.get("clock", time.time)
        self._keeper = kept.get("keeper")
        self._drain = kept.get("drain")
        self._lock = asyncio.Lock()
        self._in_flight: dict[asyncio.Task[Any], _Slot] = {}
        self._admitted: set[_Places] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._noted: set[str] = set()
        self._pins = 0
        self.closing = False
        """Turns in flight are being cancelled by us, not by their clients."""
        self.stopping = False
        """The gateway takes no new turn."""

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def being_made(self) -> int:
        """Turns in flight that are not on record yet: one stays in flight until its client has the reply."""
        return sum(slot.new and slot.turn not in self.tree.turns for slot in self._in_flight.values())

    @property
    def busy(self) -> bool:
        """Somebody uses it, or something is still to be written: it must stay in memory."""
        return bool(self._pins or self._in_flight or self._settling)

    @property
    def usage(self) -> Usage:
        """What counts against its limits: no failed turns; bytes as the store counted them when the last turn was stored, where
        they are limited, and else when it was brought into memory."""
        turns = len(self.tree.turns) - self.tree.failed
        return Usage(turns, self._tokens, self._bytes, self.touched, self.interrupted)

    @contextmanager
    def held(self) -> Iterator[Self]:
        """Keep it in memory meanwhile. For everyone who looks a session up and awaits something before the last use of it."""
        self._wake()
        self._pins += 1
        try:
            yield self
        finally:
            self._pins -= 1
            self._rest()

    def _wake(self) -> None:
        if self.row.status == "dropped":
            raise NotFound(f"session {self.row.id!r} was dropped")
        if self.evicted:
            raise RuntimeError(f"session {self.row.id} has left memory since it was looked up; look it up again, and hold it")
        if self._keeper is not None:
            self._keeper.woke(self.row.id)

    def _rest(self) -> None:
        if self._keeper is not None and not self.busy and not self.evicted:
            self._keeper.rested(self.row.id)

    @contextmanager
    def admit(self, choices: int) -> Iterator[None]:
        """Hold a place for each new turn of one request; its turns take them up. Raises what `turn_slot` raises where they do not all fit.

        Turns that go on with what is on record need no place, and must not be counted.
        """
        self._allow(choices)
        places = _Places(choices)
        self._admitted.add(places)
        token = _ADMITTED.set(places)
        try:
            yield
        finally:
            _ADMITTED.reset(token)
            self._admitted.discard(places)

    @contextmanager
    def turn_slot(self, *, new: bool = True) -> Iterator[None]:
        """Hold a place for the current task's turn. Raises SessionClosed or LimitReached. A turn that is not `new` is on record already.

        A cancellation that comes because the session is closed leaves as SessionClosed: the client is still there. One that
        comes because the gateway stops leaves as EngineUnavailable, as every request does from then on: clients ask again.
        """
        places = _ADMITTED.get()
        if new and places is not None and places.left and places in self._admitted:
            self._allow(0)
            places.left -= 1
        else:
            self._allow(1 if new else 0)
        task = asyncio.current_task()
        assert task is not None
        self._wake()
        self._in_flight[task] = _Slot(new)
        try:
            yield
        except asyncio.CancelledError:
            if not self.closing:
                raise
            if self.row.status == "open":
                raise EngineUnavailable("the gateway stopped while this reply was being made; ask again when it is back") from None
            raise SessionClosed("the session was closed while this reply was being made") from None
        finally:
            del self._in_flight[task]
            self.touched = self._clock()
            self._rest()

    def _allow(self, choices: int) -> None:
        """Raises what stands in the way of so many new turns, or with 0 what stands in the way of any request."""
        refused = limits.over(self.row, self.touched, self.in_flight, self._clock())
        if refused is None and self.stopping:
            raise EngineUnavailable("the gateway is stopping; ask again when it is back")
        if refused is None and choices and limits.counted(self.row.limits):
            refused = limits.spent(self.row.limits, self.usage, self._unrecorded(), choices)
        if refused is not None:
            self._note(refused.limit)
            raise refused.error

    def _unrecorded(self) -> int:
        """New turns that hold a place, or are in flight and not on record yet."""
        return self.being_made + sum(places.left for places in self._admitted)

    def _note(self, limit: str) -> None:
        """A request was refused at this limit, if any: the row comes to say so, or that the session's time is up."""
        if limit and self._keeper is not None:
            self._keeper.refused(limit)
        if not limit or limit in self.row.reached or limit in self._noted:
            return
        self._noted.add(limit)

        async def noted() -> None:
            try:
                if limit in (limits.TTL, limits.IDLE):
                    await self._expired(limit, None)
                else:
                    await self._changed(lambda row: limits.reached(row, limit))
            except (StoreError, NotFound) as error:
                swallowed(log, "gateway.limit", "that session %s reached its %s could not be written: %s", self.row.id, limit, error)
            finally:
                self._noted.discard(limit)

        self._background(noted())

    async def settled(self) -> None:
        """Return when all that is still to be known of this session's turns is written."""
        while self._settling:
            await asyncio.wait(self._settling)

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that keeps the session in memory until it is done."""
        if self._keeper is not None:
            self._keeper.woke(self.row.id)
        task = asyncio.create_task(work)
        self._settling.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._settling.discard(task)
            self._rest()

        task.add_done_callback(done)
        return task

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Await it, held. It goes on when the caller is cancelled."""
        task = self._background(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unheard)
            raise

    def _unheard(self, task: asyncio.Task[None]) -> None:
        """Nobody waits any more for what this task did."""
        if not task.cancelled() and (error := task.exception()) is not None:
            swallowed(log, "gateway.change", "session %s could not be changed, and who asked has left: %s", self.row.id, error)

    async def _changed(self, change: Callable[[SessionRow], SessionRow]) -> None:
        """Change the row, on disk first."""
        async with self._lock:
            if self.row.status == "dropped":
                raise NotFound(f"session {self.row.id!r} was dropped")
            row = change(self.row)
            if row == self.row:
                return
            await self._store.put_session(row)
            was, self.row = self.row, row
            if self._keeper is not None and was.status != row.status:
                self._keeper.closed(row.ended)
            if self._keeper is not None and was.rewards != row.rewards:
                self._keeper.rewarded()

    async def reward(self, value: float, lineage: str = "") -> None:
        """Add a reward of the session, or of one lineage: those that go through the turn of that id. Open or closed, any number of times.

        Raises BadRequest for what is no number that merges with the others, and NotFound once the session is dropped.
        """
        body = checked(RewardBody, {"value": value, "lineage": lineage})
        with self.held():
            await self._to_its_end(self._changed(lambda row: self._rewarded(row, body.value, body.lineage)))

    def _rewarded(self, row: SessionRow, value: float, lineage: str) -> SessionRow:
        if lineage and lineage not in self.tree.turns:
            raise BadRequest(f"lineage: this session has no turn {shown(lineage)}; a lineage is named by the id of its last turn")
        rewards = (*row.rewards, Reward(value, self._clock(), lineage))
        if merged(rewards, lineage, row.reward_rule) is None:
            raise BadRequest(f"reward: {value!r} and those before it are together beyond what a float holds")
        return replace(row, rewards=rewards)

    async def finish(self, reward: float | None = None, *, drain: float | None = None) -> None:
        """Close, let turns in flight end within `drain` seconds, cancel those that do not. Finishing again only adds the reward."""
        body = checked(FinishBody, {"reward": reward, "drain": drain})
        with self.held():
            await self._to_its_end(self._finished(body.reward, body.drain))

    async def _finished(self, reward: float | None, drain: float | None) -> None:
        await self._changed(lambda row: limits.closed(row if reward is None else self._rewarded(row, reward, ""), limits.FINISHED))
        await self._end_turns(drain)

    async def expire(self, now: float, *, drain: float | None = None) -> str:
        """Close it where its time is up at `now`, and say by which limit, "" for none. Turns in flight get their time to end afterwards."""
        with self.held():
            limit = limits.expiry(self.row, self.touched, self.in_flight, now)
            if limit:
                await self._to_its_end(self._expired(limit, drain))
            return limit

    async def _expired(self, limit: str, drain: float | None) -> None:
        await self._changed(lambda row: limits.closed(row, limit))
        self._background(self._end_turns(drain))

    async def drop(self) -> None:
        """End its turns at once, and forget it on disk. Nothing can be written to it afterwards."""
        with self.held():
            await self.finish(drain=0)
            await self.settled()
            async with self._lock:
                await self._store.drop(self.row.id)
                self.row = replace(self.row, status="dropped")

    async def _end_turns(self, drain: float | None) -> None:
        budget = self._drain if drain is None else drain
        await self.drain(DRAIN_SECONDS if budget is None else budget)
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


def merged(rewards: Sequence[Reward], lineage: str, rule: RewardRule) -> float | None:
    """One reward of those of a lineage, or of the whole session for ""; None where they are beyond what a float holds."""
    own = [replace(reward, lineage="") for reward in rewards if reward.lineage == lineage]
    try:
        merged = merged_reward(own, rule)
    except OverflowError:
        return None
    return merged if merged is not None and math.isfinite(merged) else None
