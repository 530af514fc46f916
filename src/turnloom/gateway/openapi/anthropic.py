"""Anthropic Messages."""

from __future__ import annotations

from turnloom.gateway.openapi.shapes import (
    BOOLEAN,
    COUNT,
    INTEGER,
    JSON_SCHEMA,
    NOT_FORCED,
    NULL,
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
    said,
    some,
    tagged,
    with_text,
)
from turnloom.wire.fields import MAX_MESSAGES, MAX_MODEL, MAX_PARTS, MAX_TOOLS

_IMAGE = said(tagged("image", {"source": loose(OBJECT)}, "source"), "Refused with a 400, or a placeholder in words, as the gateway is set.")
_DOCUMENT = said(
    either(
        tagged("document", {"source": record({"type": is_("text"), "data": TEXT})}),
        tagged("document", {"source": {"not": record({"type": is_("text")})}}, "source"),
    ),
    "One of plain text is that text; any other is treated as an image.",
)
_TEXT = tagged("text", {"text": TEXT})
_REFERENCE = said(tagged("tool_reference", {"tool_name": loose(TEXT)}, "tool_name"), "Read as the tool's name.")
_TEXTS = [_TEXT, _IMAGE, _DOCUMENT, _REFERENCE]
_TEXT_CONTENT = either(TEXT, listed(either(*_TEXTS), MAX_PARTS))
_RESULT = tagged(
    "tool_result",
    {"tool_use_id": TEXT, "content": maybe(_TEXT_CONTENT), "is_error": loose(BOOLEAN)},
    "content",
    "is_error",
)
_USER_BLOCKS = listed(either(*_TEXTS, _RESULT), MAX_PARTS, 1)
_SAYS_SOMETHING = either(tagged("text", {"text": SOME_TEXT}), _IMAGE, _RESULT)
_USER = tagged("user", {"content": with_text(_USER_BLOCKS, _SAYS_SOMETHING)}, tag="role")
_ASSISTANT_BLOCKS = either(
    _TEXT,
    tagged("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT}),
    tagged("thinking", {"thinking": TEXT, "signature": loose(TEXT)}, "signature"),
    tagged("redacted_thinking", {"data": TEXT}),
)
_ASSISTANT = tagged("assistant", {"content": either(TEXT, listed(_ASSISTANT_BLOCKS, MAX_PARTS))}, tag="role")
_SYSTEM = tagged("system", {"content": _TEXT_CONTENT}, tag="role")

_TOOL = either(
    record({"type": is_(None, "custom"), "name": TEXT, "description": maybe(TEXT), "input_schema": JSON_SCHEMA}, "name", "input_schema"),
    said(
        record({"type": {"not": is_(None, "custom")}, "name": loose(TEXT)}, "type"),
        "Runs on a provider's servers: it is not offered to the model.",
    ),
)
_FORMAT = tagged("json_schema", {"schema": JSON_SCHEMA})

REQUEST: Schema = {
    "description": f"{SAMPLED} The last message must not be the assistant's.",
    **record(
        {
            "model": loose(said(TEXT, f"Any name of at most {MAX_MODEL} characters; the reply repeats it.")),
            "messages": listed(either(_USER, _ASSISTANT, _SYSTEM), MAX_MESSAGES, 1),
            "system": maybe(_TEXT_CONTENT),
            "max_tokens": maybe(COUNT),
            "stop_sequences": STOPS,
            "stream": maybe(BOOLEAN),
            "tools": maybe(listed(_TOOL, MAX_TOOLS)),
            "tool_choice": said(
                either(NULL, is_("auto", "none"), record({"type": is_("auto", "none")})),
                NOT_FORCED,
            ),
            "output_config": maybe(some({"format": maybe(_FORMAT)})),
            "output_format": maybe(_FORMAT),
        },
        "messages",
    ),
}

_USAGE = record(dict.fromkeys(("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"), INTEGER))
_SAID = either(
    _TEXT,
    tagged("thinking", {"thinking": TEXT, "signature": TEXT}),
    tagged("tool_use", {"id": {"type": "string", "pattern": "^[a-zA-Z0-9_-]+$"}, "name": TEXT, "input": OBJECT}),
)
_REPLY = record(
    {
        "id": TEXT,
        "type": is_("message"),
        "role": is_("assistant"),
        "model": TEXT,
        "content": {"type": "array", "items": _SAID},
        "stop_reason": is_("end_turn", "max_tokens", "stop_sequence", "tool_use"),
        "stop_sequence": maybe(TEXT),
        "usage": _USAGE,
    }
)
_MODEL = record({"type": is_("model"), "id": TEXT, "display_name": TEXT, "created_at": {"type": "string", "format": "date-time"}})

ANTHROPIC = Shapes(
    request=REQUEST,
    reply=_REPLY,
    events="`message_start`, then `content_block_start`, `_delta` and `_stop` for each block, `ping` in silence, `message_delta`, "
    "`message_stop`; or `error` as the last.",
    count=record({"input_tokens": INTEGER}),
    models=record({"data": {"type": "array", "items": _MODEL}, "has_more": BOOLEAN, "first_id": maybe(TEXT), "last_id": maybe(TEXT)}),
    model=_MODEL,
    error=record({"type": is_("error"), "error": record({"type": TEXT, "message": TEXT})}),
)
