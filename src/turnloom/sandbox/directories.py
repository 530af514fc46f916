"""Makes, removes and sweeps the directories of local sandboxes. It touches no directory that it did not make.

The process that makes a directory holds a lock (flock(2)) on it until it has
removed it. The kernel gives the lock back when that process ends, however it
ends, so a directory whose lock is free is a leftover.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("turnloom.sandbox")

_PREFIX = "turnloom-sandbox-"
_NAME = re.compile(re.escape(_PREFIX) + "([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Place:
    """A sandbox's directory; `lock` is the descriptor that holds it."""

    path: Path
    lock: int

    def give_back(self) -> None:
        os.close(self.lock)


def make(parent: Path | None, sandbox: str, parts: Sequence[str] = ("work", "home", "tmp")) -> Place:
    """A directory for the sandbox with this id (32 hexadecimal digits), with these directories in it. Raises OSError."""
    # Resolved, because paths are compared after following symlinks (/tmp is one on some systems).
    directory = Path(parent or tempfile.gettempdir()).resolve()
    draft, path = directory / f".{_PREFIX}{sandbox}", directory / f"{_PREFIX}{sandbox}"
    draft.mkdir(mode=0o700)
    lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # A file system without locks: nobody else gets one either, so nothing is swept there.
            log.debug("cannot lock %s: %s", draft, error)
        for name in parts:
            (draft / name).mkdir(parents=True)
        # Only now under the name that a sweep looks for.
        draft.rename(path)
    except BaseException:
        os.close(lock)
        remove(draft)
        raise
    return Place(path, lock)


def stale(parent: Path | None) -> list[tuple[str, Place]]:
    """Sandbox ids and directories whose process is gone. The caller now holds their locks."""
    found = []
    with os.scandir(parent or tempfile.gettempdir()) as entries:
        candidates = list(entries)
    for entry in candidates:
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            continue
        lock = _lock(Path(entry.path))
        if lock is not None:
            found.append((match[1], Place(Path(entry.path), lock)))
    return found


def _lock(path: Path) -> int | None:
    """The directory's lock, or None when another holds it or it is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        log.debug("cannot open %s: %s", path, error)
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        log.debug("%s is in use: %s", path, error)
        os.close(lock)
        return None
    return lock


def remove(root: Path) -> None:
    """Remove a directory that an agent filled: unreadable, read-only or as deep as it likes. Raises OSError when something stays.

    Each directory found is moved up below `root` before it is emptied, so neither the depth nor the length of a path matters.
    """
    try:
        if not stat.S_ISDIR(os.lstat(root).st_mode):
            os.unlink(root)
            return
    except FileNotFoundError:
        return
    failure: OSError | None = None
    names = (root / f"{uuid.uuid4().hex}.{number}" for number in itertools.count())
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        try:
            for entry in _opened(directory):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif directory == root:
                    waiting.append(Path(entry.path))
                else:
                    os.chmod(entry.path, stat.S_IRWXU)  # Moving a directory takes the right to write to it.
                    waiting.append(Path(entry.path).rename(next(names)))
            if directory != root:
                os.rmdir(directory)
        except OSError as error:
            log.debug("cannot empty %s: %s", directory, error)
            failure = failure or error
    try:
        os.rmdir(root)
    except OSError as error:
        raise failure or error from None


def _opened(directory: Path) -> list[os.DirEntry[str]]:
    os.chmod(directory, stat.S_IRWXU)
    with os.scandir(directory) as entries:
        return list(entries)
