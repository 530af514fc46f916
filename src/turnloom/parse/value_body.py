"""The body that is a head and one bracketed value: Mistral, Gemma 4, LFM2, Phi-4, Granite 3, Command. Head and meaning are a subclass's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse.body import Attempt, Broken, Ended
from turnloom.parse.nesting import JSON, Bracketed, Syntax
from turnloom.types import CallStatus, Tool

MAX_HEAD = 512
"""Characters between an opening tag and the value; more than that opens no call."""


class ValueBody:
    """A `Body`, of which a subclass says the meaning (`decode`).

    `head` matches everything from the body's first character to the value's
    opening bracket, with the tool's `name` as a group where it is there;
    `unfinished` matches whatever could become that.
    """

    opener: ClassVar[str] = ""
    fault: ClassVar[CallStatus]
    syntax: ClassVar[Syntax] = JSON
    head: ClassVar[re.Pattern[str]] = re.compile(r"(?=\[)")
    unfinished: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    tail: ClassVar[tuple[str, ...]]
    """What must stand after the value, blanks before each."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._start = ""
        self.said: dict[str, str | None] = {}
        """What the groups of the head matched, once there is one."""
        self.value: Bracketed | None = None

    @property
    def name(self) -> str:
        return self.said.get("name") or ""

    @property
    def span(self) -> tuple[int, int]:
        """Where the value stands in the block."""
        assert self.value is not None
        return self.value.start, self.value.end

    def feed(self, text: str) -> Ended | Broken | None:
        if self.value is None:
            self._start += text
            # Of bounded length, so this is looked at a bounded number of times.
            start = self._start[:MAX_HEAD]
            found = self.head.match(start)
            if found is None:
                possible = len(self._start) < MAX_HEAD and self.unfinished.fullmatch(start)
                return None if possible else Broken(self._at, self.fault, restart=True)
            self.said = found.groupdict()
            self.value = Bracketed(self._at + found.end(), self.tail, self.fault, self.syntax)
            text = self._start[found.end() :]
        return self.value.feed(text)

    def finish(self) -> Ended | None:
        return None

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        raise NotImplementedError
