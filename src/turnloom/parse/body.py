"""One call's block, from its opening tag to its closing tag: the promise of a body format. Knows no format itself.

A body finds the end of its own block, because only it knows where a closing tag
is an end and where it is part of a value. Offsets count characters from the
block's first, the first of its opening tag.
"""

from __future__ import annotations

from collections.abc import Mapping
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
class Decoded:
    """`arguments` is the JSON text of an object where `status` is OK, else empty. `written` is the model's own id for the call."""

    status: CallStatus
    name: str = ""
    arguments: str = ""
    written: str = ""


class Body(Protocol):
    """One block's body; made with the offset of its opener."""

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

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> Decoded:
        """What the whole block `raw` says, once it ended with status None."""
        ...


def printable(name: str) -> str:
    """A name fit for a record: a lone surrogate becomes its escape."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
