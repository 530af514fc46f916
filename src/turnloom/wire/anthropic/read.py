"""Reads the body of a Messages request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from turnloom.errors import BadRequest
from turnloom.types import Message, Part, Reasoning, Request, Text, Tool, ToolCall, ToolResult
from turnloom.wire import fields, quirks
from turnloom.wire.contract import COUNT, DEFAULT_READING, Envelope, Reading
from turnloom.wire.fields import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, string
from turnloom.wire.json import read_object, text_of
from turnloom.wire.quirks import Quirk
from turnloom.wire.refs import turn_in

THOUGHTS = "thoughts"
"""Key of `Request.wire`: the client asked to be shown the reasoning."""


def read(body: bytes, envelope: Envelope, reading: Reading = DEFAULT_READING) -> Request:
    sent = read_object(body)
    return _Reader(reading).request(sent, fields.boolean(sent, "stream", envelope.accepts_stream), counting=envelope.verb == COUNT)


class _Reader:
    """One request's. It counts what it puts placeholders for."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._images = 0

    def request(self, sent: Mapping[str, Any], stream: bool, *, counting: bool) -> Request:
        messages = fields.items(sent.get("messages"), "messages", MAX_MESSAGES)
        if not messages:
            raise BadRequest("messages: must be a list with at least one message")
        neutral = [*self._system(sent.get("system"))]
        for i, message in enumerate(messages):
            neutral += self._message(message, f"messages.{i}")
        if not any(m.role in ("user", "tool") for m in neutral):
            raise BadRequest("messages: at least one user message is required")
        if neutral[-1].role == "assistant" and not counting:
            raise BadRequest(
                "messages: the last message is from the assistant; prefilling a reply is not supported, end with a user message"
            )
        tools, declined = _tools(sent)
        model = sent.get("model")
        return Request(
            messages=tuple(neutral),
            tools=tools,
            max_tokens=fields.positive(sent, "max_tokens"),
            stop=fields.stops(sent.get("stop_sequences"), "stop_sequences"),
            stream=stream,
            model=model if isinstance(model, str) else "",
            call_tools=_tool_choice(sent.get("tool_choice"), declined),
            json_schema=_json_schema(sent),
            declined=declined,
            images=self._images,
            wire={THOUGHTS: _thoughts(sent.get("thinking"))},
        )

    def _system(self, system: Any) -> Iterator[Message]:
        if system is None:
            return
        texts = [t.text for t in self._texts(system, "system")]
        if Quirk.BILLING_HEADER in self._reading.quirks:
            texts = [quirks.without_billing_header(t) for t in texts]
        if parts := tuple(Text(t) for t in texts if t):
            yield Message("system", parts)

    def _message(self, message: Any, where: str) -> list[Message]:
        if not isinstance(message, dict):
            raise BadRequest(f"{where}: must be an object with role and content")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f'{where}.role: must be "user" or "assistant", not {fields.shown(role)}')
        content = message.get("content")
        if role == "assistant":
            blocks = _blocks(content, where)
            parts = tuple(_assistant_part(b, f"{where}.content.{i}") for i, b in enumerate(blocks))
            return [Message("assistant", parts, _reference(blocks))]
        if role == "system":
            return [Message("system", tuple(self._texts(content, f"{where}.content")))]
        return list(self._user(content, where))

    def _user(self, content: Any, where: str) -> Iterator[Message]:
        """A user message; each tool result in it becomes a tool message of its own, in place."""
        texts: list[Part] = []
        blocks = _blocks(content, where)
        for i, block in enumerate(blocks):
            at = f"{where}.content.{i}"
            if block.get("type") == "tool_result":
                if texts:
                    yield Message("user", tuple(texts))
                    texts = []
                yield Message("tool", (self._tool_result(block, at),))
            else:
                texts.append(self._text(block, at))
        if texts or not blocks:
            if not any(p.text for p in cast(list[Text], texts)):
                raise BadRequest(f"{where}.content: a user message needs some text or a tool result")
            yield Message("user", tuple(texts))

    def _tool_result(self, block: Mapping[str, Any], where: str) -> ToolResult:
        content = block.get("content")
        texts = [] if content is None else self._texts(content, f"{where}.content")
        return ToolResult(string(block, "tool_use_id", where), "\n".join(t.text for t in texts), block.get("is_error") is True)

    def _texts(self, content: Any, where: str) -> list[Text]:
        """Content that must be text: a string or a list of blocks."""
        if isinstance(content, str):
            return [Text(content)]
        return [self._text(block, f"{where}.{i}") for i, block in enumerate(_blocks(content, where))]

    def _text(self, block: Mapping[str, Any], where: str) -> Text:
        kind = block.get("type")
        if kind == "text":
            return Text(string(block, "text", where))
        if kind == "tool_reference" and Quirk.TOOL_REFERENCE in self._reading.quirks:
            return Text(str(block.get("tool_name", "")))
        if kind in ("image", "document"):
            return Text(self._shown(block, where))
        raise BadRequest(f"{where}.type: {fields.shown(kind)} is not supported here; send text or tool_result blocks")

    def _shown(self, block: Mapping[str, Any], where: str) -> str:
        """A picture or a document in words: a document of text is that text."""
        source = block.get("source")
        source = source if isinstance(source, dict) else {}
        if block.get("type") == "document" and source.get("type") == "text":
            return string(source, "data", f"{where}.source")
        if block.get("type") == "document" and source.get("type") == "content":
            return "\n".join(t.text for t in self._texts(source.get("content"), f"{where}.source.content"))
        data, media_type = source.get("data"), source.get("media_type")
        shown = fields.image(self._reading, str(media_type or block.get("type")), data if isinstance(data, str) else "", where)
        self._images += 1
        return shown


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
        raise BadRequest(f"{where}.content: must be a string or a list of content blocks")
    return fields.at_most(MAX_PARTS, content, f"{where}.content")


def _assistant_part(block: Mapping[str, Any], where: str) -> Part:
    reader = _ASSISTANT_PARTS.get(str(block.get("type")))
    if reader is None:
        raise BadRequest(f"{where}.type: {fields.shown(block.get('type'))} is not supported in an assistant message")
    return reader(block, where)


def _tool_use(block: Mapping[str, Any], where: str) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.input: must be an object")
    return ToolCall(string(block, "id", where), string(block, "name", where), text_of(arguments))


def _redacted(block: Mapping[str, Any], where: str) -> Reasoning:
    string(block, "data", where)
    return Reasoning("")


_ASSISTANT_PARTS: Mapping[str, Callable[[Mapping[str, Any], str], Part]] = {
    "text": lambda block, where: Text(string(block, "text", where)),
    "tool_use": _tool_use,
    "thinking": lambda block, where: Reasoning(string(block, "thinking", where)),
    "redacted_thinking": _redacted,
}


_OPAQUE = {"thinking": "signature", "redacted_thinking": "data"}


def _reference(blocks: Sequence[Mapping[str, Any]]) -> str:
    """The turn that the signatures name, or else the calls' ids, which some clients choose themselves."""
    signed = fields.only(turn_in(block.get(_OPAQUE.get(str(block.get("type")), ""))) for block in blocks)
    return signed or fields.only(turn_in(block.get("id")) for block in blocks if block.get("type") == "tool_use")


def _tools(sent: Mapping[str, Any]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """(the tools that the client runs, the names of those that only Anthropic could, MCP servers among them)."""
    tools, declined = [], []
    for i, tool in enumerate(fields.objects(sent.get("tools"), "tools", MAX_TOOLS)):
        if tool.get("type") in (None, "custom"):
            tools.append(_tool(tool, string(tool, "name", f"tools.{i}"), f"tools.{i}"))
        elif tool["type"] != "mcp_toolset":
            declined.append(str(tool.get("name") or tool["type"]))
    declined += [str(server.get("name") or "mcp") for server in fields.objects(sent.get("mcp_servers"), "mcp_servers", MAX_TOOLS)]
    return tuple(tools), tuple(declined)


def _tool(tool: Mapping[str, Any], name: str, where: str) -> Tool:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema: must be a JSON Schema object")
    return Tool(name, fields.optional_string(tool, "description", where), text_of(schema))


def _tool_choice(choice: Any, declined: tuple[str, ...]) -> bool:
    if choice is None:
        return True
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "tool" and choice.get("name") in declined:
        raise BadRequest(f"tool_choice.name: {fields.shown(choice['name'])} runs on the provider's servers and is not available here")
    if kind not in ("auto", "none"):
        raise BadRequest(
            f'tool_choice.type: {fields.shown(kind)} is not supported; the sampled tokens are the model\'s own, use "auto" or "none"'
        )
    return bool(kind == "auto")


def _thoughts(thinking: Any) -> bool:
    """Whether thinking is asked for; how much of it is the model's own choice."""
    return isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")


def _json_schema(sent: Mapping[str, Any]) -> str:
    """The older field's, or the newer one's."""
    config = sent.get("output_config")
    if config is not None and not isinstance(config, dict):
        raise BadRequest("output_config: must be an object")
    formats = {"output_format": sent.get("output_format"), "output_config.format": (config or {}).get("format")}
    schemas = [_schema(wanted, where) for where, wanted in formats.items() if wanted is not None]
    return schemas[0] if schemas else ""


def _schema(wanted: Any, where: str) -> str:
    schema = wanted.get("schema") if isinstance(wanted, dict) and wanted.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise BadRequest(f'{where}: must be {{"type": "json_schema", "schema": {{…}}}}')
    return text_of(schema)
