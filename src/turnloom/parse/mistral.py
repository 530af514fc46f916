"""What Mistral's models write: `[TOOL_CALLS]NAME[ARGS]{…}`, or the older `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`.

`[CALL_ID]ID` may stand before `[ARGS]`; some templates leave `[ARGS]` out. Another
call may follow with a tag of its own or, with `[ARGS]`, right behind. There is no
closing tag: the block ends with its JSON. Reasoning stands in `[THINK]…[/THINK]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnloom.parse.body import Attempt, printable
from turnloom.parse.format import Format
from turnloom.parse.json_calls import Keys, read_arguments, read_list
from turnloom.parse.markup import Markup
from turnloom.parse.tags import tagged
from turnloom.parse.value_body import ValueBody
from turnloom.types import CallStatus, Tool

_OPENER, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_KEYS = Keys(id=("id",))
_NAME = r"[^\[\]{}()\"'<>,;:\s]"
_LABEL = rf"(?P<name>{_NAME}{{1,256}})(?:\[CALL_ID\](?P<id>[^\[\]{{}}\s]{{0,128}}))?"
_BLANK = r"[ \t\r\n]{0,32}"


def _starts(*words: str) -> str:
    """A pattern for everything that one of the words starts with, itself included."""
    return "|".join(re.escape(word[:n]) for word in words for n in range(1, len(word) + 1))


_REST = rf"(?:{_starts('[CALL_ID]', _ARGS)}|\[CALL_ID\][^\[\]{{}}\s]{{0,128}}(?:{_starts(_ARGS)})?)"
_AGAIN = re.compile(rf"{_LABEL}\[ARGS\]{_BLANK}\{{")
_MAY_COME_AGAIN = re.compile(rf"{_NAME}{{1,256}}(?:{_REST}(?:(?<=\[ARGS\]){_BLANK})?)?")


def _again(text: str) -> bool | None:
    if _AGAIN.match(text):
        return True
    return None if _MAY_COME_AGAIN.fullmatch(text) else False


class MistralBody(ValueBody):
    fault = CallStatus.INVALID_JSON
    head = re.compile(rf"{_LABEL}(?:\[ARGS\])?{_BLANK}(?=\{{)|(?=\[{_BLANK}[\{{\]])")
    unfinished = re.compile(rf"{_NAME}{{1,256}}{_REST}?{_BLANK}|\[{_BLANK}")
    tail = ()

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        if not self.name:
            return read_list(raw, self.span, tools, _KEYS)
        start, end = self.span
        return [read_arguments(self.name, raw[start:end], tools, printable(self.said["id"] or ""))]


FORMAT = Format("mistral", lambda template: _OPENER in template, tagged(MistralBody, markup=Markup(_OPENER, "", again=_again)))
