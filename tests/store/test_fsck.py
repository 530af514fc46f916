"""`fsck` finds every kind of damage that can be made to a store, names where it is, and finds none in what gateways write."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import NAMES, column_of, overwrite_page, write_small_sessions
from tests.support.gateways import bench, follow, user
from turnloom.errors import StoreError
from turnloom.store import blobs
from turnloom.store.fsck import check
from turnloom.store.rows import decode_session, encode_session

SESSIONS, TURNS = 3, 3


async def written(path: Path) -> None:
    """Sessions of some turns each, by a gateway."""
    async with bench(lambda body, index: f"reply number {index}", store=path) as b:
        for number in range(SESSIONS):
            b.handle = await b.gateway.open_session(id=f"s{number}")
            body = user("hi")
            for turn in range(TURNS):
                body = follow(body, (await b.post(body)).body, f"more {turn}")
    change(path, "DELETE FROM sessions WHERE id NOT LIKE 's_'", known=False)  # the one that comes with the bench


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "s.db"
    asyncio.run(written(path))
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copy(whole, tmp_path / "s.db"))


def change(path: Path, *statements: str, known: bool = True) -> None:
    """`known`: what was changed has no checksum that would tell, as in files of old."""
    connection = sqlite3.connect(path)
    for statement in (*statements, *(NO_CRC if known else ())):
        connection.execute(statement)
    connection.commit()
    connection.close()


NO_CRC = ("UPDATE sessions SET crc = NULL", "UPDATE deltas SET crc = NULL")
OWNER = "(SELECT number FROM sessions WHERE id = 's1')"
SECOND = f"(SELECT number FROM deltas WHERE session = {OWNER} ORDER BY number LIMIT 1 OFFSET 1)"


def body_changed(path: Path, **fields: Any) -> None:
    """The second turn of the second session, with other words of itself."""
    connection = sqlite3.connect(path)
    (body,) = connection.execute(f"SELECT body FROM deltas WHERE number = {SECOND}").fetchone()
    said = blobs.unpack(body)
    known = {name: value(said) if callable(value) else value for name, value in fields.items()}
    connection.execute(f"UPDATE deltas SET body = ?, crc = NULL WHERE number = {SECOND}", (blobs.pack(said | known),))
    connection.commit()
    connection.close()


def row_changed(path: Path) -> None:
    connection = sqlite3.connect(path)
    (body,) = connection.execute("SELECT body FROM sessions WHERE id = 's1'").fetchone()
    row = decode_session(body)
    connection.execute("UPDATE sessions SET body = ?, crc = NULL WHERE id = 's1'", (encode_session(row).replace(b"s1", b"s9"),))
    connection.commit()
    connection.close()


def test_what_gateways_write_is_clean(path: Path) -> None:
    report = check(path)
    assert report.problems == []
    assert (report.sessions, report.turns) == (SESSIONS, SESSIONS * TURNS)
    assert report.tokens > report.turns


def last_byte(path: Path, table: str, column: str) -> None:
    """Another one at the end of a column, in the second session or its second turn."""
    where = "id = 's1'" if table == "sessions" else f"number = {SECOND}"
    other = f"CAST(substr({column}, 1, length({column}) - 1) || x'07' AS BLOB)"
    change(path, f"UPDATE {table} SET {column} = {other} WHERE {where}", known=False)


COLUMNS = [("sessions", "body"), *(("deltas", column) for column in ("nodes", "body", "appended", "output", "logprobs"))]

DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    **{f"a byte of {t} {c}": (partial(last_byte, table=t, column=c), "by its checksum, what was written") for t, c in COLUMNS},
    "a session's words": (lambda p: change(p, "UPDATE sessions SET body = x'01ff' WHERE id = 's1'"), "a stored body is damaged"),
    "a session's row of another": (row_changed, "in its row"),
    "a status": (lambda p: change(p, "UPDATE sessions SET status = 'closed' WHERE id = 's1'"), "its status is 'closed' in the table"),
    "an end of time": (lambda p: change(p, "UPDATE sessions SET expires = 5.0 WHERE id = 's1'"), "its end of time is 5.0 in the table"),
    "an idle time": (lambda p: change(p, "UPDATE sessions SET idle = 5.0 WHERE id = 's1'"), "its idle time is 5.0"),
    "an opening": (lambda p: change(p, "UPDATE sessions SET created = 5.0 WHERE id = 's1'"), "its opening is 5.0"),
    "a turn's words": (lambda p: change(p, f"UPDATE deltas SET body = x'0000' WHERE number = {SECOND}"), "damaged"),
    "its messages": (lambda p: change(p, f"UPDATE deltas SET nodes = x'00' WHERE number = {SECOND}"), "damaged"),
    "an outcome": (lambda p: change(p, f"UPDATE deltas SET outcome = 'lost' WHERE number = {SECOND}"), "damaged"),
    "half an id": (lambda p: change(p, f"UPDATE deltas SET output = x'010203' WHERE number = {SECOND}"), "no whole number of tokens"),
    "a lost logprob": (lambda p: change(p, f"UPDATE deltas SET logprobs = x'00000000' WHERE number = {SECOND}"), "a logprob each"),
    "a logprob that is no number": (
        lambda p: change(p, f"UPDATE deltas SET logprobs = CAST(substr(logprobs, 5) || x'0000c07f' AS BLOB) WHERE number = {SECOND}"),
        "a logprob each",
    ),
    "another prompt": (
        lambda p: change(p, f"UPDATE deltas SET appended = CAST(appended || x'01000000' AS BLOB) WHERE number = {SECOND}"),
        "checksum",
    ),
    "another id in the prompt": (
        lambda p: change(p, f"UPDATE deltas SET appended = CAST(x'01000000' || substr(appended, 5) AS BLOB) WHERE number = {SECOND}"),
        "checksum",
    ),
    "an output that a prompt went on from": (
        lambda p: change(p, f"UPDATE deltas SET output = CAST(x'01000000' || substr(output, 5) AS BLOB) WHERE number = {SECOND}"),
        "checksum",
    ),
    "a base that is gone": (lambda p: body_changed(p, base="nobody"), "goes on from turn nobody"),
    "too much kept": (lambda p: body_changed(p, prompt_len=lambda turn: turn["prompt_len"] + 1), "keeps"),
    "another checksum": (lambda p: body_changed(p, prompt_crc=1), "checksum"),
    "a version beyond the output": (lambda p: body_changed(p, versions=[["v", 0, 999]]), "weight versions"),
    "a piece beyond the output": (lambda p: body_changed(p, pieces=[[999, "e", ""]]), "pieces"),
    "a call beyond the output": (lambda p: body_changed(p, calls=[["ok", "ls", "", 0, 1, 0, 999]]), "calls"),
    "another turn's id": (lambda p: body_changed(p, id="another"), "in its own words"),
    "another place": (lambda p: body_changed(p, index=7), "number 7"),
    "a turn that is gone": (lambda p: change(p, f"DELETE FROM deltas WHERE number = {SECOND}"), "stands at 1"),
    "nodes of another place": (
        lambda p: change(p, f"UPDATE deltas SET nodes = (SELECT nodes FROM deltas WHERE number = {SECOND} - 1) WHERE number = {SECOND}"),
        "do not fit",
    ),
    "turns of nobody": (
        lambda p: change(p, "UPDATE deltas SET session = 99 WHERE session = (SELECT number FROM sessions WHERE id = 's1')"),
        "belong to no session",
    ),
    "a count": (lambda p: change(p, "UPDATE sessions SET tokens = tokens + 1 WHERE id = 's1'"), "it counts"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_where_it_is_and_hides_no_other(path: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    change(path, "UPDATE sessions SET bytes = 1 WHERE id = 's2'", known=False)
    damage(path)
    report = check(path)
    assert any(words in problem.what for problem in report.problems), report.problems
    assert all(problem.advice for problem in report.problems)
    assert "s0" not in {problem.session for problem in report.problems}
    assert "s2" in {problem.session for problem in report.problems}, "what comes after is looked at"
    assert report.sessions == SESSIONS


def test_a_page_that_is_overwritten_is_found(path: Path) -> None:
    change(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    connection = sqlite3.connect(path)
    (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'deltas'").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = b"\xa5" * size
    path.write_bytes(data)
    report = check(path)
    assert report.problems
    assert any(problem.session == "" for problem in report.problems)


@pytest.mark.parametrize("table", ["sessions", "deltas"])
async def test_a_page_that_is_overwritten_hides_none_of_the_others(tmp_path: Path, table: str) -> None:
    path = tmp_path / "s.db"
    await write_small_sessions(path)
    change(path, "UPDATE sessions SET bytes = 1 WHERE id IN ('s00', 's59')", known=False)
    overwrite_page(path, column_of(path, "s30", "sessions.body" if table == "sessions" else "output"))
    report = check(path)
    assert report.sessions == len(NAMES)
    lost = {problem.session for problem in report.problems if "cannot be read" in problem.what} - {""}
    assert "s30" in lost
    assert len(lost) < 20
    assert {problem.session for problem in report.problems if "it counts" in problem.what} == {"s00", "s59"}, (
        "before the page, and after it"
    )
    assert report.turns == len(NAMES)


def test_what_is_no_store_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("hello" * 300)
    with pytest.raises(StoreError, match="not a Turnloom store"):
        check(tmp_path / "x.db")


async def test_a_store_that_is_being_written_may_be_looked_at(path: Path) -> None:
    async with bench(lambda *_: "more", store=path) as b:
        await b.post(user("hi"))
        assert [p for p in check(path).problems if p.session in ("s0", "s1", "s2")] == []


@pytest.mark.parametrize(("damage", "code"), [(None, 0), ("another checksum", 1)])
def test_the_verb(path: Path, damage: str | None, code: int) -> None:
    if damage:
        DAMAGE[damage][0](path)
    verb = [sys.executable, "-m", "turnloom.cli.main", "fsck", str(path)]
    told = subprocess.run(verb, capture_output=True, text=True)
    assert told.returncode == code, told.stderr
    assert told.stdout.splitlines()[-1].endswith("problems" if code else "clean")
    found = json.loads(subprocess.run([*verb, "--json"], capture_output=True, text=True).stdout)
    assert (found["sessions"], found["turns"], bool(found["problems"])) == (SESSIONS, SESSIONS * TURNS, bool(code))


def test_the_verb_where_there_is_no_store(tmp_path: Path) -> None:
    for name, content in (("absent", None), ("text", "hello" * 300)):
        if content:
            (tmp_path / name).write_text(content)
        told = subprocess.run([sys.executable, "-m", "turnloom.cli.main", "fsck", str(tmp_path / name)], capture_output=True, text=True)
        assert (told.returncode, len(told.stderr.splitlines())) == (2, 1)
