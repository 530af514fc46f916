"""A sandbox that bubblewrap isolates: Linux namespaces, without a daemon and without being root.

Each command runs in namespaces of its own (users, mounts, processes, network,
IPC, host name), sees what `bwrap/view.py` names and nothing else, has no network
but the gateway's address, and is ended as a whole with its namespace. Its files
are in a directory of this machine, which belongs to a user of its own when
Turnloom runs as root. What this does not keep in is in docs/sandboxes.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from turnloom.errors import SandboxError
from turnloom.sandbox import directories
from turnloom.sandbox.beneath import Beneath
from turnloom.sandbox.bwrap import view
from turnloom.sandbox.bwrap.held import Held, launch
from turnloom.sandbox.bwrap.limits import Group, Limits, disk_exceeded, groups_left, limit_processes, prlimit, remove_group
from turnloom.sandbox.bwrap.relay import Reached, serving
from turnloom.sandbox.bwrap.stage import Stage, stage, user_of
from turnloom.sandbox.bwrap.view import ROOT, UID, Mount
from turnloom.sandbox.contract import ANYWHERE, FILE_LIMIT, OUTPUT_LIMIT, ExecResult, Needs, SandboxUnavailable
from turnloom.sandbox.processes import TAG
from turnloom.sandbox.spawn import failure, quietly, refuse_odd_words, to_the_end
from turnloom.sandbox.sweep import remove, sweep, sweep_once

log = logging.getLogger("turnloom.sandbox")

_T = TypeVar("_T")
_PROGRAMS = ("bwrap", "prlimit", "setpriv", "unshare", "mount", "du", "cp")
_NAMESPACES = ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv")
_OUTER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class _Laid:
    """Where a started sandbox is, and who it is out here."""

    place: directories.Place
    uid: int
    files: Beneath
    group: Group

    @property
    def inside(self) -> Path:
        return self.place.path / "inside"

    @property
    def control(self) -> Path:
        return self.place.path / "control"


class BubblewrapSandbox:
    """Sandbox in namespaces (see the module). `grace` is the seconds from TERM to KILL, `show` more of the host to read."""

    def __init__(
        self,
        needs: Needs = ANYWHERE,
        *,
        parent: Path | None = None,
        grace: float = 2.0,
        limits: Limits | None = None,
        show: Sequence[Path] = (),
    ) -> None:
        self._image = Path(needs.image).resolve() if needs.image else None
        self._workdir = needs.workdir or f"{ROOT}/work"
        self._parent = parent
        self._grace = grace
        self._limits = limits or Limits()
        self._show = tuple(show)
        self._id = uuid.uuid4().hex
        self._execs = 0
        self._laid: _Laid | None = None
        self._reached = Reached()
        self._running: set[Held] = set()

    @property
    def host_files(self) -> bool:
        return self._image is None

    @property
    def root(self) -> str:
        self._base()
        return ROOT

    @property
    def workdir(self) -> str:
        self._base()
        return self._workdir

    @property
    def home(self) -> str:
        self._base()
        return f"{ROOT}/home"

    def reach(self, url: str) -> str:
        return self._reached.add(url)

    async def start(self) -> None:
        if self._laid is not None:
            raise SandboxError("the sandbox is already started")
        await sweep_once(self._parent)
        writable = view.writable(self._workdir)
        parts = ["inside/sandbox/work", "inside/sandbox/home", "inside/tmp", "control/etc"]
        if self._workdir != f"{ROOT}/work":
            parts.append(f"inside{self._workdir}")
        try:
            place = await asyncio.to_thread(directories.make, self._parent, self._id, parts)
        except OSError as error:
            raise failure("make a sandbox directory", error) from error
        uid = user_of(self._id)
        self._laid = _Laid(place, uid, Beneath(place.path / "inside", writable, uid), Group(self._id, self._limits))
        try:
            await asyncio.to_thread(self._fill, self._laid)
            await self._copy_workdir(self._laid)
        except BaseException as error:
            await self.stop()
            if isinstance(error, OSError):
                raise failure("make a sandbox directory", error) from error
            raise

    def _fill(self, laid: _Laid) -> None:
        for name, text in view.users().items():
            (laid.control / "etc" / name).write_text(text)
            (laid.control / "etc" / name).chmod(0o644)
        closed = 0o711 if laid.uid != os.geteuid() else 0o700
        for path in (laid.place.path, laid.inside, laid.control):
            path.chmod(closed)
        (laid.control / "etc").chmod(0o755)
        for parent, names, _ in os.walk(laid.inside):
            for name in names:
                os.chown(os.path.join(parent, name), laid.uid, laid.uid)
                os.chmod(os.path.join(parent, name), 0o755)
        (laid.inside / "tmp").chmod(0o1777)

    async def _copy_workdir(self, laid: _Laid) -> None:
        """The workdir as the image has it."""
        if self._image is None or not view.has(self._image, self._workdir):
            return
        target = laid.inside / self._workdir.strip("/")
        source = self._image / self._workdir.strip("/")
        await _host("cp", "-a", "--reflink=auto", "--no-target-directory", "--", str(source), str(target))
        if laid.uid != os.geteuid():
            await _host("chown", "-hR", f"{laid.uid}:{laid.uid}", "--", str(target))

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
        laid = self._base()
        directory = await self._host_side("work in", cwd or "", lambda path: laid.files.directory(path))
        shown = view.shown_of_host(self._show) if self._image is None else []
        environment = self._environment(shown, env)
        refuse_odd_words(argv, environment)
        if odd := next((name for name in environment if not name or "=" in name), None):
            raise SandboxError(f"{odd!r} is no name of an environment variable")
        self._execs += 1
        tag = f"{self._id}.{self._execs}"
        started = time.monotonic()
        held = await self._held(laid, argv, directory, shown, environment, tag, stdin, output_limit)
        self._running.add(held)
        timed_out, limit = False, ""
        try:
            _look_for(argv[0], held, directory, environment["PATH"])
            async with AsyncExitStack() as stack:
                await self._confine(held, laid, stack)
                held.let_go()
                timed_out, limit = await self._wait(held, laid, timeout)
        finally:
            try:
                await to_the_end(held.end())
            finally:
                self._running.discard(held)
        return _result(held, timed_out, limit, time.monotonic() - started)

    async def _held(
        self,
        laid: _Laid,
        argv: Sequence[str],
        directory: str,
        shown: Sequence[Path],
        environment: Mapping[str, str],
        tag: str,
        stdin: bytes | None,
        output_limit: int,
    ) -> Held:
        staged = stage(laid.uid, [laid.place.path, *([self._image] if self._image is not None else []), *shown])
        words = [*_NAMESPACES, "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
        system = view.of_image(self._image, self._workdir, laid.control) if self._image is not None else view.of_host(laid.control)
        mounts = [
            *system,
            *view.own(laid.inside, self._workdir, self._image),
            *(Mount("--ro-bind", str(path), str(path)) for path in shown),
        ]
        words += view.arguments(mounts, self._limits.shm, staged.seen)
        words += ["--chdir", directory]
        for name, value in environment.items():
            words += ["--setenv", name, value]
        return await launch(
            [*staged.command(), *self._prlimit(laid, staged)],
            words,
            argv,
            env={"PATH": _OUTER_PATH, TAG: tag},
            tag=tag,
            marker=(ROOT, laid.inside / "sandbox"),
            stdin=stdin,
            output_limit=output_limit,
        )

    def _prlimit(self, laid: _Laid, staged: Stage) -> list[str]:
        """A user of its own has no processes but the sandbox's, so their number can be held from the start."""
        return [*prlimit(self._limits, processes=staged.uid != os.geteuid(), memory=not laid.group), "--"]

    async def _confine(self, held: Held, laid: _Laid, stack: AsyncExitStack) -> None:
        try:
            laid.group.add(held.child)
            if laid.uid == os.geteuid():
                limit_processes(held.child, self._limits)
        except OSError as error:
            raise failure("hold the sandbox to its limits", error) from error
        if self._reached.ports:
            await stack.enter_async_context(serving(held.child, self._reached.ports))

    async def _wait(self, held: Held, laid: _Laid, timeout: float | None) -> tuple[bool, str]:
        """Whether the time was up, and which limit was exceeded."""
        ended = asyncio.ensure_future(held.process.wait())
        watch = asyncio.ensure_future(disk_exceeded(laid.inside, self._limits.disk)) if self._limits.disk else None
        both = {ended, *((watch,) if watch is not None else ())}
        try:
            done, _ = await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                return False, ""
            if watch is not None and watch in done:
                watch.result()
                log.warning("sandbox %s holds more than %d bytes: its command is ended", self._id, self._limits.disk)
                return False, "disk"
            await asyncio.to_thread(held.terminate)
            await quietly(held.process.wait(), self._grace)
            return True, ""
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def write_file(self, path: str, data: bytes) -> None:
        await self._host_side("write", path, lambda whole: self._base().files.write(whole, data))

    async def read_file(self, path: str, *, limit: int = FILE_LIMIT) -> bytes:
        return await self._host_side("read", path, lambda whole: self._base().files.read(whole, limit))

    async def upload(self, source: Path, path: str) -> None:
        await self._host_side("copy", path, lambda whole: self._base().files.copy_in(source, whole))

    async def download(self, path: str, target: Path) -> None:
        await self._host_side("copy", path, lambda whole: self._base().files.copy_out(whole, target))

    async def _host_side(self, what: str, path: str, work: Callable[[str], _T]) -> _T:
        self._base()
        whole = path if path.startswith("/") else f"{self._workdir}/{path}"
        try:
            return await asyncio.to_thread(work, whole)
        except (OSError, RecursionError, ValueError) as error:
            raise failure(f"{what} {path!r}", error) from error

    async def stop(self) -> None:
        laid, self._laid = self._laid, None
        if laid is not None:
            await to_the_end(self._remove(laid))

    async def _remove(self, laid: _Laid) -> None:
        for held in tuple(self._running):
            held.kill()
            await held.ended.wait()  # Its `exec` ends it.
        await remove(self._id, laid.place)
        laid.group.close()

    def _base(self) -> _Laid:
        if self._laid is None:
            raise SandboxUnavailable("the sandbox is not running")
        return self._laid

    def _environment(self, shown: Sequence[Path], env: Mapping[str, str] | None) -> dict[str, str]:
        path = view.search_path(shown) if self._image is None else view.PATH
        return {"PATH": path, "LANG": "C.UTF-8", "HOME": f"{ROOT}/home", "TMPDIR": "/tmp", **(env or {})}


def _result(held: Held, timed_out: bool, limit: str, duration: float) -> ExecResult:
    out, err = held.out.buffer, held.err.buffer
    note = f"\n[ended: the sandbox's limit of {limit} was exceeded]\n".encode() if limit else b""
    return ExecResult(held.exit_code, out.value(), err.value() + note, timed_out, out.dropped, err.dropped, duration, limit)


def _look_for(name: str, held: Held, directory: str, path: str) -> None:
    try:
        root = os.open(f"/proc/{held.child}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise failure(f"start {name!r}", error) from error
    try:
        view.find_program(root, name, directory, path)
    finally:
        os.close(root)


async def _host(*words: str) -> None:
    """Run a program of this host to its end. Raises SandboxError with what it says when it fails."""
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise SandboxError(f"{words[0]} fails: {' '.join(said.decode('utf-8', 'replace').split())[:300] or process.returncode}")


class BubblewrapBackend:
    """Sandboxes in namespaces of this machine. The limits are per sandbox (see `Limits`).

    `parent` is where their directories are made, the temporary directory unless
    given; `show` are more directories of the host that can be read inside.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        parent: Path | None = None,
        grace: float = 2.0,
        show: Sequence[Path | str] | str = (),
        processes: int | None = 4096,
        file_size: int | None = 4 << 30,
        disk: int | None = 8 << 30,
        memory: int | None = None,
        shm: int = 64 << 20,
    ) -> None:
        self._parent = Path(parent) if parent is not None else None
        self._grace = grace
        self._show = tuple(Path(path) for path in ((show,) if isinstance(show, str) else show))
        self._limits = Limits(processes=processes, file_size=file_size, disk=disk, memory=memory, shm=shm)

    async def require(self) -> None:
        missing = [program for program in _PROGRAMS if shutil.which(program, path=_OUTER_PATH) is None]
        if missing:
            raise SandboxError(f"there is no {', no '.join(missing)} here: install bubblewrap, util-linux and coreutils (Linux only)")
        user = stage(user_of(uuid.uuid4().hex), [])
        words = [*user.command(), "bwrap", *_NAMESPACES, "--ro-bind", "/usr", "/usr"]
        for mount in view.of_host(Path("/nonexistent")):
            if mount.target.count("/") == 1 and mount.target != "/usr":
                words += [mount.kind, mount.source, mount.target]
        try:
            await _host(*words, "--proc", "/proc", "--dev", "/dev", "--", "/usr/bin/env", "true")
        except SandboxError as error:
            raise SandboxError(f"{error}; user namespaces must be permitted here (docs/sandboxes.md says how)") from error

    def make(self, needs: Needs) -> BubblewrapSandbox:
        view.refuse_odd_needs(needs)
        view.shown_of_host(self._show)
        return BubblewrapSandbox(needs, parent=self._parent, grace=self._grace, limits=self._limits, show=self._show)

    async def prune(self) -> Sequence[str]:
        removed = await sweep(self._parent)
        groups = [group for path in removed for group in groups_left(path.rpartition("-")[2])]
        return [*removed, *(str(group) for group in groups if remove_group(group))]
