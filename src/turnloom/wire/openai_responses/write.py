"""Writes a reply as a response object: its items, and what it says again of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnloom.types import FinishReason, Part, Reasoning, Text, Tool, ToolCall
from turnloom.wire import freeform
from turnloom.wire.contract import Head, Reply
from turnloom.wire.json import whole_text, write
from turnloom.wire.openai_responses.ids import item_id, response_id
from turnloom.wire.openai_responses.tools import short_name
from turnloom.wire.refs import as_base64


def whole(reply: Reply) -> bytes:
    writer = ItemWriter(reply.head)
    parts = reply.message.parts or (Text(""),)  # Without any item, a client would have nothing to carry back.
    last = len(parts) - 1
    items = [writer.item(part, i, ended(reply) if i == last else "completed") for i, part in enumerate(parts)]
    return write(finished(reply, items))


def finished(reply: Reply, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The response of a reply that came to its end, or to the end of what it was allowed."""
    status = ended(reply)
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    usage = _usage(reply.head.prompt_tokens, reply.output_tokens)
    return response(reply.head, status, items, incomplete_details=details, usage=usage)


def ended(reply: Reply) -> str:
    return "incomplete" if reply.finish.reason is FinishReason.LENGTH else "completed"


def response(head: Head, status: str, items: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
    """Every field of a response. Its temperature and top_p are the session's, which no reply tells."""
    return {
        "id": response_id(head),
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": list(items),
        "temperature": None,
        "top_logprobs": 0,
        "top_p": None,
        "usage": None,
        **head.request.wire.get("echo", {}),
        **more,
    }


class ItemWriter:
    """The items of one reply: `opened` as they are announced, `item` when they are done."""

    def __init__(self, head: Head) -> None:
        self._turn = head.turn_id
        self._tools: dict[str, Tool] = {tool.name: tool for tool in head.request.tools}
        self.summary = bool(head.request.wire.get("summary"))
        """Whether reasoning goes out as a summary, which clients show and carry back, or as the text it is."""
        self._encrypted = bool(head.request.wire.get("encrypted"))

    def message(self, number: int, content: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
        return {
            "id": item_id("msg", self._turn, number),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": list(content),
        }

    def reasoning(self, number: int, text: str | None, status: str) -> dict[str, Any]:
        """`text` is None while there is none yet."""
        item: dict[str, Any] = {"id": item_id("rs", self._turn, number), "type": "reasoning", "status": status, "summary": []}
        if self.summary:
            item["summary"] = [] if text is None else [summary_text(text)]
        else:
            item["content"] = [] if text is None else [reasoning_text(text)]
        if self._encrypted:
            item["encrypted_content"] = as_base64(self._turn)
        return item

    def call(self, call: ToolCall, number: int, *, done: bool) -> dict[str, Any]:
        """`done` False: as it is announced, without what it says."""
        tool = self._tools.get(call.name, Tool(call.name, "", "{}"))
        kind, holder = ("custom_tool_call", "input") if tool.freeform else ("function_call", "arguments")
        item = {
            "id": item_id("ctc" if tool.freeform else "fc", self._turn, number),
            "type": kind,
            "status": "completed" if done else "in_progress",
            "call_id": call.id,
            "name": short_name(tool),
            holder: self.said(call) if done else "",
        }
        return {**item, "namespace": tool.namespace} if tool.namespace else item

    def said(self, call: ToolCall) -> str:
        """What the call says: a freeform tool's string, or JSON text as the model spelled it."""
        return freeform.string_of(call.arguments) if self.is_freeform(call) else whole_text(call.arguments)

    def is_freeform(self, call: ToolCall) -> bool:
        return call.name in self._tools and self._tools[call.name].freeform

    def item(self, part: Part, number: int, status: str) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            return self.call(part, number, done=True)
        if isinstance(part, Reasoning):
            return self.reasoning(number, part.text, status)
        assert isinstance(part, Text)
        return self.message(number, [output_text(part.text)], status)


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def summary_text(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + output_tokens,
    }
