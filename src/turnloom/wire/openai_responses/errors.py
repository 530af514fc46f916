"""Errors in OpenAI's words, where this dialect has its own: before a stream, and within one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnloom.errors import (
    EngineAborted,
    EngineOverloaded,
    EngineRejected,
    PromptTooLong,
    RenderError,
    RequestError,
    TurnloomError,
    UnknownResponse,
)
from turnloom.wire import openai_errors
from turnloom.wire.contract import WireError
from turnloom.wire.json import write


def wire_error(error: TurnloomError) -> WireError:
    return replace(openai_errors.wire_error(error), body=write({"error": _error(error)}))


def failure(error: TurnloomError) -> dict[str, str]:
    """The error of a response that failed within its stream.

    Codex ends its run at once on `invalid_prompt`, on `context_length_exceeded`
    and on `server_is_overloaded`, and asks again on every other code: on
    `rate_limit_exceeded` after as long as the message says. Other clients show the
    code and the message, and know a context overflow by either.
    """
    if isinstance(error, PromptTooLong):
        return {"code": "context_length_exceeded", "message": _error(error)["message"]}
    if isinstance(error, EngineOverloaded | EngineAborted):
        return {"code": "rate_limit_exceeded", "message": f"{error}. Please try again in 1s."}
    if isinstance(error, RequestError | EngineRejected | RenderError):
        return {"code": "invalid_prompt", "message": str(error)}
    return {"code": "server_error", "message": _error(error)["message"]}


def _error(error: TurnloomError) -> dict[str, Any]:
    shared: dict[str, Any] = openai_errors.error_object(error)["error"]
    if isinstance(error, UnknownResponse):
        return {**shared, "param": "previous_response_id", "code": "previous_response_not_found"}
    if isinstance(error, PromptTooLong):
        words = "Your input exceeds the context window of this model. Please adjust your input and try again."
        return {**shared, "message": f"{words} ({error.tokens} tokens > {error.limit} maximum)", "param": "input"}
    return shared
