"""The gateway's one task besides its requests: it closes sessions whose time is up, and puts those out of memory that nobody uses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turnloom.counters import SWALLOWED
from turnloom.gateway.sessions import Sessions

T = TypeVar("T")

log = logging.getLogger("turnloom.gateway")

SWEEP_SECONDS = 5.0
"""A session whose time is up takes no turn from then on; its row says so, and its turns in flight end, at the next sweep."""


class Janitor:
    """What fails in a sweep is logged and counted, and tried again in the next. `failures` counts that."""

    def __init__(self, sessions: Sessions, clock: Callable[[], float], every: float | None = None) -> None:
        self._sessions = sessions
        self._clock = clock
        self._every = SWEEP_SECONDS if every is None else every
        self._task: asyncio.Task[None] | None = None
        self.failures = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stopping twice, or before the start, is no error."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            await self.sweep(self._clock())

    async def sweep(self, now: float) -> list[tuple[str, str]]:
        """Expire, then evict. The sessions that were closed, each with the limit that it was. Raises nothing."""
        ended = []
        for session_id in await self._tried(self._sessions.due(now), "which sessions' time is up", ()):
            if limit := await self._tried(self._sessions.expire(session_id, now), f"session {session_id}, whose time is up,", ""):
                ended.append((session_id, limit))
        self._sessions.evict()
        return ended

    async def _tried(self, work: Awaitable[T], what: str, otherwise: T) -> T:
        try:
            return await work
        except Exception:
            self.failures += 1
            SWALLOWED.labels("gateway.janitor").inc()
            log.exception("%s: could not be told or closed; tried again in %g s", what, self._every)
            return otherwise
