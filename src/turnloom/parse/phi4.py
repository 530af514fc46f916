"""What Phi-4-mini writes, `<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>`, and Granite 3, without the closing tag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse.body import Attempt
from turnloom.parse.format import Format
from turnloom.parse.json_calls import Keys, read_list
from turnloom.parse.markup import Markup
from turnloom.parse.tags import tagged
from turnloom.parse.value_body import ValueBody
from turnloom.types import CallStatus, Tool

_OPEN, _CLOSE = "<|tool_call|>", "<|/tool_call|>"


class Phi4Body(ValueBody):
    fault = CallStatus.INVALID_JSON
    tail: ClassVar[tuple[str, ...]] = (_CLOSE,)

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return read_list(raw, self.span, tools, Keys())


class GraniteBody(Phi4Body):
    tail: ClassVar[tuple[str, ...]] = ()


# Its template only shows the tags around the tools it lists.
FORMAT = Format("phi4", lambda template: _CLOSE in template or "<|/tool|>" in template, tagged(Phi4Body, markup=Markup(_OPEN, _CLOSE)))
GRANITE = Format("granite3", lambda template: _OPEN in template, tagged(GraniteBody, markup=Markup(_OPEN, "")))
