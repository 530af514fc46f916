"""What stays bounded: the write-ahead log, and what a write costs however much is stored. Costs are counted, not timed."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.conftest import make_delta, make_row
from turnloom.store import lists, schema, sqlite
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import Message, Outcome, Text, ids

PAGE = 4096
LOG_BYTES = (schema.CHECKPOINT_PAGES + 100) * (PAGE + 24)
"""What the log may hold between two checkpoints: a commit more than it takes to begin one."""


def large(turn: str) -> object:
    delta = make_delta(turn, tokens=20_000)
    return replace(delta, turn=replace(delta.turn, output=ids(range(20_000))))


def log_of(store: SQLiteStore) -> int:
    return Path(f"{store.path}-wal").stat().st_size


async def test_the_log_is_folded_in_as_it_grows(sqlite_store: SQLiteStore) -> None:
    await sqlite_store.put_session(make_row())
    for number in range(150):
        await sqlite_store.append("s1", large(f"t{number}"))  # type: ignore[arg-type]
        if number % 10 == 0:
            await sqlite_store.usage("s1")
        assert log_of(sqlite_store) < LOG_BYTES
    assert sqlite_store.path.stat().st_size > 3 * LOG_BYTES, "more went through the log than it ever held"


async def test_the_log_that_a_slow_reader_held_up_is_cut_when_it_has_left(sqlite_store: SQLiteStore) -> None:
    await sqlite_store.put_session(make_row())
    reader = sqlite3.connect(sqlite_store.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM sessions").fetchall()
    number = 0
    while log_of(sqlite_store) < schema.WAL_BYTES + LOG_BYTES:
        await sqlite_store.append("s1", large(f"t{number}"))  # type: ignore[arg-type]
        number += 1
    reader.close()
    for more in range(3):
        await sqlite_store.append("s1", large(f"u{more}"))  # type: ignore[arg-type]
    assert log_of(sqlite_store) <= schema.WAL_BYTES


async def steps(store: SQLiteStore, work: Callable[[], Awaitable[object]]) -> int:
    """How many instructions of SQLite's machine the writer needs for it."""
    assert store._writer is not None
    count = 0

    def one() -> int:
        nonlocal count
        count += 1
        return 0

    store._writer.connection.set_progress_handler(one, 1)
    await work()
    store._writer.connection.set_progress_handler(None, 1)
    return count


async def test_a_write_costs_the_same_however_many_turns_there_are(sqlite_store: SQLiteStore) -> None:
    reply = Message("assistant", (Text("a.txt"),))
    for number in range(20):
        await sqlite_store.put_session(make_row(f"other{number}"))

    async def costs(turn: str) -> list[int]:
        async def noted() -> None:
            sqlite_store.begin("s1", f"{turn}-begun", 1.0)
            sqlite_store.cancel("s1", f"{turn}-begun")
            sqlite_store.acknowledge("s1", turn)
            await sqlite_store.amend("s1", turn, abort="verified")

        return [
            await steps(sqlite_store, lambda: sqlite_store.append("s1", make_delta(turn))),
            await steps(sqlite_store, lambda: sqlite_store.replace("s1", make_delta(turn).turn, reply)),
            await steps(sqlite_store, lambda: sqlite_store.amend("s1", turn, outcome=Outcome.ORPHANED)),
            await steps(sqlite_store, noted),
            await steps(sqlite_store, lambda: sqlite_store.put_session(make_row())),
        ]

    await sqlite_store.put_session(make_row())
    await sqlite_store.append("s1", make_delta("t0"))
    few = await costs("t1")
    for number in range(2, 1000):
        await sqlite_store.append("s1", make_delta(f"t{number}"))
    many = await costs("t1000")
    assert all(few)
    assert many == few


EVERY_TURN = """
BEGIN_TURN CANCEL_TURN APPEND COUNT BEFORE REPLACE AMEND ACKNOWLEDGE DELTAS PUT_SESSION BY_KEY ENDED
""".split()
QUERIES = {name: getattr(sqlite, name) for name in EVERY_TURN}
QUERIES |= {name: getattr(lists, name) for name in ("SESSIONS", "SESSIONS_OF_STATUS", "NUMBERS_OF_STATUS", "EXPIRED")}
QUERIES["usage"] = f"SELECT {lists.USAGE} FROM sessions WHERE id = ?"
QUERIES["number"] = "SELECT number FROM sessions WHERE id = ?"
QUERIES["drop"] = "DELETE FROM deltas WHERE session = (SELECT number FROM sessions WHERE id = ?)"


@pytest.mark.parametrize("name", QUERIES)
async def test_nothing_that_a_turn_needs_looks_at_every_row(sqlite_store: SQLiteStore, name: str) -> None:
    query = QUERIES[name]
    given: object = {"status": None, "limit": 10, "offset": 0, "now": 0.0} if ":" in query else [None] * query.count("?")
    connection = sqlite3.connect(sqlite_store.path)
    plan = [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {query}", given)]  # type: ignore[arg-type]
    connection.close()
    assert not [step for step in plan if re.match(r"SCAN(?!.* USING INDEX sessions_by_age)|USE TEMP B-TREE", step)], plan
