"""Errors in OpenAI's words, for every dialect of OpenAI's. It spells and decides nothing else.

The shape is `{"error": {"message", "type", "param", "code"}}`. Types, codes and
statuses follow OpenAI's public guide to its error codes; clients read the code
and the message, and what they do next depends on both.
"""

from __future__ import annotations

import re
from typing import Any

from turnloom.errors import (
    BadRequest,
    EngineAborted,
    EngineOverloaded,
    LimitReached,
    PromptTooLong,
    RequestError,
    SessionClosed,
    TurnloomError,
    Unauthorized,
    UnknownResponse,
)
from turnloom.wire.contract import WireError
from turnloom.wire.json import write

_FIELD = re.compile(r"([a-z_][a-zA-Z_]*(?:\.\w+)*): ")
"""What a BadRequest begins with: the path of the field that is wrong."""

_INDEX = re.compile(r"\.(\d+)")

_BUSY = (EngineOverloaded, EngineAborted)


def error_object(error: TurnloomError) -> dict[str, Any]:
    """`{"error": …}`: the body of an error response, and the data of an error in a stream."""
    kind, code = _kind(error)
    return {"error": {"message": _message(error), "type": kind, "param": _param(error), "code": code}}


def wire_error(error: TurnloomError) -> WireError:
    """The status is the error's own, but a busy engine is 503, since OpenAI knows no 529.

    `Retry-After: 1` where asking again will help; `x-should-retry: false` tells the
    official SDKs that it cannot.
    """
    status = 503 if isinstance(error, _BUSY) else error.status
    headers = {}
    if isinstance(error, _BUSY):
        headers = {"retry-after": "1"}
    elif isinstance(error, LimitReached | SessionClosed):
        headers = {"x-should-retry": "false"}
    return WireError(status, write(error_object(error)), headers)


def _kind(error: TurnloomError) -> tuple[str, str | None]:
    """(type, code).

    A session's limit is OpenAI's quota, which waiting does not bring back:
    `rate_limit_exceeded` would have clients ask again for ever.
    """
    match error:
        case PromptTooLong():
            return "invalid_request_error", "context_length_exceeded"
        case UnknownResponse():
            return "invalid_request_error", "previous_response_not_found"
        case Unauthorized():
            return "invalid_request_error", "invalid_api_key"
        case LimitReached():
            return "insufficient_quota", "insufficient_quota"
    if error.status == 429:
        return "requests", "rate_limit_exceeded"
    if error.status < 500:
        return "invalid_request_error", None
    return "server_error", "server_error"


def _message(error: TurnloomError) -> str:
    """Clients that get an error within a stream see no status: those that ask again know one to ask again for by its words."""
    if isinstance(error, PromptTooLong):
        return (
            f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in {error.tokens} tokens. "
            "Please reduce the length of the messages."
        )
    if isinstance(error, Unauthorized):
        return f"Incorrect API key provided: {error}"
    if isinstance(error, EngineOverloaded):
        return f"The engine is currently overloaded, please try again later: {error}"
    if error.status >= 500 and not isinstance(error, RequestError):
        return f"Internal server error: {error}"
    return str(error)


def _param(error: TurnloomError) -> str | None:
    """The field that a bad request names, spelled as OpenAI does: `messages[0].content`."""
    if isinstance(error, PromptTooLong):
        return "messages"
    if isinstance(error, UnknownResponse):
        return "previous_response_id"
    found = _FIELD.match(str(error)) if isinstance(error, BadRequest) else None
    return _INDEX.sub(r"[\1]", found[1]) if found else None
