"""A call written as labels and then one JSON object: what DeepSeek V3 and V3.1 and Kimi K2 share. The spellings are a subclass's.

Each label ends at a separator and holds no `<` and no newline. The arguments
keep the model's spelling; nothing at all between the last separator and the
closing tag is a call without arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse import strict_json
from turnloom.parse.body import MAX_LABEL, Attempt, Broken, Ended, undeclared
from turnloom.parse.nesting import Bracketed
from turnloom.types import CallStatus, Tool

_LABEL = re.compile(r"[^<\n]*")
_BLANKS = " \t\r\n"


class HeadedJsonBody:
    opener: ClassVar[str] = ""
    fault: ClassVar[CallStatus] = CallStatus.MALFORMED
    separators: ClassVar[tuple[str, ...]]
    """What ends each label, in order."""
    fence: ClassVar[str] = ""
    """What must stand before the object, blanks aside."""
    tail: ClassVar[tuple[str, ...]]
    """What must stand after it; the last one is the block's closing tag."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._carry = ""
        self._labels: list[str] = []
        self._fenced = not self.fence
        self._value: Bracketed | None = None

    @property
    def name(self) -> str:
        return self._labels[-1] if len(self._labels) == len(self.separators) else ""

    def feed(self, text: str) -> Ended | Broken | None:
        if self._value is not None:
            return self._value.feed(text)
        window, self._carry = self._carry + text, ""
        i = 0
        while len(self._labels) < len(self.separators):
            end = _label_end(window, i)
            separator = self.separators[len(self._labels)]
            if end - i > MAX_LABEL:
                return Broken(self._at + end, self.fault, restart=True)
            if not window.startswith(separator, end):
                if not separator.startswith(window[end:]):
                    return Broken(self._at + end, self.fault, restart=True)
                self._wait(window, i)
                return None
            self._labels.append(window[i:end].strip(_BLANKS))
            i = end + len(separator)
        return self._before_object(window, i)

    def _wait(self, window: str, i: int) -> None:
        self._carry = window[i:]
        self._at += i

    def _before_object(self, window: str, i: int) -> Ended | Broken | None:
        i = _after_blanks(window, i)
        if not self._fenced:
            if not window.startswith(self.fence, i):
                if not self.fence.startswith(window[i:]):
                    return Broken(self._at + i, self.fault, restart=True)
                self._wait(window, i)
                return None
            self._fenced = True
            i = _after_blanks(window, i + len(self.fence))
        if i == len(window):
            self._wait(window, i)
            return None
        self._value = Bracketed(self._at + i, self.tail, CallStatus.INVALID_JSON, absent=window[i] != "{")
        return self._value.feed(window[i:])

    def finish(self) -> Ended | None:
        return None

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return [self._call(self.name, raw, tools)]

    def _call(self, name: str, raw: str, tools: Mapping[str, Tool], written: str = "") -> Attempt:
        assert self._value is not None
        arguments = raw[self._value.start : self._value.end] or "{}"
        if not strict_json.is_object(arguments):
            return Attempt(CallStatus.INVALID_JSON)
        return undeclared(name, tools) or Attempt(CallStatus.OK, name, strict_json.escape_surrogates(arguments), written)


def _label_end(window: str, at: int) -> int:
    found = _LABEL.match(window, at)
    assert found is not None
    return found.end()


def _after_blanks(window: str, at: int) -> int:
    return len(window) - len(window[at:].lstrip(_BLANKS))
