"""The error tree. Each error knows its HTTP status and the boundary it belongs to.

TurnloomError
├── RequestError            the client's fault; `wire` turns it into the dialect's own shape
│   ├── BadRequest          400  malformed, unsupported or contradictory
│   ├── UnknownResponse     400  `previous_response_id` names no reply of this session
│   ├── PromptTooLong       400  more tokens than the context holds
│   ├── Unauthorized        401  no session has this key
│   ├── NotFound            404
│   ├── BodyTooLarge        413
│   ├── LimitReached        429  a limit of the session
│   └── SessionClosed       503
├── EngineError             the engine's fault
│   ├── EngineRejected      400  it refused this request; asking again will not help
│   ├── EngineOverloaded    529  busy; ask again
│   ├── EngineUnavailable   503  cannot be reached, or died
│   ├── EngineProtocol      502  it broke its own contract; nothing it said is kept as sampled
│   └── EngineAborted       529  it ended the request early
├── RenderError             400  the chat template refuses these messages
├── StoreError              500  a turn could not be made durable
├── GatewayUnavailable      503  a client cannot reach its gateway, or lost it in the middle of an answer
├── SandboxError, HarnessError, TaskError   the rollout's side
└── ConfigError             what a person set; shown on one line with what to do
"""

from __future__ import annotations

MAX_MESSAGE = 1500
"""Characters of an error's message: what it is about may be of any length, and goes into answers and logs."""


class TurnloomError(Exception):
    """Root of everything Turnloom raises on purpose. `status` is the HTTP status a client sees."""

    status: int = 500

    def __init__(self, message: str = "") -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…")


class RequestError(TurnloomError):
    status = 400


class BadRequest(RequestError):
    status = 400


class UnknownResponse(RequestError):
    """No turn of this session has this response id."""

    status = 400

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Previous response with id '{response_id}' not found.")
        self.response_id = response_id


class PromptTooLong(RequestError):
    """The prompt has `tokens` tokens and the context holds `limit`."""

    status = 400

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"prompt is too long: {tokens} tokens > {limit} maximum")
        self.tokens = tokens
        self.limit = limit


class Unauthorized(RequestError):
    status = 401


class NotFound(RequestError):
    status = 404


class BodyTooLarge(RequestError):
    status = 413


class LimitReached(RequestError):
    status = 429


class SessionClosed(RequestError):
    status = 503


class EngineError(TurnloomError):
    status = 500


class EngineRejected(EngineError):
    status = 400


class EngineOverloaded(EngineError):
    """`retry_after` is what the engine asked for, in seconds."""

    status = 529

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailable(EngineError):
    status = 503


class EngineProtocol(EngineError):
    status = 502


class EngineAborted(EngineError):
    status = 529


class RenderError(TurnloomError):
    status = 400


class StoreError(TurnloomError):
    status = 500


class GatewayUnavailable(TurnloomError):
    status = 503


class SandboxError(TurnloomError):
    pass


class HarnessError(TurnloomError):
    pass


class TaskError(TurnloomError):
    pass


class ConfigError(TurnloomError):
    pass
