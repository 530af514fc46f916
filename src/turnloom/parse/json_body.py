"""The body that Hermes, Qwen2.5 and Qwen3 write: one JSON object with a name and arguments, as `json_calls` says.

`{"name": …, "arguments": {…}}`; `parameters` is a synonym.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse.body import TOOL_CLOSE, TOOL_OPEN, Attempt, Broken, Ended
from turnloom.parse.format import Format
from turnloom.parse.json_calls import Keys, read_object
from turnloom.parse.nesting import Bracketed
from turnloom.parse.tags import tagged
from turnloom.parse.xml_body import XmlBody
from turnloom.types import CallStatus, Tool


class JsonBody:
    """Follows strings and brackets only far enough to find the end; `decode` judges the grammar."""

    opener: ClassVar[str] = "{"
    fault: ClassVar[CallStatus] = CallStatus.INVALID_JSON

    def __init__(self, at: int) -> None:
        self.name = ""
        self._value = Bracketed(at, (TOOL_CLOSE,), self.fault)

    def feed(self, text: str) -> Ended | Broken | None:
        return self._value.feed(text)

    def finish(self) -> Ended | None:
        return None

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return [read_object(raw[len(TOOL_OPEN) : -len(TOOL_CLOSE)], tools, Keys())]


_TAUGHT = re.compile(r"<tool_call>(?:\\n|\s)*\{\\?[\"']")

# JSON or XML bodies; also what the renderer teaches a model whose template has no place for tools.
FORMAT = Format("hermes", lambda template: bool(_TAUGHT.search(template)), tagged(JsonBody, XmlBody))
