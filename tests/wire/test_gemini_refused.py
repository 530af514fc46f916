"""Requests that Gemini's dialect refuses, and anything at all."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire.test_gemini_read import COUNT, DIALECT, GENERATE, HI, PNG, STREAM, call, model, read, user
from turnloom.errors import BadRequest
from turnloom.types import Request
from turnloom.wire.contract import Envelope

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no contents": ({"contents": None}, "contents: must be a list with at least one"),
    "empty contents": ({"contents": []}, "contents: must be a list with at least one"),
    "contents are text": ({"contents": "hi"}, "contents: must be a list"),
    "content is text": ({"contents": ["hi"]}, "contents.0: must be an object"),
    "unknown role": ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, 'contents.0.role: must be "user" or "model"'),
    "no parts": ({"contents": [{"role": "user"}]}, "contents.0.parts: a user content needs some text"),
    "empty text": ({"contents": [user({"text": ""})]}, "contents.0.parts: a user content needs some text"),
    "text is no string": ({"contents": [user({"text": 1})]}, "contents.0.parts.0.text: must be a string"),
    "model text is no string": ({"contents": [model({"text": 1}), HI]}, "contents.0.parts.0.text: must be a string"),
    "parts are text": ({"contents": [{"parts": "x"}]}, "contents.0.parts: must be a list"),
    "image": ({"contents": [user(PNG)]}, "contents.0.parts.0.inlineData: images and files are not supported"),
    "image in a response": (
        {"contents": [user({"functionResponse": {"name": "f", "parts": [PNG]}})]},
        "contents.0.parts.0.functionResponse.parts.0.inlineData: images and files are not supported",
    ),
    "call of the user": ({"contents": [user(call("f"))]}, "contents.0.parts.0.functionCall: is not supported here"),
    "image of the model": ({"contents": [model(PNG), HI]}, "contents.0.parts.0.inlineData: is not supported in a model content"),
    "code": ({"contents": [HI, model({"executableCode": {"code": "1"}}), HI]}, "contents.1.parts.0.executableCode: is not supported"),
    "arguments": ({"contents": [model({"functionCall": {"name": "f", "args": "x"}}), HI]}, "contents.0.parts.0.functionCall.args"),
    "call without name": ({"contents": [model({"functionCall": {}}), HI]}, "contents.0.parts.0.functionCall.name: must be a string"),
    "call is no object": ({"contents": [model({"functionCall": 1}), HI]}, "contents.0.parts.0.functionCall: must be an object"),
    "response is no object": (
        {"contents": [user({"functionResponse": {"name": "f", "response": "x"}})]},
        "contents.0.parts.0.functionResponse.response: must be an object",
    ),
    "prefill": ({"contents": [HI, model({"text": "b"})]}, "prefilling a reply"),
    "system is a list": ({"systemInstruction": [1]}, "systemInstruction: must be an object"),
    "image in system": (
        {"systemInstruction": {"parts": [PNG]}},
        "systemInstruction.parts.0.inlineData: images and files are not supported",
    ),
    "cached": ({"cachedContent": "cachedContents/x"}, "cachedContent: cached contents are not kept here"),
    "forced": ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode: 'ANY'"),
    "unknown mode": ({"tool_config": {"function_calling_config": {"mode": "x"}}}, "toolConfig.functionCallingConfig.mode: 'X'"),
    "unknown function": (
        {"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["f"]}}},
        "allowedFunctionNames.0: 'f' is not among the functions",
    ),
    "tool without name": ({"tools": [{"functionDeclarations": [{}]}]}, "tools.0.functionDeclarations.0.name"),
    "parameters": ({"tools": [{"functionDeclarations": [{"name": "f", "parameters": 1}]}]}, "functionDeclarations.0.parameters: must be"),
    "unknown type": (
        {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"properties": {"a": {"type": "TEXT"}}}}]}]},
        "tools.0.functionDeclarations.0.parameters.properties.a.type: 'TEXT' is no type",
    ),
    "many tools": ({"tools": [{"functionDeclarations": [{"name": "f"}] * 4096}] * 2}, "tools: has 8192 items"),
    "candidates": ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount: one candidate"),
    "top logprobs": ({"generationConfig": {"responseLogprobs": True, "logprobs": 3}}, "generationConfig.logprobs: only the chosen"),
    "spoken": (
        {"generationConfig": {"responseModalities": ["TEXT", "AUDIO"]}},
        "generationConfig.responseModalities: this model writes text",
    ),
    "candidates in a string": ({"generationConfig": {"candidateCount": "2"}}, "generationConfig.candidateCount: one candidate"),
    "zero tokens in a string": ({"generationConfig": {"maxOutputTokens": "0"}}, "generationConfig.maxOutputTokens: must be an integer"),
    "tokens that are no number": ({"generationConfig": {"maxOutputTokens": "five"}}, "generationConfig.maxOutputTokens: must be an int"),
    "half a token": ({"generationConfig": {"maxOutputTokens": "1.5"}}, "generationConfig.maxOutputTokens: must be an integer"),
    "a reply of many parts": (
        {"contents": [model(*[call("f")] * 3000), model(*[call("f")] * 3000), HI]},
        "contents.0: this reply has 6000 parts; at most 4096",
    ),
    "zero tokens": ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens: must be an integer"),
    "empty stop": ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences.0"),
    "config": ({"generationConfig": []}, "generationConfig: must be an object"),
    "enum output": ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType: 'text/x.enum'"),
    "schema of text": ({"generationConfig": {"responseSchema": {}}}, "generationConfig.responseMimeType: a response schema needs"),
    "schema is text": (
        {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": "x"}},
        "generationConfig.responseJsonSchema: must be a schema object",
    ),
}


@pytest.mark.parametrize(("fields", "says"), REFUSED.values(), ids=REFUSED)
def test_bad_requests_name_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize("key", ["parameters", "parametersJsonSchema"])
def test_deep_schemas_are_refused(key: str) -> None:
    deep = b'{"items":' * 400 + b"{}" + b"}" * 400
    body = (
        b'{"contents":[{"parts":[{"text":"a"}]}],"tools":[{"functionDeclarations":[{"name":"f","' + key.encode() + b'":' + deep + b"}]}]}"
    )
    with pytest.raises(BadRequest, match="deeper than"):
        DIALECT.read(body, GENERATE)


KEYS = [
    *(
        "contents",
        "role",
        "parts",
        "text",
        "thought",
        "thoughtSignature",
        "functionCall",
        "functionResponse",
        "name",
        "args",
        "id",
        "response",
    ),
    *("inlineData", "data", "mimeType", "tools", "functionDeclarations", "parameters", "type", "properties", "items", "anyOf", "minItems"),
    *("toolConfig", "functionCallingConfig", "mode", "generationConfig", "thinkingConfig", "generateContentRequest", "_", "a_b_"),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["user", "model", "STRING", "AUTO", "AAAA", "", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)
PARTS = st.lists(st.dictionaries(st.sampled_from(KEYS[2:14]), VALUES, min_size=1, max_size=2) | st.just({"text": "x"}), max_size=3)
CONTENTS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "model", None]), "parts": PARTS | VALUES}) | VALUES, max_size=4)
FIELDS = st.sampled_from(
    ["tools", "systemInstruction", "toolConfig", "generationConfig", "generateContentRequest", "model", "cachedContent"]
)


@given(CONTENTS | VALUES, st.dictionaries(FIELDS, VALUES, max_size=3), st.sampled_from([GENERATE, STREAM, COUNT]))
def test_reading_anything_is_a_request_or_a_bad_request(contents: Any, fields: dict[str, Any], envelope: Envelope) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(DIALECT.read(json.dumps({"contents": contents, **fields}).encode(), envelope), Request)


@given(st.binary(max_size=200))
def test_reading_any_bytes_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        DIALECT.read(body, GENERATE)
