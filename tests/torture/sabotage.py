"""What is done to a gateway before it serves: waits in which it may be killed, and errors that the torture must find."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from turnloom.core.records import Delta
from turnloom.core.retry import Answer, Answers
from turnloom.gateway.session import Session
from turnloom.store.contract import SessionRow
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import Message, Turn, floats, ids


def linger(rng: random.Random) -> None:
    """Before and after a commit, now and then: what is between two awaits may take its time there."""
    for name in ("append", "replace", "put_session", "amend"):
        setattr(SQLiteStore, name, _lingering(getattr(SQLiteStore, name), rng))


def _lingering(write: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
    async def slow(*args: Any, **kwargs: Any) -> None:
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.05)
        await write(*args, **kwargs)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.1)

    return slow


def told_before_stored() -> None:
    append = SQLiteStore.append
    late: set[asyncio.Task[None]] = set()

    async def early(self: SQLiteStore, session_id: str, delta: Delta) -> None:
        async def later() -> None:
            await asyncio.sleep(0.2)
            await append(self, session_id, delta)

        late.add(asyncio.create_task(later()))

    SQLiteStore.append = early  # type: ignore[method-assign]


def every_request_new() -> None:
    Answers.find = lambda *_: (Answer.NEW, None)  # type: ignore[assignment, method-assign]


def _loaded(change: Callable[[Sequence[Delta]], Sequence[Delta]]) -> None:
    deltas = SQLiteStore.deltas

    async def changed(self: SQLiteStore, session_id: str) -> Sequence[Delta]:
        return change(await deltas(self, session_id))

    SQLiteStore.deltas = changed  # type: ignore[method-assign]


def last_turn_not_loaded() -> None:
    _loaded(lambda deltas: deltas[:-1])


def other_ids_loaded() -> None:
    def change(delta: Delta) -> Delta:
        return replace(
            delta, turn=replace(delta.turn, output=ids([*delta.turn.output.tolist()[:-2], *delta.turn.output.tolist()[-1:] * 2]))
        )

    _loaded(lambda deltas: [change(delta) if len(delta.turn.output) > 1 else delta for delta in deltas])


def other_logprobs_stored() -> None:
    put = SQLiteStore.replace

    async def changed(self: SQLiteStore, session_id: str, turn: Turn, reply: Message) -> None:
        await put(self, session_id, replace(turn, logprobs=floats(turn.logprobs[::-1].tolist())), reply)

    SQLiteStore.replace = changed  # type: ignore[method-assign]


def beginnings_stay() -> None:
    async def kept(self: Session, turn: Turn, reply: Message) -> bool:
        return False

    Session.replace = kept  # type: ignore[method-assign]


def begun_not_noted() -> None:
    SQLiteStore.begin = lambda *_: None  # type: ignore[assignment, method-assign]


def closed_not_stored() -> None:
    put = SQLiteStore.put_session

    async def open_only(self: SQLiteStore, row: SessionRow) -> None:
        if row.status == "open":
            await put(self, row)

    SQLiteStore.put_session = open_only  # type: ignore[method-assign]


SABOTAGE: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        told_before_stored,
        every_request_new,
        last_turn_not_loaded,
        other_ids_loaded,
        other_logprobs_stored,
        beginnings_stay,
        begun_not_noted,
        closed_not_stored,
    )
}
