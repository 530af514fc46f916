"""What Mistral's models write: `[TOOL_CALLS]NAME[ARGS]{…}`, or the older `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`.

`[CALL_ID]ID` may stand before `[ARGS]`; some templates leave `[ARGS]` out. Another
call may follow with a tag of its own or, with `[ARGS]`, right behind. There is no
closing tag: the block ends with its JSON. Reasoning stands in `[THINK]…[/THINK]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnloom.parse import strict_json
from turnloom.parse.blocks import Tags, ValueBlock, blocks
from turnloom.parse.body import printable
from turnloom.parse.format import Format
from turnloom.parse.json_calls import Keys, read_list
from turnloom.parse.nesting import JSON
from turnloom.parse.reader import Attempt
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


class MistralBlock(ValueBlock):
    tags = Tags(_OPENER, "", CallStatus.INVALID_JSON, again=_again)
    syntax = JSON
    head = re.compile(rf"(?:\[TOOL_CALLS\]{_BLANK})?{_LABEL}(?:\[ARGS\])?{_BLANK}(?=\{{)|\[TOOL_CALLS\]{_BLANK}(?=\[{_BLANK}[\{{\]])")
    unfinished = re.compile(rf"(?:\[TOOL_CALLS\]{_BLANK})?(?:{_NAME}{{1,256}}{_REST}?{_BLANK})?|\[TOOL_CALLS\]{_BLANK}\[{_BLANK}")

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        if raw.startswith("[", self.value_at):
            return read_list(raw, self.value_at, self.value_end, tools, _KEYS)
        found = self.head.match(raw)
        assert found is not None
        name, arguments = self.name, raw[self.value_at : self.value_end]
        if name not in tools:
            return [Attempt(CallStatus.UNKNOWN_TOOL, len(raw), printable(name))]
        if not strict_json.is_object(arguments):
            return [Attempt(CallStatus.INVALID_JSON, len(raw), name)]
        return [Attempt(CallStatus.OK, len(raw), name, strict_json.escape_surrogates(arguments), printable(found["id"] or ""))]


FORMAT = Format("mistral", lambda template: _OPENER in template, blocks(MistralBlock))
