"""Sessions without a socket: a clock that stands still, turns that are made at once, stores that count what is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.histories import assistant, request, user
from turnloom.core.unroll import prompt_crc
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import Sessions
from turnloom.store.contract import Limits, SessionRow, Store
from turnloom.store.memory import MemoryStore
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import Finish, FinishReason, Message, Outcome, Sampling, Turn, floats, ids

_NUMBERS = count()


class Clock:
    """Unix seconds, as the test says."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    time = __call__
    """So that it can stand for the module."""


class CountingStore(MemoryStore):
    """Keeps every row that was put."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[SessionRow] = []

    async def put_session(self, row: SessionRow) -> None:
        await super().put_session(row)
        self.rows.append(row)


@asynccontextmanager
async def sessions(
    store: str | Store = "memory", path: Path | None = None, clock: Clock | None = None, **options: Any
) -> AsyncIterator[Sessions]:
    """All sessions of one store, which is opened and closed: "memory", "sqlite" in the folder `path`, or one that is given."""
    if isinstance(store, str):
        store = MemoryStore() if store == "memory" else SQLiteStore(path / "t.db")  # type: ignore[operator]
    await store.open()
    try:
        made = Sessions(store, Sampling(), options.pop("limits", Limits()), clock or Clock(), **options)
        await made.start()
        yield made
        await made.close()
        await made.settled()
    finally:
        await store.close()


async def take(session: Session, text: str, *, tokens: int = 2, outcome: Outcome = Outcome.DELIVERED, ended: float | None = None) -> Turn:
    """One turn of a client that says `text` first and gets a reply of so many tokens."""
    with session.turn_slot():
        return await commit(session, text, tokens=tokens, outcome=outcome, ended=ended)


async def commit(session: Session, text: str, *, tokens: int = 2, outcome: Outcome = Outcome.DELIVERED, ended: float | None = None) -> Turn:
    """What `take` does within its place."""
    turn_id = f"turn{next(_NUMBERS)}"
    pending = session.tree.prepare(request(user(text)))
    held = session.tree.held(pending.base)
    appended = ids([100, 101])
    prompt = ids(np.concatenate([held, appended]))
    now = session._clock() if ended is None else ended
    session.begin(turn_id, now)
    reply: Message = assistant(f"reply to {text}")

    def made(index: int) -> Turn:
        return Turn(
            id=turn_id,
            index=index,
            base=pending.base,
            fork=None,
            appended=appended,
            prompt_len=len(prompt),
            prompt_crc=prompt_crc(prompt),
            output=ids(range(200, 200 + tokens)),
            logprobs=floats([-0.5] * tokens),
            finish=Finish(FinishReason.STOP),
            outcome=outcome,
            sampling=Sampling(),
            started=now,
            ended=now,
        )

    turn = await session.commit(pending, reply, made)
    if outcome is Outcome.DELIVERED:
        session.acknowledge(turn_id)
    return turn
