"""The store's promises without a disk: for tests, demos and trainers that keep nothing.

Nothing survives the process. It never interprets what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from turnloom.core.records import Delta
from turnloom.errors import StoreError
from turnloom.store import codec, schema
from turnloom.store.contract import Entry, SessionRow, StoreStats, Usage
from turnloom.store.rows import decode_session, encode_session
from turnloom.types import Message, Outcome, Turn


@dataclass(slots=True)
class _Held:
    row: SessionRow
    usage: Usage
    deltas: dict[str, Delta] = field(default_factory=dict)

    def count(self, turns: int, before: Turn | None, turn: Turn, size: int) -> None:
        known = 0 if before is None else len(before.output)
        tokens = self.usage.tokens + len(turn.output) - known
        touched = max(self.usage.touched, turn.ended)
        self.usage = Usage(self.usage.turns + turns, tokens, self.usage.bytes + size, touched)


class MemoryStore:
    """Implements `turnloom.store.contract.Store`. Closing it keeps what it holds; it can be opened again."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._keys: dict[str, str] = {}
        self._open = False

    async def open(self) -> None:
        if self._open:
            raise StoreError("the memory store is already open")
        self._open = True

    async def put_session(self, row: SessionRow) -> None:
        self._check_open()
        copy = decode_session(encode_session(row))  # the caller keeps its own mappings
        holder = self._keys.get(row.key_hash, row.id)
        if holder != row.id:
            raise StoreError(f"session {row.id} cannot be stored: session {holder} has its key; a key opens one session only")
        if row.id in self._held:
            self._keys.pop(self._held[row.id].row.key_hash, None)
            self._held[row.id].row = copy
        else:
            self._held[row.id] = _Held(copy, Usage(touched=row.created))
        if row.key_hash:
            self._keys[row.key_hash] = row.id

    def begin(self, session_id: str, turn_id: str, started: float) -> None:
        """Nothing outlives this process that could tell of it."""

    def cancel(self, session_id: str, turn_id: str) -> None:
        """See `begin`."""

    async def append(self, session_id: str, delta: Delta) -> None:
        held = self._session(session_id, "put the session before its turns")
        codec.check_delta(delta)
        if delta.turn.id in held.deltas:
            raise StoreError(f"session {session_id} already holds turn {delta.turn.id}; a turn is stored once")
        held.deltas[delta.turn.id] = delta
        held.count(1, None, delta.turn, _size(delta))

    async def replace(self, session_id: str, turn: Turn, reply: Message) -> None:
        held = self._session(session_id, "nothing to replace")
        before = held.deltas.get(turn.id)
        if before is None:
            raise StoreError(f"session {session_id} has no turn {turn.id} to replace")
        delta = Delta(codec.replied(before.nodes, turn.id, reply), turn)
        codec.check_delta(delta)
        held.deltas[turn.id] = delta
        held.count(0, before.turn, turn, _size(delta) - _size(before))

    async def amend(self, session_id: str, turn_id: str, *, outcome: Outcome | None = None, abort: str | None = None) -> None:
        deltas = self._session(session_id, "nothing to amend").deltas
        if turn_id not in deltas:
            raise StoreError(f"session {session_id} has no turn {turn_id} to amend")
        delta = deltas[turn_id]
        turn = delta.turn
        changed = replace(turn, outcome=outcome or turn.outcome, abort=turn.abort if abort is None else abort)
        deltas[turn_id] = replace(delta, turn=changed)

    def acknowledge(self, session_id: str, turn_id: str) -> None:
        held = self._held.get(session_id)
        if held is not None and (delta := held.deltas.get(turn_id)) is not None:
            held.deltas[turn_id] = replace(delta, turn=replace(delta.turn, acknowledged=True))

    async def session(self, session_id: str) -> SessionRow | None:
        self._check_open()
        held = self._held.get(session_id)
        return None if held is None else held.row

    async def session_by_key(self, key_hash: str) -> SessionRow | None:
        """None for an empty hash: a session without a key is opened by none."""
        self._check_open()
        holder = self._keys.get(key_hash)
        return None if holder is None else self._held[holder].row

    async def usage(self, session_id: str) -> Usage:
        """Zero for an unknown session."""
        self._check_open()
        held = self._held.get(session_id)
        return Usage() if held is None else held.usage

    async def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> Sequence[Entry]:
        self._check_open()
        found = [h for h in reversed(self._held.values()) if h.row.status != "dropped" and status in (None, h.row.status)]
        found.sort(key=lambda held: held.row.created, reverse=True)
        return [Entry(held.row.id, held.row, held.usage) for held in found[offset : offset + limit]]

    async def expired(self, now: float) -> Sequence[tuple[str, str]]:
        self._check_open()
        return [(session_id, limit) for session_id, held in self._held.items() if (limit := _over(held, now))]

    async def stats(self) -> StoreStats:
        self._check_open()
        by_status = Counter(held.row.status for held in self._held.values() if held.row.status != "dropped")
        return StoreStats(dict(by_status), sum(held.usage.turns for held in self._held.values()), 0, schema.VERSION)

    async def deltas(self, session_id: str) -> Sequence[Delta]:
        """Empty for an unknown session."""
        self._check_open()
        held = self._held.get(session_id)
        return [] if held is None else list(held.deltas.values())

    async def drop(self, session_id: str) -> None:
        self._check_open()
        held = self._held.pop(session_id, None)
        if held is not None:
            self._keys.pop(held.row.key_hash, None)

    async def close(self) -> None:
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError("the memory store is not open; open the store before using it")

    def _session(self, session_id: str, advice: str) -> _Held:
        self._check_open()
        if session_id not in self._held:
            raise StoreError(f"no session {session_id} is stored; {advice}")
        return self._held[session_id]


def _size(delta: Delta) -> int:
    """About what a file would take, before compression."""
    turn = delta.turn
    messages = sum(len(str(node.message)) for node in delta.nodes)
    return messages + turn.appended.nbytes + turn.output.nbytes + turn.logprobs.nbytes


def _over(held: _Held, now: float) -> str:
    limits = held.row.limits
    if held.row.status != "open":
        return ""
    if limits.ttl is not None and held.row.created + limits.ttl <= now:
        return "ttl"
    return "idle_timeout" if limits.idle_timeout is not None and held.usage.touched + limits.idle_timeout <= now else ""
