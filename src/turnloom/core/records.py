"""What the tree is made of, and what one committed turn adds to it."""

from __future__ import annotations

from dataclasses import dataclass

from turnloom.types import Message, Tool, Turn


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
