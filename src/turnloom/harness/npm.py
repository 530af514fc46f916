"""Installs agents that come from npm into a cache that runs share. It never changes what is installed.

One directory per package and version, `CACHE/agents/NAME-VERSION`, made beside
its place and renamed into it when complete: what is there is whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from turnloom.engine.models import cache_dir
from turnloom.errors import HarnessError
from turnloom.sandbox.contract import Sandbox

log = logging.getLogger("turnloom.harness")

INSTALL_TIME = 900.0
_POLL = 0.1


@dataclass(frozen=True, slots=True)
class NpmAgent:
    """An npm package, its program in `node_modules/.bin`, and the oldest Node.js that runs it.

    `scripts` lets its install scripts run, with this user's rights and outside any sandbox: only for packages that do not
    work without.
    """

    name: str
    package: str
    version: str
    program: str
    node: int = 20
    scripts: bool = False


async def ensure_installed(agent: NpmAgent, sandbox: Sandbox, cache: Path | None = None) -> Path:
    """The agent's program, installed first when it is missing.

    Raises HarnessError without Node.js, when npm fails, or when the sandbox does
    not share this host's files.
    """
    if not sandbox.host_files:
        raise HarnessError(f"{agent.name} is installed on this machine and cannot be reached from this sandbox")
    await require_tools(agent, cache)
    place = _place(agent, cache)
    program = place / "node_modules" / ".bin" / agent.program
    if not place.is_dir():
        async with _lock(place.with_name(f"{place.name}.lock")):
            if not place.is_dir():
                await _install(agent, place)
    if not program.exists():
        raise HarnessError(f"{place} holds no {agent.program}: remove that directory to install it again")
    return program


def _place(agent: NpmAgent, cache: Path | None) -> Path:
    return (cache or cache_dir()) / "agents" / f"{agent.name}-{agent.version}"


async def require_tools(agent: NpmAgent, cache: Path | None = None) -> None:
    """Raises HarnessError unless Node.js is there and, where the agent has yet to be installed, npm."""
    await require_node(agent)
    if not _place(agent, cache).is_dir() and shutil.which("npm") is None:
        raise HarnessError(f"{agent.name} is installed with npm, which is not on PATH: install npm, or use --agent sdk-agent")


async def require_node(agent: NpmAgent) -> None:
    """Raises HarnessError unless a new enough `node` is on PATH."""
    advice = f"{agent.name} needs Node.js {agent.node} or newer: install it, or use --agent sdk-agent"
    try:
        code, text = await _run("node", "--version", timeout=30.0)
    except OSError as error:
        raise HarnessError(advice) from error
    found = re.match(r"v(\d+)\.", text)
    if code != 0 or found is None or int(found[1]) < agent.node:
        raise HarnessError(f"{advice} (found {text.strip()[:40] or 'one that does not start'})")


async def _install(agent: NpmAgent, place: Path) -> None:
    draft = place.with_name(f"{place.name}.draft")
    log.info("installing %s %s into %s", agent.package, agent.version, place)
    try:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
        draft.mkdir(parents=True)
        code, text = await _run(
            *("npm", "install", "--prefix", str(draft), f"--ignore-scripts={str(not agent.scripts).lower()}"),
            *("--no-audit", "--no-fund", "--loglevel=error"),
            f"{agent.package}@{agent.version}",
            timeout=INSTALL_TIME,
        )
        if code != 0:
            lines = [line for line in text.splitlines() if line.strip()]
            raise HarnessError(f"npm cannot install {agent.package}@{agent.version}: {' | '.join(lines[:3]) or f'exit code {code}'}")
        draft.rename(place)
    except OSError as error:
        raise HarnessError(f"cannot install {agent.package}: {error}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)


async def _run(*argv: str, timeout: float) -> tuple[int, str]:
    """Exit code and output of a command of this host, with this process's own environment (npm's settings live there)."""
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
