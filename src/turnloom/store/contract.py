"""What every store promises. A store holds sessions and their deltas; it never interprets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnloom.core.records import Delta
from turnloom.types import Outcome, Sampling


@dataclass(frozen=True, slots=True)
class Limits:
    """None is unlimited. `max_context` caps prompt plus reply in tokens, `turn_timeout` one turn in seconds."""

    max_turns: int | None = None
    max_context: int | None = None
    turn_timeout: float | None = 600.0


@dataclass(frozen=True, slots=True)
class SessionRow:
    """`key_hash` is the hex SHA-256 of the key; the key itself is never stored. `status` is open, closed or dropped."""

    id: str
    key_hash: str
    created: float
    sampling: Sampling
    limits: Limits
    group: str = ""
    rollout: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    status: str = "open"
    reward: float | None = None


class Store(Protocol):
    """Every coroutine returns only when what it wrote would survive `kill -9`. Failures raise StoreError."""

    async def open(self) -> None: ...

    async def put_session(self, row: SessionRow) -> None:
        """Insert, or replace the row of that id."""
        ...

    async def append(self, session_id: str, delta: Delta) -> None:
        """All of the delta or none of it. Raises StoreError for an unknown session or a turn id seen before."""
        ...

    async def amend(self, session_id: str, turn_id: str, *, outcome: Outcome | None = None, abort: str | None = None) -> None:
        """Change what comes to be known of a stored turn: that its client was gone after all, what became of its abort."""
        ...

    async def session(self, session_id: str) -> SessionRow | None: ...

    async def session_by_key(self, key_hash: str) -> SessionRow | None: ...

    async def sessions(self, *, limit: int = 100, offset: int = 0) -> Sequence[SessionRow]:
        """Newest first; dropped ones left out."""
        ...

    async def deltas(self, session_id: str) -> Sequence[Delta]:
        """In the order they were appended, amended outcomes applied."""
        ...

    async def drop(self, session_id: str) -> None:
        """Forget the session and all its turns. Dropping twice is no error."""
        ...

    async def close(self) -> None: ...
