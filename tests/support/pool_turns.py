"""Turns of a pool whose engines are in memory, with the time set by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.support.members import Member
from turnloom.engine.contract import Chunk, Trace
from turnloom.engine.pool import Patience, Pool
from turnloom.types import Sampling, ids

PROMPT = ids([1, 2, 3])
RID = "0" * 32
SOON = Patience(attempts=3, seconds=60, pause=0.0, longest=0.0)


def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between requests: none of them is waited for, and only they are time."""
    waits: list[float] = []
    sleep = asyncio.sleep
    monkeypatch.setattr("turnloom.engine.pool.monotonic", lambda: sum(waits))

    async def asleep(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("turnloom.engine.pool.asyncio.sleep", asleep)
    return waits


async def sampled(
    pool: Pool, *, max_tokens: int | None = 50, key: str = "s", trace: Trace | None = None, rid: str = RID, **sampling: Any
) -> list[Chunk]:
    stream = pool.sample(PROMPT, Sampling(max_tokens=max_tokens, **sampling), rid=rid, routing_key=key, trace=trace)
    return [chunk async for chunk in stream]


def tokens(chunks: list[Chunk]) -> list[int]:
    assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True], "one last chunk"
    whole: list[int] = np.concatenate([c.ids for c in chunks]).tolist()
    assert np.concatenate([c.logprobs for c in chunks]).tolist() == [-t / 128 for t in whole], "each with the logprob it came with"
    return whole


def first_of(pool: Pool, key: str) -> Member:
    return pool._order(key)[0].engine  # type: ignore[return-value]


def two(patience: Patience = SOON) -> tuple[Pool, Member, Member]:
    """A pool, the session's own engine, and the other one."""
    pool = Pool([Member("one"), Member("two")], patience)
    own = first_of(pool, "s")
    return pool, own, next(m for m in pool.members if m is not own)  # type: ignore[return-value]
