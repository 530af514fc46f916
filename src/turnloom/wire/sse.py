"""Server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.wire.json import write

DONE = b"data: [DONE]\n\n"


def data(value: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + write(value) + b"\n\n"


def event(name: str, value: Mapping[str, Any]) -> bytes:
    """An event whose name is the `type` of its data too."""
    return b"event: " + name.encode() + b"\ndata: " + write({"type": name, **value}) + b"\n\n"
