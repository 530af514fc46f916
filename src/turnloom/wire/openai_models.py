"""The models there are, in OpenAI's shape: `GET /v1/models` and `GET /v1/models/NAME`."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.wire.json import write

_CREATED = 1735689600
"""2025-01-01: the shape asks for a date, and an engine tells none."""


def models(names: Sequence[str]) -> bytes:
    return write({"object": "list", "data": [_model(name) for name in names]})


def model(name: str) -> bytes:
    return write(_model(name))


def _model(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": _CREATED, "owned_by": "turnloom"}
