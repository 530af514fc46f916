"""What Command A and R7B write: reasoning, then calls in `<|START_ACTION|>[…]<|END_ACTION|>` or an answer in response tags.

Each call is `{"tool_call_id": …, "tool_name": …, "parameters": {…}}`. Aya's template
has the response tags and no place for tools: its calls are those that the renderer
teaches, as in `json_body`.
"""

from __future__ import annotations

from collections.abc import Mapping

from turnloom.parse.body import Attempt
from turnloom.parse.format import Format
from turnloom.parse.json_body import JsonBody
from turnloom.parse.json_calls import Keys, read_list
from turnloom.parse.markup import Markup
from turnloom.parse.tags import tagged
from turnloom.parse.value_body import ValueBody
from turnloom.parse.xml_body import XmlBody
from turnloom.types import CallStatus, Tool

_KEYS = Keys(("tool_name", "name"), ("parameters", "arguments"), ("tool_call_id",))
_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_MARKUP = Markup("<|START_ACTION|>", "<|END_ACTION|>", framing=_ANSWER)


class CohereBody(ValueBody):
    fault = CallStatus.INVALID_JSON
    tail = (_MARKUP.close,)

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return read_list(raw, self.span, tools, _KEYS)


FORMAT = Format("cohere", lambda template: _MARKUP.open in template, tagged(CohereBody, markup=_MARKUP))
# Command's template has these tags too: asked after it.
AYA = Format("aya", lambda template: _ANSWER[0] in template, tagged(JsonBody, XmlBody, markup=Markup(framing=_ANSWER)))
