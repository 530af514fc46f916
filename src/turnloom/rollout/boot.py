"""How many sandboxes may boot at once, and how long to wait before the next attempt. It boots none itself."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

from turnloom.rollout.contract import MakeSandbox
from turnloom.sandbox.contract import Needs, Sandbox

LONGEST_PAUSE = 60.0
"""Seconds; waiting longer for a backend that gives out helps nobody."""


def pause(first: float, attempt: int) -> float:
    """Seconds to wait after the failed attempt of this number (from 1): twice as long each time, and never in step with others."""
    return float(min(first * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.5))


def limited(make: MakeSandbox, slots: asyncio.Semaphore) -> MakeSandbox:
    """The same sandboxes, of which no more start at once than there are slots. Those for grading count too."""

    def made(needs: Needs) -> Sandbox:
        return cast(Sandbox, _Limited(make(needs), slots))

    return made


class _Limited:
    """A sandbox that waits for a slot to start, and is itself in all else."""

    def __init__(self, sandbox: Sandbox, slots: asyncio.Semaphore) -> None:
        self._sandbox, self._slots = sandbox, slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def start(self) -> None:
        async with self._slots:
            await self._sandbox.start()
