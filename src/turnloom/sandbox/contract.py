"""What every sandbox promises. It never knows what an agent or a task is.

Commands are argument lists: nothing here passes through a shell, so text from a
model or a task can be an argument but never a shell word. Paths are POSIX paths
inside the sandbox; a relative one starts at `workdir`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from turnloom.errors import SandboxError

OUTPUT_LIMIT = 1 << 20
"""Bytes kept of each output stream unless the caller says otherwise."""

FILE_LIMIT = 256 << 20
"""Bytes that `read_file` returns at most."""


class SandboxUnavailable(SandboxError):
    """The sandbox itself gives out: no connection, processes, descriptors, memory or disk left, or it is not running.

    A backend raises this for what nothing done inside can be blamed for, and a plain SandboxError for all else.
    """


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended.

    `exit_code` is negative when a signal ended it (-9 for SIGKILL). `stdout` and
    `stderr` hold at most `output_limit` bytes from the two ends with a line
    between that says how many bytes are missing; `*_dropped` is that count.
    `duration` is in seconds. `limit` names the limit of the sandbox that ended the
    command (`disk`), and is empty when none did.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    stdout_dropped: int
    stderr_dropped: int
    duration: float
    limit: str = ""

    @property
    def truncated(self) -> bool:
        return bool(self.stdout_dropped or self.stderr_dropped)

    @property
    def out(self) -> str:
        """`stdout` as UTF-8 text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def err(self) -> str:
        """`stderr` as UTF-8 text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a task asks of the place it runs in. The empty one is a bare place with an empty workdir.

    `image` names it in the backend's own terms: a container image, a template, the
    folder of a root file system. `workdir` is an absolute path inside, which then
    is `Sandbox.workdir` with whatever the image has there.
    """

    image: str = ""
    workdir: str = ""


ANYWHERE = Needs()


class Sandbox(Protocol):
    """One place to run things in, used once: start, work, stop.

    Everything but `stop` raises SandboxUnavailable before `start` and after `stop`.
    """

    @property
    def root(self) -> str:
        """Absolute path of the whole sandbox. It holds `workdir` and `home`; callers may keep files of their own beside them."""

    @property
    def workdir(self) -> str:
        """Absolute path of the working directory, empty at the start."""

    @property
    def home(self) -> str:
        """Absolute path of HOME, empty at the start."""

    @property
    def host_files(self) -> bool:
        """True when a path of this host names the same file inside, if only to read and run."""

    def reach(self, url: str) -> str:
        """The address at which programs inside reach the gateway that is at `url` out here. Call it before `exec`.

        It is all of the network that a backend which isolates lets them reach.
        """

    async def start(self) -> None:
        """Make the place. Raises SandboxError when it cannot."""

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
        """Run `argv` to its end and return how it ended.

        The environment is PATH, LANG, HOME and TMPDIR, then `env`: nothing of
        the caller's own. `stdin` None is an empty input. After `timeout` seconds
        all that the command started gets TERM, a moment later KILL, and the
        result says `timed_out`. When exec returns, or is cancelled, all that the
        command started has been ended, also what runs in a session of its own.
        A process that hides on purpose (leaves the session and clears its
        environment) is ended for certain only by a backend that isolates.
        Output beyond `output_limit` bytes a stream is read and dropped from the
        middle, so a command never blocks on it. Raises SandboxError when the
        command cannot be started.
        """

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file whole, making its directories. Raises SandboxError outside the sandbox or when it cannot."""

    async def read_file(self, path: str, *, limit: int = FILE_LIMIT) -> bytes:
        """A regular file's bytes. Raises SandboxError when it is missing, not a regular file, outside, or over `limit`."""

    async def upload(self, source: Path, path: str) -> None:
        """Copy a host file, or a directory with all in it, to `path`; symlinks stay symlinks, modes are kept."""

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or directory out to a host path that does not exist yet. Raises SandboxError when `path` is missing."""

    async def stop(self) -> None:
        """End the processes of the sandbox, as `exec` does, and remove every file. Safe to call twice, and before `start`.

        Raises SandboxError when something is left behind.
        """


class Backend(Protocol):
    """A kind of sandbox with its settings, of which any number can be made."""

    @property
    def name(self) -> str: ...

    async def require(self) -> None:
        """Quick, and changes nothing. Raises SandboxError that says what this machine or account lacks."""

    def make(self, needs: Needs) -> Sandbox:
        """One that is not started yet. Raises SandboxError for needs that this kind can never meet."""

    async def prune(self) -> Sequence[str]:
        """Remove what killed processes left behind, wherever this kind keeps it, and nothing that a running one uses; its names."""
