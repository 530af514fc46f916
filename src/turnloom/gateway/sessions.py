"""All sessions of one gateway: opened, found by key, loaded again from the store, dropped."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from turnloom.core.match import CANONICAL, Matcher
from turnloom.core.tree import Tree
from turnloom.errors import BadRequest, NotFound, Unauthorized
from turnloom.gateway.body import check_json
from turnloom.gateway.session import Session
from turnloom.store.contract import Limits, SessionRow, Store
from turnloom.types import Sampling


def new_key() -> str:
    """A session key: 256 random bits, URL-safe."""
    return f"tl-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """Hex SHA-256. Keys are looked up by hash, so no comparison tells how much of a guess was right."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class Sessions:
    def __init__(
        self,
        store: Store,
        sampling: Sampling,
        limits: Limits,
        clock: Callable[[], float],
        *,
        open_unknown: bool = False,
        matcher: Matcher = CANONICAL,
    ) -> None:
        self._store = store
        self._sampling = sampling
        self._limits = limits
        self._clock = clock
        self._open_unknown = open_unknown
        self._matcher = matcher
        self._by_id: dict[str, Session] = {}
        self._ids: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._stopping = False

    async def open(
        self,
        *,
        session_id: str | None = None,
        key: str | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        group: str = "",
        rollout: str = "",
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key. Raises BadRequest when the id is taken or the metadata is no JSON that can be exported."""
        try:
            check_json(dict(metadata or {}))
        except ValueError as error:
            raise BadRequest(f"metadata: {error}") from error
        key = key or new_key()
        session_id = session_id or uuid.uuid4().hex
        async with self._lock:
            if session_id in self._by_id or await self._store.session(session_id) is not None:
                raise BadRequest(f"session id {session_id!r} is taken; choose another or leave it out")
            row = SessionRow(
                id=session_id,
                key_hash=hash_key(key),
                created=self._clock(),
                sampling=sampling or self._sampling,
                limits=limits or self._limits,
                group=group,
                rollout=rollout or session_id,
                labels=dict(labels or {}),
                metadata=dict(metadata or {}),
            )
            await self._store.put_session(row)
            return self._keep(Session(row, self._store, Tree(self._matcher))), key

    async def by_key(self, key: str) -> Session:
        """Raises Unauthorized for a key that opens no session."""
        if not key:
            raise Unauthorized("no session key: send it as a bearer token, as x-api-key, or in the path as /s/KEY")
        hashed = hash_key(key)
        if (session_id := self._ids.get(hashed)) is not None:
            return self._by_id[session_id]
        row = await self._store.session_by_key(hashed)
        if row is not None and row.status != "dropped":
            return await self._load(row)
        if not self._open_unknown:
            raise Unauthorized("no session has this key; open one first, or serve with --open-sessions on a trusted network")
        return await self._open_for(key)

    async def _open_for(self, key: str) -> Session:
        """One session per unknown key: its id is the key's hash, so two first requests at once open one."""
        session_id = hash_key(key)[:32]
        try:
            session, _ = await self.open(session_id=session_id, key=key)
        except BadRequest:
            return await self.by_id(session_id)
        return session

    async def by_id(self, session_id: str) -> Session:
        """Raises NotFound."""
        if (session := self._by_id.get(session_id)) is not None:
            return session
        row = await self._store.session(session_id)
        if row is None or row.status == "dropped":
            raise NotFound(f"no session {session_id!r}")
        return await self._load(row)

    async def rows(self, limit: int, offset: int) -> list[SessionRow]:
        return list(await self._store.sessions(limit=limit, offset=offset))

    async def drop(self, session_id: str) -> None:
        """Finish, then forget. Raises NotFound."""
        session = await self.by_id(session_id)
        await session.finish()
        await session.settled()
        await self._store.drop(session_id)
        self._by_id.pop(session_id, None)
        self._ids.pop(session.row.key_hash, None)

    @property
    def stopping(self) -> bool:
        """No new turn is taken."""
        return self._stopping

    @property
    def in_flight(self) -> int:
        """Turns that are being made."""
        return sum(session.in_flight for session in self._by_id.values())

    async def drain(self, seconds: float) -> None:
        """Take no new turn, and let those in flight come to their end, for so long at most."""
        self._stopping = True
        for session in self._by_id.values():
            session.stopping = True
        await asyncio.gather(*(s.drain(seconds) for s in list(self._by_id.values())))

    async def close(self) -> None:
        """Take no new turn and cancel what is in flight; sessions stay open on disk and go on after a restart."""
        await self.drain(0)
        await asyncio.gather(*(s.cancel_in_flight() for s in list(self._by_id.values())))

    async def settled(self) -> None:
        await asyncio.gather(*(s.settled() for s in list(self._by_id.values())))

    @property
    def loaded(self) -> int:
        return len(self._by_id)

    async def _load(self, row: SessionRow) -> Session:
        """The session as it was: its deltas applied again, in order."""
        async with self._lock:
            if (session := self._by_id.get(row.id)) is not None:
                return session
            tree = Tree(self._matcher)
            for delta in await self._store.deltas(row.id):
                tree.apply(delta)
            return self._keep(Session(row, self._store, tree))

    def _keep(self, session: Session) -> Session:
        session.stopping = self._stopping
        self._by_id[session.row.id] = session
        self._ids[session.row.key_hash] = session.row.id
        return session
