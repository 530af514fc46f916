"""What several verbs share: options, the store opened for reading, a session by the start of its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from turnloom.core.tree import Tree
from turnloom.errors import ConfigError
from turnloom.gateway.session import Session
from turnloom.store.contract import SessionRow, Store
from turnloom.store.sqlite import SQLiteStore

T = TypeVar("T")

DEFAULT_STORE = Path("turnloom.db")

StoreOption = Annotated[Path, typer.Option("--store", help="The SQLite file that sessions are kept in.", show_default=True)]
EngineOption = Annotated[
    str, typer.Option("--engine", help="http://HOST:PORT of an SGLang server or router, or local:smollm2, local:/path/model.gguf.")
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", help="A tokenizer's folder, hub id or .gguf file. Default: what the engine names.")
]
ToolFormatOption = Annotated[
    str, typer.Option("--tool-format", help="How the model writes tool calls: auto, hermes, qwen3_coder, none, or package.module:Name.")
]


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@asynccontextmanager
async def reading(path: Path) -> AsyncIterator[SQLiteStore]:
    """The store, read-only: a gateway may be writing it. Raises ConfigError where there is none."""
    if not path.is_file():
        raise ConfigError(f"there is no store at {path}; name it with --store FILE")
    store = SQLiteStore(path, read_only=True)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def all_rows(store: Store) -> list[SessionRow]:
    """Every session, newest first."""
    rows: list[SessionRow] = []
    while page := await store.sessions(limit=500, offset=len(rows)):
        rows += page
    return rows


async def find_row(store: Store, wanted: str) -> SessionRow:
    """The session whose id starts with `wanted`, or the newest for "latest". Raises ConfigError."""
    if (exact := await store.session(wanted)) is not None:
        return exact
    rows = await all_rows(store)
    if not rows:
        raise ConfigError("the store holds no session yet")
    matches = rows[:1] if wanted == "latest" else [r for r in rows if r.id.startswith(wanted)]
    if len(matches) != 1:
        known = ", ".join(r.id[:12] for r in (matches or rows)[:5])
        advice = f"say more of the id: {known}" if matches else f"the newest are: {known}"
        raise ConfigError(f"{len(matches) or 'no'} sessions start with {wanted!r}; {advice}")
    return matches[0]


async def load_session(store: Store, row: SessionRow) -> Session:
    tree = Tree()
    for delta in await store.deltas(row.id):
        tree.apply(delta)
    return Session(row, store, tree)
