"""What Phi-4-mini writes, `<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>`, and Granite 3, without the closing tag."""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnloom.parse.blocks import Tags, ValueBlock, blocks
from turnloom.parse.format import Format
from turnloom.parse.json_calls import Keys, read_list
from turnloom.parse.nesting import JSON
from turnloom.parse.reader import Attempt
from turnloom.types import CallStatus, Tool


class Phi4Block(ValueBlock):
    tags = Tags("<|tool_call|>", "<|/tool_call|>", CallStatus.INVALID_JSON)
    syntax = JSON
    head = re.compile(r"<\|tool_call\|>[ \t\r\n]*(?=\[)")
    unfinished = re.compile(r"<\|tool_call\|>[ \t\r\n]*")

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return read_list(raw, self.value_at, self.value_end, tools, Keys())


class GraniteBlock(Phi4Block):
    tags = Tags("<|tool_call|>", "", CallStatus.INVALID_JSON)


# Its template only shows the tags around the tools it lists.
FORMAT = Format("phi4", lambda template: "<|/tool_call|>" in template or "<|/tool|>" in template, blocks(Phi4Block))
GRANITE = Format("granite3", lambda template: "<|tool_call|>" in template, blocks(GraniteBlock))
