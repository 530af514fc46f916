"""Starts the embedded server as a child process and speaks to it as to any SGLang server."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from turnloom.engine.llamacpp import require_xllamacpp
from turnloom.engine.models import find_model
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import EngineUnavailable

log = logging.getLogger("turnloom.engine")

_START = 120.0
"""Seconds until the server must have said its URL; a small model needs one or two."""

_STOP = 5.0


class LocalEngine(SGLangEngine):
    """An SGLang client that owns the server behind it: `close` stops that process, and it ends with this one in any case."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(url)
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def close(self) -> None:
        await super().close()
        await _stop(self._process)


async def start_local(
    model: str | Path = "smollm2", *, parallel: int = 2, threads: int | None = None, incremental: bool = False
) -> LocalEngine:
    """Load a GGUF file, or the model called `smollm2`, in a child process; returns when it answers.

    Raises ConfigError when the model or xllamacpp is missing, EngineUnavailable when the server does not start.
    """
    require_xllamacpp()
    path = await asyncio.to_thread(find_model, model)
    command = [sys.executable, "-m", "turnloom.engine.embedded", "--model", str(path), "--port", "0", "--with-parent"]
    command += ["--parallel", str(parallel), *(["--threads", str(threads)] if threads else []), *(["--incremental"] if incremental else [])]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C in a terminal is for the process that owns the engine: it may still have turns to end.
        start_new_session=True,
    )
    if process.stdout is None or process.stderr is None:
        raise EngineUnavailable("the embedded engine's process has no pipes")
    tail = _Tail(process.stderr)
    try:
        async with asyncio.timeout(_START):
            url = (await process.stdout.readline()).decode().strip()
    except TimeoutError:
        url = ""
    except asyncio.CancelledError:
        await _stop(process)
        raise
    if not url:
        await _stop(process)
        raise EngineUnavailable(f"the embedded engine did not start: {await tail.words()}")
    return LocalEngine(url, process)


class _Tail:
    """Reads what a process writes to standard error, so that it never blocks, and keeps the end of it."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = b""
        self._task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(4096):
            self._kept = (self._kept + data)[-4096:]
            log.debug("embedded engine: %s", data.decode("utf-8", "replace").rstrip())

    async def words(self) -> str:
        await self._task
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing"


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP):
            await process.wait()
    except TimeoutError:
        log.warning("the embedded engine (pid %d) did not stop and is killed", process.pid)
        process.kill()
        await process.wait()
