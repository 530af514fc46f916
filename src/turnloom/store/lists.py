"""What is read of many sessions at once: where one cannot be read, that says so and hides no other.

All of them is one query. Only where SQLite cannot answer that are they read one by
one, by numbers from an index.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnloom.counters import swallowed
from turnloom.errors import StoreError
from turnloom.store import schema
from turnloom.store.blobs import damaged
from turnloom.store.contract import Entry, StoreStats, Usage
from turnloom.store.readers import Rows
from turnloom.store.rows import decode_session
from turnloom.store.typed import check_types

logger = logging.getLogger("turnloom.store")

USAGE = "turns, tokens, bytes, touched, interrupted"
_LISTED = "status != 'dropped'"
_OF_STATUS = "status != 'dropped' AND status = :status"
_PAGE = "ORDER BY created DESC, number DESC LIMIT :limit OFFSET :offset"
_ENTRY = f"SELECT id, body, crc, {USAGE} FROM sessions"
_OVER = "SELECT id, CASE WHEN expires <= :now THEN 'ttl' ELSE 'idle_timeout' END FROM sessions"
_DUE = "status = 'open' AND (expires <= :now OR touched + idle <= :now)"
_ALL = {"status": None, "limit": -1, "offset": 0}

SESSIONS = f"{_ENTRY} WHERE {_LISTED} {_PAGE}"
SESSIONS_OF_STATUS = f"{_ENTRY} WHERE {_OF_STATUS} {_PAGE}"
EXPIRED = f"{_OVER} WHERE {_DUE} ORDER BY created, number"
NUMBERS = f"SELECT number FROM sessions INDEXED BY sessions_by_status WHERE {_LISTED} {_PAGE}"
NUMBERS_OF_STATUS = f"SELECT number FROM sessions INDEXED BY sessions_by_status WHERE {_OF_STATUS} {_PAGE}"
BY_STATUS = "SELECT status, count(*) FROM sessions INDEXED BY sessions_by_status WHERE status != 'dropped' GROUP BY status"
NAME = "SELECT id FROM sessions INDEXED BY sqlite_autoindex_sessions_1 WHERE +number = ?"


def listed(rows: Rows, path: Path, asked: Mapping[str, Any]) -> list[Entry]:
    """`asked` has status, limit and offset."""
    try:
        return [_entry(*row) for row in rows(SESSIONS if asked["status"] is None else SESSIONS_OF_STATUS, asked)]
    except schema.FAILURES:
        return [_alone(rows, path, number, found) for number, found in _each(rows, asked, _ENTRY)]


def expired(rows: Rows, now: float) -> list[tuple[str, str]]:
    """Those that cannot be read are logged, and left as they are."""
    try:
        return rows(EXPIRED, {"now": now})
    except schema.FAILURES:
        each = [found for _, found in _each(rows, _ALL | {"status": "open"}, _OVER, f"AND {_DUE}", {"now": now})]
    failed = [found for found in each if isinstance(found, Exception)]
    if failed:
        words = "whether their time is up cannot be told of %d sessions: %s"
        swallowed(logger, "store.expired", words, len(failed), failed[0])
    return [row for found in each if not isinstance(found, Exception) for row in found]


def stats(rows: Rows, size: int) -> StoreStats:
    """Turns of sessions that cannot be read are not counted."""
    by_status = dict(rows(BY_STATUS))
    counted = "SELECT total(max(turns, 0)) FROM sessions"
    try:
        ((turns,),) = rows(counted)
    except schema.FAILURES:
        each = [found for _, found in _each(rows, _ALL, counted)]
        turns = sum(row[0] for found in each if not isinstance(found, Exception) for row in found)
    return StoreStats(by_status, int(turns), size, schema.VERSION)


def usage(columns: Sequence[Any]) -> Usage:
    """Raises StoreError for what cannot have been counted."""
    found = Usage(*columns)
    try:
        check_types(found)
        if min(columns, default=0) < 0:
            raise ValueError("it counts less than nothing")
    except ValueError as error:
        raise damaged("session's usage is", error) from error
    return found


def _entry(session_id: str, body: bytes, known: int | None, *columns: Any) -> Entry:
    used = Usage()
    try:
        used = usage(columns)
        return Entry(session_id, decode_session(body, known), used)
    except StoreError as error:
        return Entry(session_id, None, used, str(error))


def _alone(rows: Rows, path: Path, number: int, found: list[Any] | schema.Failure) -> Entry:
    if isinstance(found, list) and found:
        return _entry(*found[0])
    ((name,),) = rows(NAME, (number,)) or (("",),)
    error = schema.explain(found, path) if isinstance(found, Exception) else damaged("session is", LookupError("it is not where it was"))
    return Entry(name, None, Usage(), str(error))


def _each(
    rows: Rows, asked: Mapping[str, Any], query: str, more: str = "", values: Mapping[str, Any] | None = None
) -> Iterator[tuple[int, list[Any] | schema.Failure]]:
    """Each session's number, and the query's answer about it alone, or why there is none."""
    for (number,) in rows(NUMBERS if asked["status"] is None else NUMBERS_OF_STATUS, asked):
        try:
            yield number, rows(f"{query} WHERE number = :number {more}", {"number": number, **(values or {})})
        except schema.FAILURES as error:
            yield number, error
