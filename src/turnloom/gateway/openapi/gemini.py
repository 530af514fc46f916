"""Gemini generateContent. Written in camel case; snake case is read as well, and one object where a list of objects is due."""

from __future__ import annotations

from turnloom.gateway.openapi.shapes import (
    BOOLEAN,
    COUNT,
    EMPTY,
    INTEGER,
    JSON_SCHEMA,
    NULL,
    NUMBER,
    OBJECT,
    SAMPLED,
    SOME_TEXT,
    STOPS,
    TEXT,
    Schema,
    Shapes,
    either,
    is_,
    listed,
    loose,
    maybe,
    record,
    refused,
    said,
    some,
)
from turnloom.wire.fields import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS

_ATTACHED = "Refused with a 400, or a placeholder in words, as the gateway is set."
_CALLS = ("functionCall", "functionResponse")
_REST = ("inlineData", "fileData", "executableCode", "codeExecutionResult", "toolCall", "toolResponse", "text")
_KINDS = (*_CALLS, *_REST)
"""The first of these that a part has is what it is."""


def _part(kind: str, schema: Schema, **beside: Schema) -> Schema:
    """A part of this kind: of those that would be read before it there is none."""
    return record({**dict.fromkeys(_KINDS[: _KINDS.index(kind)], NULL), kind: schema, **beside}, kind)


def _several(items: Schema, most: int, least: int = 0) -> Schema:
    return either(listed(items, most, least), items)


_BLOB = some({"mimeType": loose(TEXT), "data": loose(TEXT), "fileUri": loose(TEXT)})
_TEXT = _part("text", TEXT)
_NOTHING = some(dict.fromkeys(_KINDS, NULL))
_PICTURES = [_part(kind, said(_BLOB, _ATTACHED)) for kind in ("inlineData", "fileData")]
_RESPONSE = some(
    {
        "name": maybe(TEXT),
        "id": maybe(TEXT),
        "response": maybe(OBJECT),
        "parts": maybe(_several(either(_TEXT, _NOTHING, *_PICTURES), MAX_PARTS)),
    }
)
_SIGNATURE = {"thoughtSignature": loose(TEXT)}
_CALL = record({"name": TEXT, "id": maybe(TEXT), "args": maybe(OBJECT)}, "name")
_SAYS_SOMETHING = either(_part("text", SOME_TEXT), *_PICTURES, _part("functionResponse", _RESPONSE))
_USER_PARTS = either(_TEXT, _NOTHING, *_PICTURES, _part("functionResponse", _RESPONSE))
_MODEL_PARTS = either(_part("text", TEXT, thought=loose(BOOLEAN), **_SIGNATURE), _NOTHING, _part("functionCall", _CALL, **_SIGNATURE))
_CONTENT = either(
    record(
        {
            "role": is_("user", "function", "", None),
            "parts": either({**listed(_USER_PARTS, MAX_PARTS), "contains": _SAYS_SOMETHING}, _SAYS_SOMETHING),
        },
        "parts",
    ),
    record({"role": is_("model"), "parts": maybe(_several(_MODEL_PARTS, MAX_PARTS))}, "role"),
)
_SYSTEM = either(TEXT, some({"parts": maybe(_several(either(_TEXT, _NOTHING, *_PICTURES), MAX_PARTS))}))

_GOOGLE_SCHEMA = said(OBJECT, "Google's subset of OpenAPI schemas; the model is shown JSON Schema.")
_FUNCTION = record(
    {"name": TEXT, "description": maybe(TEXT), "parametersJsonSchema": maybe(JSON_SCHEMA), "parameters": maybe(_GOOGLE_SCHEMA)}, "name"
)
_TOOL = said(
    some({"functionDeclarations": maybe(_several(_FUNCTION, MAX_TOOLS))}),
    "A tool of any other kind runs on a provider's servers: it is not offered to the model.",
)
_CALLING = some(
    {
        "mode": said(is_("", "MODE_UNSPECIFIED", "AUTO", "VALIDATED", "NONE", None), "A call cannot be forced: ANY is refused with a 400."),
        "allowedFunctionNames": said(maybe(listed(TEXT, MAX_TOOLS)), "Names of functions that `tools` declares."),
    }
)
_SETTINGS = {
    "maxOutputTokens": maybe(COUNT),
    "stopSequences": STOPS,
    "candidateCount": said(is_(None, 0, 1), "One a request."),
    "responseLogprobs": loose(BOOLEAN),
    "logprobs": refused("only the sampled tokens have logprobs", *EMPTY),
    "responseModalities": maybe(listed(is_("TEXT"), MAX_TOOLS)),
    "thinkingConfig": maybe(some({"includeThoughts": loose(BOOLEAN)})),
}
_FREE = {"responseMimeType": is_("text/plain", "application/json", "", None), "responseJsonSchema": NULL, "responseSchema": NULL}
_HELD = {
    "responseMimeType": is_("application/json"),
    "responseJsonSchema": maybe(JSON_SCHEMA),
    "responseSchema": maybe(_GOOGLE_SCHEMA),
}
_CONFIG = either(some({**_SETTINGS, **_FREE}), record({**_SETTINGS, **_HELD}, "responseMimeType"))

REQUEST: Schema = {
    "description": f"{SAMPLED} The last content must not be the model's.",
    **record(
        {
            "contents": _several(_CONTENT, MAX_MESSAGES, 1),
            "systemInstruction": maybe(_SYSTEM),
            "tools": maybe(_several(_TOOL, MAX_TOOLS)),
            "toolConfig": maybe(some({"functionCallingConfig": maybe(_CALLING)})),
            "generationConfig": maybe(_CONFIG),
            "cachedContent": refused("cached contents are not kept", *EMPTY),
        },
        "contents",
    ),
}

_SAID = either(
    record({"text": TEXT, "thought": BOOLEAN, "thoughtSignature": TEXT}, "text"),
    record({"functionCall": record({"id": TEXT, "name": TEXT, "args": OBJECT}), "thoughtSignature": TEXT}, "functionCall"),
)
_CANDIDATE = record(
    {
        "content": record({"role": is_("model"), "parts": {"type": "array", "items": _SAID, "minItems": 1}}),
        "index": is_(0),
        "finishReason": is_("STOP", "MAX_TOKENS"),
        "avgLogprobs": NUMBER,
        "logprobsResult": record({"chosenCandidates": {"type": "array", "items": record({"token": TEXT, "logProbability": NUMBER})}}),
    },
    *("content", "index", "finishReason"),
)
REPLY = record(
    {
        "candidates": {"type": "array", "items": _CANDIDATE, "minItems": 1, "maxItems": 1},
        "modelVersion": TEXT,
        "responseId": TEXT,
        "usageMetadata": record(dict.fromkeys(("promptTokenCount", "candidatesTokenCount", "totalTokenCount"), INTEGER)),
    }
)
_MODEL = record(
    {"name": TEXT, "version": TEXT, "displayName": TEXT, "supportedGenerationMethods": {"type": "array", "items": TEXT}},
)

_DETAILS = {"type": "array", "items": record({"@type": TEXT})}

GEMINI = Shapes(
    request=REQUEST,
    reply=REPLY,
    events="Responses, each with the next piece of the one candidate; with `alt=sse` as data of events, else as the items of one JSON "
    "array. An empty line in silence. The last one has `finishReason` and `usageMetadata`; or an error object is the last.",
    count=record({"totalTokens": INTEGER}),
    models=record({"models": {"type": "array", "items": _MODEL}}),
    model=_MODEL,
    error=record({"error": record({"code": INTEGER, "message": TEXT, "status": TEXT, "details": _DETAILS}, "code", "message", "status")}),
)
