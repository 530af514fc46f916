"""Harnesses by name. A name with a colon is an import path, `package.module:Name`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from turnloom.errors import ConfigError
from turnloom.harness.contract import Harness

HARNESSES = {
    "sdk-agent": "turnloom.harness.sdk:SdkAgent",
    "claude-code": "turnloom.harness.claude_code:ClaudeCode",
    "pi": "turnloom.harness.pi:Pi",
    "command": "turnloom.harness.command:Command",
}


def load_harness(name: str, **options: Any) -> Harness:
    """The harness of this name, made with its own options. Raises ConfigError when there is none or it refuses them."""
    path = name if ":" in name else HARNESSES.get(name)
    if path is None:
        raise ConfigError(f"there is no agent {name!r}: use one of {', '.join(HARNESSES)}, or package.module:Name")
    module, _, attribute = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"agent {name!r} cannot be imported: {error}") from error
    try:
        return cast(Callable[..., Harness], make)(**options)
    except TypeError as error:
        raise ConfigError(f"agent {name!r} does not take these options: {error}") from error
