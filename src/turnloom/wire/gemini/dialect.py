"""The dialect itself: which function does what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnloom.errors import TurnloomError
from turnloom.types import Request
from turnloom.wire.contract import DEFAULT_READING, NO_ENVELOPE, Envelope, Head, Reading, Reply, WireError
from turnloom.wire.gemini.errors import wire_error
from turnloom.wire.gemini.fields import CALL_PREFIX
from turnloom.wire.gemini.read import read
from turnloom.wire.gemini.write import GeminiStream, whole
from turnloom.wire.json import write


class GeminiDialect:
    name = "gemini"
    call_prefix = CALL_PREFIX

    def __init__(self, reading: Reading = DEFAULT_READING) -> None:
        self._reading = reading

    def read(self, body: bytes, envelope: Envelope = NO_ENVELOPE) -> Request:
        return read(body, envelope, self._reading)

    def write(self, replies: Sequence[Reply]) -> bytes:
        return whole(replies[0])

    def stream(self, head: Head) -> GeminiStream:
        return GeminiStream(head)

    def count(self, tokens: int) -> bytes:
        return write({"totalTokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return write({"models": [_model(name) for name in names]})

    def model(self, name: str) -> bytes:
        return write(_model(name))

    def error(self, error: TurnloomError) -> WireError:
        return wire_error(error)


def _model(name: str) -> dict[str, Any]:
    """The limits that Google's shape has room for are left out: an engine's are not known here."""
    bare = name.removeprefix("models/")
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{bare}", "version": "001", "displayName": bare, "supportedGenerationMethods": methods}
