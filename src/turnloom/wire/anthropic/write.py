"""Writes a reply as a Messages response, whole or as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from turnloom.errors import TurnloomError
from turnloom.parse.contract import TextDelta
from turnloom.types import FinishReason, Part, Reasoning, Text, ToolCall
from turnloom.wire import sse
from turnloom.wire.anthropic.errors import error_object
from turnloom.wire.anthropic.read import THOUGHTS
from turnloom.wire.contract import Head, Reply, ReplyEvent, SampledTokens
from turnloom.wire.json import spliced, whole_text, write


def whole(reply: Reply) -> bytes:
    parts = [p for p in reply.message.parts if _shown(p, reply.head)]
    return write(_message(reply.head, [_block(p, reply.head.turn_id) for p in parts], _stop_reason(reply), reply.output_tokens))


def _shown(part: Part, head: Head) -> bool:
    """White space alone is not shown, nor is reasoning that was not asked for."""
    if isinstance(part, Reasoning):
        return _shows_thoughts(head)
    return isinstance(part, ToolCall) or bool(part.text.strip())


def _shows_thoughts(head: Head) -> bool:
    return head.request.wire.get(THOUGHTS) is True


def _message(head: Head, content: list[dict[str, Any]], stop: tuple[str | None, str | None], output_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{head.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": stop[0],
        "stop_sequence": stop[1],
        "usage": _usage(head.prompt_tokens, output_tokens),
    }


class AnthropicStream:
    """Server-sent events: one content block after another, each opened, filled and stopped.

    White space that opens a text block is held until something visible follows: a
    block of white space alone is refused when a client sends it back.
    """

    content_type = "text/event-stream"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._thoughts = _shows_thoughts(head)
        self._index = -1
        self._open: Literal["", "text", "thinking"] = ""
        self._held = ""

    def begin(self) -> bytes:
        return sse.event("message_start", {"message": _message(self._head, [], (None, None), 0)})

    def event(self, event: ReplyEvent, choice: int = 0) -> bytes:
        if isinstance(event, SampledTokens):
            return b""
        if isinstance(event, ToolCall):
            self._held = ""
            return self._stop() + self._call(event)
        if not event.text:
            return b""
        if isinstance(event, TextDelta):
            if self._open != "text" and not (self._held + event.text).strip():
                self._held += event.text
                return b""
            text, self._held = self._held + event.text, ""
            return self._fill("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": text})
        self._held = ""
        if not self._thoughts:
            return self._stop()
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._fill("thinking", block, {"type": "thinking_delta", "thinking": event.text})

    def ping(self) -> bytes:
        return sse.event("ping", {})

    def finish(self, reply: Reply, choice: int = 0) -> bytes:
        reason, sequence = _stop_reason(reply)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage(reply.head.prompt_tokens, reply.output_tokens)
        return self._stop() + sse.event("message_delta", {"delta": delta, "usage": usage}) + sse.event("message_stop", {})

    def error(self, error: TurnloomError) -> bytes:
        return sse.event("error", error_object(error))

    def _fill(self, kind: Literal["text", "thinking"], block: Mapping[str, Any], delta: Mapping[str, Any]) -> bytes:
        opening = b""
        if self._open != kind:
            opening = self._stop() + self._start(block)
            self._open = kind
        return opening + sse.event("content_block_delta", {"index": self._index, "delta": delta})

    def _call(self, call: ToolCall) -> bytes:
        start = self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": whole_text(call.arguments)}
        filled = sse.event("content_block_delta", {"index": self._index, "delta": delta})
        return start + filled + sse.event("content_block_stop", {"index": self._index})

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        return sse.event("content_block_start", {"index": self._index, "content_block": block})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        signed = b""
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._head.turn_id}
            signed = sse.event("content_block_delta", {"index": self._index, "delta": delta})
        return signed + sse.event("content_block_stop", {"index": self._index})


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _stop_reason(reply: Reply) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if reply.finish.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if reply.message.calls:
        return "tool_use", None
    if isinstance(reply.finish.matched, str):
        return "stop_sequence", reply.finish.matched
    return "end_turn", None


def _block(part: Part, turn_id: str) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": spliced(whole_text(part.arguments))}
    if isinstance(part, Reasoning):
        return {"type": "thinking", "thinking": part.text, "signature": turn_id}
    assert isinstance(part, Text)
    return {"type": "text", "text": part.text}
