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
from turnloom.parse.json_scan import JsonScan
from turnloom.parse.tags import tagged
from turnloom.parse.xml_body import XmlBody
from turnloom.types import CallStatus, Tool


class JsonBody:
    """Follows strings and brackets only far enough to find the end; `decode` judges the grammar."""

    opener: ClassVar[str] = "{"
    fault: ClassVar[CallStatus] = CallStatus.INVALID_JSON

    def __init__(self, at: int) -> None:
        self.name = ""
        self._scan = JsonScan(at, (TOOL_CLOSE,))

    def feed(self, text: str) -> Ended | Broken | None:
        return self._scan.feed(text)

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


_TAUGHT = re.compile(r"<tool_call>(?:\\n|\s)*\{\\?[\"']")

# JSON or XML bodies; also what the renderer teaches a model whose template has no place for tools.
FORMAT = Format("hermes", lambda template: bool(_TAUGHT.search(template)), tagged(JsonBody, XmlBody))
