"""Which files a store takes: its own, older ones, and no others."""

import sqlite3

import pytest

from turnloom.errors import StoreError
from turnloom.store import blobs, codec, schema
from turnloom.store.contract import Usage
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import Sampling


async def test_a_file_of_a_newer_schema_is_refused(path):
    store = SQLiteStore(path)
    await store.open()
    await store.close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={schema.VERSION + 1}")
    connection.close()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=rf"schema {schema.VERSION + 1} and this Turnloom knows up to {schema.VERSION}; upgrade"):
            await SQLiteStore(path, read_only=read_only).open()


def old_file(path, version, deltas):
    """A store as the schema of that version had it, with one session of these turns."""
    connection = sqlite3.connect(path)
    for steps in schema.MIGRATIONS[:version]:
        for statement in steps:
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id={schema.APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={version}")
    limits = {"max_turns": None, "max_context": None, "turn_timeout": 600.0}
    body = {"id": "s1", "key_hash": "k", "created": 5.0, "sampling": codec.encode_sampling(Sampling()), "limits": limits, "group": "g"}
    body |= {"rollout": "r", "labels": {}, "metadata": {}, "status": "open", "reward": 0.5}
    connection.execute("INSERT INTO sessions (id, key_hash, created, status, body) VALUES ('s1', 'k', 5.0, 'open', ?)", (blobs.pack(body),))
    for delta in deltas:
        outcome, _, nodes, turn, appended, output, logprobs, *_ = codec.encode_delta(delta)
        columns = (delta.turn.id, outcome, nodes, turn, appended, output, logprobs)
        connection.execute(
            "INSERT INTO deltas (session, turn, outcome, nodes, body, appended, output, logprobs) VALUES (1, ?, ?, ?, ?, ?, ?, ?)", columns
        )
    if version >= 3:
        counted = f"SELECT count(*), sum(length(output)) / 4, sum({schema.SIZE}), 5.0 FROM deltas"
        connection.execute(f"UPDATE sessions SET (turns, tokens, bytes, touched) = ({counted})")
    connection.commit()
    connection.close()
    return sum(len(part) for delta in deltas for part in codec.encode_delta(delta) if isinstance(part, bytes))


@pytest.mark.parametrize("version", range(1, schema.VERSION))
async def test_a_file_of_an_older_schema_is_brought_up_to_date(path, delta, version):
    """Its turns say nothing of aborts, nobody counted them, and they have no checksums."""
    size = old_file(path, version, [delta("t1"), delta("t2", tokens=5)])
    with pytest.raises(StoreError, match=f"older schema {version}"):
        await SQLiteStore(path, read_only=True).open()
    store = SQLiteStore(path)
    await store.open()
    assert list(await store.deltas("s1")) == [delta("t1"), delta("t2", tokens=5)]
    assert await store.usage("s1") == Usage(turns=2, tokens=8, bytes=size, touched=5.0)
    found = await store.session_by_key("k")
    assert found is not None
    assert (found.reward, found.group, found.repeats) == (0.5, "g", "retry")
    await store.amend("s1", "t1", abort="verified")
    assert [d.turn.abort for d in await store.deltas("s1")] == ["verified", ""]
    await store.close()


async def test_a_file_that_is_no_database_is_refused_and_untouched(path):
    path.write_text("notes about the weather\n" * 100)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="not a Turnloom store"):
            await SQLiteStore(path, read_only=read_only).open()
    assert path.read_text() == "notes about the weather\n" * 100


async def test_another_programs_database_is_refused_and_untouched(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="not a Turnloom store"):
            await SQLiteStore(path, read_only=read_only).open()
    assert path.read_bytes() == before
