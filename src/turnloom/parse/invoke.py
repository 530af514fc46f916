"""Calls written as `<invoke name="NAME">` inside a section: MiniMax M2, and DeepSeek V3.2 and V4 with the token `｜DSML｜` in each tag.

`<parameter name="KEY">VALUE</parameter>` and the ends, as `element_body` says.
An invoke ends where another one or the section's closing tag follows its
`</invoke>`: until then it could be part of a value. No newline frames a value.

MiniMax's values are typed by `schema`. DSML's say it themselves: with
`string="true"` the text is the value, with `string="false"` it is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse import strict_json
from turnloom.parse.body import Attempt, Ended
from turnloom.parse.element_body import ElementBody, Prev
from turnloom.parse.format import Format
from turnloom.parse.markup import Markup
from turnloom.parse.tags import tagged
from turnloom.parse.walk import call_of, typed_call
from turnloom.types import Tool

MINIMAX = Markup("<invoke", "</invoke>", (("<minimax:tool_call>", "</minimax:tool_call>"),), bare=False)
DSML = Markup(
    "<｜DSML｜invoke",
    "</｜DSML｜invoke>",
    (("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),
    bare=False,
)

_QUOTED = re.compile(r'([^"]*)"')
_TYPED = re.compile(r'([^"]+)" string="(true|false)"')


class InvokeBody(ElementBody):
    opener: ClassVar[str] = 'name="'
    parameter: ClassVar[str] = '<parameter name="'
    parameter_end: ClassVar[str] = "</parameter>"
    function: ClassVar[str] = '<invoke name="'
    function_end: ClassVar[str] = "</invoke>"
    opens: ClassVar[tuple[str, ...]] = MINIMAX.section_opens
    closes: ClassVar[tuple[str, ...]] = MINIMAX.section_closes
    after_function: ClassVar[tuple[str, ...]] = (*closes, function)

    def _name(self, label: str) -> str | None:
        found = _QUOTED.fullmatch(label)
        return found[1] if found else None

    def _key(self, label: str) -> str | None:
        return self._name(label)

    def _end_of_block(self, tag: str, at: int) -> Ended | None:
        return Ended(self._function_end)

    def _end_function(self, prev: Prev, end: int) -> None:
        super()._end_function(prev, end)
        if self._prev is Prev.OTHER and self._depth == 0 and prev is not Prev.NESTED_END:
            self._prev, self._doubtful = Prev.DOUBTFUL_END, end

    def _close(self, prev: Prev, at: int, end: int) -> None:
        """The section's closing tag, which is not part of the block."""
        super()._close(prev, at, self._doubtful if prev is Prev.DOUBTFUL_END else at)

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return typed_call(self.name, self._values(raw), tools, framed=False)


class DsmlBody(InvokeBody):
    parameter: ClassVar[str] = '<｜DSML｜parameter name="'
    parameter_end: ClassVar[str] = "</｜DSML｜parameter>"
    function: ClassVar[str] = '<｜DSML｜invoke name="'
    function_end: ClassVar[str] = "</｜DSML｜invoke>"
    opens: ClassVar[tuple[str, ...]] = DSML.section_opens
    closes: ClassVar[tuple[str, ...]] = DSML.section_closes
    after_function: ClassVar[tuple[str, ...]] = (*closes, function)

    def _key(self, label: str) -> str | None:
        return label if _TYPED.fullmatch(label) else None

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        """A value's own `string` stands in its key until here."""
        values: list[tuple[str, str]] = []
        kinds: list[str] = []
        for label, text in self._values(raw):
            found = _TYPED.fullmatch(label)
            assert found is not None
            values.append((found[1], text))
            kinds.append(found[2])
        order = iter(kinds)
        return call_of(self.name, values, tools, lambda text, _: strict_json.quote(text) if next(order) == "true" else _json(text))


def _json(text: str) -> str | None:
    bare = text.strip(" \t\n\r")
    return bare if strict_json.kind(bare) is not None else None


MINIMAX_M2 = Format("minimax_m2", lambda template: "<minimax:tool_call>" in template, tagged(InvokeBody, markup=MINIMAX))
DEEPSEEK_DSML = Format(
    "deepseek_dsml", lambda template: "｜DSML｜" in template and "invoke name=" in template, tagged(DsmlBody, markup=DSML)
)
