"""The dialect itself: which function does what."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.errors import TurnloomError
from turnloom.types import Request
from turnloom.wire import openai_models
from turnloom.wire.contract import DEFAULT_READING, NO_ENVELOPE, Envelope, Head, Reading, Reply, WireError
from turnloom.wire.json import write
from turnloom.wire.openai_responses.errors import wire_error
from turnloom.wire.openai_responses.read import read
from turnloom.wire.openai_responses.stream import ResponsesStream
from turnloom.wire.openai_responses.write import whole


class OpenAIResponsesDialect:
    name = "openai_responses"
    call_prefix = "call_"

    def __init__(self, reading: Reading = DEFAULT_READING) -> None:
        self._reading = reading

    def read(self, body: bytes, envelope: Envelope = NO_ENVELOPE) -> Request:
        return read(body, envelope, self._reading)

    def write(self, replies: Sequence[Reply]) -> bytes:
        return whole(replies[0])

    def stream(self, head: Head) -> ResponsesStream:
        return ResponsesStream(head)

    def count(self, tokens: int) -> bytes:
        return write({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return openai_models.models(names)

    def model(self, name: str) -> bytes:
        return openai_models.model(name)

    def error(self, error: TurnloomError) -> WireError:
        return wire_error(error)
