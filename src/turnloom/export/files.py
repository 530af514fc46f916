"""Atomic writing: a file appears whole under its name, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from turnloom.errors import ConfigError


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write; on a clean exit it is synced and renamed to `path`, else it is removed.

    A link is written through. Raises ConfigError where the path cannot be
    written, and where something other than a file is there: a device or a pipe
    would be replaced, not written to.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not os.path.isfile(target):
        raise ConfigError(f"cannot write {path}: it is not a file")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # Where it could not be made, it cannot be looked for either.
            temporary.unlink()
