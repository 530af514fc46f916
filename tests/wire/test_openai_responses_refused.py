"""What the Responses dialect refuses, and that nothing else than a refusal comes of what it cannot read."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.test_openai_responses import DIALECT, USER, A, called, read
from turnloom.errors import BadRequest, UnknownResponse
from turnloom.types import Request

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input: at least one user message"),
    "an empty list": ({"input": []}, "input: at least one user message"),
    "nothing after the previous response": ({"input": [], "previous_response_id": f"resp_{A}"}, "input: at least one user message"),
    "a system message only": ({"input": [{"role": "system", "content": "x"}]}, "input: at least one user message"),
    "input is a number": ({"input": 1}, "input: must be a list"),
    "an item is no object": ({"input": [1]}, "input.0: must be an object"),
    "an empty string": ({"input": ""}, "input: a user message needs some text"),
    "an empty message": ({"input": [{"role": "user", "content": []}]}, "input.0.content: a user message needs some text"),
    "no content": ({"input": [{"role": "user"}]}, "input.0.content: must be a string or a list"),
    "a strange role": ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role: must be"),
    "a strange item": ({"input": [{"type": "computer_call"}]}, "input.0.type: 'computer_call' is not supported"),
    "an item that is not a thing": ({"input": [{}]}, "input.0.type: None is not supported"),
    "a reference": ({"input": [USER, {"type": "item_reference", "id": f"rs_{A}00"}]}, "input.1: items are not stored"),
    "a bare reference": ({"input": [USER, {"id": f"rs_{A}00"}]}, "input.1: items are not stored"),
    "a compaction": ({"input": [{"type": "compaction", "encrypted_content": "x"}, USER]}, "input.0: only the provider's servers"),
    "a summary of one": ({"input": [{"type": "compaction_summary", "encrypted_content": "x"}, USER]}, "input.0: only the provider's"),
    "a compaction's content": ({"input": [{"type": "context_compaction", "encrypted_content": "x"}, USER]}, "input.0: only the"),
    "a call without id": (
        {"input": [USER, {"type": "function_call", "name": "x", "arguments": "{}"}]},
        "input.1.call_id: must be a string",
    ),
    "a call without name": ({"input": [USER, {"type": "function_call", "call_id": "c"}]}, "input.1.name: must be a string"),
    "arguments are an object": ({"input": [USER, called(A, "x", arguments={})]}, "input.1.arguments: must be a string"),
    "an output without id": ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id: must be a string"),
    "an output that is an object": ({"input": [{"type": "function_call_output", "call_id": "c", "output": {}}]}, "input.0.output: must be"),
    "a freeform call without input": ({"input": [USER, {"type": "custom_tool_call", "name": "x", "call_id": "c"}]}, "input.1.input: must"),
    "a shell call without action": ({"input": [USER, {"type": "shell_call", "call_id": "c"}]}, "input.1.action: must be an object"),
    "a part of audio": ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio' is not supported"),
    "a part an assistant cannot say": (
        {"input": [USER, {"role": "assistant", "content": [{"type": "input_image"}]}]},
        "input.1.content.0.type: 'input_image' is not supported in an assistant message",
    ),
    "reasoning without text": ({"input": [USER, {"type": "reasoning", "summary": [{}]}]}, "input.1.summary.0.text: must be a string"),
    "a tool without type": ({"tools": [{"name": "x"}]}, "tools.0.type: must be a string"),
    "a tool without name": ({"tools": [{"type": "function"}]}, "tools.0.name: must be a string"),
    "a tool's schema": ({"tools": [{"type": "function", "name": "x", "parameters": []}]}, "tools.0.parameters: must be a JSON Schema"),
    "a tool's format": ({"tools": [{"type": "custom", "name": "x", "format": {"type": "x"}}]}, "tools.0.format.type: must be"),
    "a grammar without text": ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools.0.format.syntax: must"),
    "one name in two namespaces": (
        {
            "tools": [
                {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b__c"}]},
                {"type": "namespace", "name": "a__b", "tools": [{"type": "function", "name": "c"}]},
            ]
        },
        "tools.1.tools.0.name: 'a__b__c' is the name of two tools",
    ),
    "a namespace's tool": ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "tools.0.tools.0.name: must"),
    "an additional tool": ({"input": [{"type": "additional_tools", "tools": [{}]}, USER]}, "input.0.tools.0.type: must be a string"),
    "tools is no list": ({"tools": {}}, "tools: must be a list"),
    "many tools": ({"tools": [{}] * 4097}, "tools: has 4097 items; at most 4096"),
    "many tools in all": (
        {
            "tools": [
                {"type": "namespace", "name": f"n{i}", "tools": [{"type": "function", "name": f"f{j}"} for j in range(2100)]} for i in "ab"
            ]
        },
        "tools: there are 4200 tools; at most 4096",
    ),
    "many items": ({"input": [USER] * 20_001}, "input: has 20001 items; at most 20000"),
    "many parts": ({"input": [{"role": "user", "content": [{}] * 4097}]}, "input.0.content: has 4097 items; at most 4096"),
    "a reply of many items": ({"input": [called(A, "x")] * 4097}, "input.4096: a reply has more than 4096 items"),
    "a forced call": ({"tool_choice": "required"}, "tool_choice: 'required' cannot be forced"),
    "a forced tool": ({"tool_choice": {"type": "function", "name": "ls"}}, "tool_choice: 'ls' cannot be forced"),
    "a forced server tool": (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice: 'web_search' runs on the provider's servers",
    ),
    "a choice of tools": ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "'allowed_tools' is not supported"),
    "a choice that is a number": ({"tool_choice": 1}, "tool_choice: 1 cannot be forced"),
    "in the background": ({"background": True}, "background: responses are made while the client waits"),
    "a conversation": ({"conversation": "conv_1"}, "conversation: conversations are not stored"),
    "a stored prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt: prompts are not stored"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include: log-probabilities"),
    "top logprobs": ({"top_logprobs": 3}, "include: log-probabilities"),
    "a schema that is missing": ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema: must be a JSON Schema object"),
    "a format of its own": ({"text": {"format": {"type": "xml"}}}, "text.format.type: must be"),
    "a format that is a word": ({"text": {"format": "json"}}, "text.format: must be an object"),
    "text that is a word": ({"text": "json"}, "text: must be an object"),
    "reasoning that is a word": ({"reasoning": "high"}, "reasoning: must be an object"),
    "zero tokens": ({"max_output_tokens": 0}, "max_output_tokens: must be an integer"),
    "stream is no boolean": ({"stream": 1}, "stream: must be true or false"),
    "store is no boolean": ({"store": 1}, "store: must be true or false"),
    "instructions are a list": ({"instructions": []}, "instructions: must be a string"),
    "previous is a number": ({"previous_response_id": 1}, "previous_response_id: must be a string"),
}


@pytest.mark.parametrize(("fields", "says"), REFUSED.values(), ids=REFUSED)
def test_bad_requests_name_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize("fields", [{"background": False}, {"conversation": None}, {"background": None}, {"top_logprobs": 0}])
def test_what_is_refused_may_be_declined_by_the_client(fields: dict[str, Any]) -> None:
    assert read(**fields).messages


KEYS = [
    "role",
    "content",
    "type",
    "text",
    "id",
    "call_id",
    "name",
    "arguments",
    "output",
    "summary",
    "encrypted_content",
    "tools",
    "action",
]
TYPES = [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "additional_tools",
    "input_text",
    "user",
    "assistant",
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.sampled_from(TYPES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=20,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["input", "tools", "instructions", "text", "reasoning", "tool_choice", "include", "previous_response_id"]),
        json_values,
    )
)
def test_reading_anything_is_a_request_or_a_bad_request(fields: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequest, UnknownResponse):
        assert isinstance(DIALECT.read(json.dumps(fields).encode()), Request)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1), min_size=1, max_size=4))
def test_reading_any_items_is_a_request_or_a_bad_request(items: list[dict[str, Any]]) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(read(input=items), Request)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_reading_any_bytes_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        DIALECT.read(body)
