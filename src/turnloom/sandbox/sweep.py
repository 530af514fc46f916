"""Removes the sandboxes of this machine whose process is gone, whatever kind made them. It never touches one in use."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from turnloom.counters import swallowed
from turnloom.errors import SandboxError
from turnloom.sandbox import directories
from turnloom.sandbox.processes import kill_all

log = logging.getLogger("turnloom.sandbox")

_swept: set[Path | None] = set()


async def sweep(parent: Path | None = None) -> list[str]:
    """End the processes and remove the directories of sandboxes below `parent` (the temporary directory) whose Turnloom is gone;
    those that were removed."""
    removed: list[str] = []
    try:
        left = await asyncio.to_thread(directories.stale, parent)
    except OSError as error:
        swallowed(log, "sandbox.stale", "cannot look for old sandboxes: %s", error)
        return removed
    for sandbox, place in left:
        log.warning("removing the sandbox %s, whose process is gone", place.path)
        try:
            await remove(sandbox, place)
            removed.append(str(place.path))
        except SandboxError as error:
            swallowed(log, "sandbox.stale", "%s", error)
    return removed


async def sweep_once(parent: Path | None) -> None:
    """The first call for a place sweeps it."""
    if parent not in _swept:
        _swept.add(parent)
        await sweep(parent)


async def remove(sandbox: str, place: directories.Place) -> None:
    """End what still carries the sandbox's tag, and remove its directory. Raises SandboxError when something stays."""
    try:
        await kill_all(f"{sandbox}.")
        await asyncio.to_thread(directories.remove, place.path)
    except OSError as error:
        raise SandboxError(f"cannot remove the sandbox {place.path}: {error}") from error
    finally:
        place.give_back()
