"""What only the SQLite store promises: durability, one writer, readers beside it, clear refusals."""

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import threading

import pytest

from turnloom.errors import StoreError
from turnloom.store import schema, writer
from turnloom.store.sqlite import SQLiteStore


class Gate:
    """Holds the writer's thread inside a transaction from `shut` to `open`."""

    def __init__(self, store: SQLiteStore) -> None:
        self.store = store
        self.entered, self.opened = threading.Event(), threading.Event()

    async def shut(self) -> None:
        self.task = asyncio.ensure_future(self.store._writer.write(self.wait))
        await asyncio.to_thread(self.entered.wait)

    def wait(self, connection: sqlite3.Connection) -> None:
        self.entered.set()
        self.opened.wait()

    async def open(self) -> None:
        self.opened.set()
        await self.task


@pytest.fixture
async def gate(sqlite_store):
    gate = Gate(sqlite_store)
    yield gate
    gate.opened.set()


async def settle() -> None:
    """Let every task that can run reach its next wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_file_is_in_wal_mode_with_full_synchronisation(sqlite_store):
    connection = sqlite_store._writer.connection
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)


async def test_only_the_owner_can_read_the_file(sqlite_store, path, row):
    await sqlite_store.put_session(row())
    for name in (path.name, path.name + "-wal", path.name + ".lock"):
        assert (path.parent / name).stat().st_mode & 0o077 == 0


async def test_a_reopened_file_holds_what_was_stored(path, row, delta):
    for turn in ("t1", "t2"):
        store = SQLiteStore(path)
        await store.open()
        await store.put_session(row())
        await store.append("s1", delta(turn))
        await store.close()
    store = SQLiteStore(path, read_only=True)
    await store.open()
    assert list(await store.deltas("s1")) == [delta("t1"), delta("t2")]
    await store.close()


async def test_closing_leaves_one_file_and_the_lock(sqlite_store, path, row, delta):
    await sqlite_store.put_session(row())
    await sqlite_store.append("s1", delta())
    await sqlite_store.deltas("s1")
    await sqlite_store.close()
    assert sorted(os.listdir(path.parent)) == [path.name, path.name + ".lock"]


async def test_waiting_appends_share_one_commit(sqlite_store, row, delta, gate):
    await gate.shut()
    before = sqlite_store._writer.commits
    tasks = [asyncio.ensure_future(sqlite_store.put_session(row()))]
    tasks += [asyncio.ensure_future(sqlite_store.append("s1", delta(f"t{n}"))) for n in range(200)]
    await settle()
    await gate.open()
    await asyncio.gather(*tasks)
    assert sqlite_store._writer.commits - before == 2  # the gate's own, and one for all the rest
    assert len(await sqlite_store.deltas("s1")) == 200


async def test_a_bad_append_in_a_shared_transaction_fails_alone(sqlite_store, row, delta, gate):
    await sqlite_store.put_session(row())
    await gate.shut()
    ids = ["a", "b", "a", "c"]
    tasks = [asyncio.ensure_future(sqlite_store.append("s1", delta(turn))) for turn in ids]
    await settle()
    await gate.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), type(None), StoreError, type(None)]
    assert [d.turn.id for d in await sqlite_store.deltas("s1")] == ["a", "b", "c"]


async def test_a_cancelled_append_is_stored_all_the_same(sqlite_store, row, delta, gate):
    await sqlite_store.put_session(row())
    await gate.shut()
    task = asyncio.ensure_future(sqlite_store.append("s1", delta("t1")))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gate.open()
    await sqlite_store.append("s1", delta("t2"))
    assert list(await sqlite_store.deltas("s1")) == [delta("t1"), delta("t2")]


async def test_the_failure_of_a_cancelled_append_is_logged(sqlite_store, row, delta, gate, caplog):
    await gate.shut()
    task = asyncio.ensure_future(sqlite_store.append("nobody", delta("t1")))
    await settle()
    task.cancel()
    await settle()
    with caplog.at_level(logging.ERROR, "turnloom.store"):
        await gate.open()
        await sqlite_store.put_session(row())
    assert "no session nobody" in caplog.text


async def test_close_finishes_what_is_queued_and_refuses_what_comes_after(sqlite_store, path, row, delta, gate):
    await sqlite_store.put_session(row())
    await gate.shut()
    queued = [asyncio.ensure_future(sqlite_store.append("s1", delta(f"t{n}"))) for n in range(20)]
    await settle()
    closing = asyncio.ensure_future(sqlite_store.close())
    await settle()
    with pytest.raises(StoreError, match="closed"):
        await sqlite_store.append("s1", delta("late"))
    with pytest.raises(StoreError, match="not open"):
        await sqlite_store.deltas("s1")
    await gate.open()
    await closing
    await asyncio.gather(*queued)
    await sqlite_store.open()
    assert len(await sqlite_store.deltas("s1")) == 20


async def test_a_cancelled_close_still_closes(sqlite_store, row, gate):
    await gate.shut()
    closing = asyncio.ensure_future(sqlite_store.close())
    await settle()
    closing.cancel()
    await settle()
    await gate.open()
    await sqlite_store.close()
    await sqlite_store.open()
    await sqlite_store.put_session(row())


async def test_a_full_disk_fails_what_does_not_fit_and_nothing_else(sqlite_store, row, delta, gate):
    await sqlite_store.put_session(row())
    await gate.shut()
    pages = sqlite_store._writer.connection.execute("PRAGMA page_count").fetchone()[0]
    sqlite_store._writer.connection.execute(f"PRAGMA max_page_count={pages + 4}")
    turns = [("small1", 1), ("large", 100_000), ("small2", 1)]
    tasks = [asyncio.ensure_future(sqlite_store.append("s1", delta(turn, tokens=tokens))) for turn, tokens in turns]
    await settle()
    await gate.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] is None
    assert results[2] is None
    with pytest.raises(StoreError, match="disk is full: free some space"):
        raise results[1]
    assert [d.turn.id for d in await sqlite_store.deltas("s1")] == ["small1", "small2"]


async def test_a_transaction_lost_as_a_whole_is_done_again_piece_by_piece(sqlite_store, row, delta, gate):
    await sqlite_store.put_session(row())
    await gate.shut()

    def lose(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    first = asyncio.ensure_future(sqlite_store.append("s1", delta("t1")))
    lost = asyncio.ensure_future(sqlite_store._writer.write(lose))
    second = asyncio.ensure_future(sqlite_store.append("s1", delta("t2")))
    await settle()
    await gate.open()
    with pytest.raises(StoreError, match="full"):
        await lost
    await asyncio.gather(first, second)
    assert list(await sqlite_store.deltas("s1")) == [delta("t1"), delta("t2")]


async def test_a_transaction_that_could_not_be_ended_does_not_hold_up_the_next(sqlite_store, row):
    sqlite_store._writer.connection.execute("BEGIN IMMEDIATE")
    await sqlite_store.put_session(row())
    assert await sqlite_store.session("s1") == row()


async def test_an_id_that_cannot_be_stored_is_refused_and_spares_its_neighbour(sqlite_store, row):
    results = await asyncio.gather(sqlite_store.put_session(row("s\ud800")), sqlite_store.put_session(row("s2")), return_exceptions=True)
    assert isinstance(results[0], StoreError)
    assert await sqlite_store.session("s2") == row("s2")
    with pytest.raises(StoreError, match="cannot be looked up"):
        await sqlite_store.session("s\ud800")


OTHER_PROCESS = """
import asyncio, sys
from turnloom.errors import StoreError
from turnloom.store.sqlite import SQLiteStore

async def main(path):
    try:
        await SQLiteStore(path).open()
    except StoreError as error:
        print(error)
    store = SQLiteStore(path, read_only=True)
    await store.open()
    print([delta.turn.id for delta in await store.deltas("s1")])
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


async def test_another_process_can_read_but_not_write(sqlite_store, path, row, delta):
    await sqlite_store.put_session(row())
    await sqlite_store.append("s1", delta("t1"))
    child = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", OTHER_PROCESS, str(path)], capture_output=True, text=True, check=True
    )
    refusal, turns = child.stdout.splitlines()
    assert f"being written by process {os.getpid()}" in refusal
    assert turns == "['t1']"
    await sqlite_store.append("s1", delta("t2"))
    assert len(await sqlite_store.deltas("s1")) == 2


async def test_a_reader_sees_what_the_writer_adds_later(sqlite_store, path, row, delta):
    await sqlite_store.put_session(row())
    reader = SQLiteStore(path, read_only=True)
    await reader.open()
    await sqlite_store.append("s1", delta("t1"))
    assert list(await reader.deltas("s1")) == [delta("t1")]
    with pytest.raises(StoreError, match="read-only"):
        await reader.append("s1", delta("t2"))
    await reader.close()


async def test_the_lock_is_free_again_after_close(path):
    for _ in range(2):
        store = SQLiteStore(path)
        await store.open()
        await store.close()


async def test_turns_of_a_killed_process_were_interrupted(path, row, delta):
    store = SQLiteStore(path)
    await store.open()
    await store.put_session(row("s1"))
    for turn in ("t1", "t2", "t3"):
        store.begin("s1", turn, 1.0)
    await store.append("s1", delta("t1"))
    store.cancel("s1", "t2")
    await store.put_session(row("s2"))
    killed = path.with_name("killed.db")
    for end in ("", "-wal"):
        killed.with_name(killed.name + end).write_bytes(path.with_name(path.name + end).read_bytes())
    await store.close()
    for _ in range(2):
        store = SQLiteStore(killed)
        await store.open()
        assert (await store.usage("s1")).interrupted == 1
        await store.close()


async def test_a_note_is_written_though_nothing_else_is(path, row, delta, monkeypatch):
    monkeypatch.setattr(writer, "LATER", 0.05)
    store = SQLiteStore(path)
    await store.open()
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1"))
    store.acknowledge("s1", "t1")
    async with asyncio.timeout(10):
        while [d.turn.acknowledged for d in await store.deltas("s1")] != [True]:
            await asyncio.sleep(0.01)
    await store.close()


async def test_notes_share_the_commit_of_what_is_waited_for(path, row, delta):
    store = SQLiteStore(path)
    await store.open()
    await store.put_session(row("s1"))
    before = (await store.stats()).commits
    for number in range(20):
        store.begin("s1", f"t{number}", 1.0)
        await store.append("s1", delta(f"t{number}"))
        store.acknowledge("s1", f"t{number}")
    assert (await store.stats()).commits == before + 20
    await store.close()


async def test_a_session_row_that_is_damaged_hides_no_other(path, row):
    store = SQLiteStore(path)
    await store.open()
    for name in ("s1", "s2", "s3"):
        await store.put_session(row(name))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE sessions SET body = x'01ff' WHERE id = 's2'")
    connection.commit()
    connection.close()
    entries = await store.sessions()
    assert [(entry.id, entry.row is None, "damaged" in entry.error) for entry in entries] == [
        ("s3", False, False),
        ("s2", True, True),
        ("s1", False, False),
    ]
    await store.close()


async def test_a_missing_directory_and_a_missing_file_are_explained(path):
    with pytest.raises(StoreError, match="create it first"):
        await SQLiteStore(path.parent / "nowhere" / "runs.db").open()
    with pytest.raises(StoreError, match="cannot be opened: check that it exists"):
        await SQLiteStore(path, read_only=True).open()
    assert not path.exists()


async def test_a_damaged_turn_is_a_store_error(sqlite_store, row, delta):
    await sqlite_store.put_session(row())
    await sqlite_store.append("s1", delta())
    await sqlite_store._writer.write(lambda c: c.execute("UPDATE deltas SET output = x'00'") and None)
    with pytest.raises(StoreError, match="session s1: a stored turn is damaged"):
        await sqlite_store.deltas("s1")
