"""Puts agents into a cache that runs share, and holds what harnesses of such agents have in common.

One directory per agent and version, `CACHE/agents/NAME-VERSION`, made beside its
place and renamed into it when complete: what is there is whole, and is never
changed. `npm.py` and `pip.py` say what goes into it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from turnloom.engine.models import cache_dir
from turnloom.errors import HarnessError
from turnloom.sandbox.contract import Sandbox

log = logging.getLogger("turnloom.harness")

INSTALL_TIME = 900.0
_POLL = 0.1


class Package(Protocol):
    """One version of an agent, and how it gets onto this machine."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    async def require(self) -> None:
        """Quick, and changes nothing. Raises HarnessError that says what this machine lacks to install or start it."""

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        """The words that start the agent, installed first when it is missing. Raises HarnessError."""
        ...


class PackagedHarness:
    """What the harness of a packaged agent is but for its command line. `program` is an installation of the user's own."""

    def __init__(self, package: Package, args: Sequence[str], program: Sequence[str]) -> None:
        self.name = package.name
        self.package = package
        self._args = tuple(args)
        self._program = tuple(program)

    async def require(self) -> None:
        if not self._program:
            await self.package.require()

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        return self._program or await self.package.install(sandbox)


def place_of(name: str, version: str) -> Path:
    return cache_dir() / "agents" / f"{name}-{version}"


async def ensure(place: Path, fill: Callable[[Path], Awaitable[None]], name: str, sandbox: Sandbox) -> None:
    """`place` filled by `fill` unless it is there; once, however many runs of this machine ask.

    `fill` gets an empty directory that is renamed to `place` when it returns.
    Raises HarnessError when the sandbox does not share this host's files, or the cache cannot be written.
    """
    if not sandbox.host_files:
        raise HarnessError(f"{name} is installed on this machine and cannot be reached from this sandbox")
    if place.is_dir():
        return
    async with _lock(place.with_name(f"{place.name}.lock")):
        if not place.is_dir():
            await _make(place, fill, name)


async def _make(place: Path, fill: Callable[[Path], Awaitable[None]], name: str) -> None:
    draft = place.with_name(f"{place.name}.draft")
    log.info("installing %s", place)
    try:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
        draft.mkdir(parents=True)
        await fill(draft)
        draft.rename(place)
    except OSError as error:
        raise HarnessError(f"cannot install {name}: {error}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)


async def run_host(*argv: str, timeout: float) -> tuple[int, str]:
    """Exit code and output of a command of this host, with this process's own environment (the installers' settings live there)."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError as error:
        raise HarnessError(f"{argv[0]} did not end within {timeout:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode("utf-8", "replace")


@asynccontextmanager
async def _lock(path: Path) -> AsyncIterator[None]:
    """Held by one run at a time, over all processes of this machine; waiting can be cancelled."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise HarnessError(f"cannot write in {path.parent}: set TURNLOOM_CACHE to a directory that can be written ({error})") from error
    try:
        while not _try_lock(descriptor):  # noqa: ASYNC110 - the holder may be another process
            await asyncio.sleep(_POLL)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
