"""Reads the body of a Chat Completions request: its settings and its tools. The messages are read by `messages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.errors import BadRequest
from turnloom.types import Request, Tool
from turnloom.wire import fields, freeform
from turnloom.wire.contract import DEFAULT_READING, Envelope, Reading
from turnloom.wire.fields import MAX_MESSAGES, MAX_TOOLS, string
from turnloom.wire.json import read_object, text_of
from turnloom.wire.openai_chat.messages import MessageReader

MAX_CHOICES = 16
_MAX_MODALITIES = 16

_NO_PARAMETERS = '{"type":"object","properties":{}}'

_REFUSED = {
    "functions": "the legacy form of tools; send tools",
    "function_call": "the legacy form of tool_choice; send tool_choice",
    "audio": "this model answers in text only; leave it out",
    "prediction": "predicted outputs are not supported; leave it out",
    "web_search_options": "web search runs on the provider's servers and is not available here; leave it out",
    "moderation": "moderation runs on the provider's servers and is not available here; leave it out",
}
"""What would change the reply and cannot be had, with what to do."""


def read(body: bytes, envelope: Envelope, reading: Reading = DEFAULT_READING) -> Request:
    sent = read_object(body)
    _refuse(sent)
    raw = fields.items(sent.get("messages"), "messages", MAX_MESSAGES)
    if not raw:
        raise BadRequest("messages: must be a list with at least one message")
    reader = MessageReader(reading)
    messages = tuple(m for i, each in enumerate(raw) for m in reader.message(each, f"messages.{i}"))
    if not messages:
        raise BadRequest("messages: at least one message needs some text")
    tools, declined = _tools(sent.get("tools"))
    stream = fields.boolean(sent, "stream", envelope.accepts_stream)
    model = sent.get("model")
    return Request(
        messages=messages,
        tools=tools,
        max_tokens=_max_tokens(sent),
        stop=fields.stops(sent.get("stop"), "stop"),
        stream=stream,
        model=model if isinstance(model, str) else "",
        call_tools=_tool_choice(sent.get("tool_choice"), declined),
        choices=_choices(sent),
        logprobs=_logprobs(sent),
        json_schema=_json_schema(sent.get("response_format")),
        declined=declined,
        images=reader.images,
        wire={"include_usage": _include_usage(sent)},
    )


def _refuse(sent: Mapping[str, Any]) -> None:
    for key, why in _REFUSED.items():
        if sent.get(key) not in (None, [], {}):
            raise BadRequest(f"{key}: {why}")
    modalities = fields.items(sent.get("modalities"), "modalities", _MAX_MODALITIES)
    if any(each != "text" for each in modalities):
        raise BadRequest('modalities: this model answers in text only; send ["text"] or leave it out')


def _max_tokens(sent: Mapping[str, Any]) -> int | None:
    """The newer field's or the older one's; where both are sent, what keeps within both."""
    found = [n for key in ("max_completion_tokens", "max_tokens") if (n := fields.positive(sent, key)) is not None]
    return min(found, default=None)


def _choices(sent: Mapping[str, Any]) -> int:
    wanted = fields.positive(sent, "n") or 1
    if wanted > MAX_CHOICES:
        raise BadRequest(f"n: {wanted} replies are asked for; at most {MAX_CHOICES} are supported")
    return wanted


def _logprobs(sent: Mapping[str, Any]) -> bool:
    if sent.get("top_logprobs") not in (None, 0):
        raise BadRequest("top_logprobs: only the sampled tokens have logprobs here; leave it out, or send 0")
    return fields.boolean(sent, "logprobs", False)


def _include_usage(sent: Mapping[str, Any]) -> bool:
    options = sent.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise BadRequest("stream_options: must be an object")
    wanted = options.get("include_usage")
    if wanted is not None and not isinstance(wanted, bool):
        raise BadRequest("stream_options.include_usage: must be true or false")
    return bool(wanted)


def _tools(value: Any) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """(the tools that the client runs, the names of those that only a provider's servers could)."""
    tools, declined = [], []
    for i, tool in enumerate(fields.objects(value, "tools", MAX_TOOLS)):
        kind = tool.get("type", "function")
        if not isinstance(kind, str):
            raise BadRequest(f'tools.{i}.type: must be "function" or "custom"')
        if kind in ("function", "custom"):
            read_tool = _function if kind == "function" else _custom
            tools.append(read_tool(_object(tool, kind, f"tools.{i}"), f"tools.{i}.{kind}"))
        else:
            declined.append(str(tool.get("name") or kind))
    return tuple(tools), tuple(declined)


def _function(function: Mapping[str, Any], where: str) -> Tool:
    """A function without parameters takes none."""
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise BadRequest(f"{where}.parameters: must be a JSON Schema object")
    parameters = text_of(schema) if schema is not None else _NO_PARAMETERS
    return Tool(string(function, "name", where), fields.optional_string(function, "description", where), parameters)


def _custom(custom: Mapping[str, Any], where: str) -> Tool:
    name, description = string(custom, "name", where), fields.optional_string(custom, "description", where)
    form = custom.get("format")
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "grammar":
        grammar, at = _object(custom["format"], "grammar", f"{where}.format"), f"{where}.format.grammar"
        description = freeform.described(description, string(grammar, "syntax", at), string(grammar, "definition", at))
    elif kind not in (None, "text"):
        raise BadRequest(f'{where}.format.type: must be "text" or "grammar"')
    return Tool(name, description, freeform.PARAMETERS, freeform=True)


def _object(holder: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = holder.get(key)
    if not isinstance(value, dict):
        raise BadRequest(f"{where}.{key}: must be an object")
    return value


def _tool_choice(choice: Any, declined: tuple[str, ...]) -> bool:
    """Whether tools may be called."""
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    forced = choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        held = choice.get(kind) if isinstance(kind, str) else None
        forced = held.get("name", kind) if isinstance(held, dict) else kind
    if forced in declined:
        raise BadRequest(f"tool_choice: {fields.shown(forced)} runs on the provider's servers and is not available here")
    raise BadRequest(f'tool_choice: {fields.shown(forced)} is not supported; the sampled tokens are the model\'s own, use "auto" or "none"')


def _json_schema(wanted: Any) -> str:
    if wanted is None:
        return ""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return text_of({"type": "object"})
    if kind != "json_schema":
        raise BadRequest('response_format.type: must be "text", "json_object" or "json_schema"')
    schema = _object(wanted, "json_schema", "response_format").get("schema")
    if not isinstance(schema, dict):
        raise BadRequest("response_format.json_schema.schema: must be a JSON Schema object")
    return text_of(schema)
