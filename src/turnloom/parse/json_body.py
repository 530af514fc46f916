"""The body that Hermes, Qwen2.5 and Qwen3 write: one JSON object with a name and arguments.

`{"name": …, "arguments": {…}}`; `parameters` is a synonym; the arguments may be
a JSON string that holds an object; with neither the call has no arguments. Other
members are ignored. The arguments keep the model's spelling: number formats,
duplicate keys, escapes and spaces. Never decides what a value means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse import strict_json
from turnloom.parse.body import TOOL_CLOSE, TOOL_OPEN, Broken, Decoded, Ended, printable
from turnloom.parse.format import Format
from turnloom.parse.tags import tagged
from turnloom.parse.xml_body import XmlBody
from turnloom.types import CallStatus, Tool

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_OUTSIDE = re.compile(r"[ \t\n\r0-9+\-.eEtrufalsn,:]*")
_BLANK = re.compile(r"[ \t\n\r]*")


class JsonBody:
    """Follows strings and brackets only far enough to find the end; `decode` judges the grammar."""

    opener: ClassVar[str] = "{"
    fault: ClassVar[CallStatus] = CallStatus.INVALID_JSON

    def __init__(self, at: int) -> None:
        self.name = ""
        self._at = at
        self._carry = ""
        self._depth = 0
        self._string = False
        self._escaped = False
        self._closed = False

    def feed(self, text: str) -> Ended | Broken | None:
        window, self._carry = self._carry + text, ""
        i = 0
        while i < len(window) and not self._closed:
            if self._escaped:
                self._escaped = False
                i += 1
                continue
            i = _end(_IN_STRING if self._string else _OUTSIDE, window, i)
            if i == len(window):
                break
            if not self._step(window[i]):
                return Broken(self._at + i, CallStatus.INVALID_JSON, restart=False)
            i += 1
        if self._closed:
            i = _end(_BLANK, window, i)
            if window.startswith(TOOL_CLOSE, i):
                return Ended(self._at + i + len(TOOL_CLOSE))
            if not TOOL_CLOSE.startswith(window[i : i + len(TOOL_CLOSE)]):
                return Broken(self._at + i, CallStatus.INVALID_JSON, restart=True)
        self._carry = window[i:]
        self._at += i
        return None

    def _step(self, char: str) -> bool:
        """One character that ends a run. False: strict JSON has no such character here."""
        if self._string:
            self._string = char != '"'
            self._escaped = char == "\\"
            return char in '"\\'
        if char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self._closed = self._depth == 0
        else:
            self._string = char == '"'
            return self._string
        return True

    def finish(self) -> Ended | None:
        return None

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> Decoded:
        try:
            found = strict_json.members(raw[len(TOOL_OPEN) : -len(TOOL_CLOSE)])
        except ValueError:
            return Decoded(CallStatus.INVALID_JSON)
        names = [member.value for member in found if member.key == "name"]
        name = names[-1] if names else None
        if not isinstance(name, str) or not name:
            return Decoded(CallStatus.MISSING_NAME)
        if name not in tools:
            return Decoded(CallStatus.UNKNOWN_TOOL, printable(name))
        given = [member for member in found if member.key in ("arguments", "parameters")]
        arguments = _arguments(given[0]) if given else "{}"
        if arguments is None or len(names) > 1 or len(given) > 1:
            return Decoded(CallStatus.MALFORMED, name)
        return Decoded(CallStatus.OK, name, arguments)


def _arguments(member: strict_json.Member) -> str | None:
    """The text of the object that the member is or holds."""
    if isinstance(member.value, dict):
        return member.text
    if isinstance(member.value, str):
        return strict_json.escape_surrogates(member.value) if strict_json.is_object(member.value) else None
    return None


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


_TAUGHT = re.compile(r"<tool_call>(?:\\n|\s)*\{\\?[\"']")

# JSON or XML bodies; also what the renderer teaches a model whose template has no place for tools.
FORMAT = Format("hermes", lambda template: bool(_TAUGHT.search(template)), tagged(JsonBody, XmlBody))
