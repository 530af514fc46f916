"""A request's messages as they are on record: what the engine is shown when a history that came back is written again.

Clients respell replies, leave out their reasoning and rename their calls. Where a
reply matched, the recorded one stands in its place, and the results that follow it
answer its calls under their recorded ids and in their order.
"""

from __future__ import annotations

from turnloom.core.order import as_recorded
from turnloom.core.records import Pending
from turnloom.core.tree import Tree
from turnloom.types import Message


def restored(tree: Tree, pending: Pending) -> tuple[Message, ...]:
    """All of the request's messages. A reply that no turn generated is the client's own, as it came."""
    came = pending.request.messages
    return tuple(as_recorded(came, [*_replies(tree, pending), *came[len(pending.path) - 1 if pending.path else 0 :]]))


def restored_tail(pending: Pending, reply: Message) -> tuple[Message, ...]:
    """The messages after the base turn's reply, which is `reply` on record."""
    came = pending.request.messages[-len(pending.tail) - 1 :]
    return tuple(as_recorded(came, [reply, *pending.tail])[1:])


def calls_before(tree: Tree, pending: Pending, index: int) -> int:
    """How many calls the first `index` messages have as they are on record."""
    return sum(len(message.calls) for message in _replies(tree, pending)[:index])


def _replies(tree: Tree, pending: Pending) -> list[Message]:
    """What stands for each message that matched."""
    nodes = [tree.nodes[node] for node in pending.path[1:]]
    return [
        node.message if node.turn is not None and node.message is not None else message
        for node, message in zip(nodes, pending.request.messages, strict=False)
    ]
