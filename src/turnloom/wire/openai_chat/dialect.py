"""The dialect itself: which function does what."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.errors import TurnloomError
from turnloom.types import Request
from turnloom.wire import openai_models
from turnloom.wire.contract import DEFAULT_READING, NO_ENVELOPE, Envelope, Head, Reading, Reply, WireError
from turnloom.wire.json import write
from turnloom.wire.openai_chat.read import read
from turnloom.wire.openai_chat.write import OpenAIChatStream, whole
from turnloom.wire.openai_errors import wire_error


class OpenAIChatDialect:
    name = "openai_chat"
    call_prefix = "call_"

    def __init__(self, reading: Reading = DEFAULT_READING) -> None:
        self._reading = reading

    def read(self, body: bytes, envelope: Envelope = NO_ENVELOPE) -> Request:
        return read(body, envelope, self._reading)

    def write(self, replies: Sequence[Reply]) -> bytes:
        return whole(replies)

    def stream(self, head: Head) -> OpenAIChatStream:
        return OpenAIChatStream(head)

    def count(self, tokens: int) -> bytes:
        """OpenAI counts no tokens of a chat; this is in the words of its usage."""
        return write({"total_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return openai_models.models(names)

    def model(self, name: str) -> bytes:
        return openai_models.model(name)

    def error(self, error: TurnloomError) -> WireError:
        return wire_error(error)
