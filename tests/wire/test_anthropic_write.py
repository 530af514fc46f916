"""The Anthropic dialect writes: neutral reply in, bytes out."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from anthropic.types import Message as SdkMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.support.sse import read_sse
from turnloom.errors import (
    BadRequest,
    BodyTooLarge,
    EngineAborted,
    EngineOverloaded,
    EngineUnavailable,
    LimitReached,
    PromptTooLong,
    SessionClosed,
    StoreError,
    TurnloomError,
    Unauthorized,
)
from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import Finish, FinishReason, Message, Reasoning, Request, Text, ToolCall
from turnloom.wire.anthropic import AnthropicDialect
from turnloom.wire.anthropic.read import THOUGHTS
from turnloom.wire.contract import Head, Reply
from turnloom.wire.json import whole_text

DIALECT = AnthropicDialect()
TURN = "0" * 31 + "1"
UNASKED = Head(TURN, "m", 0, 7, Request(()))
HEAD = Head(TURN, "m", 0, 7, Request((), wire={THOUGHTS: True}))
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def reply(*parts: Any, finish: Finish = Finish(FinishReason.STOP), head: Head = HEAD) -> Reply:  # noqa: B008 (frozen)
    return Reply(head, Message("assistant", parts), finish, 3)


def test_write_a_message_that_the_sdk_reads() -> None:
    call = ToolCall("toolu_t100", "ls", '{"path": "."}')
    raw = DIALECT.write([reply(Reasoning("hmm"), Text("\n"), Text("Hi"), call)])
    message = SdkMessage.model_validate_json(raw)
    assert [b.type for b in message.content] == ["thinking", "text", "tool_use"], "a block of white space alone is not sent"
    assert message.content[2].input == {"path": "."}
    assert (message.id, message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("msg_" + TURN, "tool_use", 7, 3)


LETTERS = st.text(st.characters(codec=None), max_size=4)
"""Any text at all, halves of surrogate pairs included."""

ESCAPES = st.sampled_from(["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", '\\"', "\\u00e9", "\\n", "ud83d", "é", "😀"])
QUOTED = st.lists(ESCAPES, max_size=6).map(lambda parts: '"' + "".join(parts) + '"')
NUMBERS = st.sampled_from(["-0", "1E300", "12345678901234567890123", "-9223372036854775809", "1.10", "9" * 300])
JSON_TEXT = st.recursive(
    QUOTED | NUMBERS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ",\n".join(items) + "]")
        | st.lists(st.tuples(QUOTED, inner), max_size=3).map(lambda items: "{" + ", ".join(f"{k} : {v}" for k, v in items) + "}")
    ),
    max_leaves=6,
)


def sent_arguments(call: ToolCall) -> tuple[str, str]:
    """The text of a call's arguments in the message, and in the stream."""
    body = DIALECT.write([reply(call)]).decode()
    streamed = read_sse(DIALECT.stream(HEAD).event(call).decode())
    (delta,) = [data["delta"]["partial_json"] for name, data in streamed if name == "content_block_delta"]
    return body.partition('"input":')[2].partition('}],"stop_reason"')[0], delta


@given(st.lists(st.tuples(QUOTED, JSON_TEXT), min_size=1, max_size=3))
def test_what_the_model_wrote_goes_out_as_it_stands(members: list[tuple[str, str]]) -> None:
    arguments = "{" + ",".join(f"{key}: {value}" for key, value in members) + "}"
    call = ToolCall("toolu_1", "ls", arguments)
    plain, streamed = sent_arguments(call)
    assert plain == streamed == whole_text(arguments)
    orjson.loads(plain)
    value = json.loads(arguments, object_pairs_hook=list)
    assert json.loads(plain, object_pairs_hook=list) == whole(value)
    assert (plain == arguments) == (whole(value) == value), "only what is lone changes"


def whole(value: Any) -> Any:
    """What the value is with every lone surrogate as U+FFFD."""
    if isinstance(value, list | tuple):
        return type(value)(whole(v) for v in value)
    return re.sub("[\ud800-\udfff]", "\ufffd", value) if isinstance(value, str) else value


@given(st.lists(st.tuples(st.sampled_from(["text", "reasoning", "call"]), LETTERS), max_size=5), LETTERS)
def test_any_model_text_can_be_sent(plan: list[tuple[str, str]], matched: str) -> None:
    writer = DIALECT.stream(HEAD)
    parts: list[Any] = []
    sent = writer.begin()
    for kind, text in plan:
        call = ToolCall("c", "ls", quote_object(text))
        parts.append(call if kind == "call" else Text(text) if kind == "text" else Reasoning(text))
        sent += writer.event(call if kind == "call" else TextDelta(text) if kind == "text" else ReasoningDelta(text))
    done = reply(*parts, finish=Finish(FinishReason.STOP, matched))
    orjson.loads(DIALECT.write([done]))
    read_sse((sent + writer.finish(done)).decode())


def quote_object(text: str) -> str:
    return '{"a": ' + json.dumps(text, ensure_ascii=False) + "}"


STOPS = {
    "end_turn": (reply(Text("a")), None),
    "max_tokens": (reply(Text("a"), finish=Finish(FinishReason.LENGTH)), None),
    "tool_use": (reply(ToolCall("a", "b", "{}")), None),
    "stop_sequence": (reply(Text("a"), finish=Finish(FinishReason.STOP, "END")), "END"),
}


@pytest.mark.parametrize(("reason", "case"), STOPS.items(), ids=STOPS)
def test_stop_reasons(reason: str, case: tuple[Reply, str | None]) -> None:
    body = json.loads(DIALECT.write([case[0]]))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, case[1])


def test_stream_a_transcript() -> None:
    call = ToolCall("toolu_t100", "ls", '{"path": "."}')
    writer = DIALECT.stream(HEAD)
    sent = writer.begin() + writer.ping()
    for event in (
        ReasoningDelta("hm"),
        ReasoningDelta("m"),
        TextDelta("\n\n"),
        TextDelta("Hi"),
        TextDelta(" you\n"),
        call,
        TextDelta("\n"),
    ):
        sent += writer.event(event)
    sent += writer.finish(reply(Text("Hi"), call))
    events = read_sse(sent.decode())
    for name, data in events:
        assert name == data["type"]
        if name != "ping":
            STREAM_EVENT.validate_python(data)
    shown = [(n, d.get("index"), d.get("content_block", d.get("delta", {})).get("type")) for n, d in events]
    assert shown == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    text = "".join(d["delta"]["text"] for n, d in events if n == "content_block_delta" and d["delta"]["type"] == "text_delta")
    assert text == "\n\nHi you\n"
    assert events[-2][1] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"input_tokens": 7, "output_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }


def test_thinking_that_nobody_asked_for_is_not_shown() -> None:
    done = reply(Reasoning("a"), Text("One."), Reasoning("b"), Text("Two."), Reasoning("c"), head=UNASKED)
    assert json.loads(DIALECT.write([done]))["content"] == [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    writer = DIALECT.stream(UNASKED)
    sent = writer.begin()
    for event in (ReasoningDelta("a"), TextDelta("\n\n"), TextDelta("One."), ReasoningDelta("b"), TextDelta("Two."), ReasoningDelta("c")):
        sent += writer.event(event)
    events = read_sse((sent + writer.finish(done)).decode())
    kinds = [(name.removeprefix("content_block_"), data["index"]) for name, data in events if name.startswith("content_block_")]
    assert kinds == [("start", 0), ("delta", 0), ("stop", 0), ("start", 1), ("delta", 1), ("stop", 1)]
    assert not any("thinking" in json.dumps(data) or "signature" in json.dumps(data) for _, data in events)
    silent = reply(Reasoning("a"), head=UNASKED)
    assert json.loads(DIALECT.write([silent]))["content"] == []


@given(st.lists(st.sampled_from(["t:hello", "t: ", "t:\n", "r:think", "c"]), max_size=10))
def test_any_stream_is_well_formed(plan: list[str]) -> None:
    """Blocks open, fill and stop in turn, and nothing visible is lost."""
    writer = DIALECT.stream(HEAD)
    sent, parts = writer.begin(), []
    for i, step in enumerate(plan):
        event: Any = ToolCall(f"c{i}", "ls", "{}") if step == "c" else (TextDelta if step[0] == "t" else ReasoningDelta)(step[2:])
        parts.append(event)
        sent += writer.event(event)
    events = read_sse((sent + writer.finish(reply())).decode())
    open_block = None
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
        else:
            assert data["index"] == open_block
        if name == "content_block_stop":
            open_block = None
    assert open_block is None
    shown = "".join(d["delta"].get("text", "") for n, d in events if n == "content_block_delta")
    assert "".join(shown.split()) == "".join("".join(p.text for p in parts if isinstance(p, TextDelta)).split())


ERRORS = {
    BadRequest("x"): (400, "invalid_request_error"),
    PromptTooLong(9, 5): (400, "invalid_request_error"),
    Unauthorized("x"): (401, "authentication_error"),
    BodyTooLarge("x"): (413, "request_too_large"),
    LimitReached("x"): (429, "rate_limit_error"),
    SessionClosed("x"): (503, "api_error"),
    StoreError("x"): (500, "api_error"),
    EngineAborted("x"): (529, "overloaded_error"),
    EngineOverloaded("x"): (529, "overloaded_error"),
    EngineUnavailable("x"): (503, "api_error"),
}


@pytest.mark.parametrize(("error", "expected"), ERRORS.items(), ids=[type(e).__name__ for e in ERRORS])
def test_errors_have_anthropics_shape(error: TurnloomError, expected: tuple[int, str]) -> None:
    answer = DIALECT.error(error)
    body = json.loads(answer.body)
    assert (answer.status, body["error"]["type"]) == expected
    assert body["type"] == "error"
    failed = isinstance(error, EngineUnavailable)
    assert body["error"]["message"] == (f"Internal server error: {error}" if failed else str(error))
    assert (answer.headers.get("x-should-retry") == "false") == isinstance(error, LimitReached | SessionClosed | Unauthorized)
    assert (answer.headers.get("retry-after") == "1") == isinstance(error, EngineAborted | EngineOverloaded)
    streamed = read_sse(DIALECT.stream(HEAD).error(error).decode())
    assert streamed == [("error", body)]


def test_overflow_is_said_in_the_words_that_make_agents_compact() -> None:
    assert str(PromptTooLong(9000, 8192)) == "prompt is too long: 9000 tokens > 8192 maximum"
