"""Reads the messages of a Chat Completions request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.errors import BadRequest
from turnloom.types import Message, Part, Reasoning, Text, ToolCall, ToolResult
from turnloom.wire import fields, freeform
from turnloom.wire.contract import Reading
from turnloom.wire.fields import MAX_PARTS, string
from turnloom.wire.json import text_of
from turnloom.wire.refs import turn_in

_REASONING = ("reasoning_content", "reasoning", "reasoning_text")
"""Where clients carry a reply's reasoning back, as it was called where they got it; the first that holds any counts."""


class MessageReader:
    """One request's. `images` counts those that a placeholder stands for."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.images = 0

    def message(self, sent: Any, where: str) -> list[Message]:
        """The message; nothing for a system message without text."""
        if not isinstance(sent, dict):
            raise BadRequest(f"{where}: must be an object with role and content")
        role = sent.get("role")
        if role in ("system", "developer"):
            texts = self._texts(sent.get("content"), f"{where}.content")
            return [Message("system", texts)] if any(t.text for t in texts) else []
        if role == "user":
            return [self._user(sent, where)]
        if role == "assistant":
            return [_assistant(sent, where)]
        if role == "tool":
            return [self._tool(sent, where)]
        if role == "function":
            raise BadRequest(f'{where}.role: "function" is the legacy form of a tool\'s result; send role "tool" with its tool_call_id')
        raise BadRequest(f'{where}.role: must be "system", "developer", "user", "assistant" or "tool", not {fields.shown(role)}')

    def _user(self, sent: Mapping[str, Any], where: str) -> Message:
        texts = self._texts(sent.get("content"), f"{where}.content")
        if not any(t.text for t in texts):
            raise BadRequest(f"{where}.content: a user message needs some text")
        return Message("user", texts)

    def _tool(self, sent: Mapping[str, Any], where: str) -> Message:
        """No content is an empty result."""
        content = sent.get("content")
        texts = () if content is None else self._texts(content, f"{where}.content")
        return Message("tool", (ToolResult(string(sent, "tool_call_id", where), "\n".join(t.text for t in texts)),))

    def _texts(self, content: Any, where: str) -> tuple[Text, ...]:
        """Content that must be text: a string, or a list of parts."""
        if isinstance(content, str):
            return (Text(content),)
        return tuple(self._text(part, f"{where}.{i}") for i, part in enumerate(_parts(content, where)))

    def _text(self, part: Mapping[str, Any], where: str) -> Text:
        kind = part.get("type")
        if kind == "text":
            return Text(string(part, "text", where))
        if kind in ("image_url", "input_audio", "file"):
            media_type, data = _attached(part.get(kind), kind)
            shown = fields.image(self._reading, media_type, data, where)
            self.images += 1
            return Text(shown)
        raise BadRequest(f"{where}.type: {fields.shown(kind)} is not supported here; send text parts")


def _attached(value: Any, kind: str) -> tuple[str, str]:
    """(media type, base64 data or "") of a picture, a sound or a file."""
    held = value if isinstance(value, dict) else {"url": value}
    if kind == "input_audio":
        return f"audio/{held.get('format')}", _string(held.get("data"))
    plain, key = ("image", "url") if kind == "image_url" else ("file", "file_data")
    url = _string(held.get(key))
    if not url.startswith("data:"):
        return plain, url if plain == "file" else ""
    head, _, data = url.removeprefix("data:").partition(",")
    media_type, _, encoding = head.partition(";")
    return media_type or plain, data if encoding.endswith("base64") else ""


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest(f"{where}: must be a string or a list of content parts")
    return fields.at_most(MAX_PARTS, content, where)


def _assistant(sent: Mapping[str, Any], where: str) -> Message:
    """Reasoning, then words, then calls: the order in which a chat message can hold them."""
    for key, instead in (("function_call", "tool_calls"), ("audio", "content")):
        if sent.get(key) is not None:
            raise BadRequest(f"{where}.{key}: is not supported; send {instead}")
    calls = [
        _call(c, f"{where}.tool_calls.{i}") for i, c in enumerate(fields.objects(sent.get("tool_calls"), f"{where}.tool_calls", MAX_PARTS))
    ]
    parts: list[Part] = [*_reasoning(sent), *_words(sent, where), *calls]
    return Message("assistant", tuple(parts), fields.only(turn_in(call.id) for call in calls))


def _reasoning(sent: Mapping[str, Any]) -> list[Reasoning]:
    found = [sent.get(key) for key in _REASONING]
    return [Reasoning(text) for text in found if isinstance(text, str) and text][:1]


def _words(sent: Mapping[str, Any], where: str) -> list[Text]:
    content = sent.get("content")
    if content is None or isinstance(content, str):
        texts = [content or ""]
    else:
        texts = [_said(part, f"{where}.content.{i}") for i, part in enumerate(_parts(content, f"{where}.content"))]
    return [Text(text) for text in (*texts, fields.optional_string(sent, "refusal", where)) if text]


def _said(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise BadRequest(f"{where}.type: {fields.shown(kind)} is not supported in an assistant message")
    return string(part, kind, where)


def _call(sent: Mapping[str, Any], where: str) -> ToolCall:
    kind = sent.get("type") or "function"
    call_id = string(sent, "id", where)
    if kind not in ("function", "custom"):
        raise BadRequest(f'{where}.type: must be "function" or "custom", not {fields.shown(kind)}')
    held = sent.get(kind)
    if not isinstance(held, dict):
        raise BadRequest(f"{where}.{kind}: must be an object")
    name = string(held, "name", f"{where}.{kind}")
    if kind == "custom":
        return ToolCall(call_id, name, freeform.arguments_of(string(held, "input", f"{where}.custom")))
    return ToolCall(call_id, name, _arguments(held, f"{where}.function"))


def _arguments(function: Mapping[str, Any], where: str) -> str:
    """JSON text as it came, valid or not; some clients send none, or the object itself."""
    value = function.get("arguments")
    if value is None:
        return "{}"
    if isinstance(value, dict):
        return text_of(value)
    text = string(function, "arguments", where)
    return text if text.strip() else "{}"
