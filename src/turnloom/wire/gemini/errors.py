"""Errors in Google's words: an HTTP code, the name of the google.rpc code, and details that say whether to ask again."""

from __future__ import annotations

from typing import Any

from turnloom.errors import (
    EngineAborted,
    EngineOverloaded,
    EngineUnavailable,
    LimitReached,
    PromptTooLong,
    SessionClosed,
    TurnloomError,
    Unauthorized,
)
from turnloom.wire.contract import WireError
from turnloom.wire.json import write

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
"""https://cloud.google.com/apis/design/errors#handling_errors; 413 has no code of its own."""

_SOON, _NEVER = "1s", "86400s"
"""How long to wait. Gemini CLI gives up at once where it is asked to wait more than five minutes."""


def wire_error(error: TurnloomError) -> WireError:
    headers = {"Retry-After": "1"} if _again(error) else {}
    return WireError(_code(error), write(error_object(error)), headers)


def error_object(error: TurnloomError) -> dict[str, Any]:
    code = _code(error)
    told: dict[str, Any] = {"code": code, "message": _message(error), "status": _STATUSES[code]}
    if details := _details(error):
        told["details"] = details
    return {"error": told}


def _code(error: TurnloomError) -> int:
    """Google knows no 529, and tells of a broken backend with a 500."""
    status = 503 if error.status == 529 else error.status
    return status if status in _STATUSES else 500


def _message(error: TurnloomError) -> str:
    if isinstance(error, PromptTooLong):
        return f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed ({error.limit})."
    if isinstance(error, Unauthorized):
        return f"API key not valid. Please pass a valid API key: {error}."
    return str(error)


def _details(error: TurnloomError) -> list[dict[str, Any]]:
    if isinstance(error, Unauthorized):
        info = {"reason": "API_KEY_INVALID", "domain": "googleapis.com"}
        return [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", **info}]
    if _again(error) or isinstance(error, LimitReached | SessionClosed):
        return [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": _SOON if _again(error) else _NEVER}]
    return []


def _again(error: TurnloomError) -> bool:
    return isinstance(error, EngineOverloaded | EngineUnavailable | EngineAborted)
