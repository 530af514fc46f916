"""A request's messages as they are on record: what the engine is shown when a history that came back is written again.

Clients respell replies, leave out their reasoning and rename their calls. Where a
reply matched, the recorded one stands in its place, and the results that follow it
answer its calls under their recorded ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnloom.core.match import call_key
from turnloom.core.tree import Pending, Tree
from turnloom.types import Message, ToolResult


def restored(tree: Tree, pending: Pending) -> tuple[Message, ...]:
    """All of the request's messages."""
    renamed = _Renamed()
    messages: list[Message] = []
    for message, node in zip(pending.request.messages, pending.path[1:], strict=False):
        recorded = tree.nodes[node].message
        if tree.nodes[node].turn is None or recorded is None:
            messages.append(renamed.result(message))
        else:
            renamed.reply(recorded, message)
            messages.append(recorded)
    rest = pending.request.messages[len(messages) :]
    return (*messages, *map(renamed.result, rest))


def restored_tail(pending: Pending, reply: Message) -> tuple[Message, ...]:
    """The messages after the base turn's reply, which is `reply` on record."""
    renamed = _Renamed()
    renamed.reply(reply, pending.request.messages[-len(pending.tail) - 1])
    return tuple(map(renamed.result, pending.tail))


class _Renamed:
    """Which recorded call an id means that came back."""

    def __init__(self) -> None:
        self._meant: dict[str, list[str]] = {}

    def reply(self, recorded: Message, came: Message) -> None:
        """Calls are the same by id, then by what they say, then by their place."""
        pairs = _pairs(recorded, came)
        for call_id in dict.fromkeys(came_id for came_id, _ in pairs):
            self._meant[call_id] = [recorded_id for came_id, recorded_id in pairs if came_id == call_id]

    def result(self, message: Message) -> Message:
        if message.role != "tool":
            return message
        return replace(message, parts=tuple(self._part(p) if isinstance(p, ToolResult) else p for p in message.parts))

    def _part(self, part: ToolResult) -> ToolResult:
        meant = self._meant.get(part.call_id)
        if not meant:
            return part
        # Several calls under one id are answered in their order.
        return replace(part, call_id=meant.pop(0) if len(meant) > 1 else meant[0])


def _pairs(recorded: Message, came: Message) -> Sequence[tuple[str, str]]:
    """(id that came back, recorded id) of each call, in the order in which they came back."""
    left = list(recorded.calls)
    pairs: list[tuple[str, str]] = []
    for call in came.calls:
        ways = ([c for c in left if c.id == call.id], [c for c in left if call_key(c) == call_key(call)], left)
        same = next((found[0] for found in ways if found), None)
        if same is not None:
            left.remove(same)
            pairs.append((call.id, same.id))
    return pairs
