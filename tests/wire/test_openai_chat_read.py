"""Reading Chat Completions requests: bytes in, neutral request out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnloom.errors import BadRequest
from turnloom.types import Message, Reasoning, Request, Text, ToolCall, ToolResult
from turnloom.wire.contract import Envelope, Reading
from turnloom.wire.openai_chat import OpenAIChatDialect

DIALECT = OpenAIChatDialect()
PLACEHOLDERS = OpenAIChatDialect(Reading(images="placeholder"))
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
HI = {"role": "user", "content": "hi"}
TURN = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32


def read(dialect: OpenAIChatDialect = DIALECT, **fields: Any) -> Request:
    return dialect.read(json.dumps({"model": "m", "messages": [HI], **fields}).encode())


def messages(*sent: Any) -> tuple[Message, ...]:
    return read(messages=list(sent)).messages


def echoed(**fields: Any) -> Message:
    """An assistant message as it is read."""
    return messages(HI, {"role": "assistant", **fields}, HI)[1]


def call(arguments: Any, call_id: str = "c1", name: str = "ls") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_read_a_whole_request() -> None:
    request = read(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": [{"type": "text", "text": "list"}, {"type": "text", "text": "all"}], "name": "ann"},
            {
                "role": "assistant",
                "content": "I will",
                "reasoning_content": "hmm",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": [call('{"path": "."}'), call("{}", "c2")],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "tool", "tool_call_id": "c2", "content": None},
            {"role": "system", "content": "Hurry."},
            {"role": "user", "content": "go on"},
        ],
        tools=[{"type": "function", "function": {"name": "ls", "description": "List", "parameters": SCHEMA, "strict": True}}],
        max_completion_tokens=10,
        stop=["END"],
        stream=True,
        stream_options={"include_usage": True},
        n=2,
        logprobs=True,
        top_logprobs=0,
        temperature=0.1,
        top_p=0.5,
        seed=1,
        metadata={"a": "b"},
        user="u",
        store=False,
        parallel_tool_calls=False,
        service_tier="auto",
        reasoning_effort="high",
        prompt_cache_key="k",
        modalities=["text"],
        functions=[],
    )
    assert request.messages == (
        Message("system", (Text("Be brief."),)),
        Message("system", (Text("Be kind."),)),
        Message("user", (Text("list"), Text("all"))),
        Message("assistant", (Reasoning("hmm"), Text("I will"), ToolCall("c1", "ls", '{"path": "."}'), ToolCall("c2", "ls", "{}"))),
        Message("tool", (ToolResult("c1", "a\nb"),)),
        Message("tool", (ToolResult("c2", ""),)),
        Message("system", (Text("Hurry."),)),
        Message("user", (Text("go on"),)),
    )
    assert [(t.name, t.description, json.loads(t.parameters), t.freeform) for t in request.tools] == [("ls", "List", SCHEMA, False)]
    assert (request.max_tokens, request.stop, request.stream, request.model) == (10, ("END",), True, "m")
    assert (request.call_tools, request.choices, request.logprobs, request.json_schema) == (True, 2, True, "")
    assert request.wire == {"include_usage": True}


def test_what_a_minimal_request_means() -> None:
    request = read(stop=None, n=None, tools=None, max_tokens=None, response_format=None, stream_options=None, tool_choice=None)
    assert request == DIALECT.read(b'{"messages": [{"role": "user", "content": "hi"}], "model": "m"}')
    assert (request.max_tokens, request.stop, request.stream, request.choices, request.logprobs) == (None, (), False, 1, False)
    assert request.wire == {"include_usage": False}


@pytest.mark.parametrize(("said", "asked"), [("", None), ('"stream": null,', None), ('"stream": true,', True), ('"stream": false,', False)])
@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
def test_the_body_decides_on_streaming_where_it_says(said: str, asked: bool | None, accept: str) -> None:
    body = "{" + said + '"messages": [{"role": "user", "content": "a"}]}'
    wanted = DIALECT.read(body.encode(), Envelope({"accept": accept})).stream
    assert wanted is (accept == "text/event-stream" if asked is None else asked)


def test_a_string_equals_a_list_of_one_part_and_cache_marks_do_not_count() -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for role in ("system", "user"):
        assert messages({"role": role, "content": "hi"}, HI) == messages({"role": role, "content": [part]}, HI)
    assert echoed(content="hi") == echoed(content=[part])


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": ""}, {"content": []}, {"content": [{"type": "text", "text": ""}]}])
def test_no_content_beside_calls_in_every_spelling(fields: dict[str, Any]) -> None:
    assert echoed(tool_calls=[call("{}")], **fields) == Message("assistant", (ToolCall("c1", "ls", "{}"),))
    assert echoed(**fields) == Message("assistant", ())


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "reasoning_text"])
def test_reasoning_comes_back_under_the_names_that_clients_have_for_it(field: str) -> None:
    assert echoed(content="a", **{field: "hm"}) == Message("assistant", (Reasoning("hm"), Text("a")))
    assert echoed(content="a", **{field: None}) == echoed(content="a", **{field: {"effort": "low"}}) == Message("assistant", (Text("a"),))
    both = echoed(content="a", reasoning_content="hm", reasoning="hm")
    assert both.reasoning == "hm", "two names of one thought are one thought"


def test_a_history_may_end_with_a_reply_and_asks_for_one_more() -> None:
    """OpenAI begins another message there; Qwen Code relies on it after a summary."""
    assert [m.role for m in messages(HI, {"role": "assistant", "content": "b"})] == ["user", "assistant"]


def test_a_refusal_is_what_was_said() -> None:
    assert echoed(content=None, refusal="No.") == echoed(content=[{"type": "refusal", "refusal": "No."}]) == echoed(content="No.")


@pytest.mark.parametrize(
    ("sent", "kept"),
    [('{"a" : 1.10}', '{"a" : 1.10}'), ("{not json", "{not json"), ("", "{}"), ("  ", "{}"), (None, "{}"), ({"a": [1]}, '{"a":[1]}')],
)
def test_arguments_are_kept_as_they_came(sent: Any, kept: str) -> None:
    assert echoed(tool_calls=[call(sent)]).calls[0].arguments == kept


def test_a_call_without_a_type_is_a_functions() -> None:
    plain = {k: v for k, v in call("{}").items() if k != "type"}
    assert echoed(tool_calls=[plain]) == echoed(tool_calls=[call("{}")])


def test_custom_tools_take_one_string() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    request = read(
        tools=[{"type": "custom", "custom": {"name": "patch", "description": "Patch", "format": grammar}}],
        messages=[
            HI,
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'say "é"\n'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
    )
    (tool,) = request.tools
    assert (tool.name, tool.freeform) == ("patch", True)
    assert tool.description == "Patch\n\nThe text in `input` must follow this lark grammar:\nstart: /.+/"
    assert json.loads(tool.parameters) == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    (made,) = request.messages[1].calls
    assert (made.name, json.loads(made.arguments)) == ("patch", {"input": 'say "é"\n'})


@pytest.mark.parametrize("form", [None, {}, {"type": "text"}])
def test_a_custom_tool_of_any_text_is_described_as_it_was(form: Any) -> None:
    (tool,) = read(tools=[{"type": "custom", "custom": {"name": "say", "description": "Say it", "format": form}}]).tools
    assert tool.description == "Say it"


def test_a_function_without_parameters_takes_none() -> None:
    (tool,) = read(tools=[{"type": "function", "function": {"name": "now"}}]).tools
    assert (tool.description, json.loads(tool.parameters)) == ("", {"type": "object", "properties": {}})


@pytest.mark.parametrize(
    ("ids", "ref"),
    [
        (["c1"], ""),
        ([f"call_{TURN}00"], TURN),
        ([f"call_{TURN}00", f"call_{TURN}01"], TURN),
        ([f"call_{TURN}00", "c1"], TURN),
        ([f"call_{TURN}00", f"call_{OTHER}00"], ""),
    ],
)
def test_the_ids_of_calls_name_the_turn_they_came_with(ids: list[str], ref: str) -> None:
    assert echoed(tool_calls=[call("{}", i) for i in ids]).ref == ref


def test_server_tools_are_declined_by_name_and_not_offered() -> None:
    plain = {"type": "function", "function": {"name": "ls"}}
    request = read(tools=[{"type": "web_search_preview"}, plain, {"type": "mcp", "name": "docs"}], tool_choice="auto")
    assert ([t.name for t in request.tools], request.declined) == (["ls"], ("web_search_preview", "docs"))


@pytest.mark.parametrize(("choice", "may"), [(None, True), ("auto", True), ("none", False)])
def test_tool_choice(choice: str | None, may: bool) -> None:
    assert read(tool_choice=choice).call_tools is may


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "json_object"}, '{"type":"object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
            json.dumps(SCHEMA, separators=(",", ":")),
        ),
    ],
)
def test_structured_output(wanted: Any, schema: str) -> None:
    assert read(response_format=wanted).json_schema == schema


@pytest.mark.parametrize(
    ("sent", "limit"), [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 7, "max_completion_tokens": 6}, 6)]
)
def test_both_names_of_the_limit(sent: dict[str, int], limit: int) -> None:
    assert read(**sent).max_tokens == limit


ATTACHED = {
    "a picture": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}, "[image/png, 3 bytes, not shown]"),
    "a picture with a charset": (
        {"type": "image_url", "image_url": {"url": "data:image/png;a=b;base64,QUJD"}},
        "[image/png, 3 bytes, not shown]",
    ),
    "a bare address": ({"type": "image_url", "image_url": "https://example.com/a.png"}, "[image, not shown]"),
    "a picture by address": ({"type": "image_url", "image_url": {"url": "https://example.com/a,b.png"}}, "[image, not shown]"),
    "a picture in plain text": ({"type": "image_url", "image_url": {"url": "data:image/svg+xml,QUJD"}}, "[image/svg+xml, not shown]"),
    "text as a picture": ({"type": "image_url", "image_url": {"url": "data:,hello"}}, "[image, not shown]"),
    "a sound": ({"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}, "[audio/wav, 3 bytes, not shown]"),
    "a file": (
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD", "filename": "a"}},
        "[application/pdf, 3 bytes, not shown]",
    ),
    "a file as plain base64": ({"type": "file", "file": {"file_data": "QUJD"}}, "[file, 3 bytes, not shown]"),
    "a file by id": ({"type": "file", "file": {"file_id": "f"}}, "[file, not shown]"),
    "nothing": ({"type": "file"}, "[file, not shown]"),
}


@pytest.mark.parametrize(("part", "placeholder"), ATTACHED.values(), ids=ATTACHED)
def test_what_a_model_of_text_cannot_see_is_refused_or_a_counted_placeholder(part: dict[str, Any], placeholder: str) -> None:
    sent = [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]
    request = read(PLACEHOLDERS, messages=sent)
    assert (request.messages[0].parts[1], request.images) == (Text(placeholder), 1)
    with pytest.raises(BadRequest, match=r"messages\.0\.content\.1: .*not supported"):
        read(messages=sent)


def test_lone_surrogates_become_replacement_characters() -> None:
    body = b'{"messages":[{"role":"user","content":"cut \\ud83d here \\ud83d\\ude00"}]}'
    assert DIALECT.read(body).messages[0].text == "cut \ufffd here 😀"
