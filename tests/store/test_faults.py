"""What a disk, a file and other programs can do to a store: it says so, acknowledges nothing that is not stored, and goes on afterwards."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.store.conftest import NAMES, column_of, make_delta, make_row, overwrite_page, write_small_sessions
from turnloom.errors import StoreError
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import ids

LARGE = 150_000
"""Tokens of a turn that needs more than a megabyte."""


async def stored(path: Path, session: str = "s1") -> list[str]:
    """The turns that a process finds which opens the file anew."""
    store = SQLiteStore(path)
    await store.open()
    turns = [delta.turn.id for delta in await store.deltas(session)]
    assert (await store.usage(session)).turns == len(turns)
    await store.close()
    return turns


async def begun(path: Path, *turns: str) -> SQLiteStore:
    """An open store with one session of these turns."""
    store = SQLiteStore(path, busy_timeout=0.05)
    await store.open()
    await store.put_session(make_row())
    for turn in turns:
        await store.append("s1", make_delta(turn))
    return store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


def fill(disk: Path) -> Path:
    """All of the disk but a few pages, in one file."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
        file.truncate(file.tell() - 4 * 4096)
    return filler


async def test_a_disk_that_is_full_takes_nothing_and_everything_again_when_there_is_room(small_disk: Path) -> None:
    store = await begun(small_disk / "runs.db", "t1")
    filler = fill(small_disk)
    for turn in ("t2", "t3"):
        with pytest.raises(StoreError, match="disk is full: free some space and go on"):
            await store.append("s1", make_delta(turn, tokens=LARGE))
    store.begin("s1", "t9", 1.0)
    assert [delta.turn.id for delta in await store.deltas("s1")] == ["t1"]
    filler.unlink()
    await store.append("s1", make_delta("t4", tokens=LARGE))
    await store.append("s1", make_delta("t2"))
    await store.close()
    assert await stored(small_disk / "runs.db") == ["t1", "t4", "t2"]


async def test_a_store_that_was_killed_on_a_full_disk_holds_what_it_acknowledged(small_disk: Path) -> None:
    store = await begun(small_disk / "runs.db", "t1")
    filler = fill(small_disk)
    with pytest.raises(StoreError, match="full"):
        await store.append("s1", make_delta("t2", tokens=LARGE))
    filler.unlink()
    killed = small_disk / "killed.db"
    for end in ("", "-wal"):
        shutil.copy(f"{store.path}{end}", f"{killed}{end}")
    await store.close()
    assert await stored(killed) == ["t1"]


async def test_a_new_store_on_a_full_disk_is_refused(small_disk: Path) -> None:
    filler = fill(small_disk)
    with filler.open("ab") as file:
        file.write(bytes(3 * 4096))
    store = SQLiteStore(small_disk / "runs.db")
    with pytest.raises(StoreError, match="disk is full"):
        await store.open()
    filler.unlink()
    await store.open()
    await store.close()


BEYOND_ITS_LIMIT = """
import asyncio, os, resource, sys
from tests.store.conftest import make_delta
from turnloom.errors import StoreError
from turnloom.store.sqlite import SQLiteStore

async def main(path):
    store = SQLiteStore(path)
    await store.open()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path + "-wal") + 100_000, hard))
    failed, number = 0, 0
    while failed < 5:
        batch = [f"t{number + n}" for n in range(8)]
        number += 8
        results = await asyncio.gather(*(store.append("s1", make_delta(t, tokens=400)) for t in batch), return_exceptions=True)
        for turn, error in zip(batch, results):
            assert error is None or isinstance(error, StoreError), error
            failed += error is not None
            print("stored" if error is None else "failed", turn, error or "", flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await store.append("s1", make_delta("afterwards"))
    print("stored afterwards", flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main(sys.argv[1]))
"""


async def test_what_was_written_is_what_was_acknowledged_when_the_disk_refuses(path: Path) -> None:
    """A file that may not grow is what a broken disk is: writing fails, at any byte."""
    await (await begun(path)).close()
    child = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", BEYOND_ITS_LIMIT, str(path)], capture_output=True, text=True)
    told = [line.split(" ", 2) for line in child.stdout.splitlines()]
    assert child.returncode == -9, child.stderr
    assert {words[0] for words in told} == {"stored", "failed"}
    assert all("check the disk" in words[2] for words in told if words[0] == "failed")
    assert await stored(path) == [words[1] for words in told if words[0] == "stored"]


WITHOUT_RIGHTS = """
import asyncio, os, sys
from turnloom.errors import StoreError
from turnloom.store.sqlite import SQLiteStore

async def main(path):
    try:
        await SQLiteStore(path).open()
        print("it opened")
    except StoreError as error:
        print(error)

if os.geteuid() == 0:  # whom no permission binds
    os.setgid(65534)
    os.setuid(65534)
asyncio.run(main(sys.argv[1]))
"""


def told_without_rights(path: Path) -> str:
    """What a process is told that opens the store for writing, and is nobody in particular."""
    child = subprocess.run([sys.executable, "-c", WITHOUT_RIGHTS, str(path)], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, and write into."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


async def test_a_folder_that_cannot_be_written_is_named(open_folder: Path) -> None:
    await (await begun(open_folder / "runs.db")).close()
    (open_folder / "runs.db").chmod(0o666)
    (open_folder / "runs.db.lock").unlink()
    open_folder.chmod(0o555)
    told = told_without_rights(open_folder / "runs.db")
    assert "cannot create" in told
    assert "check the permissions of its directory" in told


async def test_a_file_that_cannot_be_written_is_named(open_folder: Path) -> None:
    await (await begun(open_folder / "runs.db", "t1")).close()
    (open_folder / "runs.db.lock").chmod(0o666)
    (open_folder / "runs.db").chmod(0o444)
    assert "cannot be written: check its permissions" in told_without_rights(open_folder / "runs.db")
    (open_folder / "runs.db").chmod(0o000)
    assert "check" in told_without_rights(open_folder / "runs.db")
    (open_folder / "runs.db").chmod(0o600)
    assert await stored(open_folder / "runs.db") == ["t1"]


async def test_a_disk_that_is_mounted_read_only_is_named(small_disk: Path) -> None:
    await (await begun(small_disk / "runs.db", "t1")).close()
    remount(small_disk, "ro")
    with pytest.raises(StoreError, match="Read-only file system; check"):
        await SQLiteStore(small_disk / "runs.db").open()
    remount(small_disk, "rw")
    assert await stored(small_disk / "runs.db") == ["t1"]


async def test_a_file_that_becomes_read_only_takes_nothing_until_it_can_be_written(path: Path) -> None:
    store = await begun(path, "t1")
    assert store._writer is not None
    store._writer.connection.execute("PRAGMA query_only=ON")
    for work in (store.append("s1", make_delta("t2")), store.put_session(make_row("s2")), store.drop("s1")):
        with pytest.raises(StoreError, match="cannot be written: check its permissions"):
            await work
    store.acknowledge("s1", "t1")
    assert [delta.turn.id for delta in await store.deltas("s1")] == ["t1"]
    assert await store.session("s2") is None
    store._writer.connection.execute("PRAGMA query_only=OFF")
    await store.append("s1", make_delta("t3"))
    await store.close()
    assert await stored(path) == ["t1", "t3"]


HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def held_by_another(path: Path) -> Iterator[None]:
    """Another process is in the middle of writing the file."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield
        other.communicate("\n")


async def test_a_program_that_holds_the_file_is_named_as_the_cause(path: Path) -> None:
    store = await begun(path, "t1")
    with held_by_another(path):
        with pytest.raises(StoreError, match="locked by another program: close that program"):
            await store.append("s1", make_delta("t2"))
        assert [delta.turn.id for delta in await store.deltas("s1")] == ["t1"], "what is stored can be read meanwhile"
    await store.append("s1", make_delta("t3"))
    await store.close()
    assert await stored(path) == ["t1", "t3"]


async def test_a_write_waits_for_a_program_that_holds_the_file_shortly(path: Path) -> None:
    store = await begun(path)
    await store.close()
    store = SQLiteStore(path, busy_timeout=60.0)
    await store.open()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.ensure_future(store.append("s1", make_delta("t1")))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    other.execute("ROLLBACK")
    other.close()
    await waiting
    await store.close()


async def sessions_of_large_turns(path: Path, sessions: int) -> None:
    """No two turns have a sampled id in common."""
    store = SQLiteStore(path)
    await store.open()
    for number in range(sessions):
        await store.put_session(make_row(f"s{number}"))
        for turn in range(3):
            delta = make_delta(f"s{number}-t{turn}", tokens=5000)
            output = ids(range((3 * number + turn) * 5000, (3 * number + turn + 1) * 5000))
            await store.append(f"s{number}", replace(delta, turn=replace(delta.turn, output=output)))
    await store.close()


async def test_a_page_that_is_damaged_costs_the_session_that_it_belongs_to(path: Path) -> None:
    await sessions_of_large_turns(path, 5)
    overwrite_page(path, np.arange(37_000, 37_300, dtype="<i4").tobytes())
    store = SQLiteStore(path)
    await store.open()
    with pytest.raises(StoreError, match="damaged: restore it from a backup"):
        await store.deltas("s2")
    assert [entry.row is None for entry in await store.sessions()] == [False] * 5
    for number in (0, 1, 3, 4):
        assert len(await store.deltas(f"s{number}")) == 3
        await store.append(f"s{number}", make_delta("more"))
        assert len(await store.deltas(f"s{number}")) == 4
    assert (await store.usage("s2")).turns == 3
    await store.close()


def turn_damaged(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE deltas SET output = x'00000000' WHERE turn = 's0-t0'")
    connection.commit()
    connection.close()


def page_damaged(path: Path) -> None:
    overwrite_page(path, np.arange(7000, 7300, dtype="<i4").tobytes())


@pytest.mark.parametrize("damage", [turn_damaged, page_damaged])
async def test_a_session_that_cannot_be_read_does_not_hold_the_others_in_the_past(path: Path, damage: Callable[[Path], None]) -> None:
    """However many reads fail, on however many threads, and whoever keeps their errors."""
    await sessions_of_large_turns(path, 2)
    damage(path)
    store = SQLiteStore(path)
    await store.open()
    errors = await asyncio.gather(*(store.deltas("s0") for _ in range(20)), return_exceptions=True)
    assert {type(error) for error in errors} == {StoreError}
    for more in range(3):
        await store.append("s1", make_delta(f"more{more}"))
        found = await asyncio.gather(*(store.deltas("s1") for _ in range(20)))
        assert {len(deltas) for deltas in found} == {4 + more}
        assert (await store.usage("s1")).turns == 4 + more
    await store.close()
    assert not Path(f"{path}-wal").exists(), "nobody has the file any more"
    assert errors


async def test_a_page_of_sessions_that_is_damaged_hides_none_of_the_others(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await write_small_sessions(path)
    overwrite_page(path, column_of(path, "s30", "sessions.body"))
    store = SQLiteStore(path)
    await store.open()
    entries = await store.sessions(limit=1000)
    assert [entry.id for entry in entries] == NAMES[::-1]
    lost = {entry.id for entry in entries if entry.row is None}
    assert "s30" in lost
    assert len(lost) < 20
    assert all("damaged: restore it from a backup" in entry.error for entry in entries if entry.row is None)
    assert [entry.id for entry in await store.sessions(limit=3, offset=28)] == ["s31", "s30", "s29"]
    assert await store.sessions(status="closed") == []
    assert {name for name, _ in await store.expired(1e9)} == set(NAMES) - lost
    assert f"cannot be told of {len(lost)} sessions" in caplog.text
    stats = await store.stats()
    assert (stats.sessions, stats.turns) == ({"open": len(NAMES)}, len(NAMES) - len(lost))
    await store.append("s00", make_delta("t2"))
    await store.close()


async def test_counts_that_are_damaged_are_none(path: Path) -> None:
    """What SQLite cannot know to be damaged: bytes far into a row, after which its counts come."""
    store = await begun(path, "t1")
    await store.put_session(make_row("s2", metadata={"words": Random(1).randbytes(9000).hex()}))
    for turn in ("t1", "t2"):
        await store.append("s2", make_delta(turn))
    await store.close()
    overwrite_page(path, column_of(path, "s2", "sessions.body")[6000:])
    store = SQLiteStore(path)
    await store.open()
    with pytest.raises(StoreError, match="a stored session's usage is damaged"):
        await store.usage("s2")
    assert [(entry.id, bool(entry.error), entry.usage.turns) for entry in await store.sessions()] == [("s2", True, 0), ("s1", False, 1)]
    assert (await store.stats()).turns == 1
    await store.close()


@pytest.mark.parametrize("left", [0.5, 0.98])
async def test_a_file_that_was_cut_off_is_refused_and_left_as_it_is(path: Path, left: float) -> None:
    await sessions_of_large_turns(path, 3)
    data = path.read_bytes()[: int(path.stat().st_size * left)]
    path.write_bytes(data)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="damaged: restore it from a backup"):
            await SQLiteStore(path, read_only=read_only).open()
    assert path.read_bytes() == data


async def test_a_file_whose_own_names_are_damaged_is_a_store_error(path: Path) -> None:
    """SQLite quotes them in its error, which is no UTF-8 then."""
    await sessions_of_large_turns(path, 1)
    path.write_bytes(path.read_bytes().replace(b"sqlite_autoindex_sessions_1", b"sqlite\xbbautoindex_sessions_1"))
    for read_only in (False, True):
        with pytest.raises(StoreError, match="damaged: restore it from a backup"):
            await SQLiteStore(path, read_only=read_only).open()
