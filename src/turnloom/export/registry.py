"""Export formats by name. A format is a function that writes samples to a file and returns how many.

Other formats need no registration: `package.module:Name` names any such function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from turnloom.errors import ConfigError, TurnloomError
from turnloom.imports import described, load_object
from turnloom.types import Sample

Writer = Callable[[Iterable[Sample], Path], int]
"""Reads each sample once and changes none."""

FORMATS = {
    "canonical": "turnloom.export.canonical:write_jsonl",
    "jsonl": "turnloom.export.canonical:write_jsonl",
    "parquet": "turnloom.export.parquet:write_parquet",
}


def load_format(name: str) -> Writer:
    """The writer of a format. Raises ConfigError for a name or an import path that leads nowhere."""
    module_name, colon, attribute = FORMATS.get(name, name).partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"no export format {name!r}; use one of {', '.join(FORMATS)}, or package.module:Name")
    writer = load_object(f"{module_name}:{attribute}", "export format")
    if not callable(writer):
        raise ConfigError(f"export format {name!r} is not a function of samples and a path")
    return cast(Writer, writer)


def export(samples: Iterable[Sample], path: str | os.PathLike[str], format: str = "canonical") -> int:
    """Write samples to `path`, whole or not at all; returns how many. Raises ConfigError, also for whatever another's format raises."""
    writer = load_format(format)
    if format in FORMATS:
        return writer(samples, Path(path))
    try:
        return writer(samples, Path(path))
    except TurnloomError:
        raise
    except Exception as error:
        raise ConfigError(f"export format {format!r} failed: {described(error)}") from error
