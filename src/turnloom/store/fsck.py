"""Whether all that a store holds can be read, fits together, and is what the engine had.

It reads, beside a gateway that may be writing, and repairs nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from turnloom.core.records import Delta
from turnloom.core.tree import Tree
from turnloom.core.unroll import prompt_crc
from turnloom.errors import StoreError
from turnloom.store import codec, schema
from turnloom.store.contract import SessionRow, Usage
from turnloom.store.rows import decode_session
from turnloom.types import Turn, ids

RECOVER = "restore the file from a backup, or save what is left with `sqlite3 FILE .recover`"
DROP = "export what is left of the session, then drop it: DELETE /api/v1/sessions/ID"
OPEN = "none needed: the counts are for limits and lists; report it, it should not be"

_LINES = 100
"""Of SQLite's own findings."""


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
    for table, things in (("deltas", "turns"), ("begun", "begun turns")):
        (count,) = connection.execute(f"SELECT count(*) FROM {table} WHERE session NOT IN (SELECT number FROM sessions)").fetchone()
        if count:
            yield Problem(f"{count} {things} belong to no session", RECOVER)


def _sessions(connection: sqlite3.Connection, report: Report) -> Iterator[Problem]:
    columns = "number, CAST(id AS TEXT), key_hash, status, body, crc, turns, tokens, bytes, touched, interrupted"
    for number, session_id, key_hash, status, body, crc, *usage in connection.execute(f"SELECT {columns} FROM sessions ORDER BY number"):
        report.sessions += 1
        try:
            row = decode_session(body, crc)
        except StoreError as error:
            yield Problem(str(error), DROP, session_id)
        else:
            yield from _row(row, session_id, key_hash, status)
        try:
            yield from _turns(connection, number, session_id, Usage(*usage), report)
        except schema.FAILURES as error:
            yield Problem(f"its turns cannot be read on: {error}", RECOVER, session_id)


def _row(row: SessionRow, session_id: str, key_hash: str, status: str) -> Iterator[Problem]:
    for name, stored, said in (("id", session_id, row.id), ("key's hash", key_hash, row.key_hash), ("status", status, row.status)):
        if stored != said:
            yield Problem(f"its {name} is {stored!r} in the table and {said!r} in its row", DROP, session_id)


def _turns(connection: sqlite3.Connection, number: int, session_id: str, usage: Usage, report: Report) -> Iterator[Problem]:
    tree = Tree()
    turns = tokens = size = 0
    whole = True
    said = f"CAST(turn AS TEXT), {schema.SIZE}, length(output)"
    stored = "outcome, abort, nodes, body, appended, output, logprobs, acknowledged, crc"
    query = f"SELECT {said}, {stored} FROM deltas WHERE session = ? ORDER BY number"
    for turn_id, length, sampled, *columns in connection.execute(query, (number,)):
        turns, size, tokens = turns + 1, size + (length or 0), tokens + (sampled or 0) // 4
        try:
            delta = codec.decode_delta(columns)
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
    counted = (usage.turns, usage.tokens, usage.bytes)
    if counted != (turns, tokens, size):
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
