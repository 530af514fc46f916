"""Atomic writing: a file appears whole under its name, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from turnloom.errors import ConfigError


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write; on a clean exit it is synced and renamed to `path`, else it is removed.

    Raises ConfigError where the path cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
