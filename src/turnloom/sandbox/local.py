"""A sandbox that is a temporary directory of this machine. It is NOT isolation.

It gives each run a fresh directory, a fresh HOME, an environment without the
caller's secrets, and an end to all its processes. It does not keep anything in:
the commands run as the user who runs Turnloom, with that user's files, network
and rights. Use it for agents and tasks you would run yourself; for anything else
use a backend that isolates.

What a killed process of Turnloom left behind, directories and processes, is
removed when the next one starts its first sandbox in the same place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnloom.errors import SandboxError
from turnloom.sandbox import directories
from turnloom.sandbox.contract import FILE_LIMIT, OUTPUT_LIMIT, ExecResult, Needs, SandboxUnavailable
from turnloom.sandbox.output import Drain
from turnloom.sandbox.processes import TAG, kill_all, terminate
from turnloom.sandbox.spawn import DRAIN_TIME, failure, quietly, refuse_odd_words, spawn, to_the_end
from turnloom.sandbox.sweep import remove, sweep, sweep_once

log = logging.getLogger("turnloom.sandbox")


class LocalSandbox:
    """Sandbox in a temporary directory, without isolation (see the module). `grace` is the seconds from TERM to KILL."""

    host_files = True

    def __init__(self, *, parent: Path | None = None, grace: float = 2.0) -> None:
        self._parent = parent
        self._grace = grace
        self._id = uuid.uuid4().hex
        self._execs = 0
        self._place: directories.Place | None = None

    @property
    def root(self) -> str:
        return str(self._base())

    @property
    def workdir(self) -> str:
        return str(self._base() / "work")

    @property
    def home(self) -> str:
        return str(self._base() / "home")

    def reach(self, url: str) -> str:
        return url

    async def start(self) -> None:
        if self._place is not None:
            raise SandboxError("the sandbox is already started")
        await sweep_once(self._parent)
        try:
            self._place = await asyncio.to_thread(directories.make, self._parent, self._id)
        except OSError as error:
            raise failure("make a sandbox directory", error) from error

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> ExecResult:
        directory = self._inside(cwd or "")
        self._execs += 1
        tag = f"{self._id}.{self._execs}"
        started = time.monotonic()
        environment = self._environment(tag, env)
        refuse_odd_words(argv, environment)
        process, out, err = await spawn(argv, cwd=directory, env=environment, stdin=stdin, output_limit=output_limit)
        timed_out = False
        try:
            try:
                await asyncio.wait_for(process.wait(), timeout)
            except TimeoutError:
                timed_out = True
                await terminate(tag, process.pid)
                await quietly(process.wait(), self._grace)
        finally:
            await to_the_end(self._clean_up(tag, process, (out, err)))
        return ExecResult(
            exit_code=process.returncode if process.returncode is not None else -9,
            stdout=out.buffer.value(),
            stderr=err.buffer.value(),
            timed_out=timed_out,
            stdout_dropped=out.buffer.dropped,
            stderr_dropped=err.buffer.dropped,
            duration=time.monotonic() - started,
        )

    async def _clean_up(self, tag: str, process: asyncio.subprocess.Process, drains: tuple[Drain, Drain]) -> None:
        await kill_all(tag, process.pid)
        await quietly(process.wait(), DRAIN_TIME)
        for drain in drains:
            await quietly(drain.closed.wait(), DRAIN_TIME)
            drain.close()

    async def write_file(self, path: str, data: bytes) -> None:
        target = self._inside(path)
        try:
            await asyncio.to_thread(_write_whole, target, data)
        except OSError as error:
            raise failure(f"write {path!r}", error) from error

    async def read_file(self, path: str, *, limit: int = FILE_LIMIT) -> bytes:
        target = self._inside(path)
        try:
            return await asyncio.to_thread(_read_regular, target, limit)
        except OSError as error:
            raise failure(f"read {path!r}", error) from error

    async def upload(self, source: Path, path: str) -> None:
        await self._copy(source, self._inside(path), path)

    async def download(self, path: str, target: Path) -> None:
        await self._copy(self._inside(path), target, path)

    async def _copy(self, source: Path, target: Path, path: str) -> None:
        try:
            await asyncio.to_thread(_copy_tree, source, target)
        except (OSError, RecursionError) as error:
            raise failure(f"copy {path!r}", error) from error

    async def stop(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await to_the_end(remove(self._id, place))

    def _base(self) -> Path:
        if self._place is None:
            raise SandboxUnavailable("the sandbox is not running")
        return self._place.path

    def _environment(self, tag: str, env: Mapping[str, str] | None) -> dict[str, str]:
        root = self._base()
        clean = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
        }
        return {**clean, **(env or {}), TAG: tag}

    def _inside(self, path: str) -> Path:
        """The real path, or SandboxError when it leads out, be it by `..`, from the top, or by a symlink the agent left."""
        root = self._base()
        try:
            target = (root / "work" / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise SandboxError(f"cannot follow {path!r}: {error}") from error
        if not target.is_relative_to(root):
            raise SandboxError(f"{path!r} is outside the sandbox")
        return target


@dataclass(frozen=True, slots=True)
class LocalBackend:
    """Sandboxes of this machine without isolation. `parent` is where their directories are made, the temporary directory unless given."""

    parent: Path | None = None
    grace: float = 2.0
    name: str = "local"

    async def require(self) -> None:
        """It needs nothing."""

    def make(self, needs: Needs) -> LocalSandbox:
        if needs.image or needs.workdir:
            raise SandboxError(f"a local sandbox has no image {needs.image or needs.workdir!r}: use --sandbox docker or bubblewrap")
        return LocalSandbox(parent=self.parent, grace=self.grace)

    async def prune(self) -> Sequence[str]:
        return await sweep(self.parent)


def _read_regular(path: Path, limit: int) -> bytes:
    # Non-blocking, because opening a FIFO an agent left would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as source:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        if found.st_size > limit:
            raise OSError(f"larger than {limit} bytes")
        return source.read()


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Put in place by a rename, so that whatever an agent left under this name (a FIFO, a hard link) is replaced, not opened.
    draft = path.with_name(f".{uuid.uuid4().hex}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _copy_tree(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)
