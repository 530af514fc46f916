"""Files below a directory that a hostile process may be changing at the same time.

Every path is resolved by the kernel with openat2(2) and RESOLVE_IN_ROOT: `..`, an
absolute path and a symlink's target all start and stay at the given root, and
nothing that is renamed or replaced meanwhile leads out. What is written is made
under a new name in a directory that is held open, and then renamed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# linux/openat2.h; the number of the system call is the same on every architecture.
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_IN_ROOT = 0x10

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 256
"""Directories in one another that are copied out at most; each holds a descriptor."""

_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in(root: int, path: str, flags: int, *, symlinks: bool = True) -> int:
    """A descriptor for `path` as seen by a process whose `/` is the open directory `root`. Raises OSError."""
    how = _How(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | (0 if symlinks else _RESOLVE_NO_SYMLINKS))
    name = os.fsencode(path)
    if b"\0" in name:
        raise OSError(f"{path!r} holds a NUL byte")
    found = int(_libc.syscall(_OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how)))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


@dataclass(frozen=True, slots=True)
class Beneath:
    """The files below `root`, of which only those below one of `writable` (paths in it) are touched. New ones belong to `owner`."""

    root: Path
    writable: tuple[str, ...]
    owner: int

    def read(self, path: str, limit: int) -> bytes:
        """A regular file of at most `limit` bytes. Raises OSError."""
        with self._open(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("not a regular file")
            with os.fdopen(os.dup(descriptor), "rb") as source:
                data = source.read(limit + 1)
        if len(data) > limit:
            raise OSError(f"larger than {limit} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file whole, replacing what has its name. Raises OSError."""
        with self._parent(path) as (directory, name):
            self._place(directory, name, data, 0o644)

    def copy_in(self, source: Path, path: str) -> None:
        """Lay a file or a directory with all in it over what is there. Raises OSError."""
        if source.is_dir():
            with self._made(path) as directory:
                self._copy_entries(source, directory)
        else:
            with self._parent(path) as (directory, name):
                self._copy_entry(source, directory, name)

    def copy_out(self, path: str, target: Path) -> None:
        """Copy a file or a directory out; symlinks stay symlinks, set-user bits go. Raises OSError."""
        with self._open(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_out(descriptor, target, 0)

    def directory(self, path: str) -> str:
        """The directory's path in the root, symlinks resolved. Raises OSError when it is none, or not in reach."""
        with self._open(path, os.O_PATH | os.O_DIRECTORY) as descriptor:
            return self._within(descriptor)

    def _within(self, descriptor: int) -> str:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        inner = f"/{place.relative_to(self.root)}" if place.is_relative_to(self.root) else ""
        if not any(PurePosixPath(inner).is_relative_to(top) for top in self.writable):
            raise OSError("outside the sandbox")
        return inner

    @contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        with _directory(self.root) as root:
            descriptor = open_in(root, path, flags)
        try:
            self._within(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The directory that holds `path`, made when it is missing, and the last name of it."""
        parent, _, name = path.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise IsADirectoryError(f"{path!r} names no file")
        with self._made(parent or "/") as directory:
            yield directory, name

    @contextmanager
    def _made(self, path: str) -> Iterator[int]:
        """A directory, with those above it made when they are missing."""
        parts = [part for part in path.split("/") if part not in ("", ".")]
        missing: list[str] = []
        with _directory(self.root) as root:
            while True:
                try:
                    held = open_in(root, "/".join(("", *parts)) or "/", os.O_RDONLY | os.O_DIRECTORY)
                    break
                except FileNotFoundError:
                    missing.append(parts.pop())
        try:
            self._within(held)
            for name in reversed(missing):
                if name == "..":
                    raise FileNotFoundError(f"{path!r} leads through a directory that does not exist")
                os.mkdir(name, 0o755, dir_fd=held)
                held = _swap(held, os.open(name, _DIRECTORY, dir_fd=held))
                os.fchown(held, self.owner, self.owner)
            yield held
        finally:
            os.close(held)

    def _place(self, directory: int, name: str, data: bytes | Path, mode: int) -> None:
        # Put in place by a rename, so that whatever is there under this name (a FIFO, a hard link) is replaced, not opened.
        draft = f".{uuid.uuid4().hex}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            with os.fdopen(descriptor, "wb") as target:
                if isinstance(data, bytes):
                    target.write(data)
                else:
                    with data.open("rb") as source:
                        shutil.copyfileobj(source, target)
                os.fchown(target.fileno(), self.owner, self.owner)
                os.fchmod(target.fileno(), mode)
            os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(draft, dir_fd=directory)
            raise

    def _copy_entries(self, source: Path, directory: int) -> None:
        for entry in sorted(source.iterdir()):
            self._copy_entry(entry, directory, entry.name)

    def _copy_entry(self, source: Path, directory: int, name: str) -> None:
        found = source.lstat()
        if stat.S_ISLNK(found.st_mode):
            draft = f".{uuid.uuid4().hex}"
            os.symlink(os.readlink(source), draft, dir_fd=directory)
            os.chown(draft, self.owner, self.owner, dir_fd=directory, follow_symlinks=False)
            os.rename(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
        elif stat.S_ISDIR(found.st_mode):
            with suppress(FileExistsError):  # Laid over what is there; a file or a symlink in its place fails below.
                os.mkdir(name, 0o700, dir_fd=directory)
            inner = os.open(name, _DIRECTORY, dir_fd=directory)
            try:
                os.fchown(inner, self.owner, self.owner)
                os.fchmod(inner, stat.S_IMODE(found.st_mode) & 0o777 | stat.S_IRWXU)
                self._copy_entries(source, inner)
            finally:
                os.close(inner)
        else:
            self._place(directory, name, source, stat.S_IMODE(found.st_mode) & 0o777)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _swap(old: int, new: int) -> int:
    os.close(old)
    return new


def _copy_out(descriptor: int, target: Path, depth: int) -> None:
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        with os.fdopen(os.dup(descriptor), "rb") as source, target.open("xb") as copy:
            shutil.copyfileobj(source, copy)
    elif stat.S_ISDIR(found.st_mode):
        if depth == _DEPTH:
            raise OSError(f"more than {_DEPTH} directories in one another")
        target.mkdir(exist_ok=depth == 0)
        for name in os.listdir(descriptor):
            _copy_out_entry(descriptor, name, target / name, depth + 1)
    else:
        raise OSError(f"{target.name!r} is neither a file nor a directory")
    target.chmod(stat.S_IMODE(found.st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)


def _copy_out_entry(directory: int, name: str, target: Path, depth: int) -> None:
    if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        target.symlink_to(os.readlink(name, dir_fd=directory))
        return
    # Non-blocking, because opening a FIFO would wait for a writer.
    inner = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        _copy_out(inner, target, depth)
    finally:
        os.close(inner)
