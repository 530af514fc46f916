"""Reads the body of a Responses request. Its items are read by `items`, its tools by `tools`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.errors import BadRequest, UnknownResponse
from turnloom.types import Message, Request, Text
from turnloom.wire import fields
from turnloom.wire.contract import COUNT, DEFAULT_READING, Envelope, Reading
from turnloom.wire.json import read_object, text_of
from turnloom.wire.openai_responses.ids import turn_of_response
from turnloom.wire.openai_responses.items import ItemReader
from turnloom.wire.openai_responses.tools import Toolbox, call_tools

_REFUSED = {
    "background": "responses are made while the client waits; leave it out",
    "conversation": "conversations are not stored; send the history in input, or previous_response_id",
    "prompt": "prompts are not stored; send the text itself in instructions or input",
    "moderation": "moderation runs on the provider's servers and is not available here; leave it out",
}
"""What would change the reply and cannot be had, with what to do."""

_SUMMARIES = ("auto", "concise", "detailed")

_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
"""What a response says again of its request, and what it says where that was silent."""


def read(body: bytes, envelope: Envelope, reading: Reading = DEFAULT_READING) -> Request:
    """`wire` holds `echo`, what a response says again of its request; `encrypted`, whether reasoning carries a reference back;
    `summary`, whether it goes out as one; and of the response that this one goes on from `previous_response_id` and `previous_instructed`.
    """
    sent = read_object(body)
    for key, why in _REFUSED.items():
        if sent.get(key) not in (None, False):
            raise BadRequest(f"{key}: {why}")
    toolbox = Toolbox()
    toolbox.add(sent.get("tools"), "tools")
    items = ItemReader(reading, toolbox)
    instructions = fields.optional_string(sent, "instructions", "")
    messages = items.read(sent.get("input"))
    previous_id = fields.optional_string(sent, "previous_response_id", "")
    previous, previous_instructed = _previous(previous_id)
    if envelope.verb != COUNT:
        _need_something_to_answer(messages, previous)
    model = sent.get("model")
    return Request(
        messages=(*([Message("system", (Text(instructions),))] if instructions else []), *messages),
        tools=toolbox.tools,
        max_tokens=fields.positive(sent, "max_output_tokens"),
        stream=fields.boolean(sent, "stream", envelope.accepts_stream),
        model=model if isinstance(model, str) else "",
        call_tools=call_tools(sent.get("tool_choice"), toolbox.declined),
        json_schema=_json_schema(sent.get("text")),
        previous=previous,
        instructed=bool(instructions),
        declined=toolbox.declined,
        images=items.images,
        wire={
            "echo": {key: default if sent.get(key) is None else sent[key] for key, default in _ECHOED.items()},
            "encrypted": _encrypted(sent),
            "summary": _summary(sent.get("reasoning")),
            "previous_response_id": previous_id,
            "previous_instructed": previous_instructed,
        },
    )


def _previous(response_id: str) -> tuple[str, bool]:
    found = turn_of_response(response_id)
    if response_id and not found[0]:
        raise UnknownResponse(response_id[:80])
    return found


def _need_something_to_answer(messages: list[Message], previous: str) -> None:
    """A reply may stand last: what the model writes next is another item after it, never the rest of its words."""
    if not messages or not (previous or any(m.role in ("user", "tool") for m in messages)):
        raise BadRequest("input: at least one user message or tool output is required")


def _encrypted(sent: Mapping[str, Any]) -> bool:
    """Who keeps the history keeps the references in it."""
    include = fields.items(sent.get("include"), "include", fields.MAX_TOOLS)
    if "message.output_text.logprobs" in include or sent.get("top_logprobs") not in (None, 0):
        raise BadRequest("include: log-probabilities are given by /v1/chat/completions and by the samples, not here; leave them out")
    return "reasoning.encrypted_content" in include or not fields.boolean(sent, "store", True)


def _summary(reasoning: Any) -> bool:
    if reasoning is None:
        return False
    if not isinstance(reasoning, dict):
        raise BadRequest("reasoning: must be an object")
    return reasoning.get("summary", reasoning.get("generate_summary")) in _SUMMARIES


def _json_schema(text: Any) -> str:
    if text is None:
        return ""
    if not isinstance(text, dict):
        raise BadRequest("text: must be an object")
    wanted = text.get("format")
    if wanted is None:
        return ""
    if not isinstance(wanted, dict):
        raise BadRequest("text.format: must be an object")
    kind = wanted.get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return text_of({"type": "object"})
    if kind != "json_schema":
        raise BadRequest('text.format.type: must be "text", "json_object" or "json_schema"')
    if not isinstance(wanted.get("schema"), dict):
        raise BadRequest("text.format.schema: must be a JSON Schema object")
    return text_of(wanted["schema"])
