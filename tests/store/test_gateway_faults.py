"""A gateway whose store fails: the client is told, never that its reply is whole, and the turn is nowhere; then it goes on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.dialects import ALL, error_of
from tests.support.gateways import Bench, bench
from tests.support.wires import WIRES, Wire
from turnloom.store.fsck import check
from turnloom.store.sqlite import SQLiteStore

REPLY = "One two three, four five six."
LONG = "seven eight nine " * 1500
"""More ids than there is room for on the last pages of a small file."""

TERMINAL = {
    "anthropic": ('"message_stop"', '"stop_reason":"'),
    "openai_chat": ("[DONE]", '"finish_reason":"'),
    "openai_responses": ("response.completed", "response.output_text.done"),
    "gemini": ("finishReason",),
    "gemini array": ("finishReason",),
}
"""What only a stream has that came to its end."""

every_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


@contextmanager
def full(store: SQLiteStore) -> Iterator[None]:
    assert store._writer is not None
    connection = store._writer.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count={pages}")
    yield
    connection.execute(f"PRAGMA max_page_count={2**30}")


@contextmanager
def read_only(store: SQLiteStore) -> Iterator[None]:
    assert store._writer is not None
    store._writer.connection.execute("PRAGMA query_only=ON")
    yield
    store._writer.connection.execute("PRAGMA query_only=OFF")


@contextmanager
def locked(store: SQLiteStore) -> Iterator[None]:
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    yield
    other.execute("ROLLBACK")
    other.close()


FAULTS = {"the disk is full": full, "it cannot be written": read_only, "locked by another program": locked}


async def ask(b: Bench, wire: Wire, *, stream: bool) -> tuple[int, bytes]:
    async with b.http.post(b.handle.base_url + wire.path(stream), json=wire.body(LONG, stream=stream)) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@every_wire
async def test_a_turn_that_cannot_be_stored_is_an_error_and_no_turn(
    tmp_path: Path, wire: Wire, stream: bool, fault: Callable[[SQLiteStore], Iterator[None]]
) -> None:
    words = next(words for words, each in FAULTS.items() if each is fault)
    store = SQLiteStore(tmp_path / "runs.db", busy_timeout=0.05)
    async with bench(lambda *_: REPLY, store=store) as b:
        session = await b.session()
        with fault(store):  # type: ignore[attr-defined]
            status, raw = await ask(b, wire, stream=stream)
            assert list(await store.deltas(session.row.id)) == []
        told = raw.decode()
        assert words in told
        assert not session.tree.turns
        if stream:
            assert status == 200
            assert wire.shown(raw), "what was sampled went out as it came"
            assert wire.error in told
            assert not [mark for mark in TERMINAL[wire.name] if mark in told]
        else:
            assert status == 500
            assert words in error_of(ALL[wire.name.split()[0]], status, raw)

        status, raw = await ask(b, wire, stream=stream)
        assert status == 200
        text = wire.shown(raw) if stream else wire.said(json.loads(raw))
        assert text == REPLY
        assert all(mark in raw.decode() for mark in TERMINAL[wire.name]) or not stream
        assert len(session.tree.turns) == 1
        told_id = session.row.id
    report = check(tmp_path / "runs.db")
    assert (report.problems, report.turns) == ([], 1)
    async with bench([], store=tmp_path / "runs.db") as b:
        assert list((await b.gateway.session(told_id)).tree.turns) == list(session.tree.turns)


async def test_a_turn_that_could_not_be_stored_is_counted(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "runs.db")
    async with bench(lambda *_: REPLY, store=store) as b:
        with read_only(store):
            await ask(b, WIRES["anthropic"], stream=True)
        async with b.http.get(f"{b.gateway.url}/metrics") as answer:
            told = await answer.text()
    assert 'turnloom_turns_total{dialect="anthropic",outcome="unrecorded"} 1.0' in told
    assert 'turnloom_errors_total{dialect="anthropic",error="StoreError"} 1.0' in told


async def test_a_session_that_cannot_be_stored_is_not_opened(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "runs.db")
    async with bench(["Yes"], store=store) as b:
        with read_only(store):
            status, told = await b.admin("POST", "/sessions", {"id": "new"})
            assert status == 500
            assert "cannot be written" in told["error"]["message"]
            assert (await b.admin("GET", "/sessions/new"))[0] == 404
        assert (await b.admin("POST", "/sessions", {"id": "new"}))[0] == 201


async def test_a_damaged_turn_or_row_costs_its_own_session(tmp_path: Path) -> None:
    """Over the admin API: the others are listed, read and served; the damaged one says what to do."""
    path = tmp_path / "runs.db"
    wire = WIRES["anthropic"]
    async with bench(lambda *_: "Yes", store=path) as b:
        for name in ("turn", "row", "lost", "whole"):
            b.handle = await b.gateway.open_session(id=name)
            for number in range(3 if name == "lost" else 1):
                async with b.http.post(b.handle.base_url + wire.whole, json=wire.body(f"hello {number}")) as answer:
                    assert answer.status == 200
        whole = b.handle
    connection = sqlite3.connect(path)
    connection.execute("UPDATE deltas SET output = x'00000000' WHERE session = (SELECT number FROM sessions WHERE id = 'turn')")
    connection.execute("UPDATE sessions SET body = x'01ff' WHERE id = 'row'")
    of_lost = "SELECT deltas.number FROM deltas JOIN sessions ON sessions.number = session WHERE id = 'lost' ORDER BY 1"
    connection.execute(f"DELETE FROM deltas WHERE number = ({of_lost} LIMIT 1 OFFSET 1)")
    connection.commit()
    connection.close()
    async with bench(lambda *_: "Yes", store=path) as b:
        status, listed = await b.admin("GET", "/sessions")
        assert status == 200
        assert [each["id"] for each in listed["sessions"] if "damaged" in each.get("error", "")] == ["row"]
        assert {each["id"] for each in listed["sessions"]} > {"turn", "row", "lost", "whole"}
        for name, said in {"turn": "damaged", "row": "damaged", "lost": "does not fit"}.items():
            for what in ("", "/tree", "/samples"):
                status, told = await b.admin("GET", f"/sessions/{name}{what}")
                assert status == 500, (name, what, told)
                message = (told if isinstance(told, dict) else json.loads(told))["error"]["message"]
                assert said in message
        assert (await b.admin("GET", "/sessions/whole/tree"))[0] == 200
        b.handle = await b.gateway.open_session(id="another")
        assert (await ask(b, wire, stream=False))[0] == 200
        url = f"{b.gateway.url}/s/{whole.key}{wire.whole}"
        async with b.http.post(url, json=wire.body("more")) as answer:
            assert answer.status == 200
        assert (await b.admin("DELETE", "/sessions/turn"))[0] in (200, 204)
