"""Errors in Anthropic's words."""

from __future__ import annotations

from typing import Any

from turnloom.errors import (
    EngineAborted,
    EngineOverloaded,
    EngineProtocol,
    EngineUnavailable,
    LimitReached,
    SessionClosed,
    TurnloomError,
    Unauthorized,
)
from turnloom.wire.contract import WireError
from turnloom.wire.json import write

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def error_object(error: TurnloomError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _TYPES.get(error.status, "api_error"), "message": _message(error)}}


def _message(error: TurnloomError) -> str:
    """Inside a stream the message is all that pi goes by: it asks again after an "internal server error", and gives up else."""
    failed = isinstance(error, EngineUnavailable | EngineProtocol)
    return f"Internal server error: {error}" if failed else str(error)


def wire_error(error: TurnloomError) -> WireError:
    """`retry-after: 1` where the engine is only busy; `x-should-retry: false` tells the official SDKs, and Claude Code,
    that asking again cannot help."""
    headers = {}
    if isinstance(error, EngineOverloaded | EngineAborted):
        headers = {"retry-after": "1"}
    elif isinstance(error, LimitReached | SessionClosed | Unauthorized):
        headers = {"x-should-retry": "false"}
    return WireError(error.status, write(error_object(error)), headers)
