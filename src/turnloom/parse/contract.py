"""What an output parser promises: text in, in pieces of any size; events out, nothing lost.

A parser is pure and incremental. However the same text is cut into pieces, the
events carry the same text and the same calls. Every character fed comes out
exactly once: as visible text, as reasoning, inside a call that parsed (`raw`),
or as framing (reasoning tags with two newlines after the closing one, tags of a
section around calls that parsed, and at most one newline on each side of any other
tag).
What could not be parsed comes out as text, with a CallRecord that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnloom.types import CallRecord, Tool


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallEvent:
    """A complete call that parsed. `arguments` is the JSON text of an object, spelled as the model did where it is JSON.

    `written` is the id that the model gave the call, where its format has ids.
    """

    name: str
    arguments: str
    record: CallRecord
    written: str = ""


ParseEvent = TextDelta | ReasoningDelta | CallEvent


class Parser(Protocol):
    """One turn's parser. `records` lists every attempt at a call so far, in order, good and bad."""

    records: list[CallRecord]

    def feed(self, text: str) -> list[ParseEvent]: ...

    def finish(self) -> list[ParseEvent]:
        """The end of the output. An open call becomes text with status UNCLOSED; open reasoning stays reasoning."""
        ...


ParserFactory = Callable[[Sequence[Tool], bool], Parser]
"""(declared tools, reasoning already opened by the prompt) -> a fresh parser."""
