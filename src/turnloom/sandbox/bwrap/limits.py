"""What a bubblewrap sandbox may use, and how that is held: rlimits, a control group where one can be made, a look at the disk."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from turnloom.counters import swallowed
from turnloom.errors import ConfigError

log = logging.getLogger("turnloom.sandbox")

_LOOK = 1.0
"""Seconds between two looks at how full the file system is."""

_COUNT = 30.0
"""Seconds after which the sandbox's own files are counted, whatever that look says: others may have freed what it took."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`processes` counts threads too. `file_size` and `disk`, `memory` and `shm` (`/dev/shm`) are bytes; None is no limit.

    `memory` is that of all processes together where a control group can be made, else
    the data of each process alone.
    """

    processes: int | None = 4096
    file_size: int | None = 4 << 30
    disk: int | None = 8 << 30
    memory: int | None = None
    shm: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("processes", "file_size", "disk", "memory", "shm"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0")


def prlimit(limits: Limits, *, processes: bool, memory: bool) -> list[str]:
    """The command line of prlimit(1) in front of another. `processes` and `memory` say whether these limits are held by it."""
    words = ["prlimit", "--core=0"]
    kinds = (
        ("fsize", resource.RLIMIT_FSIZE, limits.file_size),
        ("nproc", resource.RLIMIT_NPROC, limits.processes if processes else None),
        ("data", resource.RLIMIT_DATA, limits.memory if memory else None),
    )
    return [*words, *(f"--{name}={_held(kind, value)}" for name, kind, value in kinds if value is not None)]


def limit_processes(pid: int, limits: Limits) -> None:
    """Hold the number of processes of a user namespace that exists already: the caller's own others do not count there."""
    if limits.processes is not None:
        value = _held(resource.RLIMIT_NPROC, limits.processes)
        resource.prlimit(pid, resource.RLIMIT_NPROC, (value, value))


def _held(kind: int, value: int) -> int:
    """No more than this process may grant."""
    hard = resource.getrlimit(kind)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


async def disk_exceeded(place: Path, limit: int) -> None:
    """Return when the files below `place` take more bytes of the disk than this."""
    counted, used, taken = -_COUNT, 0, 0
    while True:
        await asyncio.sleep(_LOOK)
        now, found = time.monotonic(), _taken(place)
        if now - counted < _COUNT and used + found - taken <= limit:
            continue  # Counting reads every directory; this cannot have grown so far.
        counted, taken, used = now, found, await disk_used(place)
        if used > limit:
            return


def _taken(place: Path) -> int:
    """Bytes in use of the file system."""
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


async def disk_used(place: Path) -> int:
    """Bytes of the disk that the files below take, as far as they can be read."""
    process = await asyncio.create_subprocess_exec(
        *("du", "-sx", "--block-size=1", "--", str(place)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    word = output.split()[:1]
    return int(word[0]) if word and word[0].isdigit() else 0


class Group:
    """A control group (cgroup v2, or v1's memory and pids) for the processes of one sandbox, or none where none can be made."""

    def __init__(self, sandbox: str, limits: Limits) -> None:
        self._places: list[Path] = []
        if limits.memory is None:
            return
        for parent, settings in _hierarchies(limits):
            place = parent / f"turnloom-{sandbox}"
            try:
                place.mkdir()
                self._places.append(place)
                for name, value in settings.items():
                    (place / name).write_text(str(value))
            except OSError as error:
                log.debug("no control group %s: %s", place, error)
                self.close()
                return

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, pid: int) -> None:
        """Raises OSError."""
        for place in self._places:
            (place / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove it, empty as it is by now."""
        places, self._places = self._places, []
        for place in places:
            remove_group(place)


def remove_group(place: Path) -> bool:
    try:
        place.rmdir()
    except FileNotFoundError:
        return False
    except OSError as error:
        swallowed(log, "sandbox.cgroup", "cannot remove the control group %s: %s", place, error)
        return False
    return True


def groups_left(sandbox: str) -> list[Path]:
    """The control groups of this sandbox that are still there."""
    return [place for parent, _ in _hierarchies(Limits()) if (place := parent / f"turnloom-{sandbox}").is_dir()]


def _hierarchies(limits: Limits) -> list[tuple[Path, dict[str, int]]]:
    """Where groups can be made, each with the files to set."""
    top = Path("/sys/fs/cgroup")
    memory = limits.memory or 0
    if (top / "memory" / "memory.limit_in_bytes").exists():
        return [(top / "memory", {"memory.limit_in_bytes": memory})]
    own = _own_group()
    if own is not None and os.access(own / "cgroup.procs", os.W_OK) and "memory" in _read(own / "cgroup.subtree_control").split():
        return [(own, {"memory.max": memory, "memory.swap.max": 0})]
    return []


def _own_group() -> Path | None:
    """The parent of this process's cgroup v2: a group with processes of its own gives its children no controllers."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::/"):
            return (Path("/sys/fs/cgroup") / line[4:].strip("/")).parent if line[4:].strip("/") else Path("/sys/fs/cgroup")
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        log.debug("cannot read %s: %s", path, error)
        return ""
