"""Sandboxes by name. A name with a colon is an import path, `package.module:Name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from turnloom.errors import ConfigError, TurnloomError
from turnloom.imports import described, load_object
from turnloom.sandbox.contract import Backend

SANDBOXES = {
    "local": "turnloom.sandbox.local:LocalBackend",
    "bubblewrap": "turnloom.sandbox.bubblewrap:BubblewrapBackend",
}


def load_sandbox(name: str, **options: Any) -> Backend:
    """The backend of this name, made with its own options. Raises ConfigError when there is none or it refuses them."""
    path = name if ":" in name else SANDBOXES.get(name)
    if path is None:
        raise ConfigError(f"there is no sandbox {name!r}: use one of {', '.join(SANDBOXES)}, or package.module:Name")
    make = load_object(path, "sandbox")
    try:
        backend = cast(Callable[..., Backend], make)(**options)
    except TypeError as error:
        raise ConfigError(f"sandbox {name!r} does not take these options: {error}") from error
    except TurnloomError:
        raise
    except Exception as error:
        raise ConfigError(f"sandbox {name!r} cannot be made: {described(error)}") from error
    missing = [part for part in ("name", "make", "prune", "require") if not hasattr(backend, part)]
    if missing:
        raise ConfigError(f"sandbox {name!r} is not a Backend: it has no {', no '.join(missing)}")
    return backend
