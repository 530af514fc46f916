"""Errors of the Responses dialect: before a stream, and within one."""

from __future__ import annotations

import json

import pytest

from tests.support.sse import read_sse
from tests.wire.test_openai_responses_write import DIALECT, head, valid
from turnloom.errors import (
    BadRequest,
    EngineAborted,
    EngineOverloaded,
    EngineProtocol,
    EngineRejected,
    EngineUnavailable,
    LimitReached,
    PromptTooLong,
    RenderError,
    SessionClosed,
    StoreError,
    TurnloomError,
    Unauthorized,
    UnknownResponse,
)
from turnloom.parse.contract import ReasoningDelta, TextDelta

HTTP: dict[TurnloomError, tuple[int, str, str | None, str | None]] = {
    BadRequest("input.0.content: must be a string"): (400, "invalid_request_error", None, "input[0].content"),
    UnknownResponse("resp_1"): (400, "invalid_request_error", "previous_response_not_found", "previous_response_id"),
    PromptTooLong(9, 5): (400, "invalid_request_error", "context_length_exceeded", "input"),
    Unauthorized("x"): (401, "invalid_request_error", "invalid_api_key", None),
    LimitReached("x"): (429, "insufficient_quota", "insufficient_quota", None),
    SessionClosed("x"): (503, "server_error", "server_error", None),
    EngineAborted("x"): (503, "server_error", "server_error", None),
    StoreError("x"): (500, "server_error", "server_error", None),
}


@pytest.mark.parametrize(("error", "expected"), HTTP.items(), ids=[type(e).__name__ for e in HTTP])
def test_errors_have_openais_shape(error: TurnloomError, expected: tuple[int, str, str | None, str | None]) -> None:
    answer = DIALECT.error(error)
    said = json.loads(answer.body)["error"]
    assert (answer.status, said["type"], said["code"], said["param"]) == expected
    assert said.keys() == {"message", "type", "param", "code"}
    assert answer.headers.get("retry-after") == ("1" if isinstance(error, EngineAborted) else None)
    assert (answer.headers.get("x-should-retry") == "false") == isinstance(error, LimitReached | SessionClosed)


def test_the_words_that_clients_know() -> None:
    unknown, overflow = (
        json.loads(DIALECT.error(e).body)["error"]["message"] for e in (UnknownResponse("resp_1"), PromptTooLong(9000, 8192))
    )
    assert unknown == "Previous response with id 'resp_1' not found."
    assert overflow.startswith("Your input exceeds the context window of this model. Please adjust your input and try again.")
    assert "9000 tokens > 8192" in overflow


FAILED: dict[TurnloomError, str] = {
    EngineOverloaded("busy"): "rate_limit_exceeded",
    EngineAborted("gone"): "rate_limit_exceeded",
    EngineUnavailable("dead"): "server_error",
    EngineProtocol("odd"): "server_error",
    StoreError("full"): "server_error",
    TurnloomError("odd"): "server_error",
    EngineRejected("no"): "invalid_prompt",
    RenderError("no"): "invalid_prompt",
    SessionClosed("shut"): "invalid_prompt",
    LimitReached("used"): "invalid_prompt",
    PromptTooLong(9, 5): "context_length_exceeded",
}


@pytest.mark.parametrize(("error", "code"), FAILED.items(), ids=[type(e).__name__ for e in FAILED])
def test_a_stream_that_fails_says_so_and_keeps_what_was_whole(error: TurnloomError, code: str) -> None:
    writer = DIALECT.stream(head())
    sent = writer.begin() + writer.event(ReasoningDelta("hm")) + writer.event(TextDelta("cu")) + writer.error(error)
    events = [data for _, data in read_sse(sent.decode())]
    if code != "context_length_exceeded":  # Codex knows it, the SDK's types do not.
        valid(sent)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"], response["error"]["code"]) == ("response.failed", "failed", code)
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    said = response["error"]["message"]
    assert (str(error) if code != "context_length_exceeded" else "context window") in said
    assert ("try again in 1s" in said) == (code == "rate_limit_exceeded"), "Codex waits as long as the message says"
