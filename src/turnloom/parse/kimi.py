"""The body that Kimi K2 writes: an id, then a JSON object. The id names the tool, and goes out with the call.

The template writes `functions.NAME:INDEX`. An id of any other spelling is the
tool that it is (`NAME`), or the one declared tool whose name stands in it as a
whole word (`call_NAME_3`); of names that overlap there the longest counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse.body import Attempt
from turnloom.parse.format import Format
from turnloom.parse.headed_json import HeadedJsonBody
from turnloom.parse.markup import Markup
from turnloom.parse.tags import tagged
from turnloom.types import Tool

_ARGUMENTS = "<|tool_call_argument_begin|>"
_MARKUP = Markup(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    (
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    ),
)

_ID = re.compile(r"(functions\.)?(.*?)(:[0-9]+)?", re.DOTALL)


class KimiBody(HeadedJsonBody):
    separators: ClassVar[tuple[str, ...]] = (_ARGUMENTS,)
    tail: ClassVar[tuple[str, ...]] = (_MARKUP.close,)

    @property
    def name(self) -> str:
        return _spelled(super().name) or super().name

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        written = super().name
        return [self._call(_resolve(written, tools), raw, tools, written)]


def _spelled(written: str) -> str:
    """The name of an id that has one where the template writes it, else empty."""
    found = _ID.fullmatch(written)
    return found[2] if found and (found[1] or found[3]) else ""


def _resolve(written: str, tools: Mapping[str, Tool]) -> str:
    """The tool's name; one that is not declared where the id spells it out; empty where it names none or several."""
    for name in (written, _spelled(written)):
        if name in tools:
            return name
    names = "|".join(re.escape(name) for name in sorted(tools, key=len, reverse=True) if name)
    named = set(re.findall(rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])", written)) if names else set()
    return named.pop() if len(named) == 1 else _spelled(written)


FORMAT = Format("kimi_k2", lambda template: _ARGUMENTS in template, tagged(KimiBody, markup=_MARKUP))
