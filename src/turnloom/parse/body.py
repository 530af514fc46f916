"""One block, from its opening tag to its end, with a call or several: the promise of a body format. Knows no format itself.

A body finds the end of its own block, because only it knows where a closing tag
is an end and where it is part of a value. Offsets count characters from the
block's first, the first of its opening tag.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from turnloom.types import CallStatus, Tool

TOOL_OPEN = "<tool_call>"
TOOL_CLOSE = "</tool_call>"

MAX_LABEL = 256
"""Characters of a tool's name, a parameter's key or a call's id, at most."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The block is [0, end). `status` None: well-formed, to be decoded. `end` may lie before text already fed."""

    end: int
    status: CallStatus | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """No continuation can make the block a call; [0, at) is text and its end is the next closing tag.

    `restart`: an opening tag after `at` opens another attempt. False where the
    break may be inside a value, so that a call which was only quoted never runs.
    """

    at: int
    status: CallStatus
    restart: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a call in a block. `arguments` is the JSON text of an object where `status` is OK; `written` the model's own id.

    Of several in a block each one's text goes from where the one before ended to
    `end`, an offset in the block; the last one's to the block's end.
    """

    status: CallStatus
    name: str = ""
    arguments: str = ""
    written: str = ""
    end: int = 0


class Body(Protocol):
    """One block's body; made with the offset of its first character, which is no blank."""

    opener: ClassVar[str]
    """The first characters after the opening tag and blanks; empty: any."""
    fault: ClassVar[CallStatus]
    """What a body is that does not follow the format."""

    def __init__(self, at: int) -> None: ...

    @property
    def name(self) -> str:
        """The tool's name once it is known, else empty."""
        ...

    def feed(self, text: str) -> Ended | Broken | None:
        """More of the block; the first piece starts with the opener. None: not decided yet."""
        ...

    def finish(self) -> Ended | None:
        """The output is over. None: the block never ended."""
        ...

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        """What the whole block `raw` says, once it ended with status None; at least one attempt."""
        ...


def printable(name: str) -> str:
    """A name fit for a record: a lone surrogate becomes its escape."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def undeclared(name: str, tools: Collection[str]) -> Attempt | None:
    """What a call of that name is, whatever else it says; None: it is one to a declared tool."""
    if not name:
        return Attempt(CallStatus.MISSING_NAME)
    return None if name in tools else Attempt(CallStatus.UNKNOWN_TOOL, printable(name))
