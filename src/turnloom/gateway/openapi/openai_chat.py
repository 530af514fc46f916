"""OpenAI Chat Completions, and the errors and models that both dialects of OpenAI's share."""

from __future__ import annotations

from turnloom.gateway.openapi.shapes import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    JSON_SCHEMA,
    NOT_FORCED,
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
    tagged,
    with_text,
)
from turnloom.wire.fields import MAX_MESSAGES, MAX_MODEL, MAX_PARTS, MAX_TOOLS
from turnloom.wire.openai_chat.read import MAX_CHOICES

_ATTACHED = [
    said(tagged(kind, {kind: loose(OBJECT)}, kind), "Refused with a 400, or a placeholder in words, as the gateway is set.")
    for kind in ("image_url", "input_audio", "file")
]
_TEXT = tagged("text", {"text": TEXT})
_PARTS = listed(either(_TEXT, *_ATTACHED), MAX_PARTS)
_CONTENT = either(TEXT, _PARTS)
_SAID = either(TEXT, listed(either(_TEXT, tagged("refusal", {"refusal": TEXT})), MAX_PARTS))
_SAYS_SOMETHING = either(tagged("text", {"text": SOME_TEXT}), *_ATTACHED)

_FUNCTION_CALL = record(
    {"id": TEXT, "type": is_("function"), "function": record({"name": TEXT, "arguments": maybe(either(TEXT, OBJECT))}, "name")},
    "id",
    "function",
)
_CUSTOM_CALL = tagged("custom", {"id": TEXT, "custom": record({"name": TEXT, "input": TEXT})})
_ASSISTANT = tagged(
    "assistant",
    {
        "content": maybe(_SAID),
        "reasoning_content": loose(maybe(TEXT)),
        "refusal": maybe(TEXT),
        "tool_calls": maybe(listed(either(_FUNCTION_CALL, _CUSTOM_CALL), MAX_PARTS)),
        "function_call": refused("send tool_calls"),
        "audio": refused("send content"),
    },
    *("content", "reasoning_content", "refusal", "tool_calls", "function_call", "audio"),
    tag="role",
)
_MESSAGE = either(
    tagged("system", {"content": _CONTENT}, tag="role"),
    tagged("developer", {"content": _CONTENT}, tag="role"),
    tagged("user", {"content": with_text(_PARTS, _SAYS_SOMETHING)}, tag="role"),
    _ASSISTANT,
    tagged("tool", {"tool_call_id": TEXT, "content": maybe(_CONTENT)}, "content", tag="role"),
)

_FUNCTION = record({"name": TEXT, "description": maybe(TEXT), "parameters": maybe(JSON_SCHEMA)}, "name")
_CUSTOM = said(record({"name": TEXT, "description": maybe(TEXT)}, "name"), "The model's tool has one string, `input`; no grammar holds it.")
_TOOL = either(
    record({"type": is_("function"), "function": _FUNCTION}, "function"),
    tagged("custom", {"custom": _CUSTOM}),
    {
        **record({"type": {"type": "string", "not": is_("function", "custom")}}),
        "description": "Runs on a provider's servers: it is not offered to the model.",
    },
)
_RESPONSE_FORMAT = either(
    tagged("text", {}),
    said(tagged("json_object", {}), 'Read as the schema {"type": "object"}.'),
    tagged("json_schema", {"json_schema": record({"schema": JSON_SCHEMA})}),
)

REQUEST: Schema = {
    "description": f"{SAMPLED} The last message must not be the assistant's, and something must be said before it.",
    **record(
        {
            "model": loose(said(TEXT, f"Any name of at most {MAX_MODEL} characters; the reply repeats it.")),
            "messages": listed(_MESSAGE, MAX_MESSAGES, 1),
            "max_completion_tokens": maybe(COUNT),
            "max_tokens": said(maybe(COUNT), "The older name; where both are sent, the smaller holds."),
            "n": maybe(said({**COUNT, "maximum": MAX_CHOICES}, "As many turns, sampled at once.")),
            "stop": STOPS,
            "stream": maybe(BOOLEAN),
            "stream_options": maybe(some({"include_usage": maybe(BOOLEAN)})),
            "logprobs": said(maybe(BOOLEAN), "Those of the sampled tokens."),
            "top_logprobs": refused("only the sampled tokens have logprobs", 0),
            "tools": maybe(listed(_TOOL, MAX_TOOLS)),
            "tool_choice": said(is_(None, "auto", "none"), NOT_FORCED),
            "response_format": maybe(_RESPONSE_FORMAT),
            "modalities": maybe(listed(is_("text"), 16)),
            "functions": refused("the legacy form of tools", [], {}),
            "function_call": refused("the legacy form of tool_choice", [], {}),
            "audio": refused("the model answers in text", [], {}),
            "prediction": refused("it cannot be had", [], {}),
            "moderation": refused("moderation runs on a provider's servers", [], {}),
            "web_search_options": refused("web search runs on a provider's servers", [], {}),
        },
        "messages",
    ),
}

_CALL = either(
    tagged("function", {"id": TEXT, "function": record({"name": TEXT, "arguments": TEXT})}),
    tagged("custom", {"id": TEXT, "custom": record({"name": TEXT, "input": TEXT})}),
)
_TOKEN = record({"token": TEXT, "bytes": maybe({"type": "array", "items": INTEGER}), "logprob": NUMBER, "top_logprobs": {"type": "array"}})
_CHOICE = record(
    {
        "index": INTEGER,
        "message": record(
            {
                "role": is_("assistant"),
                "content": maybe(TEXT),
                "refusal": NULL,
                "reasoning_content": TEXT,
                "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
            },
            *("role", "content", "refusal"),
        ),
        "logprobs": maybe(record({"content": {"type": "array", "items": _TOKEN}, "refusal": NULL})),
        "finish_reason": is_("stop", "length", "tool_calls"),
    }
)
_REPLY = record(
    {
        "id": TEXT,
        "object": is_("chat.completion"),
        "created": INTEGER,
        "model": TEXT,
        "system_fingerprint": ANY,
        "choices": {"type": "array", "items": _CHOICE, "minItems": 1, "maxItems": MAX_CHOICES},
        "usage": record(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), INTEGER)),
    },
    *("id", "object", "created", "model", "choices", "usage"),
)
_MODEL = record({"id": TEXT, "object": is_("model"), "created": INTEGER, "owned_by": TEXT})

ERROR = record({"error": record({"message": TEXT, "type": TEXT, "param": maybe(TEXT), "code": maybe(TEXT)})})
MODELS = record({"object": is_("list"), "data": {"type": "array", "items": _MODEL}})

OPENAI_CHAT = Shapes(
    request=REQUEST,
    reply=_REPLY,
    events="`chat.completion.chunk` objects as data, each choice by its index, reasoning as `reasoning_content`, a chunk without choices "
    "in silence, the usage where `stream_options` ask for it, then `[DONE]`; or an error object as the last.",
    count=record({"total_tokens": INTEGER}),
    models=MODELS,
    model=_MODEL,
    error=ERROR,
)
