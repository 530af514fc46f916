"""What Chat Completions requests are refused: each names the field that is wrong, and nothing else is ever raised."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnloom.errors import BadRequest
from turnloom.types import Request
from turnloom.wire.contract import Reading
from turnloom.wire.openai_chat import OpenAIChatDialect

DIALECT = OpenAIChatDialect()
PLACEHOLDERS = OpenAIChatDialect(Reading(images="placeholder"))
HI = {"role": "user", "content": "hi"}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": arguments}}


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
        DIALECT.read(json.dumps({"model": "m", "messages": [HI], **fields}).encode())
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
