"""Small records with readable contents, and every store there is."""

import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from turnloom.core.records import Delta, Node
from turnloom.store.contract import Limits, SessionRow, Store
from turnloom.store.memory import MemoryStore
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import Finish, FinishReason, Message, Outcome, Sampling, Text, Tool, Turn, floats, ids


def make_row(id: str = "s1", **changes: object) -> SessionRow:
    fields: dict[str, object] = {"key_hash": f"hash-of-{id}", "created": 1.0, "sampling": Sampling(), "limits": Limits()}
    return SessionRow(id=id, **(fields | changes))  # type: ignore[arg-type]


def make_delta(turn: str = "t1", *, tokens: int = 3, outcome: Outcome = Outcome.DELIVERED, abort: str = "") -> Delta:
    return Delta(
        nodes=(
            Node(id=0, parent=None, tools=(Tool("bash", "runs a command", '{"type":"object"}'),)),
            Node(id=1, parent=0, message=Message("user", (Text("list the files"),))),
            Node(id=2, parent=1, message=Message("assistant", (Text("a.txt"),)), turn=turn),
        ),
        turn=Turn(
            id=turn,
            index=0,
            base=None,
            fork=None,
            appended=ids([1, 2, 3]),
            prompt_len=3,
            prompt_crc=99,
            output=ids(range(10, 10 + tokens)),
            logprobs=floats([-0.5] * tokens),
            finish=Finish(FinishReason.STOP, 2),
            outcome=outcome,
            sampling=Sampling(),
            abort=abort,
        ),
    )


PAGE = 4096
NAMES = [f"s{number:02}" for number in range(60)]


async def write_small_sessions(path: Path) -> None:
    """NAMES, each with a turn and words of its own: some share a page, and there are several."""
    store = SQLiteStore(path)
    await store.open()
    for number, name in enumerate(NAMES):
        words = Random(number).randbytes(200).hex()
        await store.put_session(make_row(name, metadata={"words": words}, limits=Limits(ttl=1.0, idle_timeout=1e6)))
        delta = make_delta("t1", tokens=100)
        await store.append(name, replace(delta, turn=replace(delta.turn, output=ids(range(100 * number, 100 * number + 100)))))
    await store.close()


def column_of(path: Path, name: str, column: str) -> bytes:
    """Of a session, or of its turns."""
    connection = sqlite3.connect(path)
    query = f"SELECT {column} FROM sessions LEFT JOIN deltas ON deltas.session = sessions.number WHERE sessions.id = ?"
    (found,) = connection.execute(query, (name,)).fetchone()
    connection.close()
    return bytes(found)


def overwrite_page(path: Path, holding: bytes) -> None:
    """The page of the file in which these bytes begin."""
    data = bytearray(path.read_bytes())
    page = data.index(holding) // PAGE
    data[page * PAGE : (page + 1) * PAGE] = b"\xa5" * PAGE
    path.write_bytes(data)


@pytest.fixture
def row() -> Callable[..., SessionRow]:
    return make_row


@pytest.fixture
def delta() -> Callable[..., Delta]:
    return make_delta


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
async def sqlite_store(path: Path) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(path)
    await store.open()
    yield store
    await store.close()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[Store]:
    store: Store = MemoryStore() if request.param == "memory" else SQLiteStore(path)
    await store.open()
    yield store
    await store.close()
