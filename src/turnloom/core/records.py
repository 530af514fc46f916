"""What the tree is made of, where a request attaches to it, and what one committed turn adds."""

from __future__ import annotations

from dataclasses import dataclass

from turnloom.core.match import RequestKeys
from turnloom.core.order import Slot
from turnloom.types import Message, Request, Tool, Turn


@dataclass(frozen=True, slots=True)
class Node:
    """One place in a session's tree.

    A head (`parent` None) holds the tools that its histories were shown and no
    message. Every other node holds one message. `turn` names the turn that
    generated the message; None where the client brought it.
    """

    id: int
    parent: int | None
    message: Message | None = None
    tools: tuple[Tool, ...] = ()
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one turn adds: new nodes, parents before children, and the turn itself. The unit of durability."""

    nodes: tuple[Node, ...]
    turn: Turn


@dataclass(frozen=True, slots=True)
class Pending:
    """Where a request attaches. `path` are the matched nodes, head first; empty when no head has these tools.

    `slots` say which of the request's messages stands where, since results stand in the order of the recorded calls.
    `base` is the deepest turn on the path: its tokens can be continued. `tail`
    are the request's messages after the base turn's reply, or all of them.
    `respelled` counts replies on the path that no key matched, but their call ids or their beginning did,
    and those whose ids name other calls than their words. `elsewhere` is the deepest turn where another pool
    sampled it: then there is no base, since its tokens are not this pool's.
    """

    request: Request
    path: tuple[int, ...]
    base: str | None
    tail: tuple[Message, ...]
    keys: RequestKeys
    slots: tuple[Slot, ...]
    respelled: int = 0
    elsewhere: str | None = None

    @property
    def order(self) -> list[int]:
        """Which of the request's messages stands where."""
        return [i for i, _ in self.slots]
