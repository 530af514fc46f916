"""Whether all that a store holds can be read, fits together, and is what the engine had.

It reads, beside a gateway that may be writing, and repairs nothing. Rows are read
one by one, by numbers from an index, so that a page which is damaged hides no
other.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turnloom.core.records import Delta
from turnloom.core.tree import Tree
from turnloom.core.unroll import prompt_crc
from turnloom.errors import StoreError
from turnloom.store import codec, schema
from turnloom.store.rows import decode_session
from turnloom.types import Turn, ids

RECOVER = "restore the file from a backup, or save what is left with `sqlite3 FILE .recover`"
DROP = "nothing of this session can be exported: restore the file from a backup, or drop it: DELETE /api/v1/sessions/ID"
OPEN = "none needed: the counts are for limits and lists; report it, it should not be"

_LINES = 100
"""Of SQLite's own findings."""

REPEATED = ("id", "key's hash", "status", "opening", "end of time", "idle time")
"""What is in columns of its own beside a session's words, and must be the same."""

BY_AGE = "SELECT number, '' FROM sessions INDEXED BY sessions_by_age"
BY_ID = "SELECT number, CAST(id AS TEXT) FROM sessions INDEXED BY sqlite_autoindex_sessions_1"
SESSION = """
SELECT turns, tokens, bytes, body, crc, CAST(id AS TEXT), key_hash, status, created, expires, idle FROM sessions WHERE number = ?
"""
NUMBERS = "SELECT number FROM deltas INDEXED BY deltas_by_session WHERE session = ? ORDER BY number"
DELTA = f"""
SELECT CAST(turn AS TEXT), {schema.SIZE}, length(output),
outcome, abort, nodes, body, appended, output, logprobs, acknowledged, crc FROM deltas WHERE number = ?
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """`session` and `turn` are ids, "" where it is about no single one."""

    what: str
    advice: str
    session: str = ""
    turn: str = ""


@dataclass(slots=True)
class Report:
    sessions: int = 0
    turns: int = 0
    tokens: int = 0
    problems: list[Problem] = field(default_factory=list)


def check(path: Path) -> Report:
    """Look at every row. Raises StoreError where the file is no store that this version reads."""
    connection = schema.connect(path, read_only=True)
    report = Report()
    try:
        connection.execute("BEGIN")  # one moment of the file, whoever writes meanwhile
        for part in (_file, _sessions, _strays):
            try:
                report.problems += part(connection, report)
            except schema.FAILURES as error:
                report.problems.append(Problem(f"it cannot be read on: {error}", RECOVER))
    finally:
        connection.close()
    return report


def _file(connection: sqlite3.Connection, report: Report) -> Iterator[Problem]:
    for (line,) in connection.execute(f"PRAGMA integrity_check({_LINES})"):
        if line != "ok":
            yield Problem(f"SQLite finds: {line}", RECOVER)


def _strays(connection: sqlite3.Connection, report: Report) -> Iterator[Problem]:
    known = "SELECT number FROM sessions INDEXED BY sessions_by_age"
    for table, things in (("deltas INDEXED BY deltas_by_session", "turns"), ("begun", "begun turns")):
        (count,) = connection.execute(f"SELECT count(*) FROM {table} WHERE session NOT IN ({known})").fetchone()
        if count:
            yield Problem(f"{count} {things} belong to no session", RECOVER)


def _sessions(connection: sqlite3.Connection, report: Report) -> Iterator[Problem]:
    found: dict[int, str] = {}
    for index in (BY_AGE, BY_ID):
        try:
            for number, session_id in connection.execute(index):
                found[number] = session_id or found.get(number, "")
        except schema.FAILURES as error:
            yield Problem(f"not all sessions can be found: {error}", RECOVER)
    for number, session_id in sorted(found.items()):
        report.sessions += 1
        counted: tuple[int, ...] | None = None
        try:
            row = _stored(connection, SESSION, number)
        except StoreError as error:
            yield Problem(str(error), RECOVER, session_id)
        else:
            counted = row[:3]
            yield from _row(session_id, *row[3:])
        try:
            yield from _turns(connection, number, session_id, counted, report)
        except schema.FAILURES as error:
            yield Problem(f"not all of its turns can be found: {error}", RECOVER, session_id)


def _stored(connection: sqlite3.Connection, query: str, number: int) -> tuple[Any, ...]:
    """One row. Raises StoreError."""
    try:
        row: tuple[Any, ...] | None = connection.execute(query, (number,)).fetchone()
    except schema.FAILURES as error:
        raise StoreError(f"it cannot be read: {error}") from error
    if row is None:
        raise StoreError("it is in an index and not in its table")
    return row


def _row(session_id: str, body: bytes, crc: int | None, *columns: Any) -> Iterator[Problem]:
    try:
        row = decode_session(body, crc)
    except StoreError as error:
        yield Problem(str(error), DROP, session_id)
        return
    expires = None if row.limits.ttl is None else row.created + row.limits.ttl
    known = (row.id, row.key_hash, row.status, row.created, expires, row.limits.idle_timeout)
    for name, stored, said in zip(REPEATED, columns, known, strict=True):
        if stored != said:
            yield Problem(f"its {name} is {stored!r} in the table and {said!r} in its row", DROP, session_id)


def _turns(
    connection: sqlite3.Connection, number: int, session_id: str, counted: tuple[int, ...] | None, report: Report
) -> Iterator[Problem]:
    """`counted` is what the session's row says of them, None where that cannot be read."""
    tree = Tree()
    turns = tokens = size = 0
    whole, all_read = True, True
    for (at,) in connection.execute(NUMBERS, (number,)):
        turns += 1
        try:
            turn_id, length, sampled, *columns = _stored(connection, DELTA, at)
        except StoreError as error:
            whole = all_read = False
            yield Problem(f"its turn number {turns - 1}: {error}", RECOVER, session_id)
            continue
        size, tokens = size + (length or 0), tokens + (sampled or 0) // 4
        try:
            delta = codec.decode_delta((*columns,))
        except StoreError as error:
            whole = False
            yield Problem(str(error), DROP, session_id, turn_id)
            continue
        if not whole:
            continue  # What follows may go on from what is missing.
        found = [Problem(what, DROP, session_id, turn_id) for what in _delta(tree, turn_id, delta)]
        yield from found
        whole = not found
    report.turns, report.tokens = report.turns + turns, report.tokens + tokens
    if all_read and counted is not None and counted != (turns, tokens, size):
        yield Problem(f"it counts {counted} turns, tokens and bytes, and holds {(turns, tokens, size)}", OPEN, session_id)


def _delta(tree: Tree, turn_id: str, delta: Delta) -> Iterator[str]:
    """What is wrong with one turn, which is added to the tree where nothing is."""
    turn = delta.turn
    if turn.id != turn_id:
        yield f"it is {turn.id} in its own words"
        return
    problems = list(_turn(tree, turn))
    yield from problems
    if problems:
        return
    try:
        tree.apply(delta)
    except (ValueError, LookupError, AssertionError, TypeError, AttributeError) as error:
        yield f"its messages do not fit what came before: {type(error).__name__}: {error}"
        return
    if turn.id not in tree.node_of:
        yield "none of its messages is its reply"


def _turn(tree: Tree, turn: Turn) -> Iterator[str]:
    sampled = len(turn.output)
    if turn.index != len(tree.turns):
        yield f"it is number {turn.index} and stands at {len(tree.turns)}"
    if len(turn.logprobs) != sampled or not np.isfinite(turn.logprobs).all():
        yield f"its {sampled} sampled ids do not have a logprob each"
    if not all(0 <= span.start <= span.end <= sampled for span in turn.versions):
        yield "its weight versions reach beyond its output"
    if not all(0 <= piece.start <= sampled for piece in turn.pieces):
        yield "its pieces reach beyond its output"
    if not all(0 <= call.first_token <= call.end_token <= sampled for call in turn.calls):
        yield "its calls reach beyond its output"
    if turn.base is not None and turn.base not in tree.turns:
        yield f"it goes on from turn {turn.base}, which there is not"
        return
    held = tree.held(turn.base)
    if not 0 <= turn.kept <= len(held):
        yield f"it keeps {turn.kept} of the {len(held)} ids that it goes on from"
    elif prompt_crc(ids(np.concatenate([held[: turn.kept], turn.appended]))) != turn.prompt_crc:
        yield "its prompt is not, by its checksum, the one that the engine had"
