"""Which sessions are in memory: found by id or key, and put out once nobody uses them. It reads and writes nothing on disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from turnloom.gateway.session import Session

IDLE_SESSIONS = 1000
"""How many sessions that nobody uses stay in memory."""

IDLE_SECONDS = 600.0
"""How long a session that nobody uses stays in memory."""


class Memory:
    """At most `most` sessions that nobody uses, none of them for longer than `keep` seconds; the longest unused leave first.

    A session with turns in flight, with anything left to write, or that somebody
    holds never leaves. Everything here is done between two awaits, so that nobody
    sees a session half gone. `left` is called for each that leaves.
    """

    def __init__(
        self, clock: Callable[[], float], most: int = IDLE_SESSIONS, keep: float = IDLE_SECONDS, left: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._left = left
        self._most = max(most, 1)
        self._keep = keep
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Those that nobody uses and since when, the longest unused first."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        """Those of now, whatever comes and goes meanwhile."""
        return iter(list(self._by_id.values()))

    @property
    def idle(self) -> int:
        return len(self._idle)

    def get(self, session_id: str) -> Session | None:
        return self._found(self._by_id.get(session_id))

    def by_key(self, key_hash: str) -> Session | None:
        return self._found(self._by_key.get(key_hash))

    def _found(self, session: Session | None) -> Session | None:
        if session is not None and session.row.id in self._idle:
            self.rested(session.row.id)
        return session

    def add(self, session: Session) -> None:
        self._by_id[session.row.id] = session
        self._by_key[session.row.key_hash] = session
        self.rested(session.row.id)

    def woke(self, session_id: str) -> None:
        self._idle.pop(session_id, None)

    def rested(self, session_id: str) -> None:
        """It is the last that was used, and the first of all may have to leave for it."""
        if session_id in self._by_id:
            self._idle[session_id] = self._clock()
            self._idle.move_to_end(session_id)
            while len(self._idle) > self._most:
                self._put_out(next(iter(self._idle)))

    def evict(self) -> int:
        """Put out those whose time without use is up. How many that were."""
        now = self._clock()
        over = [session_id for session_id, since in self._idle.items() if now >= since + self._keep]
        for session_id in over:
            self._put_out(session_id)
        return len(over)

    def _put_out(self, session_id: str) -> None:
        self.forget(self._by_id[session_id])
        self._left()

    def forget(self, session: Session) -> None:
        """From here on another object may stand for it, and this one takes no work."""
        session.evicted = True
        self._idle.pop(session.row.id, None)
        del self._by_id[session.row.id]
        del self._by_key[session.row.key_hash]
