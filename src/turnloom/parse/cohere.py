"""What Command A and R7B write: reasoning, then calls in `<|START_ACTION|>[…]<|END_ACTION|>` or an answer in response tags.

Each call is `{"tool_call_id": …, "tool_name": …, "parameters": {…}}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnloom.parse.blocks import Tags, ValueBlock, blocks
from turnloom.parse.format import Format
from turnloom.parse.json_calls import Keys, read_list
from turnloom.parse.nesting import JSON
from turnloom.parse.reader import Attempt
from turnloom.types import CallStatus, Tool

_KEYS = Keys(("tool_name", "name"), ("parameters", "arguments"), ("tool_call_id",))


class CohereBlock(ValueBlock):
    tags = Tags("<|START_ACTION|>", "<|END_ACTION|>", CallStatus.INVALID_JSON, framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>"))
    syntax = JSON
    head = re.compile(r"<\|START_ACTION\|>[ \t\r\n]*(?=\[)")
    unfinished = re.compile(r"<\|START_ACTION\|>[ \t\r\n]*")

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return read_list(raw, self.value_at, self.value_end, tools, _KEYS)


FORMAT = Format("cohere", lambda template: "<|START_ACTION|>" in template, blocks(CohereBlock))
