"""Which of a llama.cpp server's slots each live request has, and what the server says that its slots do.

A slot is one of llama.cpp's parallel sequences, with a cache of its own. A
request that goes on keeps its slot: another one would evaluate its whole prompt
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from turnloom.counters import swallowed
from turnloom.engine.http import BROKEN, EngineHTTP, words

log = logging.getLogger("turnloom.engine")

_LOOK_SECONDS = 5.0
"""For one answer; a server answers between two batches, and one of a long prompt takes seconds."""


class Slots:
    """A request takes the free slot that holds most of its prompt already."""

    def __init__(self, count: int) -> None:
        self._held: list[list[int]] = [[] for _ in range(count)]
        self._free = set(range(count))
        self._room = asyncio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def take(self, ids: list[int]) -> AsyncIterator[int]:
        """A slot; `ids` is what it will hold afterwards, and may grow meanwhile."""
        slot = await self.acquire(ids)
        try:
            yield slot
        finally:
            self.release(slot, ids)

    async def acquire(self, ids: Sequence[int], busy: Collection[int] = ()) -> int:
        """Waits for a free one, and prefers one that is not `busy` with another client's work."""
        await self._room.acquire()
        slot = max(self._free, key=lambda one: (one not in busy, _common(self._held[one], ids)))
        self._free.remove(slot)
        return slot

    def release(self, slot: int, ids: list[int]) -> None:
        """`ids` is what it holds now."""
        self._held[slot] = ids
        self._free.add(slot)
        self._room.release()


@dataclass(frozen=True, slots=True)
class SlotState:
    """`seed` is that of the request that the slot had last; None where the server does not say."""

    id: int
    processing: bool
    seed: int | None


async def look_at_slots(http: EngineHTTP) -> list[SlotState] | None:
    """What `GET /slots` says; None where the server offers none, or gives no usable answer in time."""
    try:
        async with asyncio.timeout(_LOOK_SECONDS), http.session.get(f"{http.url}/slots") as response:
            return _read_slots(orjson.loads(await response.read())) if response.status == 200 else None
    except (*BROKEN, ValueError, LookupError, TypeError) as error:
        swallowed(log, "engine.slots", "%s/slots cannot be read: %s", http.name, words(error), level=logging.INFO)
        return None


def _read_slots(answer: Any) -> list[SlotState]:
    found = []
    for entry in answer:
        params = entry.get("params")
        seed = params.get("seed") if isinstance(params, dict) else entry.get("seed")
        found.append(SlotState(int(entry["id"]), bool(entry["is_processing"]), seed if isinstance(seed, int) else None))
    return found


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix."""
    count = min(len(left), len(right))
    return next((index for index in range(count) if left[index] != right[index]), count)
