"""Holds new requests back while the weights of their engine change. Owns no request: it knows which run, and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Open at first. `running` are the requests that went through and have not come back, by id."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.running: dict[str, str] = {}
        """Request id -> the engine that has it."""
        self.held = 0
        """How many wait to go through."""

    @property
    def shut(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def wait(self, timer: asyncio.Timeout | None = None) -> None:
        """Until the gate is open; it is open when this returns. A turn's time stands still meanwhile."""
        if self._open.is_set():
            return
        clock = asyncio.get_running_loop().time
        end = timer.when() if timer is not None else None
        left = None if end is None else end - clock()
        if timer is not None and left is not None:
            timer.reschedule(None)
        self.held += 1
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self.held -= 1
            if timer is not None and left is not None and not timer.expired():
                timer.reschedule(clock() + left)

    @contextmanager
    def through(self, rid: str, engine: str) -> Iterator[None]:
        self.running[rid] = engine
        self._empty.clear()
        try:
            yield
        finally:
            del self.running[rid]
            if not self.running:
                self._empty.set()

    async def empty(self, seconds: float | None) -> bool:
        """Whether everything that runs came back within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
