"""Errors and models in OpenAI's words, which both of its dialects share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Model
from openai.types.shared import ErrorObject

from tests.support.openai_chat import chunks_of, extras, head_of
from turnloom.errors import (
    BadRequest,
    BodyTooLarge,
    EngineAborted,
    EngineOverloaded,
    EngineProtocol,
    EngineRejected,
    EngineUnavailable,
    LimitReached,
    NotFound,
    PromptTooLong,
    RenderError,
    SessionClosed,
    StoreError,
    TurnloomError,
    Unauthorized,
    UnknownResponse,
)
from turnloom.types import Request
from turnloom.wire import openai_models
from turnloom.wire.openai_chat import OpenAIChatDialect
from turnloom.wire.openai_errors import error_object, wire_error

INVALID = "invalid_request_error"
ERRORS: dict[TurnloomError, tuple[int, str, str | None, str | None]] = {
    BadRequest("x"): (400, INVALID, None, None),
    BadRequest("messages.12.content.0.text: must be a string"): (400, INVALID, "messages[12].content[0].text", None),
    BadRequest("n: 17 replies are asked for"): (400, INVALID, "n", None),
    BadRequest("The path: is no field"): (400, INVALID, None, None),
    UnknownResponse("resp_1"): (400, INVALID, "previous_response_id", "previous_response_not_found"),
    PromptTooLong(9, 5): (400, INVALID, "messages", "context_length_exceeded"),
    RenderError("messages: the template refuses"): (400, INVALID, None, None),
    EngineRejected("x"): (400, INVALID, None, None),
    Unauthorized("x"): (401, INVALID, None, "invalid_api_key"),
    NotFound("x"): (404, INVALID, None, None),
    BodyTooLarge("x"): (413, INVALID, None, None),
    LimitReached("x"): (429, "insufficient_quota", None, "insufficient_quota"),
    SessionClosed("x"): (503, "server_error", None, "server_error"),
    StoreError("x"): (500, "server_error", None, "server_error"),
    EngineProtocol("x"): (502, "server_error", None, "server_error"),
    EngineUnavailable("x"): (503, "server_error", None, "server_error"),
    EngineOverloaded("x"): (503, "server_error", None, "server_error"),
    EngineAborted("x"): (503, "server_error", None, "server_error"),
    TurnloomError("x"): (500, "server_error", None, "server_error"),
}
HEADERS: dict[type[TurnloomError], dict[str, str]] = {
    EngineOverloaded: {"retry-after": "1"},
    EngineAborted: {"retry-after": "1"},
    LimitReached: {"x-should-retry": "false"},
    SessionClosed: {"x-should-retry": "false"},
}


@pytest.mark.parametrize(("error", "expected"), ERRORS.items(), ids=[f"{type(e).__name__} {e}" for e in ERRORS])
def test_errors_have_openais_shape(error: TurnloomError, expected: tuple[int, str, str | None, str | None]) -> None:
    answer = wire_error(error)
    body = json.loads(answer.body)
    assert body == error_object(error)
    found = ErrorObject.model_validate(body["error"], strict=True)
    assert not extras(found)
    assert (answer.status, found.type, found.param, found.code) == expected
    assert answer.headers == HEADERS.get(type(error), {})
    dialect = OpenAIChatDialect()
    assert dialect.error(error) == answer
    assert chunks_of(dialect.stream(head_of(Request(messages=()))).error(error)) == [body]


def test_overflow_is_said_in_the_words_that_make_agents_compact() -> None:
    assert message(PromptTooLong(9000, 8192)) == (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. "
        "Please reduce the length of the messages."
    )


@pytest.mark.parametrize("error", [e for e in ERRORS if type(e) not in (PromptTooLong,)], ids=lambda e: type(e).__name__)
def test_no_reason_is_lost(error: TurnloomError) -> None:
    assert message(error).endswith(str(error))


@pytest.mark.parametrize("kind", [EngineOverloaded, EngineAborted, EngineUnavailable, EngineProtocol, StoreError])
def test_a_failure_within_a_stream_is_known_by_its_words(kind: type[TurnloomError]) -> None:
    """There it has no status, and pi goes by these words: it asks again for what a server says of itself."""
    assert message(kind("x")).lower().startswith(("internal server error: ", "the engine is currently overloaded"))


@pytest.mark.parametrize("error", [LimitReached("its 5 turns are used"), SessionClosed("it is finished"), BadRequest("n: wrong")])
def test_what_is_final_is_not_said_in_words_that_are_asked_again_for(error: TurnloomError) -> None:
    assert message(error) == str(error)


def message(error: TurnloomError) -> str:
    said: Any = error_object(error)["error"]["message"]
    return str(said)


def test_models() -> None:
    listed = json.loads(openai_models.models(["a", "b/c"]))
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["a", "b/c"]
    for found in (*listed["data"], json.loads(openai_models.model("a"))):
        assert not extras(Model.model_validate(found, strict=True))
    assert json.loads(openai_models.models([])) == {"object": "list", "data": []}
    dialect = OpenAIChatDialect()
    assert (dialect.models(["a"]), dialect.model("a")) == (openai_models.models(["a"]), openai_models.model("a"))
