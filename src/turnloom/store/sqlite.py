"""The durable store: one SQLite file in WAL mode, one writer thread, readers off the event loop.

At most one process writes a file; any number read it meanwhile with
`read_only=True`. Encoding happens in the writer's thread, decoding in a
reader's, so the event loop only waits.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from turnloom.core.records import Delta
from turnloom.errors import StoreError
from turnloom.store import codec, lists, lock, schema
from turnloom.store.blobs import crc
from turnloom.store.contract import Entry, SessionRow, StoreStats, Usage
from turnloom.store.readers import Readers, Rows
from turnloom.store.rows import decode_session, encode_session
from turnloom.store.writer import Writer
from turnloom.types import Message, Outcome, Turn

T = TypeVar("T")


class SQLiteStore:
    """Implements `turnloom.store.contract.Store`.

    A read-only store refuses every write with StoreError. `path` must lie on a
    local disk: WAL mode needs shared memory between readers and the writer.
    `busy_timeout` is how many seconds a write waits for another program that has
    the file locked.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, busy_timeout: float = schema.BUSY_TIMEOUT) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.busy_timeout = busy_timeout
        self._writer: Writer | None = None
        self._readers: Readers | None = None
        self._lock: int | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Opens the file, creating and upgrading it unless read-only. Raises StoreError saying what to do."""
        if self._readers is not None:
            raise StoreError(f"{self.path} is already open")
        connection = None if self.read_only else await asyncio.to_thread(self._open_for_writing)
        readers = Readers(self.path, busy_timeout=self.busy_timeout)
        try:
            await readers.run(lambda rows: rows("SELECT number FROM sessions LIMIT 1"))
        except StoreError:
            await readers.close()
            if connection is not None:
                connection.close()
                self._unlock()
            raise
        self._readers, self._closing = readers, None
        self._writer = None if connection is None else Writer(connection, self.path)

    def _open_for_writing(self) -> sqlite3.Connection:
        schema.create(self.path)
        self._lock = lock.take(self.path)
        try:
            connection = schema.connect(self.path, read_only=False, busy_timeout=self.busy_timeout)
            try:
                schema.migrate(connection, self.path)
                _interrupt(connection, self.path)
            except StoreError:
                connection.close()
                raise
        except StoreError:
            self._unlock()
            raise
        return connection

    async def put_session(self, row: SessionRow) -> None:
        body, limits = encode_session(row), row.limits
        expires = None if limits.ttl is None else row.created + limits.ttl

        def work(connection: sqlite3.Connection) -> None:
            values = (row.id, row.key_hash, row.created, row.status, body, crc(body), row.created, expires, limits.idle_timeout)
            try:
                connection.execute(PUT_SESSION, values)
            except sqlite3.IntegrityError as error:
                raise StoreError(f"session {row.id} cannot be stored: {error}; a key opens one session only") from error

        await self._write(work)

    def begin(self, session_id: str, turn_id: str, started: float) -> None:
        self._later(lambda c: c.execute(BEGIN_TURN, (turn_id, started, session_id)))

    def cancel(self, session_id: str, turn_id: str) -> None:
        self._later(lambda c: c.execute(CANCEL_TURN, (turn_id, session_id)))

    async def append(self, session_id: str, delta: Delta) -> None:
        def work(connection: sqlite3.Connection) -> None:
            columns, turn = codec.encode_delta(delta), delta.turn
            number = _number(connection, session_id)
            try:
                connection.execute(APPEND, (number, turn.id, *columns))
            except sqlite3.IntegrityError as error:
                raise StoreError(f"session {session_id} already holds turn {turn.id}; a turn is stored once") from error
            size = sum(len(column) for column in columns if isinstance(column, bytes))
            connection.execute(COUNT, (1, len(turn.output), size, turn.ended, number))
            connection.execute(ENDED, (number, turn.id))

        await self._write(work)

    async def replace(self, session_id: str, turn: Turn, reply: Message) -> None:
        def work(connection: sqlite3.Connection) -> None:
            number = _number(connection, session_id)
            known = connection.execute(BEFORE, (number, turn.id)).fetchone()
            if known is None:
                raise StoreError(f"session {session_id} has no turn {turn.id} to replace")
            delta = Delta(codec.replied(codec.decode_nodes(known[0]), turn.id, reply), turn)
            columns = codec.encode_delta(delta)
            connection.execute(REPLACE, (*columns, number, turn.id))
            size = sum(len(column) for column in columns if isinstance(column, bytes))
            connection.execute(COUNT, (0, len(turn.output) - known[1] // 4, size - known[2], turn.ended, number))
            connection.execute(ENDED, (number, turn.id))

        await self._write(work)

    async def amend(self, session_id: str, turn_id: str, *, outcome: Outcome | None = None, abort: str | None = None) -> None:
        def work(connection: sqlite3.Connection) -> None:
            number = _number(connection, session_id)
            if not connection.execute(AMEND, (outcome and str(outcome), abort, number, turn_id)).rowcount:
                raise StoreError(f"session {session_id} has no turn {turn_id} to amend")

        await self._write(work)

    def acknowledge(self, session_id: str, turn_id: str) -> None:
        self._later(lambda c: c.execute(ACKNOWLEDGE, (turn_id, session_id)))

    async def drop(self, session_id: str) -> None:
        def work(connection: sqlite3.Connection) -> None:
            for table in ("deltas", "begun"):
                connection.execute(f"DELETE FROM {table} WHERE session = (SELECT number FROM sessions WHERE id = ?)", (session_id,))
            connection.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

        await self._write(work)

    async def session(self, session_id: str) -> SessionRow | None:
        return await self._read(lambda rows: _session(rows("SELECT body, crc FROM sessions WHERE id = ?", (session_id,))))

    async def session_by_key(self, key_hash: str) -> SessionRow | None:
        """None for an empty hash: a session without a key is opened by none."""
        if not key_hash:
            return None
        return await self._read(lambda rows: _session(rows(BY_KEY, (key_hash,))))

    async def usage(self, session_id: str) -> Usage:
        """Zero for an unknown session."""
        (found,) = await self._read(lambda rows: rows(f"SELECT {lists.USAGE} FROM sessions WHERE id = ?", (session_id,))) or ((),)
        return lists.usage(found)

    async def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> Sequence[Entry]:
        asked = {"status": status, "limit": limit, "offset": offset}
        return await self._read(lambda rows: lists.listed(rows, self.path, asked))

    async def expired(self, now: float) -> Sequence[tuple[str, str]]:
        return await self._read(lambda rows: lists.expired(rows, now))

    async def stats(self) -> StoreStats:
        found, writer = await self._read(lambda rows: lists.stats(rows, _size(self.path))), self._writer
        return found if writer is None else replace(found, commits=writer.commits, commit_seconds=writer.seconds)

    async def deltas(self, session_id: str) -> Sequence[Delta]:
        """Empty for an unknown session."""

        def read(rows: Rows) -> list[Delta]:
            try:
                return [codec.decode_delta(row) for row in rows(DELTAS, (session_id,))]
            except StoreError as error:
                raise StoreError(f"{self.path}, session {session_id}: {error}") from error

        if self._writer is not None and self._closing is None:  # Notes that wait for company are part of them.
            await self._writer.flush()
        return await self._read(read)

    async def close(self) -> None:
        """Finishes every write handed in, then closes. Closing twice is no error."""
        if self._readers is None:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        assert self._readers is not None
        if self._writer is not None:
            self._writer.stop()
        await self._readers.close()  # before the writer's: the last connection to close folds the WAL in, and must be able to write
        if self._writer is not None:
            await self._writer.close()
        self._unlock()
        self._readers = self._writer = None

    async def _write(self, work: Callable[[sqlite3.Connection], None]) -> None:
        if self.read_only:
            raise StoreError(f"{self.path} was opened read-only; open it for writing to change it")
        if self._writer is None:
            raise StoreError(f"{self.path} is not open; open the store before using it")
        await self._writer.write(work)

    def _later(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Nobody waits for it. A store that is read-only or closed takes no notes."""
        if self._writer is not None:
            self._writer.write_later(work)

    async def _read(self, read: Callable[[Rows], T]) -> T:
        if self._readers is None or self._closing is not None:
            raise StoreError(f"{self.path} is not open; open the store before using it")
        return await self._readers.run(read)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


PUT_SESSION = """
INSERT INTO sessions (id, key_hash, created, status, body, crc, touched, expires, idle) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET key_hash = excluded.key_hash, created = excluded.created, status = excluded.status, body = excluded.body,
crc = excluded.crc, expires = excluded.expires, idle = excluded.idle
"""
BEGIN_TURN = "INSERT OR IGNORE INTO begun (session, turn, started) SELECT number, ?, ? FROM sessions WHERE id = ?"
ENDED = "DELETE FROM begun WHERE session = ? AND turn = ?"
CANCEL_TURN = "DELETE FROM begun WHERE turn = ? AND session = (SELECT number FROM sessions WHERE id = ?)"
APPEND = """
INSERT INTO deltas (session, turn, outcome, abort, nodes, body, appended, output, logprobs, acknowledged, crc)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
COUNT = """
UPDATE sessions SET turns = turns + ?, tokens = tokens + ?, bytes = bytes + ?, touched = max(touched, ?) WHERE number = ?
"""
BEFORE = f"SELECT nodes, length(output), {schema.SIZE} FROM deltas WHERE session = ? AND turn = ?"
REPLACE = """
UPDATE deltas SET outcome = ?, abort = ?, nodes = ?, body = ?, appended = ?, output = ?, logprobs = ?, acknowledged = ?, crc = ?
WHERE session = ? AND turn = ?
"""
AMEND = "UPDATE deltas SET outcome = coalesce(?, outcome), abort = coalesce(?, abort) WHERE session = ? AND turn = ?"
ACKNOWLEDGE = "UPDATE deltas SET acknowledged = 1 WHERE turn = ? AND session = (SELECT number FROM sessions WHERE id = ?)"
BY_KEY = "SELECT body, crc FROM sessions WHERE key_hash = ? AND key_hash != ''"
DELTAS = """
SELECT outcome, abort, nodes, deltas.body, appended, output, logprobs, acknowledged, deltas.crc FROM deltas
JOIN sessions ON sessions.number = deltas.session WHERE sessions.id = ? ORDER BY deltas.number
"""
INTERRUPT = """
UPDATE sessions SET interrupted = interrupted + (SELECT count(*) FROM begun WHERE begun.session = sessions.number)
WHERE number IN (SELECT session FROM begun)
"""


def _interrupt(connection: sqlite3.Connection, path: Path) -> None:
    """Turns that a killed process was making are counted. Raises StoreError."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(INTERRUPT)
        connection.execute("DELETE FROM begun")
        connection.execute("COMMIT")
    except schema.FAILURES as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise schema.explain(error, path) from error


def _size(path: Path) -> int:
    """Bytes of the file and what SQLite keeps beside it."""
    names = (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm")))
    return sum(name.stat().st_size for name in names if name.exists())


def _number(connection: sqlite3.Connection, session_id: str) -> int:
    row = connection.execute("SELECT number FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if row is None:
        raise StoreError(f"no session {session_id} is stored; put the session before its turns")
    return int(row[0])


def _session(found: Sequence[Any]) -> SessionRow | None:
    return decode_session(*found[0]) if found else None
