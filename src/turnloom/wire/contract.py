"""What every dialect promises: bytes in, a neutral Request out; a neutral reply in, bytes out.

A dialect is pure. The gateway owns sessions, sampling, parsing and the socket;
a dialect only spells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from turnloom.errors import TurnloomError
from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import Finish, Message, Request, ToolCall

MAX_STOPS = 64
MAX_STOP_CHARS = 1000
"""Stop strings are searched for in every piece of text, so a request brings only so many, each only so long."""

ReplyEvent = TextDelta | ReasoningDelta | ToolCall
"""What a stream carries: text and reasoning as they are sampled, a call when it is complete."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished turn as the wire needs it. Token counts are the lengths of the id lists."""

    turn_id: str
    model: str
    message: Message
    finish: Finish
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WireError:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class StreamWriter(Protocol):
    """One streamed reply, a state machine: `begin`, any number of `event` and `ping`, then `finish` or `error`.

    Each call returns the bytes to send, which may be none.
    """

    def begin(self) -> bytes: ...

    def event(self, event: ReplyEvent) -> bytes: ...

    def ping(self) -> bytes:
        """A keepalive that the dialect's clients honour."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """Everything still open is closed; the last bytes are the terminal event."""
        ...

    def error(self, error: TurnloomError) -> bytes:
        """The dialect's own way to end a stream that has begun and cannot finish."""
        ...


class Dialect(Protocol):
    name: str
    call_prefix: str
    """Begins every tool-call id we mint."""

    def read(self, body: bytes, *, stream: bool = False) -> Request:
        """`stream` is for a body that does not say. Raises BadRequest with the path of the field that is wrong."""
        ...

    def write(self, reply: Reply) -> bytes: ...

    def stream(self, turn_id: str, model: str, prompt_tokens: int) -> StreamWriter: ...

    def count(self, tokens: int) -> bytes:
        """The answer to a count-tokens request."""
        ...

    def error(self, error: TurnloomError) -> WireError: ...
