"""Who writes a store: one process, which holds the lock beside its file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnloom.errors import StoreError


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Nobody writes the store meanwhile, which need not exist yet. Raises StoreError where somebody does."""
    lock = take(path)
    try:
        yield
    finally:
        os.close(lock)


def take(path: Path) -> int:
    """An advisory lock beside the file, held as long as the descriptor is open; a killed process leaves none behind.

    Not on the file itself: closing a descriptor of it would drop SQLite's own POSIX locks.
    """
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StoreError(f"cannot create {lock_path}: {error.strerror}; check the permissions of its directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise StoreError(f"{path} is being written by process {holder or 'unknown'}; stop it, or give another --store") from error
    except OSError as error:
        os.close(lock)
        raise StoreError(f"cannot lock {lock_path}: {error.strerror}") from error
    return lock
