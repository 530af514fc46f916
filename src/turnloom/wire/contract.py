"""What every dialect promises: bytes in, a neutral Request out; a neutral reply in, bytes out.

A dialect is pure. The gateway owns sessions, sampling, parsing and the socket;
a dialect only spells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from turnloom.errors import TurnloomError
from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import Finish, Message, Request, ToolCall
from turnloom.wire.quirks import ALL, Quirk

MAX_STOPS = 64
MAX_STOP_CHARS = 1000
"""Stop strings are searched for in every piece of text, so a request brings only so many, each only so long."""


COUNT = "countTokens"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What of a request stands outside its body: header names in lower case, the query, and what its path names.

    `verb` is the method after the colon of a Gemini path, and COUNT where tokens are
    only to be counted. `accepts_stream`: the Accept header asks for an event
    stream, and not for JSON as well.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    verb: str = ""

    @property
    def accepts_stream(self) -> bool:
        accepted = self.headers.get("accept", "")
        return "text/event-stream" in accepted and "application/json" not in accepted


NO_ENVELOPE = Envelope()


@dataclass(frozen=True, slots=True)
class Reading:
    """How requests are read: the client quirks that are normalised, and what becomes of an image.

    The models that are served read text alone, so an image is refused with a 400
    or stands as a placeholder in words, which is counted.
    """

    quirks: frozenset[Quirk] = ALL
    images: Literal["refuse", "placeholder"] = "refuse"


DEFAULT_READING = Reading()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled id as text, a special one as its spelling, with its natural-log probability as the engine gave it."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was sampled since the last event; only where the request asks for logprobs."""

    tokens: tuple[SampledToken, ...]


ReplyEvent = TextDelta | ReasoningDelta | ToolCall | SampledTokens
"""What a stream carries: text and reasoning as they are sampled, a call when it is complete."""


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a reply before its first token. `created` is in Unix seconds; `model` is the name that was asked for."""

    turn_id: str
    model: str
    created: int
    prompt_tokens: int
    request: Request


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished turn as the wire needs it. Token counts are the lengths of the id lists. `tokens` only where logprobs were asked for."""

    head: Head
    message: Message
    finish: Finish
    output_tokens: int
    tokens: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class WireError:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class StreamWriter(Protocol):
    """One streamed response, a state machine: `begin`, any number of `event` and `ping`, then `finish` or `error`.

    Each call returns the bytes to send, which may be none. `choice` numbers the
    replies of a request that asked for several; events of several interleave.
    """

    content_type: str
    """`text/event-stream`, or what the client asked for."""

    def begin(self) -> bytes: ...

    def event(self, event: ReplyEvent, choice: int = 0) -> bytes: ...

    def ping(self) -> bytes:
        """A keepalive that the dialect's clients honour."""
        ...

    def finish(self, reply: Reply, choice: int = 0) -> bytes:
        """Everything still open of this choice is closed; with the last choice, the last bytes are the terminal event."""
        ...

    def error(self, error: TurnloomError) -> bytes:
        """The dialect's own way to end a stream that has begun and cannot finish."""
        ...


class Dialect(Protocol):
    name: str
    call_prefix: str
    """Begins every tool-call id we mint."""

    def read(self, body: bytes, envelope: Envelope = NO_ENVELOPE) -> Request:
        """The request of a turn, or of a count. Raises BadRequest with the path of the field that is wrong."""
        ...

    def write(self, replies: Sequence[Reply]) -> bytes:
        """The whole body of a response that is not streamed: as many replies as the request has choices."""
        ...

    def stream(self, head: Head) -> StreamWriter: ...

    def count(self, tokens: int) -> bytes:
        """The answer to a count-tokens request."""
        ...

    def models(self, names: Sequence[str]) -> bytes:
        """The answer to a request for the models there are."""
        ...

    def model(self, name: str) -> bytes:
        """The answer to a request for one model."""
        ...

    def error(self, error: TurnloomError) -> WireError: ...
