"""One turn's reply in the neutral form, built from parse events as they come."""

from __future__ import annotations

from turnloom.parse.contract import CallEvent, ParseEvent, TextDelta
from turnloom.types import Message, Part, Reasoning, Text, ToolCall
from turnloom.wire.contract import ReplyEvent


class ReplyBuilder:
    """Gathers parts and mints tool-call ids.

    An id is the dialect's prefix, the turn's id and the call's number: unique in
    the store, and a client that carries it back names the turn it came from.
    """

    def __init__(self, turn_id: str, call_prefix: str) -> None:
        self._turn_id = turn_id
        self._prefix = call_prefix
        self._parts: list[Part] = []
        self._open: list[str] = []
        self._open_kind: type[Text] | type[Reasoning] | None = None
        self._calls = 0

    def feed(self, event: ParseEvent) -> ReplyEvent:
        if isinstance(event, CallEvent):
            self._close()
            call = ToolCall(f"{self._prefix}{self._turn_id}{self._calls:02d}", event.name, event.arguments, event.written)
            self._calls += 1
            self._parts.append(call)
            return call
        kind = Text if isinstance(event, TextDelta) else Reasoning
        if kind is not self._open_kind:
            self._close()
            self._open_kind = kind
        self._open.append(event.text)
        return event

    def message(self) -> Message:
        """The reply so far; may be asked more than once."""
        self._close()
        return Message("assistant", tuple(self._parts))

    def _close(self) -> None:
        if self._open_kind is not None and (text := "".join(self._open)):
            self._parts.append(Text(text) if self._open_kind is Text else Reasoning(text))
        self._open, self._open_kind = [], None
