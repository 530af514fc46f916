"""One question to a server that many ask at once: many aborts must not be a load of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Look(Generic[T]):
    """Calling it gives what `look` says when it is asked after the call. One asking serves all who called before it began."""

    def __init__(self, look: Callable[[], Awaitable[T]]) -> None:
        self._ask = look
        self._asking: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if (before := self._asking) is not None:
            await asyncio.wait({before})
        asking = self._asking
        if asking is None or asking is before:
            asking = self._asking = asyncio.create_task(self._answer())
        return await asyncio.shield(asking)

    async def _answer(self) -> T:
        return await self._ask()
