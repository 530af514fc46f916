"""Writes a reply as a stream: one item after another, each announced, filled and done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from turnloom.errors import TurnloomError
from turnloom.parse.contract import TextDelta
from turnloom.types import ToolCall
from turnloom.wire import sse
from turnloom.wire.contract import Head, Reply, ReplyEvent, SampledTokens
from turnloom.wire.openai_responses.errors import failure
from turnloom.wire.openai_responses.ids import item_id
from turnloom.wire.openai_responses.write import ItemWriter, ended, finished, output_text, reasoning_text, response, summary_text


class ResponsesStream:
    """Server-sent events, numbered from 0. The last one holds the whole response."""

    content_type = "text/event-stream"

    def __init__(self, head: Head) -> None:
        self._head = head
        self._items = ItemWriter(head)
        self._next = 0
        self._done: list[dict[str, Any]] = []
        self._open: Literal["", "text", "reasoning"] = ""
        self._held: list[str] = []
        """What the open item has said."""

    def begin(self) -> bytes:
        started = response(self._head, "in_progress")
        return self._event("response.created", {"response": started}) + self._event("response.in_progress", {"response": started})

    def event(self, event: ReplyEvent, choice: int = 0) -> bytes:
        if isinstance(event, SampledTokens):
            return b""
        if isinstance(event, ToolCall):
            return self._close() + self._call(event)
        kind: Literal["text", "reasoning"] = "text" if isinstance(event, TextDelta) else "reasoning"
        opening = b"" if self._open == kind else self._close() + self._announce(kind)
        self._held.append(event.text)
        return opening + self._delta(event.text)

    def ping(self) -> bytes:
        return self._event("keepalive", {})

    def finish(self, reply: Reply, choice: int = 0) -> bytes:
        status = ended(reply)
        empty = b"" if self._open or self._done else self._announce("text")
        return empty + self._close(status) + self._event(f"response.{status}", {"response": finished(reply, self._done)})

    def error(self, error: TurnloomError) -> bytes:
        return self._event("response.failed", {"response": response(self._head, "failed", self._done, error=failure(error))})

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        number, self._next = self._next, self._next + 1
        return sse.event(name, {"sequence_number": number, **fields})

    @property
    def _number(self) -> int:
        """The item that is open, or comes next."""
        return len(self._done)

    def _added(self, item: Mapping[str, Any]) -> bytes:
        return self._event("response.output_item.added", {"output_index": self._number, "item": item})

    def _finished(self, item: dict[str, Any]) -> bytes:
        sent = self._event("response.output_item.done", {"output_index": self._number, "item": item})
        self._done.append(item)
        return sent

    def _call(self, call: ToolCall) -> bytes:
        item = self._items.call(call, self._number, done=True)
        kind, key = ("custom_tool_call_input", "input") if self._items.is_freeform(call) else ("function_call_arguments", "arguments")
        at = {"item_id": item["id"], "output_index": self._number}
        added = self._added(self._items.call(call, self._number, done=False))
        delta = self._event(f"response.{kind}.delta", {**at, "delta": item[key]})
        done = self._event(f"response.{kind}.done", {**at, key: item[key]})
        return added + delta + done + self._finished(item)

    def _announce(self, kind: Literal["text", "reasoning"]) -> bytes:
        self._open = kind
        if kind == "text":
            added = self._added(self._items.message(self._number, [], "in_progress"))
            return added + self._part("response.content_part.added", output_text(""))
        added = self._added(self._items.reasoning(self._number, None, "in_progress"))
        if self._items.summary:
            return added + self._part("response.reasoning_summary_part.added", summary_text(""))
        return added + self._part("response.content_part.added", reasoning_text(""))

    def _delta(self, text: str) -> bytes:
        if self._open == "text":
            return self._part_event("response.output_text.delta", delta=text, logprobs=[])
        if self._items.summary:
            return self._part_event("response.reasoning_summary_text.delta", delta=text)
        return self._part_event("response.reasoning_text.delta", delta=text)

    def _close(self, status: str = "completed") -> bytes:
        if not self._open:
            return b""
        text, kind = "".join(self._held), self._open
        if kind == "text":
            done = self._part_event("response.output_text.done", text=text, logprobs=[])
            done += self._part("response.content_part.done", output_text(text))
            item = self._items.message(self._number, [output_text(text)], status)
        else:
            item = self._items.reasoning(self._number, text, status)
            if self._items.summary:
                done = self._part_event("response.reasoning_summary_text.done", text=text)
                done += self._part("response.reasoning_summary_part.done", summary_text(text))
            else:
                done = self._part_event("response.reasoning_text.done", text=text)
                done += self._part("response.content_part.done", reasoning_text(text))
        self._open, self._held = "", []
        return done + self._finished(item)

    def _part(self, name: str, part: Mapping[str, Any]) -> bytes:
        return self._part_event(name, part=part)

    def _part_event(self, name: str, **fields: Any) -> bytes:
        """An event of the only part of the open item."""
        kind, index = "msg", "content_index"
        if self._open == "reasoning":
            kind, index = "rs", "summary_index" if self._items.summary else "content_index"
        at = {"item_id": item_id(kind, self._head.turn_id, self._number), "output_index": self._number, index: 0}
        return self._event(name, {**at, **fields})
