"""OpenAI Responses."""

from __future__ import annotations

from turnloom.gateway.openapi import openai_chat
from turnloom.gateway.openapi.shapes import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    JSON_SCHEMA,
    NOT_FORCED,
    NULL,
    OBJECT,
    SAMPLED,
    SOME_TEXT,
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

_ATTACHED = [
    said(tagged(kind, {field: loose(TEXT)}, field), "Refused with a 400, or a placeholder in words, as the gateway is set.")
    for kind, field in (("input_image", "image_url"), ("input_file", "file_data"))
]
_TEXT = record({"type": is_("input_text", "output_text", "text"), "text": TEXT})
_PARTS = listed(either(_TEXT, *_ATTACHED), MAX_PARTS)
_CONTENT = either(TEXT, _PARTS)
_SAYS_SOMETHING = either(record({"type": is_("input_text", "output_text", "text"), "text": SOME_TEXT}), *_ATTACHED)
_SAID = either(TEXT, listed(either(_TEXT, tagged("refusal", {"refusal": TEXT})), MAX_PARTS))
_MESSAGES = [
    record({"type": is_("message"), "role": is_("user"), "content": with_text(_PARTS, _SAYS_SOMETHING)}, "role", "content"),
    record({"type": is_("message"), "role": is_("system", "developer"), "content": _CONTENT}, "role", "content"),
    record({"type": is_("message"), "id": loose(TEXT), "role": is_("assistant"), "content": _SAID}, "role", "content"),
]

_GRAMMAR = tagged("grammar", {"syntax": TEXT, "definition": TEXT})
_FUNCTION = tagged("function", {"name": TEXT, "description": maybe(TEXT), "parameters": maybe(JSON_SCHEMA)}, "description", "parameters")
_CUSTOM = tagged(
    "custom", {"name": TEXT, "description": maybe(TEXT), "format": maybe(either(tagged("text", {}), _GRAMMAR))}, "description", "format"
)
_ELSEWHERE = said(
    record({"type": {"type": "string", "not": is_("function", "custom", "namespace")}}),
    "Runs on a provider's servers: it is not offered to the model.",
)
_IN_NAMESPACE = either(_FUNCTION, _CUSTOM, record({"type": {"type": "string", "not": is_("function", "custom")}}))
_NAMESPACE = tagged("namespace", {"name": TEXT, "tools": maybe(listed(_IN_NAMESPACE, MAX_TOOLS))}, "tools")
_TOOLS = maybe(listed(either(_FUNCTION, _CUSTOM, _NAMESPACE, _ELSEWHERE), MAX_TOOLS))

_WORDS = maybe(listed(record({"text": TEXT}), MAX_PARTS))
_OUTPUT = record(
    {
        "type": is_("function_call_output", "custom_tool_call_output", "shell_call_output", "apply_patch_call_output"),
        "call_id": TEXT,
        "output": _CONTENT,
    }
)
_ITEMS = [
    *_MESSAGES,
    tagged(
        "reasoning",
        {"id": loose(TEXT), "summary": _WORDS, "content": _WORDS, "encrypted_content": loose(TEXT)},
        *("id", "summary", "content", "encrypted_content"),
    ),
    tagged("function_call", {"call_id": TEXT, "name": TEXT, "namespace": loose(TEXT), "arguments": maybe(TEXT)}, "namespace", "arguments"),
    tagged("custom_tool_call", {"call_id": TEXT, "name": TEXT, "namespace": loose(TEXT), "input": TEXT}, "namespace"),
    _OUTPUT,
    record({"type": is_("local_shell_call", "shell_call"), "call_id": TEXT, "action": OBJECT}),
    either(
        tagged("local_shell_call_output", {"call_id": TEXT, "output": _CONTENT}),
        tagged("local_shell_call_output", {"call_id": NULL, "id": TEXT, "output": _CONTENT}, "call_id"),
    ),
    tagged("apply_patch_call", {"call_id": TEXT, "operation": OBJECT}),
    tagged("web_search_call", {"action": loose(OBJECT)}, "action"),
    tagged("additional_tools", {"tools": _TOOLS}, "tools"),
    tagged("configuration_update", {}),
]

REQUEST: Schema = {
    "description": f"{SAMPLED} Items are not stored: none can be referred to.",
    **record(
        {
            "model": loose(said(TEXT, f"Any name of at most {MAX_MODEL} characters; the reply repeats it.")),
            "input": either(SOME_TEXT, listed(either(*_ITEMS), MAX_MESSAGES, 1)),
            "instructions": maybe(TEXT),
            "max_output_tokens": maybe(COUNT),
            "stream": maybe(BOOLEAN),
            "store": said(maybe(BOOLEAN), "False: reasoning items carry `encrypted_content`."),
            "include": said(maybe(listed({"not": is_("message.output_text.logprobs")}, MAX_TOOLS)), "`reasoning.encrypted_content`."),
            "top_logprobs": refused("logprobs are given by chat completions", 0),
            "previous_response_id": said(maybe({"type": "string", "pattern": "^(resp_[0-9a-f]{32}i?)?$"}), "A reply of this session."),
            "reasoning": maybe(some({"summary": loose(is_("auto", "concise", "detailed", None))})),
            "tools": _TOOLS,
            "tool_choice": said(is_(None, "auto", "none"), NOT_FORCED),
            "text": maybe(
                some(
                    {"format": maybe(either(tagged("text", {}), tagged("json_object", {}), tagged("json_schema", {"schema": JSON_SCHEMA})))}
                )
            ),
            "background": refused("responses are made while the client waits", False, 0),
            "conversation": refused("conversations are not stored", False, 0),
            "prompt": refused("prompts are not stored", False, 0),
        },
        "input",
    ),
}

_STATUS = is_("in_progress", "completed", "incomplete")
_TOLD = {"id": TEXT, "status": _STATUS}
_SUMMARY = {"type": "array", "items": tagged("summary_text", {"text": TEXT})}
_REASONED = {"type": "array", "items": tagged("reasoning_text", {"text": TEXT})}
_WRITTEN = either(
    tagged(
        "message",
        {
            **_TOLD,
            "role": is_("assistant"),
            "content": {"type": "array", "items": tagged("output_text", {"text": TEXT, "annotations": ANY})},
        },
    ),
    tagged("reasoning", {**_TOLD, "summary": _SUMMARY, "content": _REASONED, "encrypted_content": TEXT}, "content", "encrypted_content"),
    tagged("function_call", {**_TOLD, "call_id": TEXT, "name": TEXT, "arguments": TEXT, "namespace": TEXT}, "namespace"),
    tagged("custom_tool_call", {**_TOLD, "call_id": TEXT, "name": TEXT, "input": TEXT, "namespace": TEXT}, "namespace"),
)
_REPLY = record(
    {
        "id": {"type": "string", "pattern": "^resp_[0-9a-f]{32}i?$"},
        "object": is_("response"),
        "created_at": INTEGER,
        "status": is_("completed", "incomplete"),
        "error": NULL,
        "incomplete_details": maybe(record({"reason": is_("max_output_tokens")})),
        "model": TEXT,
        "output": {"type": "array", "items": _WRITTEN},
        "usage": record(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER)),
    }
)

OPENAI_RESPONSES = Shapes(
    request=REQUEST,
    reply=_REPLY,
    events="`response.created`, `response.in_progress`, the events of each item from `response.output_item.added` to `.done`, `keepalive` "
    "in silence, then `response.completed` or `response.incomplete`; or `response.failed`. All are numbered.",
    count=record({"object": is_("response.input_tokens"), "input_tokens": INTEGER}),
    models=openai_chat.MODELS,
    model=openai_chat.OPENAI_CHAT.model,
    error=openai_chat.ERROR,
)
