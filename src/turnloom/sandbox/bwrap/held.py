"""One command in a bubblewrap of its own: held before it starts, let go, and ended with everything that it started.

The command's processes are those of its process id namespace, which the kernel
ends as one when the first of them ends: no process leaves it, whatever it does to
its session, its parents or its environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from turnloom.errors import SandboxError
from turnloom.sandbox.contract import SandboxUnavailable
from turnloom.sandbox.output import Drain
from turnloom.sandbox.processes import kill_all
from turnloom.sandbox.spawn import DRAIN_TIME, failure, open_pipe, quietly, spawn, to_the_end

log = logging.getLogger("turnloom.sandbox")

_START_TIME = 30.0
_PAUSE = 0.001
_SIGNALS = {int(number) for number in signal.Signals}


@dataclass(slots=True, eq=False)
class Held:
    """A command that bwrap has laid everything out for. `child` is the first process of its namespaces, by the host's number."""

    process: asyncio.subprocess.Process
    out: Drain
    err: Drain
    tag: str
    release: int
    """The descriptor at whose closing, or first byte, the command starts; -1 when it has."""
    child: int = 0
    pidfd: int = -1
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def let_go(self) -> None:
        os.write(self.release, b"x")
        self._close_release()

    @property
    def exit_code(self) -> int:
        """bwrap reports a signal as a shell does, with 128 more than its number."""
        code = self.process.returncode if self.process.returncode is not None else -9
        return 128 - code if code - 128 in _SIGNALS else code

    def terminate(self) -> None:
        """Ask every process of the command to end (TERM), each once."""
        for pid in members(self.child):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """KILL them all at once. Does not wait."""
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        elif self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()

    async def end(self) -> None:
        """KILL what is left, and wait until all of it is gone."""
        self.kill()
        if self.pidfd >= 0:
            await quietly(_readable(self.pidfd), DRAIN_TIME)
            os.close(self.pidfd)
            self.pidfd = -1
        else:
            await kill_all(self.tag, self.process.pid)
        await quietly(self.process.wait(), DRAIN_TIME)
        if self.process.returncode is None:
            await kill_all(self.tag, self.process.pid)
            await quietly(self.process.wait(), DRAIN_TIME)
        self._close_release()
        for drain in (self.out, self.err):
            await quietly(drain.closed.wait(), DRAIN_TIME)
            drain.close()
        self.ended.set()

    def _close_release(self) -> None:
        descriptor, self.release = self.release, -1
        if descriptor >= 0:
            os.close(descriptor)


async def launch(
    before: Sequence[str],
    options: Sequence[str],
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    tag: str,
    marker: tuple[str, Path],
    stdin: bytes | None,
    output_limit: int,
) -> Held:
    """Start bwrap with these options, itself started through `before`; `argv` is held until `let_go`. End the result.

    `marker` is a directory inside and where it is out here: all is laid out when the one is the other.

    Raises SandboxError when it cannot be started.
    """
    info, info_end = open_pipe(1 << 16)
    descriptors = [info_end]
    try:
        hold, release = os.pipe()
        descriptors.append(hold)
        try:
            # Not as words of bwrap's own, which every user of the host may read: the environment is among them.
            descriptors.append(words := _temporary(("--info-fd", str(info_end), "--block-fd", str(hold), *options)))
            command = [*before, "bwrap", "--args", str(words), "--", *argv]
            process, out, err = await spawn(
                command, cwd="/", env=env, stdin=stdin, output_limit=output_limit, pass_fds=descriptors, shown=argv[0]
            )
        except BaseException:
            os.close(release)
            raise
    except BaseException as error:
        info.close()
        if isinstance(error, OSError):
            raise failure(f"start {argv[0]!r}", error) from error
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    held = Held(process, out, err, tag, release)
    try:
        await _laid_out(held, info, marker)
    except BaseException:
        await to_the_end(held.end())
        raise
    finally:
        info.close()
    return held


def _temporary(words: Sequence[str]) -> int:
    descriptor = os.memfd_create("bwrap-args", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as target:
        target.writelines(os.fsencode(word) + b"\0" for word in words)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def _laid_out(held: Held, info: Drain, marker: tuple[str, Path]) -> None:
    """Wait until bwrap has mounted everything and waits itself."""
    await quietly(info.closed.wait(), _START_TIME)
    try:
        held.child = int(json.loads(info.buffer.value())["child-pid"])
        held.pidfd = os.pidfd_open(held.child)
        waited = 0.0
        while not _same(f"/proc/{held.child}/root{marker[0]}", marker[1]):
            if held.process.returncode is not None or waited > _START_TIME:
                raise ProcessLookupError("it ended")
            await asyncio.sleep(_PAUSE)
            waited += _PAUSE
    except (ValueError, KeyError, OSError) as error:
        if isinstance(error, OSError) and not isinstance(error, ProcessLookupError):
            raise failure("start bwrap", error) from error
        await quietly(held.process.wait(), DRAIN_TIME)
        await quietly(held.err.closed.wait(), DRAIN_TIME)
        said = " ".join(held.err.buffer.value().decode("utf-8", "replace").split())
        kind = SandboxUnavailable if "Resource temporarily unavailable" in said or "No space left" in said else SandboxError
        raise kind(f"bubblewrap does not start: {said or 'it says nothing'}") from error


def _same(inside: str, outside: Path) -> bool:
    try:
        return os.path.samestat(os.stat(inside), os.stat(outside))
    except OSError:
        return False


def members(child: int) -> list[int]:
    """The processes of the namespace that `child` is the first of, but for itself, by the host's numbers."""
    found: list[int] = []
    try:
        space = os.readlink(f"/proc/{child}/ns/pid")
    except OSError as error:
        log.debug("process %d is gone: %s", child, error)
        return found
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        with suppress(OSError):  # It ended meanwhile, or belongs to another user.
            if pid != child and os.readlink(entry / "ns" / "pid") == space:
                found.append(pid)
    return found


async def _readable(descriptor: int) -> None:
    """A process's descriptor can be read when it has ended; the first process of a namespace ends last."""
    if select.select([descriptor], [], [], 0)[0]:
        return
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
