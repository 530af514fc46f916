"""Holds new requests back while the weights of their engine change. Owns no request: it knows which run, and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """A turn's time limit, which stands still as long as anything stops it. Without a timer it does nothing."""

    def __init__(self, timer: asyncio.Timeout | None) -> None:
        self._timer = timer
        self._left: float | None = None
        self._stops = 0

    def stop(self) -> None:
        self._stops += 1
        timer = self._timer
        if self._stops > 1 or timer is None or timer.expired() or (end := timer.when()) is None:
            return
        self._left = end - asyncio.get_running_loop().time()
        timer.reschedule(None)

    def go_on(self) -> None:
        self._stops -= 1
        left, timer = self._left, self._timer
        if self._stops or left is None or timer is None:
            return
        self._left = None
        if not timer.expired():
            timer.reschedule(asyncio.get_running_loop().time() + left)


class Gate:
    """Open at first. `running` are the requests that went through and have not come back, by id."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._quiet = asyncio.Event()
        """Nothing runs, or nobody need wait for that: the gate is open."""
        self._quiet.set()
        self._clocks: set[Clock] = set()
        self._frozen = False
        self.running: dict[str, str] = {}
        """Request id -> the engine that has it."""
        self.held = 0
        """How many wait to go through."""

    @property
    def shut(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()
        self._tell()

    def open(self) -> None:
        """Let all through that wait, and every clock go on."""
        self._open.set()
        self._tell()
        self.thaw()

    def freeze(self) -> None:
        """The time of every turn stands still, whether it waits or not: its engine stands still too."""
        if not self._frozen:
            self._frozen = True
            for clock in self._clocks:
                clock.stop()

    def thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            for clock in self._clocks:
                clock.go_on()

    @contextmanager
    def watch(self, timer: asyncio.Timeout | None) -> Iterator[Clock]:
        """The clock of one turn, for as long as it is sampled."""
        clock = Clock(timer)
        self._clocks.add(clock)
        if self._frozen:
            clock.stop()
        try:
            yield clock
        finally:
            self._clocks.discard(clock)
            if self._frozen:
                clock.go_on()

    async def wait(self, clock: Clock) -> bool:
        """Until the gate is open; it is open when this returns. Whether it was shut. A turn's time stands still meanwhile."""
        if not self.shut:
            return False
        self.held += 1
        clock.stop()
        try:
            while self.shut:
                await self._open.wait()
        finally:
            self.held -= 1
            clock.go_on()
        return True

    @contextmanager
    def through(self, rid: str, engine: str) -> Iterator[None]:
        self.running[rid] = engine
        self._tell()
        try:
            yield
        finally:
            del self.running[rid]
            self._tell()

    def _tell(self) -> None:
        if self.running and self.shut:
            self._quiet.clear()
        else:
            self._quiet.set()

    async def empty(self, seconds: float | None) -> bool:
        """Wait for what runs to come back, for `seconds` at most, and no longer than the gate is shut. Whether nothing runs."""
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            pass
        return not self.running
