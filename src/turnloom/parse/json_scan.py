"""Follows one JSON object to its end, however it is cut. Judges no grammar: `strict_json` does, once the end is known."""

from __future__ import annotations

import re

from turnloom.parse.body import Broken, Ended
from turnloom.types import CallStatus

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE = re.compile(r"[ \t\n\r0-9+\-.eEtrufalsn,:]*")
_BLANK = re.compile(r"[ \t\n\r]*")


class JsonScan:
    """The text fed starts with `{`, at offset `at` of the block. `tail`: what must follow the object to end the block, blanks between."""

    def __init__(self, at: int, tail: tuple[str, ...]) -> None:
        self.end = -1
        """Where the object ends, once it does."""
        self._at = at
        self._tail = list(tail)
        self._carry = ""
        self._depth = 0
        self._string = False
        self._escaped = False

    def feed(self, text: str) -> Ended | Broken | None:
        window, self._carry = self._carry + text, ""
        i = 0
        while i < len(window) and self.end < 0:
            if self._escaped:
                self._escaped = False
                i += 1
                continue
            i = _end(_IN_STRING if self._string else _OUTSIDE, window, i)
            if i == len(window):
                break
            if not self._step(window[i], self._at + i + 1):
                return Broken(self._at + i, CallStatus.INVALID_JSON, restart=False)
            i += 1
        while self.end >= 0:
            i = _end(_BLANK, window, i)
            if not window.startswith(self._tail[0], i):
                if not self._tail[0].startswith(window[i:]):
                    return Broken(self._at + i, CallStatus.INVALID_JSON, restart=True)
                break
            i += len(self._tail.pop(0))
            if not self._tail:
                return Ended(self._at + i)
        self._carry = window[i:]
        self._at += i
        return None

    def _step(self, char: str, after: int) -> bool:
        """One character that ends a run. False: strict JSON has no such character here."""
        if self._string:
            self._string = char != '"'
            self._escaped = char == "\\"
            return char in '"\\'
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.end = after if self._depth == 0 else -1
        else:
            self._string = char == '"'
            return self._string
        return True


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
