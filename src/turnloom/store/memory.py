"""The store's promises without a disk: for tests, demos and trainers that keep nothing.

Nothing survives the process. It never interprets what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from turnloom.core.records import Delta
from turnloom.errors import StoreError
from turnloom.store import codec
from turnloom.store.contract import SessionRow
from turnloom.types import Outcome


@dataclass(slots=True)
class _Held:
    row: SessionRow
    deltas: dict[str, Delta] = field(default_factory=dict)


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
        copy = codec.decode_session(codec.encode_session(row))  # the caller keeps its own mappings
        holder = self._keys.get(row.key_hash, row.id)
        if holder != row.id:
            raise StoreError(f"session {row.id} cannot be stored: session {holder} has its key; a key opens one session only")
        if row.id in self._held:
            self._keys.pop(self._held[row.id].row.key_hash, None)
            self._held[row.id].row = copy
        else:
            self._held[row.id] = _Held(copy)
        if row.key_hash:
            self._keys[row.key_hash] = row.id

    async def append(self, session_id: str, delta: Delta) -> None:
        deltas = self._session(session_id, "put the session before its turns").deltas
        codec.check_delta(delta)
        if delta.turn.id in deltas:
            raise StoreError(f"session {session_id} already holds turn {delta.turn.id}; a turn is stored once")
        deltas[delta.turn.id] = delta

    async def amend(self, session_id: str, turn_id: str, *, outcome: Outcome | None = None, abort: str | None = None) -> None:
        deltas = self._session(session_id, "nothing to amend").deltas
        if turn_id not in deltas:
            raise StoreError(f"session {session_id} has no turn {turn_id} to amend")
        delta = deltas[turn_id]
        turn = delta.turn
        changed = replace(turn, outcome=outcome or turn.outcome, abort=turn.abort if abort is None else abort)
        deltas[turn_id] = replace(delta, turn=changed)

    async def session(self, session_id: str) -> SessionRow | None:
        self._check_open()
        held = self._held.get(session_id)
        return None if held is None else held.row

    async def session_by_key(self, key_hash: str) -> SessionRow | None:
        """None for an empty hash: a session without a key is opened by none."""
        self._check_open()
        holder = self._keys.get(key_hash)
        return None if holder is None else self._held[holder].row

    async def sessions(self, *, limit: int = 100, offset: int = 0) -> Sequence[SessionRow]:
        self._check_open()
        rows = [held.row for held in reversed(self._held.values()) if held.row.status != "dropped"]
        return sorted(rows, key=lambda row: row.created, reverse=True)[offset : offset + limit]

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
