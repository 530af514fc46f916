"""What a client finds out about its server once, and keeps until it is told to forget. Knows nothing of what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Try(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


class Once(Generic[T]):
    """The first success is kept. All who come while it is tried for share that one try, its failure too."""

    def __init__(self) -> None:
        self._found: T | None = None
        self._trying: _Try[T] | None = None

    def forget(self) -> None:
        """Also what is being tried for: it may be of before."""
        self._found, self._trying = None, None

    async def get(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` finds, and raises. It is given up when nobody waits for it any more."""
        if self._found is not None:
            return self._found
        trying = self._trying
        if trying is None or trying.task.done():
            trying = self._trying = _Try(asyncio.create_task(_answer(ask)))
        trying.waiting += 1
        try:
            found = await asyncio.shield(trying.task)
            if self._trying is trying:
                self._found = found
            return found
        finally:
            trying.waiting -= 1
            if not trying.waiting:
                trying.task.cancel()
                if self._trying is trying:
                    self._trying = None


async def _answer(ask: Callable[[], Awaitable[T]]) -> T:
    return await ask()
