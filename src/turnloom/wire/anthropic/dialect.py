"""The dialect itself: which function does what."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.errors import TurnloomError
from turnloom.types import Request
from turnloom.wire.anthropic.errors import wire_error
from turnloom.wire.anthropic.read import read
from turnloom.wire.anthropic.write import AnthropicStream, whole
from turnloom.wire.contract import DEFAULT_READING, NO_ENVELOPE, Envelope, Head, Reading, Reply, WireError
from turnloom.wire.json import write

_CREATED = "2025-01-01T00:00:00Z"
"""The shape of a model asks for a date, and an engine tells none."""


class AnthropicDialect:
    name = "anthropic"
    call_prefix = "toolu_"

    def __init__(self, reading: Reading = DEFAULT_READING) -> None:
        self._reading = reading

    def read(self, body: bytes, envelope: Envelope = NO_ENVELOPE) -> Request:
        return read(body, envelope, self._reading)

    def write(self, replies: Sequence[Reply]) -> bytes:
        return whole(replies[0])

    def stream(self, head: Head) -> AnthropicStream:
        return AnthropicStream(head)

    def count(self, tokens: int) -> bytes:
        return write({"input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        found = [_model(name) for name in names]
        return write({"data": found, "has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None})

    def model(self, name: str) -> bytes:
        return write(_model(name))

    def error(self, error: TurnloomError) -> WireError:
        return wire_error(error)


def _model(name: str) -> dict[str, str]:
    return {"type": "model", "id": name, "display_name": name, "created_at": _CREATED}
