"""How late the event loop is: what every reply of this process waits for, beside its own work."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import Histogram

log = logging.getLogger("turnloom.gateway")

EVERY = 0.25
"""Seconds between two looks."""

STUCK = 5.0
"""Seconds of lag that are worth a warning: by then clients wonder."""


async def watch_loop(lag: Histogram) -> None:
    """Look for as long as the task runs."""
    clock = asyncio.get_running_loop().time
    due = clock() + EVERY
    while True:
        await asyncio.sleep(due - clock())
        late = max(clock() - due, 0.0)
        lag.observe(late)
        if late > STUCK:
            log.warning("the event loop stood still for %.1f s: something in this process does not wait its turn", late)
        due = clock() + EVERY
