"""The Anthropic Messages dialect: `POST /v1/messages` and `/v1/messages/count_tokens`.

Field names, event order and error types follow Anthropic's public API reference
(version 2023-06-01). Sampling parameters that a client sends are read past: the
session pins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

from turnloom.errors import BadRequest, LimitReached, SessionClosed, TurnloomError
from turnloom.parse.contract import TextDelta
from turnloom.types import FinishReason, Message, Part, Reasoning, Request, Text, Tool, ToolCall, ToolResult
from turnloom.wire import quirks
from turnloom.wire.contract import MAX_STOP_CHARS, MAX_STOPS, Reply, ReplyEvent, WireError
from turnloom.wire.json import read_object, spliced, text_of, whole_text, write
from turnloom.wire.quirks import Quirk

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}

MAX_MESSAGES = 20_000
MAX_BLOCKS = 4096
"""Content blocks of one message, or of one tool result."""
MAX_TOOLS = 4096


class AnthropicDialect:
    name = "anthropic"
    call_prefix = "toolu_"

    def __init__(self, enabled: frozenset[Quirk] = quirks.ALL) -> None:
        self._quirks = enabled

    def read(self, body: bytes, *, stream: bool = False) -> Request:
        fields = read_object(body)
        asked = fields.get("stream")
        if asked is not None and not isinstance(asked, bool):
            raise BadRequest("stream: must be true or false")
        max_tokens = fields.get("max_tokens")
        if max_tokens is not None and not _positive(max_tokens):
            raise BadRequest("max_tokens: must be an integer of at least 1")
        return self._request(fields, max_tokens, stream if asked is None else asked)

    def _request(self, fields: Mapping[str, Any], max_tokens: int | None, stream: bool) -> Request:
        config = fields.get("output_config")
        if fields.get("output_format") is not None or (isinstance(config, dict) and config.get("format") is not None):
            raise BadRequest("output_config.format: structured output is not supported; ask for JSON in the prompt instead")
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages: must be a list with at least one message")
        _at_most(MAX_MESSAGES, messages, "messages")
        neutral = [*self._system(fields.get("system"))]
        for i, message in enumerate(messages):
            neutral += self._message(message, f"messages.{i}")
        if not any(m.role in ("user", "tool") for m in neutral):
            raise BadRequest("messages: at least one user message is required")
        if neutral[-1].role == "assistant":
            raise BadRequest(
                "messages: the last message is from the assistant; prefilling a reply is not supported, end with a user message"
            )
        return Request(
            messages=tuple(neutral),
            tools=tuple(_tool(t, f"tools.{i}") for i, t in enumerate(_list(fields.get("tools"), "tools", MAX_TOOLS))),
            max_tokens=max_tokens,
            stop=tuple(_stop(s, i) for i, s in enumerate(_list(fields.get("stop_sequences"), "stop_sequences", MAX_STOPS))),
            stream=stream,
            model=fields.get("model") if isinstance(fields.get("model"), str) else "",  # type: ignore[arg-type]
            call_tools=_tool_choice(fields.get("tool_choice")),
        )

    def _system(self, system: Any) -> Iterator[Message]:
        if system is None:
            return
        texts = [t.text for t in self._texts(system, "system")]
        if Quirk.BILLING_HEADER in self._quirks:
            texts = [quirks.without_billing_header(t) for t in texts]
        if parts := tuple(Text(t) for t in texts if t):
            yield Message("system", parts)

    def _message(self, message: Any, where: str) -> list[Message]:
        if not isinstance(message, dict):
            raise BadRequest(f"{where}: must be an object with role and content")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f'{where}.role: must be "user" or "assistant", not {role!r}')
        content = message.get("content")
        if role == "assistant":
            parts = [p for i, b in enumerate(_blocks(content, where)) for p in _assistant_part(b, f"{where}.content.{i}")]
            return [Message("assistant", tuple(parts))]
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
                texts.append(_text(block, at))
        if texts or not blocks:
            if not any(p.text for p in cast(list[Text], texts)):
                raise BadRequest(f"{where}.content: a user message needs some text or a tool result")
            yield Message("user", tuple(texts))

    def _tool_result(self, block: Mapping[str, Any], where: str) -> ToolResult:
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise BadRequest(f"{where}.tool_use_id: must be a string")
        content = block.get("content")
        texts = [] if content is None else self._texts(content, f"{where}.content")
        return ToolResult(call_id, "\n".join(t.text for t in texts), block.get("is_error") is True)

    def _texts(self, content: Any, where: str) -> list[Text]:
        """Content that must be text: a string or a list of text blocks."""
        if isinstance(content, str):
            return [Text(content)]
        found: list[Text] = []
        for i, block in enumerate(_blocks(content, where)):
            if block.get("type") == "tool_reference" and Quirk.TOOL_REFERENCE in self._quirks:
                found.append(Text(str(block.get("tool_name", ""))))
            else:
                found.append(_text(block, f"{where}.{i}"))
        return found

    def write(self, reply: Reply) -> bytes:
        content = [_block(p) for p in reply.message.parts if not (isinstance(p, Text) and not p.text.strip())]
        reason, sequence = _stop_reason(reply)
        return write(
            {
                "id": f"msg_{reply.turn_id}",
                "type": "message",
                "role": "assistant",
                "model": reply.model,
                "content": content,
                "stop_reason": reason,
                "stop_sequence": sequence,
                "usage": _usage(reply.prompt_tokens, reply.output_tokens),
            }
        )

    def stream(self, turn_id: str, model: str, prompt_tokens: int) -> AnthropicStream:
        return AnthropicStream(turn_id, model, prompt_tokens)

    def count(self, tokens: int) -> bytes:
        return write({"input_tokens": tokens})

    def error(self, error: TurnloomError) -> WireError:
        """`x-should-retry: false` tells the official SDKs that asking again cannot help."""
        final = isinstance(error, LimitReached | SessionClosed)
        headers = {"x-should-retry": "false"} if final else {}
        return WireError(error.status, write(_error(error)), headers)


class AnthropicStream:
    """Server-sent events: one content block after another, each opened, filled and stopped.

    White space that opens a text block is held until something visible follows: a
    block of white space alone is refused when a client sends it back.
    """

    def __init__(self, turn_id: str, model: str, prompt_tokens: int) -> None:
        self._turn_id = turn_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open: Literal["", "text", "thinking"] = ""
        self._held = ""

    def begin(self) -> bytes:
        message: dict[str, Any] = {
            "id": f"msg_{self._turn_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._prompt_tokens, 0),
        }
        return _sse("message_start", {"message": message})

    def event(self, event: ReplyEvent) -> bytes:
        if isinstance(event, ToolCall):
            self._held = ""
            return self._stop() + self._call(event)
        if isinstance(event, TextDelta):
            if self._open != "text" and not (self._held + event.text).strip():
                self._held += event.text
                return b""
            text, self._held = self._held + event.text, ""
            return self._fill("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": text})
        self._held = ""
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._fill("thinking", block, {"type": "thinking_delta", "thinking": event.text})

    def ping(self) -> bytes:
        return _sse("ping", {})

    def finish(self, reply: Reply) -> bytes:
        reason, sequence = _stop_reason(reply)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage(reply.prompt_tokens, reply.output_tokens)
        return self._stop() + _sse("message_delta", {"delta": delta, "usage": usage}) + _sse("message_stop", {})

    def error(self, error: TurnloomError) -> bytes:
        return _sse("error", _error(error))

    def _fill(self, kind: Literal["text", "thinking"], block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        opening = b""
        if self._open != kind:
            opening = self._stop() + self._start(block)
            self._open = kind
        return opening + _sse("content_block_delta", {"index": self._index, "delta": delta})

    def _call(self, call: ToolCall) -> bytes:
        start = self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": whole_text(call.arguments)}
        filled = _sse("content_block_delta", {"index": self._index, "delta": delta})
        return start + filled + _sse("content_block_stop", {"index": self._index})

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        return _sse("content_block_start", {"index": self._index, "content_block": block})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        signed = b""
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._turn_id}
            signed = _sse("content_block_delta", {"index": self._index, "delta": delta})
        return signed + _sse("content_block_stop", {"index": self._index})


def _sse(event: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + write({"type": event, **data}) + b"\n\n"


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _error(error: TurnloomError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(error.status, "api_error"), "message": str(error)}}


def _stop_reason(reply: Reply) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if reply.finish.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if reply.message.calls:
        return "tool_use", None
    if isinstance(reply.finish.matched, str):
        return "stop_sequence", reply.finish.matched
    return "end_turn", None


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": spliced(whole_text(part.arguments))}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": part.ref}
    assert isinstance(part, Text)
    return {"type": "text", "text": part.text}


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
        raise BadRequest(f"{where}.content: must be a string or a list of content blocks")
    return _at_most(MAX_BLOCKS, content, f"{where}.content")


def _text(block: Mapping[str, Any], where: str) -> Text:
    kind = block.get("type")
    if kind == "image":
        raise BadRequest(f"{where}: this model reads text only; images are not supported")
    if kind != "text":
        raise BadRequest(f"{where}.type: {kind!r} is not supported here; send text or tool_result blocks")
    return Text(_string(block, "text", where))


def _assistant_part(block: Mapping[str, Any], where: str) -> Iterator[Part]:
    reader = _ASSISTANT_PARTS.get(str(block.get("type")))
    if reader is None:
        raise BadRequest(f"{where}.type: {block.get('type')!r} is not supported in an assistant message")
    yield reader(block, where)


def _tool_use(block: Mapping[str, Any], where: str) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.input: must be an object")
    return ToolCall(_string(block, "id", where), _string(block, "name", where), text_of(arguments))


def _thinking(block: Mapping[str, Any], where: str) -> Reasoning:
    signature = block.get("signature")
    return Reasoning(_string(block, "thinking", where), signature if isinstance(signature, str) else "")


def _redacted(block: Mapping[str, Any], where: str) -> Reasoning:
    return Reasoning("", _string(block, "data", where))


_ASSISTANT_PARTS: Mapping[str, Callable[[Mapping[str, Any], str], Part]] = {
    "text": lambda block, where: Text(_string(block, "text", where)),
    "tool_use": _tool_use,
    "thinking": _thinking,
    "redacted_thinking": _redacted,
}


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise BadRequest(f"{where}: must be an object")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise BadRequest(f"{where}.type: {kind!r} runs on the provider's servers and is not available here; declare a custom tool instead")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema: must be a JSON Schema object")
    description = tool.get("description", "")
    if not isinstance(description, str):
        raise BadRequest(f"{where}.description: must be a string")
    return Tool(_string(tool, "name", where), description, text_of(schema))


def _tool_choice(choice: Any) -> bool:
    if choice is None:
        return True
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none"):
        raise BadRequest(f'tool_choice.type: {kind!r} is not supported; the sampled tokens are the model\'s own, use "auto" or "none"')
    return bool(kind == "auto")


def _stop(value: Any, index: int) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"stop_sequences.{index}: must be a string that is not empty")
    if len(value) > MAX_STOP_CHARS:
        raise BadRequest(f"stop_sequences.{index}: has {len(value)} characters; at most {MAX_STOP_CHARS} are supported")
    return value


def _list(value: Any, where: str, most: int) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where}: must be a list")
    return _at_most(most, value, where)


def _at_most(most: int, values: list[Any], where: str) -> list[Any]:
    if len(values) > most:
        raise BadRequest(f"{where}: has {len(values)} items; at most {most} are supported")
    return values


def _string(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{key}: must be a string")
    return value


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
