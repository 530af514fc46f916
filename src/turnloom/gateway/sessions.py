"""All sessions of one gateway: opened, found by key or id, brought back from the store, expired, dropped.

A session is in memory once or not at all. What brings one in, or changes one that
is not in memory, has its id to itself meanwhile; one that is in memory is changed
through its object alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from turnloom.core.credit import RewardRule
from turnloom.core.match import CANONICAL, Matcher
from turnloom.core.records import Delta
from turnloom.core.tree import Tree
from turnloom.counters import swallowed
from turnloom.errors import BadRequest, LimitReached, NotFound, StoreError, Unauthorized
from turnloom.gateway import limits as rules
from turnloom.gateway.memory import IDLE_SECONDS, IDLE_SESSIONS, Memory
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.opening import opening
from turnloom.gateway.session import Session
from turnloom.store.contract import Entry, Limits, Repeats, SessionRow, Store, StoreStats, Usage
from turnloom.types import Sampling
from turnloom.wire.fields import shown

T = TypeVar("T")

log = logging.getLogger("turnloom.gateway")

STATUSES = ("open", "closed")

MAX_LISTED = 1000
"""Sessions in one answer."""

_INLINE_DELTAS = 16
"""So few are applied within about a millisecond; more are in a thread, so that the event loop is not held up."""


def new_key() -> str:
    """A session key: 256 random bits, URL-safe."""
    return f"tl-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """Hex SHA-256. Keys are looked up by hash, so no comparison tells how much of a guess was right."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Sessions:
    """`max_sessions` may be open at once. At most `loaded` that nobody uses are in memory, none for longer than `keep` seconds.

    `drain` is how many seconds a finish waits for turns in flight.
    """

    def __init__(
        self,
        store: Store,
        sampling: Sampling,
        limits: Limits,
        clock: Callable[[], float],
        *,
        open_unknown: bool = False,
        matcher: Matcher = CANONICAL,
        max_sessions: int | None = None,
        loaded: int = IDLE_SESSIONS,
        keep: float = IDLE_SECONDS,
        drain: float | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._store = store
        self._sampling = sampling
        self._limits = limits
        self._clock = clock
        self._open_unknown = open_unknown
        self._matcher = matcher
        self._max = max_sessions
        self._drain = drain
        self._metrics = metrics or Metrics()
        self.memory = Memory(clock, loaded, keep, self._metrics.evictions.inc)
        self._open = 0
        self._alone: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stopping = False

    async def start(self) -> None:
        """Count the sessions that are open on disk. Raises StoreError."""
        if self._max is not None:
            self._open = (await self._store.stats()).sessions.get("open", 0)

    async def open(
        self,
        *,
        session_id: str | None = None,
        key: str | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        group: str = "",
        rollout: str = "",
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        reward_rule: RewardRule = "last",
        repeats: Repeats = "retry",
    ) -> tuple[Session, str]:
        """A new session and its key.

        A mapping for `sampling` or `limits` says what differs from the gateway's own; a `Sampling` or `Limits` is whole. Raises
        BadRequest when the id or the key is taken or a value is none that can be, and LimitReached when as many sessions are open
        as may be.
        """
        values = {
            "id": session_id,
            "group": group,
            "rollout": rollout,
            "labels": {} if labels is None else labels,
            "metadata": {} if metadata is None else metadata,
            "reward_rule": reward_rule,
            "repeats": repeats,
        }
        body, sampling, limits = opening(values, sampling, limits, (self._sampling, self._limits))
        own, session_id = key is None, body.id or uuid.uuid4().hex
        key = key or new_key()
        row = SessionRow(
            id=session_id,
            key_hash=hash_key(key),
            created=self._clock(),
            sampling=sampling,
            limits=limits,
            group=body.group,
            rollout=body.rollout or session_id,
            labels=body.labels,
            metadata=body.metadata,
            reward_rule=body.reward_rule,
            repeats=body.repeats,
        )
        await _to_its_end(self._put(row, unheard_of=own))
        return await self.by_id(session_id), key

    async def _put(self, row: SessionRow, *, unheard_of: bool) -> None:
        """`unheard_of` says of its key that nobody else can have it."""
        async with self._only(row.id), nullcontext() if unheard_of else self._only(f"{row.key_hash}'s"):
            if self.memory.get(row.id) is not None or await self._store.session(row.id) is not None:
                raise BadRequest(f"session id {row.id!r} is taken; choose another or leave it out")
            if not unheard_of and await self._store.session_by_key(row.key_hash) is not None:
                raise BadRequest("key: another session has it; choose another or leave it out")
            if self._max is not None and self._open >= self._max:
                self.refused("max_sessions")
                raise LimitReached(f"this gateway has {self._open} open sessions, as many as it may; finish one, or raise max_sessions")
            self._open += 1
            try:
                await self._store.put_session(row)
            except BaseException:
                self._open -= 1
                raise
            self._metrics.opened.inc()
            self._keep(row, Tree(self._matcher), Usage(touched=row.created))

    async def by_key(self, key: str) -> Session:
        """Raises Unauthorized for a key that opens no session. Hold what you get, if you await anything before you are done with it."""
        if not key:
            raise Unauthorized("no session key: send it as a bearer token, as x-api-key, or in the path as /s/KEY")
        hashed = hash_key(key)
        if (session := self.memory.by_key(hashed)) is not None:
            return session
        row = await self._store.session_by_key(hashed)
        if row is not None:
            try:
                session = await self.by_id(row.id)
            except NotFound:
                pass
            else:
                # It may have been dropped meanwhile, and its id be another's now.
                if hmac.compare_digest(session.row.key_hash, hashed):
                    return session
        if not self._open_unknown:
            raise Unauthorized("no session has this key; open one first, or serve with --open-sessions on a trusted network")
        return await self._open_for(key)

    async def _open_for(self, key: str) -> Session:
        """One session per unknown key: its id is the key's hash, so two first requests at once open one."""
        session_id = hash_key(key)[:32]
        try:
            session, _ = await self.open(session_id=session_id, key=key)
        except BadRequest:
            session = await self.by_id(session_id)
            if session.row.key_hash != hash_key(key):  # Somebody opened a session of their own under this id.
                raise Unauthorized("no session has this key, and the one that it would open has another") from None
        return session

    async def by_id(self, session_id: str) -> Session:
        """The one object that stands for it, brought back from the store where it was not in memory. Raises NotFound.

        Hold what you get (`Session.held`), if you await anything before you are done with it: else it may leave memory meanwhile.
        """
        if (session := self.memory.get(session_id)) is not None:
            return session
        async with self._only(session_id):
            if (session := self.memory.get(session_id)) is not None:
                return session
            row = await self._row(session_id)
            deltas, usage = await self._store.deltas(session_id), await self._store.usage(session_id)
            grow = asyncio.to_thread(grown, self._matcher, deltas) if len(deltas) > _INLINE_DELTAS else None
            tree = grown(self._matcher, deltas) if grow is None else await grow
            return self._keep(row, tree, usage)

    async def _row(self, session_id: str) -> SessionRow:
        row = await self._store.session(session_id) if session_id.isprintable() else None
        if row is None or row.status == "dropped":
            raise NotFound(f"no session {shown(session_id)}")
        return row

    def _keep(self, row: SessionRow, tree: Tree, usage: Usage) -> Session:
        session = Session(row, self._store, tree, usage=usage, clock=self._clock, keeper=self, drain=self._drain)
        session.stopping = self._stopping
        self.memory.add(session)
        return session

    async def entries(self, limit: int = 100, offset: int = 0, status: str | None = None) -> Sequence[Entry]:
        """As the store lists them, newest first. Nothing is brought into memory. Raises BadRequest and StoreError."""
        if not (0 <= limit <= MAX_LISTED and 0 <= offset < 2**31):
            raise BadRequest(f"limit: must be a whole number from 0 to {MAX_LISTED}, and offset one below {2**31}")
        if status is not None and status not in STATUSES:
            raise BadRequest(f"status: must be one of {', '.join(STATUSES)}")
        return await self._store.sessions(limit=limit, offset=offset, status=status)

    async def usage(self, session_id: str) -> Usage:
        """What the store counts of it."""
        return await self._store.usage(session_id)

    @property
    def metrics(self) -> Metrics:
        return self._metrics

    async def drop(self, session_id: str) -> None:
        """End its turns, then forget it and them. Goes on to its end when the caller is cancelled. Raises NotFound."""
        await _to_its_end(self._dropped(session_id))

    async def _dropped(self, session_id: str) -> None:
        async with self._only(session_id):
            if (session := self.memory.get(session_id)) is not None:
                await session.drop()
                self.memory.forget(session)
                return
            try:
                row = await self._row(session_id)
            except StoreError:  # Damaged: what nobody can read can be dropped all the same.
                await self._store.drop(session_id)
                await self.start()
                return
            await self._store.drop(session_id)
            if row.status == "open":
                self.closed("")

    async def due(self, now: float) -> Sequence[str]:
        """Sessions whose time is up at `now`, as the store knows it: one may have turns in flight. Raises StoreError."""
        return [session_id for session_id, _ in await self._store.expired(now)]

    async def expire(self, session_id: str, now: float) -> str:
        """Close it where its time is up at `now`, and say by which limit, "" for none. Raises StoreError."""
        return await _to_its_end(self._expired(session_id, now))

    async def _expired(self, session_id: str, now: float) -> str:
        async with self._only(session_id):
            if (session := self.memory.get(session_id)) is not None:
                return await session.expire(now)
            row = await self._store.session(session_id)
            if row is None:
                return ""
            limit = rules.expiry(row, (await self._store.usage(session_id)).touched, 0, now)
            if limit:
                await self._store.put_session(rules.closed(row, limit))
                self.closed(limit)
            return limit

    async def store_stats(self) -> StoreStats:
        """What the store holds. Raises StoreError."""
        return await self._store.stats()

    async def stats(self) -> StoreStats | None:
        """What the store holds; None where it cannot say."""
        try:
            return await self.store_stats()
        except StoreError as error:
            swallowed(log, "gateway.stats", "the store does not say what it holds: %s", error)
            return None

    def woke(self, session_id: str) -> None:
        self.memory.woke(session_id)

    def rested(self, session_id: str) -> None:
        self.memory.rested(session_id)

    def closed(self, why: str) -> None:
        self._open -= 1
        if why in (rules.TTL, rules.IDLE):
            self._metrics.expired(why)

    def refused(self, limit: str) -> None:
        self._metrics.limit(limit)

    def rewarded(self) -> None:
        self._metrics.rewards.inc()

    def evict(self) -> int:
        """Put sessions out of memory that nobody has used for long enough. How many that were."""
        return self.memory.evict()

    @property
    def stopping(self) -> bool:
        """No new turn is taken."""
        return self._stopping

    @property
    def in_flight(self) -> int:
        """Turns that are being made."""
        return sum(session.in_flight for session in self.memory)

    @property
    def loaded(self) -> int:
        return len(self.memory)

    async def drain(self, seconds: float) -> None:
        """Take no new turn, and let those in flight come to their end, for so long at most."""
        self._stopping = True
        for session in self.memory:
            session.stopping = True
        await asyncio.gather(*(s.drain(seconds) for s in self.memory))

    async def close(self) -> None:
        """Take no new turn and cancel what is in flight; sessions stay open on disk and go on after a restart."""
        await self.drain(0)
        await asyncio.gather(*(s.cancel_in_flight() for s in self.memory))

    async def settled(self) -> None:
        await asyncio.gather(*(s.settled() for s in self.memory))

    @asynccontextmanager
    async def _only(self, session_id: str) -> AsyncIterator[None]:
        """Have this id to oneself. The lock is gone when nobody holds or awaits it."""
        lock = self._alone.get(session_id)
        if lock is None:
            lock = self._alone[session_id] = asyncio.Lock()
        async with lock:
            yield


def grown(matcher: Matcher, deltas: Sequence[Delta]) -> Tree:
    """The tree as it was: its deltas applied again, in order. Raises StoreError where they do not fit each other."""
    tree = Tree(matcher)
    for delta in deltas:
        try:
            tree.apply(delta)
        except (ValueError, LookupError, AssertionError, TypeError, AttributeError) as error:
            raise StoreError(
                f"stored turn {delta.turn.id} does not fit what is stored before it: {type(error).__name__}: {error}"
            ) from error
    return tree


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await it. A caller that is cancelled meanwhile leaves at once, and what it began is done all the same."""
    return await asyncio.shield(asyncio.ensure_future(work))
