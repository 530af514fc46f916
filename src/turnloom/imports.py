"""Objects by import path, `package.module:Name`: what a user names on the command line. Nothing else is loaded so."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from turnloom.errors import ConfigError


def load_object(path: str, what: str) -> Any:
    """The object that `path` names; `what` says what it should be, for the error.

    Raises ConfigError when it is not there, and whatever the module itself raises while it is imported.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} {path!r} cannot be imported: {described(error)}") from error


def described(error: BaseException) -> str:
    """An error of someone else's code on one line, with its type where the text alone would not say."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ImportError | AttributeError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
