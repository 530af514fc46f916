"""Reading Chat Completions requests: bytes in, neutral request out."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages: must be a list with at least one message"),
    "messages is no list": ({"messages": {}}, "messages: must be a list"),
    "many messages": ({"messages": [HI] * 20_001}, "messages: has 20001 items; at most 20000"),
    "message is no object": ({"messages": ["hi"]}, "messages.0: must be an object"),
    "no role": ({"messages": [{"content": "x"}]}, "messages.0.role: must be"),
    "wrong role": ({"messages": [{"role": "bot", "content": "x"}]}, "not 'bot'"),
    "legacy role": (
        {"messages": [HI, {"role": "function", "name": "f", "content": "x"}]},
        'messages.1.role: "function" is the legacy form',
    ),
    "legacy functions": ({"functions": [{"name": "f"}]}, "functions: the legacy form of tools; send tools"),
    "legacy choice": ({"function_call": "auto"}, "function_call: the legacy form"),
    "legacy call": (
        {"messages": [HI, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, HI]},
        "messages.1.function_call: is not supported; send tool_calls",
    ),
    "an earlier sound": ({"messages": [HI, {"role": "assistant", "audio": {"id": "a"}}, HI]}, "messages.1.audio: is not supported"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content: must be a string or a list"),
    "empty text": ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content: a user message needs some text"),
    "empty parts": ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: a user message needs some text"),
    "only an empty system": ({"messages": [{"role": "system", "content": ""}]}, "messages: at least one message needs some text"),
    "part is no object": (
        {"messages": [{"role": "user", "content": ["a"]}]},
        "messages.0.content: must be a string or a list of content parts",
    ),
    "many parts": ({"messages": [{"role": "user", "content": [{}] * 4097}]}, "messages.0.content: has 4097 items; at most 4096"),
    "text is no string": ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content.0.text: must be"),
    "unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        "messages.0.content.0.type: 'video' is not supported",
    ),
    "unknown assistant part": (
        {"messages": [HI, {"role": "assistant", "content": [{"type": "image_url"}]}, HI]},
        "messages.1.content.0.type: 'image_url' is not supported in an assistant message",
    ),
    "result without id": ({"messages": [HI, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id: must be a string"),
    "result is no text": ({"messages": [HI, {"role": "tool", "tool_call_id": "a", "content": 1}]}, "messages.1.content: must be a string"),
    "calls are no list": ({"messages": [HI, {"role": "assistant", "tool_calls": {}}, HI]}, "messages.1.tool_calls: must be a list"),
    "call is no object": ({"messages": [HI, {"role": "assistant", "tool_calls": [1]}, HI]}, "messages.1.tool_calls.0: must be an object"),
    "call without id": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, HI]},
        "messages.1.tool_calls.0.id: must be a string",
    ),
    "call of no function": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "a"}]}, HI]},
        "tool_calls.0.function: must be an object",
    ),
    "call of another type": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "a", "type": "mcp"}]}, HI]},
        "messages.1.tool_calls.0.type: must be",
    ),
    "call without name": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"arguments": "{}"}}]}, HI]},
        "messages.1.tool_calls.0.function.name: must be a string",
    ),
    "arguments are a number": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [call(1)]}, HI]},
        "tool_calls.0.function.arguments: must be",
    ),
    "custom call without input": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f"}}]}, HI]},
        "messages.1.tool_calls.0.custom.input: must be a string",
    ),
    "prefill": ({"messages": [HI, {"role": "assistant", "content": "b"}]}, "prefilling a reply is not supported"),
    "zero tokens": ({"max_tokens": 0}, "max_tokens: must be an integer"),
    "boolean tokens": ({"max_completion_tokens": True}, "max_completion_tokens: must be an integer"),
    "no choices": ({"n": 0}, "n: must be an integer of at least 1"),
    "many choices": ({"n": 17}, "n: 17 replies are asked for; at most 16"),
    "top logprobs": ({"logprobs": True, "top_logprobs": 5}, "top_logprobs: only the sampled tokens have logprobs here"),
    "logprobs": ({"logprobs": 1}, "logprobs: must be true or false"),
    "stream": ({"stream": 1}, "stream: must be true or false"),
    "stream options": ({"stream_options": 1}, "stream_options: must be an object"),
    "usage wanted": ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: must be true or false"),
    "empty stop": ({"stop": [""]}, "stop.0"),
    "many stops": ({"stop": ["a"] * 65}, "stop: has 65 items; at most 64"),
    "a long stop": ({"stop": "a" * 1001}, "stop.0: has 1001 characters; at most 1000"),
    "tools is no list": ({"tools": {}}, "tools: must be a list"),
    "tool is no object": ({"tools": [1]}, "tools.0: must be an object"),
    "many tools": ({"tools": [{}] * 4097}, "tools: has 4097 items; at most 4096"),
    "tool of no type": ({"tools": [{"type": 1}]}, "tools.0.type: must be"),
    "tool without function": ({"tools": [{"type": "function", "name": "f"}]}, "tools.0.function: must be an object"),
    "tool without name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: must be a string"),
    "tool parameters": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools.0.function.parameters: must be",
    ),
    "tool description": ({"tools": [{"type": "custom", "custom": {"name": "f", "description": 1}}]}, "tools.0.custom.description: must be"),
    "custom format": ({"tools": [{"type": "custom", "custom": {"name": "f", "format": "lark"}}]}, "tools.0.custom.format.type: must be"),
    "custom grammar": (
        {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}}]},
        "tools.0.custom.format.grammar.definition: must be a string",
    ),
    "required": ({"tool_choice": "required"}, "tool_choice: 'required' is not supported"),
    "a named tool": ({"tool_choice": {"type": "function", "function": {"name": "ls"}}}, "tool_choice: 'ls' is not supported"),
    "allowed tools": ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice: 'allowed_tools' is not"),
    "a server tool by force": (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice: 'web_search' runs on the provider's servers",
    ),
    "strange choice": ({"tool_choice": {"type": ["a"]}}, "tool_choice: ['a'] is not supported"),
    "response format": ({"response_format": "json"}, "response_format.type: must be"),
    "unknown response format": ({"response_format": {"type": "grammar"}}, "response_format.type: must be"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: must be an object"),
    "no schema inside": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema: must be a JSON Schema object",
    ),
    "sound": ({"audio": {"voice": "x"}}, "audio: this model answers in text only"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities: this model answers in text only"),
    "prediction": ({"prediction": {"type": "content", "content": "x"}}, "prediction: predicted outputs are not supported"),
    "web search": ({"web_search_options": {"search_context_size": "low"}}, "web_search_options: web search runs on the provider's servers"),
}


@pytest.mark.parametrize(("fields", "says"), REFUSED.values(), ids=REFUSED)
def test_bad_requests_name_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert says in str(caught.value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "tool", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from("role content type text function custom name parameters id input arguments tool_calls url image_url".split()),
            inner,
        )
    ),
    max_leaves=20,
)
TOP = "messages tools stop max_tokens tool_choice response_format n logprobs stream stream_options modalities functions model".split()


@given(st.dictionaries(st.sampled_from(TOP), json_values))
def test_reading_anything_is_a_request_or_a_bad_request(fields: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(PLACEHOLDERS.read(json.dumps(fields).encode()), Request)


@given(st.binary(max_size=200))
def test_reading_any_bytes_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        DIALECT.read(body)
