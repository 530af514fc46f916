"""The Anthropic dialect reads: bytes in, neutral request out."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnloom.errors import (
    BadRequest,
)
from turnloom.types import Message, Reasoning, Request, Text, ToolCall, ToolResult
from turnloom.wire.anthropic import AnthropicDialect
from turnloom.wire.contract import COUNT, Envelope, Reading
from turnloom.wire.quirks import Quirk

DIALECT = AnthropicDialect()
TURN = "0" * 31 + "1"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def read(dialect: AnthropicDialect = DIALECT, **fields: Any) -> Request:
    return dialect.read(json.dumps({"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def messages(*items: Any) -> tuple[Message, ...]:
    return read(messages=list(items)).messages


def test_read_a_whole_request() -> None:
    request = read(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Be kind."}],
        tools=[{"name": "ls", "description": "List", "input_schema": SCHEMA}],
        messages=[
            {"role": "user", "content": "list"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hmm", "signature": TURN},
                    {"type": "text", "text": "I will"},
                    {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "."}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    },
                    {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        stop_sequences=["END"],
        stream=True,
        temperature=0.1,
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 5},
    )
    assert request.messages == (
        Message("system", (Text("Be brief."), Text("Be kind."))),
        Message("user", (Text("list"),)),
        Message("assistant", (Reasoning("hmm"), Text("I will"), ToolCall("toolu_1", "ls", '{"path":"."}')), TURN),
        Message("tool", (ToolResult("toolu_1", "a\nb"),)),
        Message("tool", (ToolResult("toolu_2", "", True),)),
        Message("user", (Text("go on"),)),
    )
    assert [(t.name, json.loads(t.parameters)) for t in request.tools] == [("ls", SCHEMA)]
    assert (request.max_tokens, request.stop, request.stream, request.model, request.call_tools) == (10, ("END",), True, "m", True)


def test_a_string_equals_a_list_of_one_block_and_cache_marks_do_not_count() -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert messages({"role": "user", "content": "hi"}) == messages({"role": "user", "content": [block]})
    assert read(system="s").messages == read(system=[{"type": "text", "text": "s"}]).messages


@pytest.mark.parametrize(("said", "asked"), [("", None), ('"stream": null,', None), ('"stream": true,', True), ('"stream": false,', False)])
@pytest.mark.parametrize("default", [True, False])
def test_the_body_decides_on_streaming_where_it_says(said: str, asked: bool | None, default: bool) -> None:
    body = "{" + said + '"messages": [{"role": "user", "content": "a"}]}'
    assert DIALECT.read(body.encode(), Envelope({"accept": "text/event-stream"} if default else {})).stream is (
        default if asked is None else asked
    )


def test_system_messages_stay_where_they_are() -> None:
    roles = [
        m.role for m in messages({"role": "user", "content": "a"}, {"role": "system", "content": "note"}, {"role": "user", "content": "b"})
    ]
    assert roles == ["user", "system", "user"]


def test_quirk_billing_header() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3"}, {"type": "text", "text": "Be brief."}]
    assert read(system=system).messages[0] == Message("system", (Text("Be brief."),))
    plain = AnthropicDialect(Reading(frozenset()))
    assert len(read(plain, system=system).messages[0].parts) == 2


HEADER = "x-anthropic-billing-header: cc_version=1.2.3; cch=0;"


@pytest.mark.parametrize("rest", ["", "Be brief.", "\nBe brief.\nBe kind.", HEADER])
def test_quirk_billing_header_takes_its_own_line_only(rest: str) -> None:
    system = f"{HEADER}\n{rest}"
    found = read(system=system).messages
    assert found == read(system=[{"type": "text", "text": system}]).messages
    assert [m.text for m in found if m.role == "system"] == ([rest] if rest else [])


def test_quirk_tool_reference() -> None:
    content = [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "WebFetch"}]}]
    body = [{"role": "user", "content": content}]
    assert read(messages=body).messages[0].text == "WebFetch"
    with pytest.raises(BadRequest, match="tool_reference"):
        read(AnthropicDialect(Reading(frozenset({Quirk.BILLING_HEADER}))), messages=body)


def test_what_is_counted_may_end_with_a_reply() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}).encode()
    assert DIALECT.read(body, Envelope(verb=COUNT)).messages[-1].role == "assistant"


def test_lone_surrogates_become_replacement_characters() -> None:
    body = b'{"messages":[{"role":"user","content":"cut \\ud83d here \\ud83d\\ude00"}]}'
    assert DIALECT.read(body).messages[0].text == "cut \ufffd here 😀"


REFUSED = {
    "not JSON": (b"{nope", "not valid JSON"),
    "a list": (b"[]", "must be a JSON object"),
    "NaN": (b'{"messages": NaN, "x": "\\ud800"}', "not valid JSON"),
    "a number beyond the doubles": (b'{"x": 1e999}', "not valid JSON"),
    "the same beside half a pair": (b'{"x": [1e999, "\\ud800"]}', "not valid JSON"),
    "five thousand digits": (b'{"x": ' + b"9" * 5000 + b', "y": "\\ud800"}', "not valid JSON"),
    "deep beside a long integer": (b'{"x": ' + b"[" * 1000 + b"1" * 20 + b"]" * 1000 + b"}", "nests JSON too deep"),
    "no messages": (b"{}", "messages: must be a list"),
    "empty messages": (b'{"messages": []}', "at least one message"),
    "message is no object": (b'{"messages": ["hi"]}', "messages.0: must be an object"),
    "wrong role": (b'{"messages": [{"role": "tool", "content": "x"}]}', 'messages.0.role: must be "user" or "assistant"'),
    "no content": (b'{"messages": [{"role": "user"}]}', "messages.0.content: must be a string or a list"),
    "empty text": (b'{"messages": [{"role": "user", "content": ""}]}', "messages.0.content: a user message needs some text"),
    "empty blocks": (b'{"messages": [{"role": "user", "content": []}]}', "messages.0.content: a user message needs some text"),
    "text is no string": (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}', "messages.0.content.0.text"),
    "image": (
        b'{"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}',
        "messages.0.content.0: images and files are not supported",
    ),
    "image in a result": (
        b'{"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}]}',
        "messages.0.content.0.content.0: images and files are not supported",
    ),
    "unknown block": (b'{"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}', "'search_result' is not supported"),
    "unknown assistant block": (
        b'{"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, {"role": "user", "content": "x"}]}',
        "'server_tool_use' is not supported",
    ),
    "tool_use input": (
        b'{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]}]}',
        "messages.0.content.0.input: must be an object",
    ),
    "result without id": (b'{"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}', "tool_use_id: must be a string"),
    "prefill": (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "prefilling a reply"),
    "assistant only": (b'{"messages": [{"role": "assistant", "content": "b"}]}', "at least one user message"),
    "zero tokens": (b'{"max_tokens": 0, "messages": [{"role": "user", "content": "a"}]}', "max_tokens: must be an integer"),
    "boolean tokens": (b'{"max_tokens": true, "messages": [{"role": "user", "content": "a"}]}', "max_tokens: must be an integer"),
    "forced server tool": (
        b'{"tools": [{"type": "web_search_20250305", "name": "w"}], "tool_choice": {"type": "tool", "name": "w"},'
        b' "messages": [{"role": "user", "content": "a"}]}',
        "tool_choice.name: 'w' runs on the provider's servers",
    ),
    "a tool by name": (
        b'{"tools": [{"name": "w", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "w"},'
        b' "messages": [{"role": "user", "content": "a"}]}',
        "tool_choice.type: 'tool' is not supported",
    ),
    "a document of blocks": (
        b'{"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [{}]}}]}]}',
        "messages.0.content.0.source.content.0.type",
    ),
    "tool without schema": (b'{"tools": [{"name": "w"}], "messages": [{"role": "user", "content": "a"}]}', "tools.0.input_schema"),
    "tool without name": (b'{"tools": [{"input_schema": {}}], "messages": [{"role": "user", "content": "a"}]}', "tools.0.name"),
    "tools is no list": (b'{"tools": {}, "messages": [{"role": "user", "content": "a"}]}', "tools: must be a list"),
    "tool is no object": (b'{"tools": [1], "messages": [{"role": "user", "content": "a"}]}', "tools.0: must be an object"),
    "tool description": (
        b'{"tools": [{"name": "w", "input_schema": {}, "description": 1}], "messages": [{"role": "user", "content": "a"}]}',
        "tools.0.description",
    ),
    "forced tool": (b'{"tool_choice": {"type": "any"}, "messages": [{"role": "user", "content": "a"}]}', "tool_choice.type: 'any'"),
    "empty stop": (b'{"stop_sequences": [""], "messages": [{"role": "user", "content": "a"}]}', "stop_sequences.0"),
    "many stops": (
        b'{"stop_sequences": [' + b'"a",' * 64 + b'"a"], "messages": [{"role": "user", "content": "a"}]}',
        "stop_sequences: has 65 items; at most 64",
    ),
    "a long stop": (
        b'{"stop_sequences": ["a", "' + b"a" * 1001 + b'"], "messages": [{"role": "user", "content": "a"}]}',
        "stop_sequences.1: has 1001 characters; at most 1000",
    ),
    "many messages": (
        b'{"messages": [' + b'{"role": "user", "content": "a"},' * 20_000 + b'{"role": "user", "content": "a"}]}',
        "messages: has 20001 items; at most 20000",
    ),
    "many blocks": (
        b'{"messages": [{"role": "user", "content": [' + b"{}," * 4096 + b"{}]}]}",
        "messages.0.content: has 4097 items; at most 4096",
    ),
    "many tools": (
        b'{"tools": [' + b"{}," * 4096 + b'{}], "messages": [{"role": "user", "content": "a"}]}',
        "tools: has 4097 items; at most 4096",
    ),
    "stream is no boolean": (b'{"stream": 1, "messages": [{"role": "user", "content": "a"}]}', "stream: must be true or false"),
    "schema is missing": (
        b'{"output_config": {"format": {"type": "json_schema"}}, "messages": [{"role": "user", "content": "a"}]}',
        "output_config.format: must be",
    ),
    "another format": (
        b'{"output_format": {"type": "yaml"}, "messages": [{"role": "user", "content": "a"}]}',
        "output_format: must be",
    ),
    "deep nesting of a long integer": (
        b'{"tools": [{"name": "w", "input_schema": '
        + b'{"a":' * 400
        + b"1" * 20
        + b"}" * 400
        + b'}], "messages": [{"role": "user", "content": "a"}]}',
        "nests JSON deeper",
    ),
    "deep nesting": (
        b'{"tools": [{"name": "w", "input_schema": '
        + b'{"a":' * 400
        + b"1"
        + b"}" * 400
        + b'}], "messages": [{"role": "user", "content": "a"}]}',
        "nests JSON deeper",
    ),
}


@pytest.mark.parametrize(("body", "says"), REFUSED.values(), ids=REFUSED)
def test_bad_requests_name_the_field(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        DIALECT.read(body)
    assert says in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "messages", "tools", "name", "input_schema", "id", "input", "system"]),
            inner,
        )
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "tools", "system", "max_tokens", "stop_sequences", "tool_choice", "output_config"]), json_values
    )
)
def test_reading_anything_is_a_request_or_a_bad_request(fields: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(DIALECT.read(json.dumps(fields).encode()), Request)


@given(st.binary(max_size=200))
def test_reading_any_bytes_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        DIALECT.read(body)


def test_integers_that_a_client_brings_stay_exact() -> None:
    given = '{"id":12345678901234567890123,"x":[-9223372036854775809,18446744073709551615,1.5],"t":"12345678901234567890 \\ud83d"}'
    use = '{"type":"tool_use","id":"a","name":"b","input":' + given + "}"
    body = '{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[' + use + ']},{"role":"user","content":"y"}]}'
    (call,) = DIALECT.read(body.encode()).messages[1].calls
    assert call.arguments == given.replace("\\ud83d", "\ufffd")
    whole_body = body.replace(" \\ud83d", "").encode()
    assert DIALECT.read(whole_body).messages[1].calls[0].arguments == given.replace(" \\ud83d", "")
