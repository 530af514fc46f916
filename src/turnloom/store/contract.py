"""What every store promises. A store holds sessions and their deltas; it never interprets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from turnloom.core.credit import Reward, RewardRule, merged_reward
from turnloom.core.records import Delta
from turnloom.types import Message, Outcome, Sampling, Turn


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may use; None is unlimited.

    `max_context` caps prompt plus reply in tokens, `turn_timeout` one turn in
    seconds. `max_tokens` caps what is sampled in all turns, `max_bytes` what the
    store holds of them. A session expires `ttl` seconds after it was opened, and
    after `idle_timeout` seconds without a turn.
    """

    max_turns: int | None = None
    max_context: int | None = None
    turn_timeout: float | None = 600.0
    max_tokens: int | None = None
    max_bytes: int | None = None
    ttl: float | None = None
    idle_timeout: float | None = None


Repeats = Literal["retry", "resample"]
"""What a request is that came before, where it does not say so itself: the same one again, or the wish for another reply."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """`key_hash` is the hex SHA-256 of the key; the key itself is never stored. `status` is open, closed or dropped.

    `ended` says why it is closed: "finished", or the limit that closed it (`ttl`,
    `idle_timeout`). `reached` names the limits at which a request was refused.
    """

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
    rewards: tuple[Reward, ...] = ()
    reward_rule: RewardRule = "last"
    repeats: Repeats = "retry"
    ended: str = ""
    reached: tuple[str, ...] = ()

    @property
    def reward(self) -> float | None:
        """The rewards of the whole session, merged by its rule."""
        return merged_reward(self.rewards, self.reward_rule)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a session has on record. `tokens` are sampled ones, `bytes` those of its stored turns, `touched` when the last one
    ended (Unix seconds; when it was opened, before the first). `interrupted` turns were being made when a gateway was killed."""

    turns: int = 0
    tokens: int = 0
    bytes: int = 0
    touched: float = 0.0
    interrupted: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One session as the list has it. `row` is None where it cannot be read, and `error` says why."""

    id: str
    row: SessionRow | None
    usage: Usage
    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """`sessions` by status, the rest over all of them. `bytes` is the size of the files, 0 in memory. `commits` and
    `commit_seconds` are of this process."""

    sessions: Mapping[str, int]
    turns: int
    bytes: int
    schema: int
    commits: int = 0
    commit_seconds: float = 0.0


class Store(Protocol):
    """Every coroutine returns only when what it wrote would survive `kill -9`. Failures raise StoreError."""

    async def open(self) -> None:
        """Turns that were begun and never stored count as interrupted from here on."""
        ...

    async def put_session(self, row: SessionRow) -> None:
        """Insert, or replace the row of that id."""
        ...

    def begin(self, session_id: str, turn_id: str, started: float) -> None:
        """Note that a turn is being made. Written with the next thing that is, and gone when the turn is stored or `cancel`led."""
        ...

    def cancel(self, session_id: str, turn_id: str) -> None:
        """A turn that was begun ended without a record."""
        ...

    async def append(self, session_id: str, delta: Delta) -> None:
        """All of the delta or none of it. Raises StoreError for an unknown session or a turn id seen before."""
        ...

    async def replace(self, session_id: str, turn: Turn, reply: Message) -> None:
        """The turn and its reply in the place of those stored under its id, all or nothing: it was gone on with.

        Raises StoreError for an unknown session or turn.
        """
        ...

    async def amend(self, session_id: str, turn_id: str, *, outcome: Outcome | None = None, abort: str | None = None) -> None:
        """Change what comes to be known of a stored turn: that its client was gone after all, what became of its abort."""
        ...

    def acknowledge(self, session_id: str, turn_id: str) -> None:
        """Note that a stored turn's client has all of it. Written with the next thing that is: a kill may lose it."""
        ...

    async def session(self, session_id: str) -> SessionRow | None: ...

    async def session_by_key(self, key_hash: str) -> SessionRow | None: ...

    async def usage(self, session_id: str) -> Usage:
        """Zero for an unknown session."""
        ...

    async def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> Sequence[Entry]:
        """Newest first; dropped ones left out, and with `status` all others too."""
        ...

    async def expired(self, now: float) -> Sequence[tuple[str, str]]:
        """Open sessions whose time was up at `now`: each id, and which limit it was, `ttl` or `idle_timeout`."""
        ...

    async def deltas(self, session_id: str) -> Sequence[Delta]:
        """In the order they were appended, amended outcomes applied."""
        ...

    async def drop(self, session_id: str) -> None:
        """Forget the session and all its turns. Dropping twice is no error."""
        ...

    async def stats(self) -> StoreStats: ...

    async def close(self) -> None: ...
