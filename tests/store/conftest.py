"""Small records with readable contents, and every store there is."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

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
